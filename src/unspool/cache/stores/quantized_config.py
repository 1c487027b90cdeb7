"""The settings of quantised caches, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from unspool.cache.config import CacheConfig
from unspool.cache.stores.quantizers import BACKENDS, Backend
from unspool.errors import SettingError
from unspool.kernels.packing import Scheme

_MOST_POSITIONS: Final = 1 << 16  # of a group or a residual
_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}


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

    __hash__ = None  # type: ignore[assignment]  # it can be changed

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
    """What `cache_config` says, checked; where it names no backend, unspool packs keys by channel, values by token."""
    chosen = options if "backend" in options else {"backend": "unspool", "axis_value": 1, **options}
    config = QuantizedCacheConfig(**chosen)
    config.validate()
    return config
