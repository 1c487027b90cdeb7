"""GPT-NeoX and Pythia: attention and feed-forward side by side, each with its own norm."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.frequencies import read_rope
from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, read_ids, read_sizes, refuse_unbuilt
from unspool.models.families.gguf import read_gguf_decoder
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource

NAMES = WeightNames(
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{i}.",
    attn_norm="input_layernorm",
    qkv=("attention.query_key_value",),
    qkv_layout="grouped",
    out="attention.dense",
    ffn_norm="post_attention_layernorm",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    prefix="gpt_neox.",
)


def _read_config(config: Settings) -> DecoderSpec:
    refuse_unbuilt(config)
    sizes = read_sizes(config)
    head_dim = sizes["head_dim"]
    has_bias = config.boolean("attention_bias", default=True)
    return DecoderSpec(
        family="gpt_neox",
        **sizes,
        ffn_size=config.integer("intermediate_size"),
        max_context=config.integer("max_position_embeddings", default=2048),
        norm=NormSpec("layer", config.number("layer_norm_eps", default=1e-5), has_bias=True),
        residual="parallel" if config.boolean("use_parallel_residual", default=True) else "sequential",
        rope=read_rope(config, head_dim, rotary_fraction=0.25),
        attention_scale=head_dim**-0.5,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        is_gated=False,
        activation=config.text("hidden_act", default="gelu"),
        has_ffn_bias=True,
        is_head_tied=config.boolean("tie_word_embeddings", default=False),
        **read_ids(config),
    )


def _find_names(_config: Settings, source: WeightSource) -> WeightNames:
    # transformers 5 calls the head lm_head, as elsewhere; before that it was embed_out.
    return replace(NAMES, head="lm_head") if "lm_head.weight" in source else NAMES


def _read_gguf(header: Settings, source: WeightSource) -> DecoderSpec:
    spec = read_gguf_decoder(header, source, family="gpt_neox", norm="layer", activation="gelu")
    is_parallel = header.boolean("use_parallel_residual", default=True)
    return replace(spec, residual="parallel" if is_parallel else "sequential")


GPT_NEOX = DecoderFamily(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    model_types=("gpt_neox",),
    read_config=_read_config,
    find_names=_find_names,
    gguf=("gptneox",),
    read_gguf=_read_gguf,
)
