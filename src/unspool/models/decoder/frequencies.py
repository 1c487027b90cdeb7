"""Rotary frequencies and their scalings, computed in float32 as the models were trained."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from unspool.errors import LoadError, UnsupportedError
from unspool.models.decoder.spec import RopeSpec
from unspool.models.settings import Settings

_BUILT = ("default", "linear", "llama3", "yarn")


def plain_frequencies(width: int, theta: float) -> torch.Tensor:
    """One frequency per pair: theta ** -(2 i / width) (pairs,)."""
    return 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width))


def make_rope(
    frequencies: torch.Tensor, *, is_interleaved: bool = False, gain: float = 1.0, factor: float = 1.0
) -> RopeSpec:
    """The description that holds these frequencies, divided by `factor` (linear scaling)."""
    scaled = frequencies / factor
    if not scaled.isfinite().all():
        raise LoadError("the rope settings of this model make frequencies that are not finite")
    return RopeSpec(tuple(scaled.tolist()), is_interleaved, gain)


def read_rope(
    config: Settings,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    rotary_fraction: float = 1.0,
    scaling: Settings | None = None,
    is_interleaved: bool = False,
) -> RopeSpec:
    """The rope of a config: `rope_parameters` as transformers 5 writes them, or the older flat keys.

    `theta` and `rotary_fraction` are the family's defaults; `scaling` is given if the family keeps its parameters
    elsewhere; `is_interleaved` says that the stored weights pair neighbours.
    """
    scaling = scaling or config.part("rope_parameters") or config.part("rope_scaling")
    empty = Settings({}, config.where)
    found = scaling or empty
    theta = (
        found.number("rope_theta", default=None)
        if found.has("rope_theta")
        else config.number("rope_theta", "rotary_emb_base", default=theta)
    )
    fraction = found if found.has("partial_rotary_factor") else config
    share = fraction.number("partial_rotary_factor", "rotary_pct", default=rotary_fraction)
    width = int(head_dim * share)
    if width % 2 or not 0 < width <= head_dim:
        raise UnsupportedError(f"{config.where} rotates {width} of {head_dim} numbers a head; pairs need an even part")
    kind = found.text("rope_type", "type", default="default")
    frequencies = plain_frequencies(width, theta)
    if kind == "default":
        return make_rope(frequencies, is_interleaved=is_interleaved)
    if kind == "linear":
        return make_rope(frequencies, is_interleaved=is_interleaved, factor=found.number("factor"))
    if kind == "llama3":
        scaled = _llama3(frequencies, found, _trained_context(config, found))
        return make_rope(scaled, is_interleaved=is_interleaved)
    if kind == "yarn":
        return replace(_yarn(width, theta, found, config), is_interleaved=is_interleaved)
    raise UnsupportedError(
        f"{config.where} asks for rope scaling {kind!r}, which is not built (these are: {', '.join(_BUILT)}); "
        "scalings that change with the length of the batch would make a row's answer depend on its neighbours"
    )


def read_two_ropes(config: Settings, head_dim: int, *, theta: float, local_theta: float) -> tuple[RopeSpec, RopeSpec]:
    """The ropes of full and of sliding layers: nested by kind as transformers 5 writes them, or flat."""
    nested = config.part("rope_parameters")
    if nested is not None and (nested.has("full_attention") or nested.has("sliding_attention")):
        full, local = nested.part("full_attention"), nested.part("sliding_attention")
        empty = Settings({}, config.where)
        return (
            read_rope(config, head_dim, theta=theta, scaling=full or empty),
            read_rope(config, head_dim, theta=local_theta, scaling=local or empty),
        )
    local_theta = config.number("rope_local_base_freq", default=local_theta)
    return read_rope(config, head_dim, theta=theta), make_rope(plain_frequencies(head_dim, local_theta))


def _trained_context(config: Settings, scaling: Settings) -> int:
    outer = config.find("original_max_position_embeddings")
    source = config if outer is not None else scaling
    return source.integer("original_max_position_embeddings", default=config.find("max_position_embeddings"))


def _llama3(frequencies: torch.Tensor, scaling: Settings, trained: int) -> torch.Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated (Llama 3.1)."""
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    lengths = 2 * math.pi / frequencies  # wavelengths in positions
    blend = (trained / lengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    slowed = torch.where(lengths > trained / low, frequencies / factor, frequencies)
    return torch.where((lengths <= trained / low) & (lengths >= trained / high), blended, slowed)


def _yarn(width: int, theta: float, scaling: Settings, config: Settings) -> RopeSpec:
    """High frequencies are kept, low ones are interpolated, with a ramp between (Peng et al., 2023)."""
    trained = _trained_context(config, scaling)
    context = config.integer("max_position_embeddings", default=trained)
    factor = scaling.number("factor", default=context / trained)
    return yarn_rope(
        plain_frequencies(width, theta),
        theta=theta,
        factor=factor,
        trained=trained,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        is_whole=scaling.boolean("truncate", default=True),
        gain=_yarn_gain(scaling, factor),
    )


def _yarn_gain(scaling: Settings, factor: float) -> float:
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    both, alone = scaling.optional_number("mscale"), scaling.optional_number("mscale_all_dim")
    if both and alone:
        return yarn_magnitude(factor, both) / yarn_magnitude(factor, alone)
    return yarn_magnitude(factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on rotated queries and keys."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_rope(
    frequencies: torch.Tensor,
    *,
    theta: float,
    factor: float,
    trained: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    is_whole: bool = True,
    gain: float,
    is_interleaved: bool = False,
) -> RopeSpec:
    """YaRN over plain frequencies; `is_whole` rounds the ramp's ends outwards."""
    width = 2 * frequencies.numel()

    def pair_turning(times: float) -> float:
        return width * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(beta_fast), pair_turning(beta_slow)
    if is_whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low if high != low else 0.001  # a step would divide by zero
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    turned = frequencies / factor * ramp + frequencies * (1 - ramp)
    return make_rope(turned, gain=gain, is_interleaved=is_interleaved)
