"""Tiny random models of transformers, most of families that unspool has no native form of."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers

from unspool.models.adapters import set_native

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
MPT = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 3,
    "vocab_size": 97,
    "max_seq_len": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DEEPSEEK = {
    **SIZES,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
NEO = {**SIZES, "num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]]}
NEO = {name: value for name, value in NEO.items() if name not in ("num_hidden_layers", "num_attention_heads")}
PAIR: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "init_std": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "gemma2": ("Gemma2", {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 5}),
    "bloom": ("Bloom", SIZES),
    "gpt2": ("GPT2", SIZES),
    "stablelm": ("StableLm", LLAMA),
    "cohere": ("Cohere", LLAMA),
    "cohere2": ("Cohere2", {**LLAMA, "sliding_window": 5, "layer_types": TYPES}),
    "olmo2": ("Olmo2", LLAMA),
    "granite": ("Granite", {**LLAMA, "logits_scaling": 2.0, "attention_multiplier": 0.3}),
    "starcoder2": ("Starcoder2", {**LLAMA, "sliding_window": 5}),
    "phi3": ("Phi3", {**LLAMA, "sliding_window": 5}),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4}),
    "gpt_oss": ("GptOss", {**LLAMA, "head_dim": 8, "num_local_experts": 4, "sliding_window": 5, "layer_types": TYPES}),
    "glm": ("Glm", {**LLAMA, "head_dim": 8}),
    "codegen": ("CodeGen", {**SIZES, "rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCode", SIZES),
    "gpt_neo": ("GPTNeo", {**NEO, "window_size": 5}),
    "imagegpt": ("ImageGPT", {**SIZES, "vocab_size": 98}),  # the first of whose tokens is never written
    "mpt": ("Mpt", {**MPT, "use_cache": True}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
}
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", PAIR),
    "marian": ("Marian", {**PAIR, "scale_embedding": True}),
    "m2m_100": ("M2M100", PAIR),
    "blenderbot_small": ("BlenderbotSmall", PAIR),
    "t5": (
        "T5",
        {
            "vocab_size": 97,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
            "initializer_factor": 8.0,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    ),
}
HEADS = {"GPT2": "GPT2LMHeadModel", "Marian": "MarianMTModel", "ImageGPT": "ImageGPTForCausalImageModeling"}


def make(name: str, attention: str | None = None) -> Any:
    """A model with random weights whose answers depend on everything that it reads; the adapter runs it by default."""
    kind, settings = (DECODERS | PAIRS)[name]
    config = getattr(transformers, f"{kind}Config")(**settings)
    head = HEADS.get(kind, f"{kind}ForCausalLM" if name in DECODERS else f"{kind}ForConditionalGeneration")
    told = {} if attention is None else {"attn_implementation": attention}
    torch.manual_seed(3)
    model = getattr(transformers, head)._from_config(config, **told)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.25)
    set_native(model, False)
    return model.eval()


make_once = cache(make)


def make_inputs(*, is_left: bool = True, width: int = 12) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the left as decoders want them, or on the right as encoders do."""
    ids = torch.randint(3, 97, (3, width), generator=torch.Generator().manual_seed(4))
    column, pads = torch.arange(width), torch.tensor([[5], [9], [0]])
    mask = (column >= pads if is_left else column < width - pads).long()
    return {"input_ids": ids * mask, "attention_mask": mask}
