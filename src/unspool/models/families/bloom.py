"""BLOOM: ALiBi instead of positions, and a norm right after the embeddings."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import AlibiSpec, DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed, read_ids, read_sizes, refuse_unbuilt
from unspool.models.families.gguf import read_gguf_decoder
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource

NAMES = WeightNames(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    layer="transformer.h.{i}.",
    attn_norm="input_layernorm",
    qkv=("self_attention.query_key_value",),
    qkv_layout="grouped",
    out="self_attention.dense",
    ffn_norm="post_attention_layernorm",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="transformer.ln_f",
    prefix="transformer.",
)


def _read_config(config: Settings) -> DecoderSpec:
    refuse_unbuilt(config)
    config.refuse("apply_residual_connection_post_layernorm", True, because="residuals are taken before the norm here")
    sizes = read_sizes(
        config,
        hidden=("n_embed", "hidden_size"),
        layers=("n_layer", "num_hidden_layers"),
        heads=("n_head", "num_attention_heads"),
    )
    hidden_size, head_dim = sizes["hidden_size"], sizes["head_dim"]
    return DecoderSpec(
        family="bloom",
        **sizes,
        ffn_size=4 * hidden_size,
        max_context=None,
        norm=NormSpec("layer", config.number("layer_norm_epsilon", default=1e-5), has_bias=True),
        alibi=AlibiSpec(),
        attention_scale=head_dim**-0.5,
        has_qkv_bias=True,
        has_out_bias=True,
        is_gated=False,
        activation="gelu_new",
        has_ffn_bias=True,
        has_embedding_norm=True,
        is_head_tied=config.boolean("tie_word_embeddings", default=True),
        **read_ids(config),
    )


def _read_gguf(header: Settings, source: WeightSource) -> DecoderSpec:
    spec = read_gguf_decoder(header, source, family="bloom", norm="layer", has_rope=False, activation="gelu_new")
    return replace(spec, alibi=AlibiSpec(), has_embedding_norm=True, max_context=None)


BLOOM = DecoderFamily(
    name="bloom",
    architectures=("BloomForCausalLM",),
    model_types=("bloom",),
    read_config=_read_config,
    find_names=fixed(NAMES),
    gguf=("bloom",),
    read_gguf=_read_gguf,
)
