"""The cache of state-space models: no keys, but what each layer's convolution and recurrence remember."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from unspool.cache.contract.capabilities import JOIN, RAGGED, SELECT_ROWS, TRIAL, UNDO
from unspool.cache.mamba_surface import StateSurface
from unspool.cache.older_names import takes_batch_size
from unspool.cache.stored import FixedCache, StoredCache
from unspool.cache.stores.states import Inputs, Replay, StateStore, refuse_keys
from unspool.errors import SettingError, UnsupportedError


class MambaCache(StateSurface, FixedCache):
    """The states of a Mamba model: of one size however long the text gets, so nothing in them can be taken back.

    A row can go back to nothing, to where it was put aside, or to any length since `begin_trial`; all rows can go back
    by the last pass, if it read one token of each.
    """

    can = frozenset({TRIAL, UNDO, SELECT_ROWS, RAGGED, JOIN})
    is_compileable = False
    is_endless = True
    max_batch_size: int
    _store: StateStore

    @takes_batch_size
    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise SettingError(f"a cache of states needs at least one row, not max_batch_size={max_batch_size}")
        self.max_batch_size, self.dtype = max_batch_size, dtype
        self.num_layers, self.intermediate_size = int(config.num_hidden_layers), _find_inner(config)
        self.ssm_state_size, self.conv_kernel_size = int(config.state_size), int(config.conv_kernel)
        self.conv_size = _find_conv_size(config)
        self.has_heads = getattr(config, "model_type", "") == "mamba2"
        shape = (self.num_layers, max_batch_size, self.conv_kernel_size, self.conv_size)
        place = torch.device(device or "cpu")
        super().__init__(StateStore(shape, self.ssm_state_size, dtype, place, inner=self.intermediate_size))

    @property
    def device(self) -> torch.device:
        """Where the states are."""
        return self._store.conv.device

    @property
    def conv_states(self) -> torch.Tensor:
        """The last inputs of every layer's convolution: (layers, rows, channels, conv_kernel_size).

        Its channels are the intermediate ones, and with Mamba-2 those of B and C after them.
        """
        return self._store.conv.transpose(-1, -2)

    @property
    def ssm_states(self) -> torch.Tensor:
        """Every layer's recurrent state: (layers, rows, intermediate_size, ssm_state_size), float32."""
        return self._store.ssm.transpose(-1, -2)

    # --- a forward pass: `extend` and `next_state` in every layer, instead of `write` ------------------
    def extend(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        """What a layer's convolution reads: the inputs before `inputs` (rows, new, inner), and these after them.

        Returns (rows, conv_kernel_size - 1 + new, inner), and keeps each row's last real inputs for the next pass.
        """
        return self._store.extend(layer, self._require_span(), inputs)

    def state(self, layer: int) -> torch.Tensor:
        """A layer's recurrent state before this pass: (rows, state, inner), float32."""
        return self._store.ssm[layer]

    def next_state(self, layer: int) -> torch.Tensor:
        """Where the state after this pass is to be written: (rows, state, inner), float32."""
        self._require_span()
        return self._store.next_ssm[layer]

    def keep_inputs(self, layer: int, inputs: Inputs, replay: Replay) -> None:
        """While a trial is on: what the recurrence was given (rows first), and how to run it again over a part."""
        self._store.keep_inputs(layer, inputs, replay)

    def list_buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where a pass reads and writes all layers' states: windows, next windows, states, next states."""
        store = self._store
        return store.conv, store.next_conv, store.ssm, store.next_ssm

    def advance(self, rows: int) -> None:
        raise UnsupportedError("a MambaCache is written through begin(), extend() and end()")

    # --- rows ----------------------------------------------------------------------------------------
    def _open(self, rows: int) -> None:
        if rows > self.max_batch_size:
            raise SettingError(
                f"{rows} rows do not fit a cache of states for max_batch_size={self.max_batch_size}; make it larger"
            )
        super()._open(rows)

    def _check_rows(self, rows: int) -> None:
        """Rows that are selected or join bring their own memory."""

    def truncate(self, lengths: Sequence[int]) -> None:
        if self._store.can_undo and list(lengths) == [held - 1 for held in self.lengths]:
            self._store.undo()
            self.lengths = list(lengths)
        else:
            super().truncate(lengths)

    def put_aside(self, rows: Sequence[int]) -> None:
        self._store.put_aside(rows, self.lengths)

    def take_back(self) -> None:
        for row, length in self._store.take_back().items():
            self.lengths[row] = length

    def _select(self, index: torch.Tensor) -> None:
        super()._select(index)
        self.max_batch_size = max(self.max_batch_size, len(index))

    def _join(self, other: StoredCache) -> None:
        super()._join(other)
        self.max_batch_size = max(self.max_batch_size, len(self.lengths) + len(other.lengths))

    # --- files ---------------------------------------------------------------------------------------
    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return {}, {"conv": self._store.conv, "ssm": self._store.ssm}

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> MambaCache:
        conv, ssm = tensors["conv"], tensors["ssm"]
        layers, rows, kernel, channels = conv.shape
        if ssm.dim() != 4 or ssm.shape[:2] != (layers, rows) or (lengths and len(lengths) != rows):
            raise ValueError(f"states of shapes {list(conv.shape)} and {list(ssm.shape)} for {len(lengths)} rows")
        sizes = SimpleNamespace(
            num_hidden_layers=layers,
            intermediate_size=ssm.shape[3],
            conv_size=channels,
            conv_kernel=kernel,
            state_size=ssm.shape[2],
        )
        cache = cls(sizes, rows, conv.dtype, conv.device)
        cache._store.fill(conv, ssm)
        cache.lengths = list(lengths)
        return cache

    def find_misfit(self, shape: Any) -> str | None:
        sizes = shape.config
        if not hasattr(sizes, "state_size"):
            return "it holds states and no keys, and the model has attention; give it a DynamicCache"
        for name, mine, its in (
            ("layers", self.num_layers, shape.num_layers),
            ("intermediate_size", self.intermediate_size, _find_inner(sizes)),
            ("channels of a convolution", self.conv_size, _find_conv_size(sizes)),
            ("state_size", self.ssm_state_size, sizes.state_size),
            ("conv_kernel", self.conv_kernel_size, sizes.conv_kernel),
        ):
            if mine != its:
                return f"it has {name} {mine} and the model {its}"
        if self.device.type != shape.device.type:
            return f"its states are on {self.device} and the model on {shape.device}; make it with device=model.device"
        if self.dtype != shape.dtype:
            return f"its states are {self.dtype} and the model's {shape.dtype}; make it with dtype=model.dtype"
        return None

    # --- the reference's surface ---------------------------------------------------------------------
    def update_conv_state(self, *given: Any, **named: Any) -> torch.Tensor:
        """Append inputs to a layer's window, and return it: `(layer_idx, new_conv_state, cache_position)`.

        The inputs are (rows, intermediate_size, 1 to conv_kernel_size). Called as `(conv_states, layer_idx)`, as
        releases of transformers from 5.0 on do, it takes any number, and returns them behind the window.
        """
        if given and isinstance(given[0], torch.Tensor):
            if not any(self.lengths):
                self._open(given[0].shape[0])
            return self._extend_window(given[0], named["layer_idx"] if len(given) == 1 else given[1])
        layer_idx, new_conv_state, cache_position = _read_older(given, named)
        rows, num_new = self._check_state(layer_idx, new_conv_state, "conv_kernel_size", self.conv_kernel_size)
        self._store.can_undo, held = False, self._store.conv[layer_idx]
        held.copy_(torch.cat((held[:, num_new:], new_conv_state.transpose(1, 2).to(held)), dim=1))
        self.lengths = [int(cache_position.max()) + 1] * rows
        return self.conv_states[layer_idx]

    def update_ssm_state(self, layer_idx: int, new_ssm_state: torch.Tensor) -> torch.Tensor:
        """Replace a layer's recurrent state (rows, intermediate_size, state_size); return it."""
        self._check_state(layer_idx, new_ssm_state, "state_size", self.ssm_state_size)
        self._store.can_undo = False
        self._store.ssm[layer_idx].copy_(new_ssm_state.transpose(1, 2))
        return self.ssm_states[layer_idx]

    def _check_state(self, layer: int, state: torch.Tensor, name: str, most: int) -> tuple[int, int]:
        """Rows and the last dimension of a state that fits."""
        rows = self._store.conv.shape[1]
        inner = self.conv_size if name == "conv_kernel_size" else self.intermediate_size
        if not 0 <= layer < self.num_layers:
            raise SettingError(f"the cache has {self.num_layers} layers; layer {layer} was given")
        least = 1 if name == "conv_kernel_size" else most
        if state.dim() != 3 or state.shape[:2] != (rows, inner) or not least <= state.shape[2] <= most:
            raise SettingError(
                f"a state of shape {list(state.shape)} does not fit a cache of {rows} rows with "
                f"{inner} channels and {name}={most}"
            )
        return rows, int(state.shape[2])

    def write(self, layer: int, kv: torch.Tensor) -> NoReturn:
        raise refuse_keys()

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise refuse_keys()


def _read_older(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The arguments of update_conv_state() as transformers had them before 5.0."""

    def read(layer_idx: int, new_conv_state: torch.Tensor, cache_position: torch.Tensor) -> Any:
        return layer_idx, new_conv_state, cache_position

    layer, state, positions = read(*given, **named)
    return layer, state, positions


def _find_inner(config: Any) -> int:
    """Channels of the recurrence; configs of Mamba-2 may give the factor alone."""
    given = getattr(config, "intermediate_size", None)
    return int(config.expand * config.hidden_size) if given is None else int(given)


def _find_conv_size(config: Any) -> int:
    """Channels of the convolution: those of the recurrence and, in Mamba-2, those of every group's B and C."""
    given = getattr(config, "conv_size", None)
    if given is not None:
        return int(given)
    inner = _find_inner(config)
    if getattr(config, "model_type", "") != "mamba2":
        return inner
    return inner + 2 * int(config.n_groups) * int(config.state_size)


def refuse_without_states(info: Any) -> str | None:
    """Why a model (its `info`) can't be served by states; None if it can."""
    if "state" in info.layer_kinds:
        return None
    return f"it holds the states of Mamba models, and {info.family} is none; leave it out, or use 'dynamic'"
