"""Llamas with one part exchanged: rotation, biases, a window, norms, or factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unspool.errors import LoadError
from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed
from unspool.models.families.llama import NAMES, read_llama_config, with_window
from unspool.models.settings import Settings
from unspool.protocols import LayerKind

UNGATED_NAMES = replace(NAMES, up=("mlp.up_proj",))


def _read_smollm3(config: Settings) -> DecoderSpec:
    """Every fourth layer does not rotate queries and keys."""
    spec = read_llama_config(config, "smollm3", theta=2e6, is_head_tied=True)
    turned = config.find("no_rope_layers")
    if turned is None:
        interval = config.integer("no_rope_layer_interval", default=4)
        turned = [int((layer + 1) % interval != 0) for layer in range(spec.num_layers)]
    if (
        not isinstance(turned, list | tuple)
        or len(turned) != spec.num_layers
        or any(one not in (0, 1) for one in turned)
    ):
        raise LoadError(f"{config.where}'s no_rope_layers are not a 0 or 1 for each of {spec.num_layers} layers")
    unturned = frozenset(layer for layer, is_turned in enumerate(turned) if not is_turned)
    is_windowed = config.boolean("use_sliding_window", default=False) and config.has("sliding_window")
    window = config.integer("sliding_window") if is_windowed else None
    default: list[LayerKind] = [
        "sliding" if window is not None and layer in unturned else "full" for layer in range(spec.num_layers)
    ]
    return with_window(replace(spec, unturned=unturned), config, window, default)


def _read_exaone4(config: Settings) -> DecoderSpec:
    """Norms of what residuals add alone; if layers have windows, the others do not rotate queries and keys."""
    spec = read_llama_config(config, "exaone4")
    window = config.optional_integer("sliding_window", default=4096)
    pattern = config.optional_integer("sliding_window_pattern", default=4) if window is not None else None
    default: list[LayerKind] = [
        "sliding" if pattern is not None and (layer + 1) % pattern else "full" for layer in range(spec.num_layers)
    ]
    spec = replace(spec, norm_placement="after", qk_norm=spec.norm)
    spec = with_window(spec, config, window, default)
    if window is None:
        return spec
    return replace(spec, unturned=frozenset(i for i in range(spec.num_layers) if spec.kind_of(i) == "full"))


def _read_cwm(config: Settings) -> DecoderSpec:
    spec = read_llama_config(config, "cwm", theta=1e6)
    default: list[LayerKind] = ["sliding" if layer % 4 else "full" for layer in range(spec.num_layers)]
    return with_window(spec, config, config.optional_integer("sliding_window", default=8192), default)


def read_granite_config(config: Settings) -> DecoderSpec:
    """Embeddings, scores, what residuals add, and logits have factors.

    A norm does not see the factor of all states, but for its epsilon. So states are kept divided by the residuals'
    factor, and nothing is multiplied layer by layer.
    """
    spec = read_llama_config(config, "granite")
    scale = config.number("residual_multiplier", default=1.0)
    return replace(
        spec,
        norm=replace(spec.norm, eps=spec.norm.eps / scale**2),
        state_scale=scale,
        embedding_scale=config.number("embedding_multiplier", default=1.0) / scale,
        attention_scale=config.number("attention_multiplier", default=1.0),
        logit_scale=1.0 / config.number("logits_scaling", default=1.0),
    )


def _read_helium(config: Settings) -> DecoderSpec:
    spec = read_llama_config(config, "helium", theta=100_000.0, is_interleaved=True)
    return replace(spec, has_out_bias=False)


def _read_ernie(config: Settings) -> DecoderSpec:
    spec = read_llama_config(config, "ernie4_5", theta=500_000.0, is_interleaved=True, is_head_tied=True)
    has_bias = config.boolean("use_bias", default=False)
    return replace(spec, has_qkv_bias=has_bias, has_out_bias=has_bias, has_ffn_bias=has_bias)


def _read_arcee(config: Settings) -> DecoderSpec:
    return replace(read_llama_config(config, "arcee", activation="relu2"), is_gated=False)


def _read_jais2(config: Settings) -> DecoderSpec:
    """Layer norms, biases and an ungated feed-forward."""
    norm = NormSpec("layer", config.number("layer_norm_eps", default=1e-5), has_bias=True)
    spec = read_llama_config(config, "jais2", norm=norm, activation="relu2")
    has_bias = config.boolean("attention_bias", default=True)
    return replace(
        spec,
        is_gated=False,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        has_ffn_bias=config.boolean("mlp_bias", default=True),
    )


def _read_nemotron(config: Settings) -> DecoderSpec:
    """Layer norms with weights around 1, half of each head rotated, an ungated feed-forward."""
    norm = NormSpec("layer", config.number("norm_eps", default=1e-5), offset=1.0, has_bias=True)
    spec = read_llama_config(config, "nemotron", norm=norm, rotary_fraction=0.5, activation="relu2")
    return replace(spec, is_gated=False)


def _read_starcoder2(config: Settings) -> DecoderSpec:
    """Layer norms, biases, an ungated feed-forward, and a window in all layers if there is one."""
    norm = NormSpec("layer", config.number("norm_epsilon", default=1e-5), has_bias=True)
    spec = read_llama_config(config, "starcoder2", norm=norm, activation="gelu_pytorch_tanh", is_head_tied=True)
    has_bias = config.boolean("use_bias", default=True)
    spec = replace(spec, is_gated=False, has_qkv_bias=has_bias, has_out_bias=has_bias, has_ffn_bias=has_bias)
    window = config.optional_integer("sliding_window")
    return with_window(spec, config, window, ["full" if window is None else "sliding"] * spec.num_layers)


def _read_stablelm(config: Settings) -> DecoderSpec:
    """Layer norms, a quarter of each head rotated; larger ones have parallel residuals and norms for each head."""
    norm = NormSpec("layer", config.number("layer_norm_eps", default=1e-5), has_bias=True)
    spec = read_llama_config(config, "stablelm", norm=norm, rotary_fraction=0.25)
    is_parallel = config.boolean("use_parallel_residual", default=False)
    return replace(
        spec,
        residual="parallel" if is_parallel else "sequential",
        has_ffn_norm=not is_parallel,
        has_qkv_bias=config.boolean("use_qkv_bias", default=False),
        has_out_bias=False,
        has_ffn_bias=False,
        qk_norm=replace(norm, has_bias=False) if config.boolean("qk_layernorm", default=False) else None,
        qk_norm_span="each",
    )


def _make(
    name: str, architecture: str, read: Callable[[Settings], DecoderSpec], names: WeightNames = NAMES
) -> DecoderFamily:
    return DecoderFamily(
        name=name,
        architectures=(f"{architecture}ForCausalLM",),
        model_types=(name,),
        read_config=read,
        find_names=fixed(names),
    )


LLAMA_KIN = (
    _make("smollm3", "SmolLM3", _read_smollm3),
    _make(
        "exaone4",
        "Exaone4",
        _read_exaone4,
        replace(NAMES, post_attn_norm="post_attention_layernorm", post_ffn_norm="post_feedforward_layernorm"),
    ),
    _make("cwm", "Cwm", _read_cwm),
    _make("granite", "Granite", read_granite_config),
    _make("helium", "Helium", _read_helium),
    _make("ernie4_5", "Ernie4_5", _read_ernie),
    _make("arcee", "Arcee", _read_arcee, UNGATED_NAMES),
    _make("jais2", "Jais2", _read_jais2, UNGATED_NAMES),
    _make("nemotron", "Nemotron", _read_nemotron, UNGATED_NAMES),
    _make("starcoder2", "Starcoder2", _read_starcoder2, replace(NAMES, up=("mlp.c_fc",), down="mlp.c_proj")),
    _make(
        "stablelm",
        "StableLm",
        _read_stablelm,
        replace(NAMES, q_norm="self_attn.q_layernorm.norms.{h}", k_norm="self_attn.k_layernorm.norms.{h}"),
    ),
)
"""Each family's entry."""
