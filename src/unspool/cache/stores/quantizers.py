"""Who turns groups of numbers into codes: unspool's own quantiser, or optimum-quanto's and hqq's where installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch

from unspool.kernels.packing import BITS, Fit, fit_range


@dataclass(frozen=True, slots=True)
class Backend:
    """What a backend of quantised caches packs, and what its axes mean."""

    package: str  # as pip knows it; empty: nothing to install
    nbits: tuple[int, ...]
    by_channel: dict[int, bool]  # axis -> whether groups run down the positions of a channel

    def find_fit(self) -> Fit:
        """The package's own quantiser where it is installed, unspool's where not."""
        if self.package == "optimum-quanto" and _is_installed("optimum.quanto"):
            return fit_with_quanto
        if self.package == "hqq" and _is_installed("hqq.core.quantize"):
            return fit_with_hqq
        return fit_range


# quanto flattens a tensor into runs of its last axis for axis 0, and keeps channels apart for axis -1. hqq does the
# same for axis 1 and axis 0. Our own axes are those of (positions, channels): the one that a group runs along.
BACKENDS: Final[dict[str, Backend]] = {
    "unspool": Backend("", BITS, {0: True, 1: False, -1: False}),
    "quanto": Backend("optimum-quanto", (2, 4), {0: False, -1: True}),
    "HQQ": Backend("hqq", BITS, {0: True, 1: False}),
}


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not there
        return False


def fit_with_quanto(
    groups: torch.Tensor, nbits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and shifts of optimum-quanto's MaxOptimizer, a group each."""
    from optimum.quanto import MaxOptimizer, qint2, qint4

    scale, shift = MaxOptimizer()(groups, qint4 if nbits == 4 else qint2, 0, None)
    return _round(groups, scale.reshape(-1), -shift.reshape(-1).float(), nbits, dtype)


def fit_with_hqq(
    groups: torch.Tensor, nbits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and zero points of hqq's Quantizer, a group each."""
    from hqq.core.quantize import Quantizer

    made: tuple[Any, dict[str, Any]] = Quantizer.quantize(
        groups,
        nbits=nbits,
        group_size=groups.shape[1],
        axis=1,
        bitpack=False,
        compute_dtype=torch.float32,
        device=str(groups.device),
    )
    meta = made[1]
    scale, zero = (meta[name].float().reshape(-1).to(groups.device) for name in ("scale", "zero"))
    return _round(groups, scale, -zero * scale, nbits, dtype)


def _round(
    groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, nbits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes for the scale and the zero point as they are kept."""
    scale, zero = scale.to(dtype), zero.to(dtype)
    wide = scale.float()[:, None]
    codes = (groups - zero.float()[:, None]) / torch.where(wide > 0, wide, 1.0)
    return codes.round_().clamp_(0, (1 << nbits) - 1).to(torch.uint8), scale, zero
