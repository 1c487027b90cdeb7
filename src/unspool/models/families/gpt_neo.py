"""GPT-Neo: learned positions, scores that are not scaled, and a window in every second layer."""

from __future__ import annotations

from unspool.errors import LoadError
from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed, read_ids, read_sizes, refuse_unbuilt
from unspool.models.settings import Settings
from unspool.protocols import LayerKind

NAMES = WeightNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{i}.",
    attn_norm="ln_1",
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    out="attn.attention.out_proj",
    ffn_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    final_norm="transformer.ln_f",
    prefix="transformer.",
)
_KINDS: dict[str, LayerKind] = {"global": "full", "local": "sliding"}


def _read_config(config: Settings) -> DecoderSpec:
    refuse_unbuilt(config)
    sizes = read_sizes(config, layers=("num_layers",), heads=("num_heads",))
    max_context = config.integer("max_position_embeddings", default=2048)
    return DecoderSpec(
        family="gpt_neo",
        **sizes,
        ffn_size=config.integer("intermediate_size", default=4 * sizes["hidden_size"]),
        max_context=max_context,
        norm=NormSpec("layer", config.number("layer_norm_epsilon", default=1e-5), has_bias=True),
        num_positions=max_context,
        layer_kinds=_read_kinds(config, sizes["num_layers"]),
        window=config.integer("window_size", default=256),
        has_out_bias=True,
        is_gated=False,
        activation=config.text("activation_function", default="gelu_new"),
        has_ffn_bias=True,
        is_head_tied=config.boolean("tie_word_embeddings", default=True),
        **read_ids(config),
    )


def _read_kinds(config: Settings, num_layers: int) -> tuple[LayerKind, ...]:
    """Global or local for each layer: listed, or as patterns with how often each is repeated."""
    listed = config.find("attention_layers")
    if listed is None:
        listed = _repeat(config.find("attention_types") or [[["global", "local"], num_layers // 2]], num_layers)
    if not isinstance(listed, list | tuple) or len(listed) != num_layers:
        raise LoadError(f"{config.where} does not name a kind of attention for each of {num_layers} layers")
    if any(not isinstance(kind, str) or kind not in _KINDS for kind in listed):
        raise LoadError(f"{config.where} has a kind of attention other than global and local")
    return tuple(_KINDS[kind] for kind in listed)


def _repeat(patterns: object, num_layers: int) -> list[object] | None:
    kinds: list[object] = []
    for pattern in patterns if isinstance(patterns, list | tuple) else ():
        if not isinstance(pattern, list | tuple) or len(pattern) != 2:
            return None
        some, times = pattern
        if not isinstance(some, list | tuple) or type(times) is not int or not 0 < times * len(some) <= num_layers:
            return None
        kinds += [*some] * times
    return kinds


GPT_NEO = DecoderFamily(
    name="gpt_neo",
    architectures=("GPTNeoForCausalLM",),
    model_types=("gpt_neo",),
    read_config=_read_config,
    find_names=fixed(NAMES),
)
