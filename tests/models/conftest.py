"""Tiny random models of every architecture, made by transformers and loaded natively."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers
from safetensors.torch import load_file

from unspool.models.native import NativeModel
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

GOLDENS = Path(__file__).parents[1] / "conformance" / "goldens"

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
GEMMA = {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 12}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _make(name: str, **settings: Any) -> Callable[[], Any]:
    def build() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # GPT-BigCode's own, on import
            config = getattr(transformers, f"{name}Config")(**settings)
            getattr(transformers, f"{name}PreTrainedModel", None)
        head = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(name, f"{name}ForCausalLM")
        # Falcon's eager attention adds ALiBi twice (in the mask and to the scores); its other one is right.
        attention = "sdpa" if settings.get("alibi") else "eager"
        return getattr(transformers, head)._from_config(config, attn_implementation=attention)

    return build


CASES: dict[str, Callable[[], Any]] = {
    "llama": _make("Llama", **LLAMA),
    "llama-tied-biased": _make("Llama", **LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-llama3-rope": _make("Llama", **LLAMA, rope_parameters=dict(LLAMA3_ROPE)),
    "llama-linear-rope": _make(
        "Llama", **LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
    ),
    "llama-yarn": _make("Llama", **LLAMA, head_dim=16, rope_parameters=dict(YARN)),
    "mistral": _make("Mistral", **LLAMA, sliding_window=5),
    "mistral-full": _make("Mistral", **LLAMA, sliding_window=None),
    "qwen2": _make("Qwen2", **LLAMA, tie_word_embeddings=True),
    "qwen2-window": _make("Qwen2", **LLAMA, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": _make("Qwen3", **LLAMA, head_dim=16),
    "gemma": _make("Gemma", **{**LLAMA, "head_dim": 8}),
    "gemma2": _make("Gemma2", **GEMMA, sliding_window=5),
    "gemma3": _make("Gemma3Text", **{**GEMMA, "num_hidden_layers": 4}, sliding_window=5, sliding_window_pattern=3),
    "vaultgemma": _make("VaultGemma", **GEMMA, sliding_window=5),
    "smollm3": _make("SmolLM3", **{**LLAMA, "num_hidden_layers": 4}),
    "smollm3-window": _make(
        "SmolLM3",
        **{**LLAMA, "num_hidden_layers": 4},
        use_sliding_window=True,
        sliding_window=5,
        no_rope_layer_interval=2,
    ),
    "exaone4": _make("Exaone4", **{**LLAMA, "num_hidden_layers": 4}, sliding_window=5, sliding_window_pattern=2),
    "exaone4-full": _make("Exaone4", **LLAMA, sliding_window=None, layer_types=["full_attention"] * 3),
    "cwm": _make("Cwm", **{**LLAMA, "num_hidden_layers": 5}, head_dim=8, sliding_window=5),
    "ministral": _make(
        "Ministral",
        **LLAMA,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "granite": _make(
        "Granite",
        **LLAMA,
        embedding_multiplier=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.4,
        logits_scaling=3.0,
    ),
    "helium": _make("Helium", **LLAMA, head_dim=8, attention_bias=True),
    "ernie4_5": _make("Ernie4_5", **LLAMA, head_dim=8, use_bias=True),
    "arcee": _make("Arcee", **LLAMA),
    "jais2": _make("Jais2", **LLAMA),
    "nemotron": _make("Nemotron", **LLAMA, attention_bias=True),
    "starcoder2": _make("Starcoder2", **LLAMA, sliding_window=5),
    "stablelm": _make("StableLm", **LLAMA, partial_rotary_factor=0.5, use_qkv_bias=True),
    "stablelm-12b": _make("StableLm", **LLAMA, use_parallel_residual=True, qk_layernorm=True),
    "olmo": _make("Olmo", **LLAMA),
    "olmo2": _make("Olmo2", **LLAMA),
    "olmo3": _make("Olmo3", **{**LLAMA, "num_hidden_layers": 4}, sliding_window=5),
    "cohere": _make("Cohere", **LLAMA),
    "cohere-normed": _make("Cohere", **LLAMA, use_qk_norm=True, attention_bias=True, logit_scale=0.3),
    "cohere2": _make("Cohere2", **{**LLAMA, "num_hidden_layers": 4}, sliding_window=5),
    "glm": _make("Glm", **LLAMA, head_dim=8),
    "glm4": _make("Glm4", **LLAMA, head_dim=8),
    "phi3": _make("Phi3", **LLAMA, sliding_window=5),
    "persimmon": _make("Persimmon", **SIZES, intermediate_size=48),
    "gpt_bigcode": _make("GPTBigCode", **SIZES),
    "gpt_bigcode-many": _make("GPTBigCode", **SIZES, multi_query=False),
    "gpt_neo": _make(
        "GPTNeo", **{**SIZES, "num_hidden_layers": 4}, attention_types=[[["global", "local"], 2]], window_size=5
    ),
    "codegen": _make("CodeGen", **SIZES, rotary_dim=4),
    "biogpt": _make("BioGpt", **SIZES, intermediate_size=48),
    "mpt": _make(
        "Mpt",
        vocab_size=97,
        d_model=32,
        n_layers=3,
        n_heads=4,
        max_seq_len=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "gpt2": _make("GPT2", **SIZES),
    "gpt2-scaled-by-layer": _make("GPT2", **SIZES, scale_attn_by_inverse_layer_idx=True, n_inner=40),
    "gpt_neox": _make("GPTNeoX", **SIZES, intermediate_size=48, rotary_pct=0.5),
    "gpt_neox-sequential": _make(
        "GPTNeoX", **SIZES, intermediate_size=48, use_parallel_residual=False, tie_word_embeddings=True
    ),
    "gptj": _make("GPTJ", **SIZES, rotary_dim=4),
    "opt": _make("OPT", **SIZES, ffn_dim=48, init_std=0.3),
    "opt-350m": _make("OPT", **SIZES, ffn_dim=48, init_std=0.3, do_layer_norm_before=False, word_embed_proj_dim=24),
    "bloom": _make("Bloom", **SIZES),
    "bloom-6-heads": _make("Bloom", **{**SIZES, "num_attention_heads": 6, "hidden_size": 48}),
    "phi": _make("Phi", **SIZES, intermediate_size=48),
    "phi-normed": _make("Phi", **SIZES, intermediate_size=48, qk_layernorm=True),
    "falcon-7b": _make("Falcon", **SIZES),
    "falcon-40b": _make("Falcon", **SIZES, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": _make("Falcon", **SIZES, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon-rw": _make(
        "Falcon", **SIZES, alibi=True, multi_query=False, parallel_attn=False, bias=True, activation="gelu"
    ),
    "mixtral": _make("Mixtral", **LLAMA, num_local_experts=5),
    "mixtral-window": _make("Mixtral", **LLAMA, num_local_experts=4, num_experts_per_tok=3, sliding_window=5),
    "qwen2_moe": _make(
        "Qwen2Moe", **LLAMA, **EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[1], decoder_sparse_step=1
    ),
    "qwen2_moe-window": _make(
        "Qwen2Moe",
        **LLAMA,
        **EXPERTS,
        shared_expert_intermediate_size=24,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=5,
    ),
    "qwen3_moe": _make("Qwen3Moe", **LLAMA, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3_moe-sparse": _make("Qwen3Moe", **LLAMA, **EXPERTS, head_dim=8, decoder_sparse_step=2),
    "olmoe": _make("Olmoe", **LLAMA, num_experts=6, num_experts_per_tok=3),
    "granitemoe": _make(
        "GraniteMoe",
        **LLAMA,
        num_local_experts=6,
        num_experts_per_tok=2,
        embedding_multiplier=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.4,
        logits_scaling=3.0,
    ),
    "gpt_oss": _make("GptOss", **LLAMA, head_dim=8, num_local_experts=5, num_experts_per_tok=2, sliding_window=5),
    "flex_olmo": _make("FlexOlmo", **LLAMA, num_experts=6, num_experts_per_tok=3),
    "ernie4_5_moe": _make(
        "Ernie4_5_Moe",
        **LLAMA,
        head_dim=8,
        moe_intermediate_size=24,
        moe_num_experts=6,
        moe_k=2,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
    ),
    "dots1": _make(
        "Dots1",
        **LLAMA,
        head_dim=8,
        moe_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.4,
        norm_topk_prob=True,
    ),
    "glm4_moe": _make(
        "Glm4Moe",
        **LLAMA,
        head_dim=8,
        moe_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=3,
        routed_scaling_factor=1.7,
        first_k_dense_replace=1,
        use_qk_norm=True,
        attention_bias=True,
        num_nextn_predict_layers=0,
    ),
}


@dataclass(frozen=True)
class Pair:
    """The reference and the native model with the same weights."""

    reference: Any
    native: NativeModel
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]


def randomise(model: Any) -> Any:
    """Norms and biases start as ones and zeros; noise makes a mistake with them visible."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue  # a table of sinusoids, which is not saved
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def make_pair(make: Callable[[], Any], folder: Path) -> Pair:
    """Save what transformers made, and load the files natively."""
    torch.manual_seed(3)
    reference = randomise(make())
    reference.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    return Pair(reference, build_model(config, MemorySource(weights)), config, weights)


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """The pair of a name; each is made once."""
    return cache(lambda name: make_pair(CASES[name], tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def load_pair() -> Callable[[Callable[[], Any], Path], Pair]:
    """Makes a pair of what a function builds."""
    return make_pair


@pytest.fixture(params=list(CASES))
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], Pair]) -> Pair:
    """Every architecture in turn."""
    return pair_of(request.param)


@pytest.fixture(scope="session")
def golden_pair() -> Callable[[str], Pair]:
    """The pair of a golden model, whose config has the form of transformers 4.52."""

    @cache
    def load(name: str) -> Pair:
        folder = GOLDENS / "models" / name
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        is_pair = bool(config.get("is_encoder_decoder"))
        auto = transformers.AutoModelForSeq2SeqLM if is_pair else transformers.AutoModelForCausalLM
        auto = transformers.AutoModelForSpeechSeq2Seq if name == "whisper" else auto
        reference = auto.from_pretrained(folder, attn_implementation="eager").eval()
        return Pair(reference, build_model(config, MemorySource(weights)), config, weights)

    return load
