"""OPT and BioGPT: learned positions that start at 2; OPT-350m normalises afterwards and has narrow embeddings."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed, read_ids, read_sizes, refuse_unbuilt
from unspool.models.settings import Settings

_OFFSET = 2  # the table's first two rows belong to padding

NAMES = WeightNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
    layer="model.decoder.layers.{i}.",
    attn_norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    ffn_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
    final_norm="model.decoder.final_layer_norm",
    prefix="model.",
)


def _read_config(config: Settings) -> DecoderSpec:
    refuse_unbuilt(config)
    sizes = read_sizes(config)
    hidden_size, head_dim = sizes["hidden_size"], sizes["head_dim"]
    max_context = config.integer("max_position_embeddings", default=2048)
    is_before = config.boolean("do_layer_norm_before", default=True)
    is_affine = config.boolean("layer_norm_elementwise_affine", default=True)
    has_bias = config.boolean("enable_bias", default=True)
    return DecoderSpec(
        family="opt",
        **sizes,
        ffn_size=config.integer("ffn_dim"),
        max_context=max_context,
        norm=NormSpec("layer", 1e-5, has_bias=is_affine, has_weight=is_affine),
        norm_placement="pre" if is_before else "post",
        has_final_norm=is_before and not config.boolean("_remove_final_layer_norm", default=False),
        num_positions=max_context + _OFFSET,
        position_offset=_OFFSET,
        attention_scale=head_dim**-0.5,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        is_gated=False,
        activation=config.text("activation_function", default="relu"),
        has_ffn_bias=has_bias,
        embedding_size=config.integer("word_embed_proj_dim", default=hidden_size),
        is_head_tied=config.boolean("tie_word_embeddings", default=True),
        **read_ids(config),
    )


def _read_biogpt(config: Settings) -> DecoderSpec:
    refuse_unbuilt(config)
    sizes = read_sizes(config)
    hidden_size, head_dim = sizes["hidden_size"], sizes["head_dim"]
    max_context = config.integer("max_position_embeddings", default=1024)
    return DecoderSpec(
        family="biogpt",
        **sizes,
        ffn_size=config.integer("intermediate_size"),
        max_context=max_context,
        norm=NormSpec("layer", 1e-5, has_bias=True),
        num_positions=max_context + _OFFSET,
        position_offset=_OFFSET,
        attention_scale=head_dim**-0.5,
        has_qkv_bias=True,
        has_out_bias=True,
        is_gated=False,
        activation=config.text("hidden_act", default="gelu"),
        has_ffn_bias=True,
        embedding_scale=hidden_size**0.5 if config.boolean("scale_embedding", default=True) else 1.0,
        is_head_tied=config.boolean("tie_word_embeddings", default=True),
        **read_ids(config),
    )


OPT = DecoderFamily(
    name="opt",
    architectures=("OPTForCausalLM",),
    model_types=("opt",),
    read_config=_read_config,
    find_names=fixed(NAMES),
)
BIOGPT = DecoderFamily(
    name="biogpt",
    architectures=("BioGptForCausalLM",),
    model_types=("biogpt",),
    read_config=_read_biogpt,
    find_names=fixed(
        replace(
            NAMES,
            embedding="biogpt.embed_tokens",
            positions="biogpt.embed_positions",
            layer="biogpt.layers.{i}.",
            final_norm="biogpt.layer_norm",
            head="output_projection",
            prefix="biogpt.",
        )
    ),
)
