"""The families that calls are made of: what transformers calls them, and settings of a tiny model."""

from __future__ import annotations

from typing import Any

from tests.fuzz.beside.newer import MIXED, NEWER
from tests.models.adapters import tiny
from tests.models.adapters.tiny import DEEPSEEK, LLAMA, PAIR, SIZES, TYPES

Family = tuple[str, dict[str, Any]]

_HEADS = {**LLAMA, "head_dim": 8}
_WINDOW = {**LLAMA, "sliding_window": 5}
_SOME_WINDOWS = {**_WINDOW, "layer_types": TYPES}
_FEED = {**SIZES, "intermediate_size": 48}
_READS_BACK = {**_FEED, "is_decoder": True}
_STATES = {name: size for name, size in SIZES.items() if name not in ("num_attention_heads", "max_position_embeddings")}
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 8}
_EXPERTS = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_FIRST_GPT = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, **_IDS}
_ALIBI = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "new_decoder_architecture": False}
_T5 = tiny.PAIRS["t5"][1]

_USUAL = ("llama", "gpt2", "gemma2", "bloom", "mixtral", "gpt_oss", "gpt_neo", "mpt", "olmo2")
USUAL: dict[str, Family] = {
    **{name: tiny.DECODERS[name] for name in _USUAL},
    "mistral": ("Mistral", {**_WINDOW, "head_dim": 8}),
    "gemma3": ("Gemma3", {**_SOME_WINDOWS, "head_dim": 8}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", _HEADS),
    "phi": ("Phi", {**_FEED, "partial_rotary_factor": 0.5}),
    "opt": ("OPT", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": ("GPTNeoX", _FEED),
    "gptj": ("GPTJ", {**SIZES, "rotary_dim": 4}),
    "falcon": ("Falcon", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": ("Falcon", {**SIZES, **_ALIBI}),
    "mamba": ("Mamba", _STATES),
    "mamba2": ("Mamba2", {**_STATES, **_MAMBA2}),
}
RARE: dict[str, Family] = {
    **{name: family for name, family in tiny.DECODERS.items() if name not in _USUAL and name != "imagegpt"},
    "gemma": ("Gemma", _HEADS),
    "olmo": ("Olmo", LLAMA),
    "olmo3": ("Olmo3", _SOME_WINDOWS),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 8}),
    "granitemoe": ("GraniteMoe", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron": ("Nemotron", LLAMA),
    "helium": ("Helium", _HEADS),
    "smollm3": ("SmolLM3", {**LLAMA, "no_rope_layers": [1, 0, 1]}),
    "xglm": (
        "XGLM",
        {"d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4, "vocab_size": 97, **_IDS}
        | {"max_position_embeddings": 64},
    ),
    "biogpt": ("BioGpt", _FEED),
    "recurrent_gemma": ("RecurrentGemma", {**LLAMA, "lru_width": 32, "attention_window_size": 16}),
    "lfm2": ("Lfm2", {**LLAMA, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "exaone4": ("Exaone4", _SOME_WINDOWS),
    "persimmon": ("Persimmon", _FEED),
    "falcon_mamba": ("FalconMamba", _STATES),
    "rwkv": ("Rwkv", {**_STATES, "attention_hidden_size": 32, "intermediate_size": 48, "context_length": 64}),
    "arcee": ("Arcee", LLAMA),
    "apertus": ("Apertus", LLAMA),
    "ernie4_5": ("Ernie4_5", _HEADS),
    "hunyuan": ("HunYuanDenseV1", _HEADS),
    "seed_oss": ("SeedOss", _HEADS),
    "glm4": ("Glm4", _HEADS),
    "doge": ("Doge", {**LLAMA, "keep_window_size": 64}),
    "diffllama": ("DiffLlama", LLAMA),
    "bitnet": ("BitNet", LLAMA),
    "jetmoe": (
        "JetMoe",
        {**_FEED, "num_key_value_heads": 4, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 1},
    ),
    "olmoe": ("Olmoe", {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    "ministral": ("Ministral", {**_WINDOW, "head_dim": 8}),
    "minimax": ("MiniMax", {**_HEADS, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4}),
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK, "topk_method": "greedy"}),
    "gpt_neox_japanese": ("GPTNeoXJapanese", {**SIZES, "intermediate_multiple_size": 2}),
    "bert": ("Bert", _READS_BACK),
    "roberta": ("Roberta", {**_READS_BACK, "max_position_embeddings": 70}),
    "roformer": ("RoFormer", _READS_BACK),
    "electra": ("Electra", {**_READS_BACK, "embedding_size": 32}),
    "openai_gpt": ("OpenAIGPT", _FIRST_GPT),
    "ctrl": ("CTRL", {**_FIRST_GPT, "dff": 48}),
    "vaultgemma": ("VaultGemma", {**_SOME_WINDOWS, "head_dim": 8}),
}
DECODERS: dict[str, Family] = {**USUAL, **RARE, **NEWER, **MIXED}
_PROPHET = {
    "vocab_size": 97,
    "hidden_size": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_buckets": 8,
    "relative_max_distance": 16,
    "decoder_start_token_id": 2,
    **_IDS,
}
USUAL_PAIRS: dict[str, Family] = {name: tiny.PAIRS[name] for name in ("t5", "bart", "marian")}
RARE_PAIRS: dict[str, Family] = {
    **{name: family for name, family in tiny.PAIRS.items() if name not in USUAL_PAIRS},
    "mbart": ("MBart", PAIR),
    "pegasus": ("Pegasus", PAIR),
    "plbart": ("PLBart", PAIR),
    "blenderbot": ("Blenderbot", PAIR),
    "mvp": ("Mvp", PAIR),
    "mt5": ("MT5", _T5),
    "umt5": ("UMT5", _T5),
    "longt5": ("LongT5", {**_T5, "local_radius": 4}),
    "led": (
        "LED",
        {**PAIR, "attention_window": [4, 4], "max_encoder_position_embeddings": 64}
        | {"max_decoder_position_embeddings": 64},
    ),
    "prophetnet": ("ProphetNet", {**_PROPHET, "ngram": 2}),
    "bigbird_pegasus": ("BigBirdPegasus", {**PAIR, "attention_type": "original_full"}),
    "fsmt": (
        "FSMT",
        {**PAIR, "num_beams": 1, "max_length": 20, "src_vocab_size": 97, "tgt_vocab_size": 97, "langs": ["en", "de"]},
    ),
    "pegasus_x": ("PegasusX", {**PAIR, "block_size": 4, "num_global_tokens": 2}),
}
PAIRS: dict[str, Family] = {**USUAL_PAIRS, **RARE_PAIRS}
SPEECH: dict[str, dict[str, Any]] = {  # settings that such a model's file has more, or has not: None
    "whisper": {},
    "whisper_forced": {"forced_decoder_ids": [[1, None], [2, 56]]},  # as older files have it
    "whisper_english": {
        "forced_decoder_ids": [[1, 60]],
        "is_multilingual": False,
        "lang_to_id": None,
        "task_to_id": None,
    },
}
STATES = ("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "lfm2", "minimax", *MIXED)
WINDOWS = (  # some layers see the last few columns alone
    *("mistral", "gemma2", "gemma3", "gpt_oss", "gpt_neo", "cohere2", "starcoder2", "phi3", "olmo3", "exaone4"),
    *("ministral", "vaultgemma", "recurrent_gemma"),
    *(
        name
        for name, (_, settings) in NEWER.items()
        if {"sliding_window", "local_attention", "attention_chunk_size"} & settings.keys()
    ),
)
HEADS = {
    **tiny.HEADS,
    "Bert": "BertLMHeadModel",
    "OpenAIGPT": "OpenAIGPTLMHeadModel",
    "CTRL": "CTRLLMHeadModel",
}
