"""Llama and its closest variants: Mistral, Qwen 2 and 3, SmolLM. `llama_kin` has those with another part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from unspool.models.decoder.frequencies import read_rope
from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import (
    DecoderFamily,
    fixed,
    read_ids,
    read_layer_kinds,
    read_sizes,
    refuse_unbuilt,
)
from unspool.models.families.gguf import read_gguf_decoder
from unspool.models.settings import Settings
from unspool.protocols import LayerKind

NAMES = WeightNames(
    embedding="model.embed_tokens",
    layer="model.layers.{i}.",
    attn_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    final_norm="model.norm",
    prefix="model.",
)


def read_llama_config(
    config: Settings,
    family: str = "llama",
    *,
    norm: NormSpec | None = None,
    theta: float = 10_000.0,
    rotary_fraction: float = 1.0,
    is_interleaved: bool = False,
    activation: str = "silu",
    is_head_tied: bool = False,
) -> DecoderSpec:
    """A Llama: the block that many others start from. What is given beside the config are a family's defaults."""
    refuse_unbuilt(config)
    sizes = read_sizes(config, kv_heads=("num_key_value_heads",))
    head_dim = sizes["head_dim"]
    has_bias = config.boolean("attention_bias", default=False)
    return DecoderSpec(
        family=family,
        **sizes,
        ffn_size=config.integer("intermediate_size"),
        max_context=config.integer("max_position_embeddings", default=2048),
        norm=norm or NormSpec("rms", config.number("rms_norm_eps", default=1e-6)),
        rope=read_rope(config, head_dim, theta=theta, rotary_fraction=rotary_fraction, is_interleaved=is_interleaved),
        attention_scale=head_dim**-0.5,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        activation=config.text("hidden_act", default=activation),
        has_ffn_bias=config.boolean("mlp_bias", default=False),
        is_head_tied=config.boolean("tie_word_embeddings", default=is_head_tied),
        **read_ids(config),
    )


def _read_mistral_config(config: Settings) -> DecoderSpec:
    """A Llama with a sliding window in all layers."""
    spec = read_llama_config(config, "mistral")
    window = config.optional_integer("sliding_window", default=4096)
    default: list[LayerKind] = ["sliding" if window is not None else "full"] * spec.num_layers
    return with_window(spec, config, window, default)


def read_qwen2_config(config: Settings) -> DecoderSpec:
    """A Llama with biases on q, k and v, and a window in the upper layers if it is switched on."""
    spec = replace(read_llama_config(config, "qwen2"), has_qkv_bias=True, has_out_bias=False)
    return _with_upper_window(spec, config)


def _read_qwen3_config(config: Settings) -> DecoderSpec:
    """A Llama whose queries and keys are normalised, head by head."""
    spec = read_llama_config(config, "qwen3")
    spec = replace(spec, qk_norm=spec.norm)
    return _with_upper_window(spec, config)


def _with_upper_window(spec: DecoderSpec, config: Settings) -> DecoderSpec:
    is_on = config.boolean("use_sliding_window", default=False)
    window = config.integer("sliding_window", default=4096) if is_on else None
    first = config.integer("max_window_layers", default=28)
    default: list[LayerKind] = [
        "sliding" if window is not None and i >= first else "full" for i in range(spec.num_layers)
    ]
    return with_window(spec, config, window, default)


def with_window(spec: DecoderSpec, config: Settings, window: int | None, default: list[LayerKind]) -> DecoderSpec:
    """The same block with a window in the layers that the config lists, or in the default ones."""
    kinds = read_layer_kinds(config, spec.num_layers, default)
    if window is None and "sliding" in kinds:
        window = config.integer("sliding_window")
    return replace(spec, window=window if "sliding" in kinds else None, layer_kinds=kinds)


LLAMA = DecoderFamily(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    read_config=read_llama_config,
    find_names=fixed(NAMES),
    gguf=("llama",),
    # llama.cpp's converter stores q and k of this architecture with the rope pairs as neighbours. Mixtral is one of it.
    read_gguf=partial(read_gguf_decoder, family="llama", is_interleaved=True, normalises=True),
)
MISTRAL = DecoderFamily(
    name="mistral",
    architectures=("MistralForCausalLM", "MinistralForCausalLM"),
    model_types=("mistral", "ministral"),
    read_config=_read_mistral_config,
    find_names=fixed(NAMES),
)
QWEN2 = DecoderFamily(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    read_config=read_qwen2_config,
    find_names=fixed(NAMES),
    gguf=("qwen2",),
    read_gguf=partial(read_gguf_decoder, family="qwen2"),
)
QWEN3 = DecoderFamily(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    read_config=_read_qwen3_config,
    find_names=fixed(NAMES),
    gguf=("qwen3",),
    read_gguf=partial(read_gguf_decoder, family="qwen3"),
)
