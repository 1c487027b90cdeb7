"""How caches are packed: their settings, checked before anything is computed, and who turns numbers into codes.

That is unspool's own quantiser, or optimum-quanto's and hqq's if they are installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch

from unspool.cache.config import CacheConfig
from unspool.errors import SettingError
from unspool.kernels.packing import BITS, Fit, Scheme, fit_range

_MOST_POSITIONS: Final = 1 << 16  # of a group or a residual
_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}


@dataclass(frozen=True, slots=True)
class Backend:
    """What a backend of quantised caches packs, and what its axes mean."""

    package: str  # as pip knows it; empty: nothing to install
    nbits: tuple[int, ...]
    by_channel: dict[int, bool]  # axis -> whether groups run down the positions of a channel

    def find_fit(self) -> Fit:
        """The package's own quantiser if it is installed, otherwise unspool's."""
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


class QuantizedCacheConfig(CacheConfig):
    """How a cache packs its keys and values (KIVI, Liu et al., 2024).

    `axis_key` and `axis_value` mean what they mean to the backend. quanto: 0 groups along the channels of a position,
    -1 down the positions of a channel. HQQ: 1 along the channels, 0 down the positions. unspool: as HQQ. Scales and
    zero points are kept in `compute_dtype`.
    """

    cache_implementation: str | None = None  # it serves both kinds, the one that grows and the static one

    def __init__(
        self,
        backend: str = "quanto",
        nbits: int = 4,
        axis_key: int = 0,
        axis_value: int = 0,
        q_group_size: int = 64,
        residual_length: int = 128,
        compute_dtype: torch.dtype | str = torch.float16,
        device: str | torch.device = "cpu",
    ) -> None:
        self.backend = backend
        self.nbits = nbits
        self.axis_key = axis_key
        self.axis_value = axis_value
        self.q_group_size = q_group_size
        self.residual_length = residual_length
        named = str(compute_dtype).removeprefix("torch.")
        self.compute_dtype: Any = _DTYPES.get(named, compute_dtype)  # validate() refuses what is no dtype of these
        self.device = str(device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuantizedCacheConfig) and self.to_dict() == other.to_dict()

    def validate(self) -> None:
        """Raise the error that names the first value that can't be, for this backend."""
        backend = self._find_backend()
        if isinstance(self.nbits, bool) or self.nbits not in backend.nbits:
            others = [name for name, other in BACKENDS.items() if self.nbits in other.nbits]
            hint = f"; backend={others[0]!r} packs {self.nbits}" if others else ""
            raise SettingError(
                f"`nbits`={self.nbits!r} can't be packed with backend={self.backend!r}"
                f"{f' ({backend.package})' if backend.package else ''}, which takes "
                f"{' or '.join(map(str, backend.nbits))}{hint}"
            )
        for name in ("axis_key", "axis_value"):
            axis = getattr(self, name)
            if isinstance(axis, bool) or axis not in backend.by_channel:
                raise SettingError(
                    f"`{name}`={axis!r} is no axis of backend={self.backend!r}, which takes "
                    f"{' or '.join(map(str, backend.by_channel))}"
                )
        for name, least in (("q_group_size", 1), ("residual_length", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_POSITIONS:
                raise SettingError(f"`{name}` must be a whole number from {least} to {_MOST_POSITIONS}, not {value!r}")
        if self.compute_dtype not in _DTYPES.values():
            raise SettingError(f"`compute_dtype` must be one of {', '.join(_DTYPES)}, not {self.compute_dtype!r}")
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise SettingError(f"`device`={self.device!r} is no device: {error}") from error

    def find_backend(self) -> Backend:
        """The backend, once all values are known to be sound."""
        self.validate()
        return self._find_backend()

    def _find_backend(self) -> Backend:
        backend = BACKENDS.get(self.backend) if isinstance(self.backend, str) else None
        if backend is None:
            raise SettingError(f"`backend`={self.backend!r} is none of {', '.join(map(repr, BACKENDS))}")
        return backend

    def make_schemes(self, width: int) -> tuple[Scheme, Scheme]:
        """How keys and values of heads of a width are packed."""
        axes = self.find_backend().by_channel
        keys, values = (
            Scheme.of(width, self.nbits, self.q_group_size, axes[axis], self.compute_dtype)
            for axis in (self.axis_key, self.axis_value)
        )
        return keys, values


OPTIONS: Final = tuple(QuantizedCacheConfig().to_dict())


def read_quantized_config(options: Mapping[str, Any]) -> QuantizedCacheConfig:
    """What `cache_config` says, checked; if it names no backend, unspool packs keys by channel, values by token."""
    chosen = options if "backend" in options else {"backend": "unspool", "axis_value": 1, **options}
    config = QuantizedCacheConfig(**chosen)
    config.validate()
    return config


def fit_with_quanto(
    groups: torch.Tensor, nbits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and shifts of optimum-quanto's MaxOptimizer, one per group."""
    from optimum.quanto import MaxOptimizer, qint2, qint4

    scale, shift = MaxOptimizer()(groups, qint4 if nbits == 4 else qint2, 0, None)
    return _round(groups, scale.reshape(-1), -shift.reshape(-1).float(), nbits, dtype)


def fit_with_hqq(
    groups: torch.Tensor, nbits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and zero points of hqq's Quantizer, one per group."""
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
