"""Persimmon: layer norms, also of queries and keys, half of each head rotated, an ungated feed-forward."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed
from unspool.models.families.llama import NAMES, read_llama_config
from unspool.models.settings import Settings


def _read_config(config: Settings) -> DecoderSpec:
    norm = NormSpec("layer", config.number("layer_norm_eps", default=1e-5), has_bias=True)
    spec = read_llama_config(config, "persimmon", norm=norm, theta=25_000.0, rotary_fraction=0.5, activation="relu2")
    return replace(
        spec,
        qk_norm=norm if config.boolean("qk_layernorm", default=True) else None,
        has_qkv_bias=True,
        has_out_bias=True,
        is_gated=False,
        has_ffn_bias=True,
    )


PERSIMMON = DecoderFamily(
    name="persimmon",
    architectures=("PersimmonForCausalLM",),
    model_types=("persimmon",),
    read_config=_read_config,
    find_names=fixed(
        replace(
            NAMES,
            qkv=("self_attn.query_key_value",),
            qkv_layout="grouped",
            out="self_attn.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
            final_norm="model.final_layernorm",
        )
    ),
)
