"""Gemma 1 to 3 and VaultGemma: scaled embeddings, norm weights around 1, then norms on both sides, windows, caps."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.frequencies import make_rope, plain_frequencies, read_two_ropes
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed, read_layer_kinds
from unspool.models.families.gguf import read_gguf_decoder
from unspool.models.families.llama import NAMES as LLAMA_NAMES
from unspool.models.families.llama import read_llama_config
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource
from unspool.protocols import LayerKind

_TANH = "gelu_pytorch_tanh"
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}  # the sizes whose scale follows the hidden size, not the head's
_LOCAL_THETA = 10_000.0

SANDWICH_NAMES = replace(
    LLAMA_NAMES,
    post_attn_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffn_norm="post_feedforward_layernorm",
)


def _read_gemma(config: Settings) -> DecoderSpec:
    """The first Gemma, from which the later ones are made."""
    if not config.has("head_dim"):
        config = Settings({**config.values, "head_dim": 256}, config.where)
    spec = read_llama_config(config, "gemma")
    # The first files say "gelu" and mean its tanh form; `hidden_activation` was added to say so.
    activation = config.text("hidden_activation", "hidden_act", default=_TANH)
    return replace(
        spec,
        norm=NormSpec("rms", spec.norm.eps, offset=1.0, is_float32=True),
        activation=_TANH if activation == "gelu" else activation,
        embedding_scale=spec.hidden_size**0.5,
        is_head_tied=config.boolean("tie_word_embeddings", default=True),
    )


def _read_gemma2(config: Settings) -> DecoderSpec:
    spec = _read_gemma(config)
    kinds: list[LayerKind] = ["full" if i % 2 else "sliding" for i in range(spec.num_layers)]
    return replace(
        spec,
        family="gemma2",
        norm_placement="sandwich",
        activation=config.text("hidden_activation", default=_TANH),
        attention_scale=config.number("query_pre_attn_scalar", default=256) ** -0.5,
        attention_softcap=config.optional_number("attn_logit_softcapping", 50.0),
        logit_softcap=config.optional_number("final_logit_softcapping", 30.0),
        layer_kinds=read_layer_kinds(config, spec.num_layers, kinds),
        window=config.integer("sliding_window", default=4096),
    )


def _read_vaultgemma(config: Settings) -> DecoderSpec:
    """Gemma 2 without the outer norms."""
    return replace(_read_gemma2(config), family="vaultgemma", norm_placement="pre")


def _read_gemma3(config: Settings) -> DecoderSpec:
    head_dim = config.integer("head_dim", default=256)
    full, local = read_two_ropes(config, head_dim, theta=1e6, local_theta=_LOCAL_THETA)
    spec = _read_gemma(Settings({**config.values, "rope_parameters": None, "rope_scaling": None}, config.where))
    pattern = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds: list[LayerKind] = ["sliding" if (i + 1) % pattern else "full" for i in range(spec.num_layers)]
    return replace(
        spec,
        family="gemma3",
        norm_placement="sandwich",
        qk_norm=spec.norm,
        rope=full,
        local_rope=local,
        activation=config.text("hidden_activation", default=_TANH),
        attention_scale=config.number("query_pre_attn_scalar", default=256) ** -0.5,
        attention_softcap=config.optional_number("attn_logit_softcapping"),
        logit_softcap=config.optional_number("final_logit_softcapping"),
        layer_kinds=read_layer_kinds(config, spec.num_layers, kinds),
        window=config.integer("sliding_window", default=4096),
    )


def _read_gguf(header: Settings, source: WeightSource) -> DecoderSpec:
    """The first Gemma; llama.cpp's converter has added the 1 to norm weights already."""
    spec = read_gguf_decoder(header, source, family="gemma", activation=_TANH)
    return replace(
        spec,
        norm=replace(spec.norm, is_float32=True),
        embedding_scale=spec.hidden_size**0.5,
    )


def _read_later_gguf(header: Settings, source: WeightSource, family: str, pattern: int) -> DecoderSpec:
    spec = _read_gguf(header, source)
    width = spec.hidden_size / spec.num_heads if spec.num_layers == _LAYERS_27B[family] else spec.head_dim
    return replace(
        spec,
        family=family,
        norm_placement="sandwich",
        attention_scale=width**-0.5,
        attention_softcap=header.optional_number("attn_logit_softcapping"),
        logit_softcap=header.optional_number("final_logit_softcapping"),
        layer_kinds=tuple("sliding" if (i + 1) % pattern else "full" for i in range(spec.num_layers)),
        window=header.integer("attention.sliding_window", default=4096),
    )


def _read_gemma2_gguf(header: Settings, source: WeightSource) -> DecoderSpec:
    spec = _read_later_gguf(header, source, "gemma2", pattern=2)
    return replace(spec, attention_softcap=spec.attention_softcap or 50.0, logit_softcap=spec.logit_softcap or 30.0)


def _read_gemma3_gguf(header: Settings, source: WeightSource) -> DecoderSpec:
    spec = _read_later_gguf(header, source, "gemma3", pattern=6)
    theta = header.number("rope.freq_base_swa", default=_LOCAL_THETA)
    return replace(spec, local_rope=make_rope(plain_frequencies(spec.head_dim, theta)))


GEMMA = DecoderFamily(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    model_types=("gemma",),
    read_config=_read_gemma,
    find_names=fixed(LLAMA_NAMES),
    gguf=("gemma",),
    read_gguf=_read_gguf,
)
GEMMA2 = DecoderFamily(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    model_types=("gemma2",),
    read_config=_read_gemma2,
    find_names=fixed(SANDWICH_NAMES),
    gguf=("gemma2",),
    read_gguf=_read_gemma2_gguf,
)
VAULTGEMMA = DecoderFamily(
    name="vaultgemma",
    architectures=("VaultGemmaForCausalLM",),
    model_types=("vaultgemma",),
    read_config=_read_vaultgemma,
    find_names=fixed(replace(LLAMA_NAMES, ffn_norm="pre_feedforward_layernorm")),
)
GEMMA3 = DecoderFamily(
    name="gemma3",
    architectures=("Gemma3ForCausalLM",),
    model_types=("gemma3_text",),
    read_config=_read_gemma3,
    find_names=fixed(SANDWICH_NAMES),
    gguf=("gemma3",),
    read_gguf=_read_gemma3_gguf,
)
