"""GPT-2: learned positions, layer norms, matrices stored (in, out). GPT-BigCode has one key head, and does not."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed, read_ids, read_sizes, refuse_unbuilt
from unspool.models.families.gguf import read_gguf_decoder
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource

NAMES = WeightNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{i}.",
    attn_norm="ln_1",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    ffn_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    final_norm="transformer.ln_f",
    prefix="transformer.",
    is_transposed=True,
)


def _read_config(config: Settings, family: str = "gpt2", activation: str = "gelu_new") -> DecoderSpec:
    refuse_unbuilt(config)
    sizes = read_sizes(
        config,
        hidden=("n_embd", "hidden_size"),
        layers=("n_layer", "num_hidden_layers"),
        heads=("n_head", "num_attention_heads"),
    )
    hidden_size, head_dim = sizes["hidden_size"], sizes["head_dim"]
    num_positions = config.integer("n_positions", "max_position_embeddings", default=1024)
    return DecoderSpec(
        family=family,
        **sizes,
        ffn_size=config.integer("n_inner", default=4 * hidden_size),
        max_context=num_positions,
        norm=NormSpec("layer", config.number("layer_norm_epsilon", default=1e-5), has_bias=True),
        num_positions=num_positions,
        attention_scale=head_dim**-0.5 if config.boolean("scale_attn_weights", default=True) else 1.0,
        is_scaled_by_layer=config.boolean("scale_attn_by_inverse_layer_idx", default=False),
        has_qkv_bias=True,
        has_out_bias=True,
        is_gated=False,
        activation=config.text("activation_function", default=activation),
        has_ffn_bias=True,
        is_head_tied=config.boolean("tie_word_embeddings", default=True),
        **read_ids(config),
    )


def _read_bigcode(config: Settings) -> DecoderSpec:
    """The first StarCoder: all heads share one key head."""
    spec = _read_config(config, "gpt_bigcode", "gelu_pytorch_tanh")
    return replace(spec, num_kv_heads=1 if config.boolean("multi_query", default=True) else spec.num_heads)


def _find_bigcode_names(config: Settings, _source: WeightSource) -> WeightNames:
    is_grouped = not config.boolean("multi_query", default=True)
    return replace(NAMES, is_transposed=False, qkv_layout="grouped" if is_grouped else "stacked")


def _read_gguf(header: Settings, source: WeightSource) -> DecoderSpec:
    spec = read_gguf_decoder(header, source, family="gpt2", norm="layer", has_rope=False, activation="gelu_new")
    return replace(spec, num_positions=spec.max_context)


GPT2 = DecoderFamily(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    model_types=("gpt2",),
    read_config=_read_config,
    find_names=fixed(NAMES),
    gguf=("gpt2",),
    read_gguf=_read_gguf,
)
GPT_BIGCODE = DecoderFamily(
    name="gpt_bigcode",
    architectures=("GPTBigCodeForCausalLM",),
    model_types=("gpt_bigcode",),
    read_config=_read_bigcode,
    find_names=_find_bigcode_names,
)
