"""Falcon: the 7B block (one norm, one key head), the 40B block (two norms, grouped) and the RW block (ALiBi)."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.frequencies import read_rope
from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import AlibiSpec, DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, check_groups, read_head_dim, read_ids, refuse_unbuilt
from unspool.models.families.gguf import find_gguf_names, read_gguf_decoder
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource

NAMES = WeightNames(
    embedding="transformer.word_embeddings",
    layer="transformer.h.{i}.",
    attn_norm="input_layernorm",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
    ffn_norm="post_attention_layernorm",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="transformer.ln_f",
    prefix="transformer.",
)


def _is_new(config: Settings) -> bool:
    return config.boolean("new_decoder_architecture", default=False)


def _has_two_norms(config: Settings) -> bool:
    return _is_new(config) and config.integer("num_ln_in_parallel_attn", default=2) == 2


def _read_config(config: Settings) -> DecoderSpec:
    refuse_unbuilt(config)
    hidden_size = config.integer("n_embed", "hidden_size")
    num_heads = config.integer("num_attention_heads", "n_head")
    head_dim = read_head_dim(config, hidden_size, num_heads)
    is_parallel = _is_new(config) or config.boolean("parallel_attn", default=True)
    has_alibi = config.boolean("alibi", default=False)
    has_bias = config.boolean("bias", default=False)
    if _is_new(config):
        num_kv_heads = config.integer("num_kv_heads", "n_head_kv", default=num_heads)
    else:
        num_kv_heads = 1 if config.boolean("multi_query", default=True) else num_heads
    check_groups(config, num_heads, num_kv_heads)
    return DecoderSpec(
        family="falcon",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers", "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=config.integer("ffn_hidden_size", default=4 * hidden_size),
        max_context=None if has_alibi else config.integer("max_position_embeddings", default=2048),
        norm=NormSpec("layer", config.number("layer_norm_epsilon", default=1e-5), has_bias=True),
        residual="parallel" if is_parallel else "sequential",
        has_ffn_norm=not is_parallel or _has_two_norms(config),
        rope=None if has_alibi else read_rope(config, head_dim),
        alibi=AlibiSpec(scale=head_dim**-0.5, is_rounded=True) if has_alibi else None,
        attention_scale=head_dim**-0.5,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        is_gated=False,
        activation=config.text("activation", default="gelu"),
        has_ffn_bias=has_bias,
        is_head_tied=config.boolean("tie_word_embeddings", default=True),
        **read_ids(config),
    )


def _find_names(config: Settings, _source: WeightSource) -> WeightNames:
    names = NAMES
    if _has_two_norms(config):
        names = replace(names, attn_norm="ln_attn", ffn_norm="ln_mlp")
    if _is_new(config) or not config.boolean("multi_query", default=True):
        names = replace(names, qkv_layout="grouped")
    return names


def _read_gguf(header: Settings, source: WeightSource) -> DecoderSpec:
    spec = read_gguf_decoder(header, source, family="falcon", norm="layer", activation="gelu")
    return replace(spec, residual="parallel", has_ffn_norm="blk.0.attn_norm_2.weight" in source)


def _find_gguf_names(header: Settings, source: WeightSource) -> WeightNames:
    # If there are two norms, llama.cpp's attn_norm_2 is that of attention and attn_norm the other.
    names = find_gguf_names(header, source)
    if "blk.0.attn_norm_2.weight" in source:
        names = replace(names, attn_norm="attn_norm_2", ffn_norm="attn_norm")
    return names


FALCON = DecoderFamily(
    name="falcon",
    architectures=("FalconForCausalLM",),
    model_types=("falcon",),
    read_config=_read_config,
    find_names=_find_names,
    gguf=("falcon",),
    read_gguf=_read_gguf,
    find_gguf_names=_find_gguf_names,
)
