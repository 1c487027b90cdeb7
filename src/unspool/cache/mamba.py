"""The cache of state-space models: no keys, but what each layer's convolution and recurrence remember."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from unspool.cache.base import JOIN, RAGGED, SELECT_ROWS, TRIAL, Cache
from unspool.cache.older_names import takes_batch_size
from unspool.cache.span import Span
from unspool.errors import SettingError, UnsupportedError

Inputs = tuple[torch.Tensor, ...]
Replay = Callable[[torch.Tensor, Inputs, Sequence[int]], torch.Tensor]
"""The state after each row's first `counts[row]` positions of a pass, from the state before it and its inputs."""


@dataclass(slots=True)
class _Pass:
    """What one forward pass of a trial was given, so that its first part alone can be computed again."""

    counts: list[int]
    windows: dict[int, torch.Tensor] = field(default_factory=dict)  # a layer each: (rows, kernel + new, inner)
    inputs: dict[int, tuple[Inputs, Replay]] = field(default_factory=dict)  # a layer each, rows first

    def select(self, index: torch.Tensor, rows: Sequence[int]) -> None:
        self.counts = [self.counts[row] for row in rows]
        self.windows = {layer: window[index.to(window.device)] for layer, window in self.windows.items()}
        self.inputs = {
            layer: (tuple(part[index.to(part.device)] for part in parts), replay)
            for layer, (parts, replay) in self.inputs.items()
        }


@dataclass(slots=True)
class _Trial:
    """The states when a trial began, and the passes since."""

    lengths: list[int]
    conv: torch.Tensor
    ssm: torch.Tensor
    passes: list[_Pass] = field(default_factory=list)


class MambaCache(Cache):
    """The states of a Mamba model: of one size however long the text gets, so nothing in them can be taken back.

    A row can go back to nothing, to where it was put aside, or to any length since `begin_trial`. New states are
    written beside the old ones and take their place when a pass ends, so that a pass that fails changes nothing.
    """

    can = frozenset({TRIAL, SELECT_ROWS, RAGGED, JOIN})
    is_endless = True

    @takes_batch_size
    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.max_batch_size = max_batch_size
        self.dtype = dtype
        self.num_layers = int(config.num_hidden_layers)
        self.intermediate_size = int(config.intermediate_size)
        self.ssm_state_size = int(config.state_size)
        self.conv_kernel_size = int(config.conv_kernel)
        if max_batch_size < 1:
            raise SettingError(f"a cache of states needs at least one row, not max_batch_size={max_batch_size}")
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        self._trial: _Trial | None = None
        self._pass: _Pass | None = None  # the one under way, where a trial is on
        self._aside: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}  # a row each: its length and states
        self._make_states(max_batch_size)

    def _make_states(self, rows: int) -> None:
        layers, kernel, width, inner = (
            self.num_layers,
            self.conv_kernel_size,
            self.ssm_state_size,
            self.intermediate_size,
        )
        # Channels lie innermost, so that everything the recurrence broadcasts runs along them. It is kept in float32,
        # whatever the model computes in: a state is rounded again with every token.
        self._conv = torch.zeros(layers, rows, kernel, inner, dtype=self.dtype, device=self._device)
        self._ssm = torch.zeros(layers, rows, width, inner, dtype=torch.float32, device=self._device)
        self._next_conv, self._next_ssm = torch.empty_like(self._conv), torch.empty_like(self._ssm)

    @property
    def device(self) -> torch.device:
        """Where the states are."""
        return self._conv.device

    @property
    def conv_states(self) -> torch.Tensor:
        """The last inputs of every layer's convolution: (layers, rows, intermediate_size, conv_kernel_size)."""
        return self._conv.transpose(-1, -2)

    @property
    def ssm_states(self) -> torch.Tensor:
        """Every layer's recurrent state: (layers, rows, intermediate_size, ssm_state_size), float32."""
        return self._ssm.transpose(-1, -2)

    @property
    def nbytes(self) -> int:
        """Bytes that the states take, those in the making included."""
        states = (self._conv, self._ssm, self._next_conv, self._next_ssm)
        return sum(state.nbytes for state in states)

    # --- a forward pass: `extend` and `advance` in every layer, instead of `write` --------------------------
    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        if not self.lengths and rows > self.max_batch_size:
            raise SettingError(
                f"{rows} rows do not fit a cache of states for max_batch_size={self.max_batch_size}; make it larger"
            )
        self._pass = None  # of a pass that failed
        was_empty = not self.lengths
        span = super().begin(rows, num_new, counts, device)
        if was_empty and self._conv.shape[1] != rows:
            self._make_states(rows)
        if self._trial is not None:
            if not self._trial.lengths:  # the trial began before the first pass
                self._trial.lengths = [0] * rows
                self._trial.conv, self._trial.ssm = self._conv.clone(), self._ssm.clone()
            self._pass = _Pass(list(span.counts))
        return span

    def extend(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        """What a layer's convolution reads: the inputs before `inputs` (rows, new, inner), and these after them.

        Gives (rows, conv_kernel_size - 1 + new, inner), and keeps each row's last real inputs for the next pass.
        """
        span, held, kept = self._require_span(), self._conv[layer], self._next_conv[layer]
        num_new, kernel = span.num_new, self.conv_kernel_size
        if num_new == 1 and self._pass is None and min(span.counts) == 1:
            return torch.cat((held[:, 1:], inputs), dim=1, out=kept)
        whole = torch.cat((held, inputs), dim=1)  # (rows, kernel + new, inner)
        if min(span.counts) == num_new:
            kept.copy_(whole[:, num_new:])
        else:
            kept.copy_(_take_windows(whole, span.counts, kernel))
        if self._pass is not None:
            self._pass.windows[layer] = whole
        return whole[:, 1:]

    def state(self, layer: int) -> torch.Tensor:
        """A layer's recurrent state before this pass: (rows, state, inner), float32."""
        return self._ssm[layer]

    def next_state(self, layer: int) -> torch.Tensor:
        """Where the state after this pass is to be written: (rows, state, inner), float32."""
        self._require_span()
        return self._next_ssm[layer]

    def list_buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where a pass reads and writes all layers' states: windows, next windows, states, next states."""
        return self._conv, self._next_conv, self._ssm, self._next_ssm

    def keep_inputs(self, layer: int, inputs: Inputs, replay: Replay) -> None:
        """While a trial is on: what the recurrence was given (rows first), and how to run it again over a part."""
        if self._pass is not None:
            self._pass.inputs[layer] = (inputs, replay)

    def end(self) -> None:
        super().end()
        self._swap()
        if self._trial is not None and self._pass is not None:
            self._trial.passes.append(self._pass)
        self._pass = None

    def _swap(self) -> None:
        self._conv, self._next_conv = self._next_conv, self._conv
        self._ssm, self._next_ssm = self._next_ssm, self._ssm

    def write(self, layer: int, kv: torch.Tensor) -> NoReturn:  # noqa: ARG002 - the contract's arguments
        raise self._refuse_keys()

    def _refuse_keys(self) -> UnsupportedError:
        return UnsupportedError(
            "a MambaCache holds states and no keys: it serves Mamba models alone. Give a model with attention a "
            "DynamicCache, or leave the cache out"
        )

    # --- rows ------------------------------------------------------------------------------------------
    def begin_trial(self) -> None:
        self._trial = _Trial(list(self.lengths), self._conv.clone(), self._ssm.clone())

    def truncate(self, lengths: Sequence[int]) -> None:
        """Roll every row back: all rows to nothing, or each to a length it has had since the trial began."""
        self._check_lengths(lengths)
        wanted = list(lengths)
        trial, self._trial = self._trial, None
        if wanted == self.lengths:
            return
        if not any(wanted):
            self._conv.zero_()
            self._ssm.zero_()
        elif trial is not None and all(new >= old for new, old in zip(wanted, trial.lengths, strict=True)):
            self._replay(trial, wanted)
        else:
            self._trial = trial
            reach = trial.lengths if trial is not None else self.lengths
            raise UnsupportedError(
                f"can't roll back from lengths {self.lengths} to {wanted}: a state can't be taken apart. Rows can go "
                f"back to {reach}, or all of them to 0; call begin_trial() before tokens that may be taken back"
            )
        self.lengths = wanted

    def _replay(self, trial: _Trial, wanted: list[int]) -> None:
        """Read the trial's passes again from where it began, each row as far as it is to get."""
        self._conv, self._ssm = trial.conv, trial.ssm
        at = list(trial.lengths)
        for kept in trial.passes:
            counts = [min(count, end - here) for count, end, here in zip(kept.counts, wanted, at, strict=True)]
            at = [here + count for here, count in zip(at, counts, strict=True)]
            goes_on = torch.tensor([count > 0 for count in counts], device=self._device)[:, None, None]
            for layer, window in kept.windows.items():
                inputs, replay = kept.inputs[layer]
                taken = _take_windows(window, counts, self.conv_kernel_size)
                # A row that stopped in an earlier pass has read less than this pass's window says.
                self._conv[layer] = torch.where(goes_on, taken, self._conv[layer])
                self._ssm[layer] = replay(self._ssm[layer], inputs, counts)

    def put_aside(self, rows: Sequence[int]) -> None:
        """Copy rows that go on as padding, so that `take_back` can return them to where they are now.

        They are known by their places: rows that are selected in between must be back in them by then.
        """
        for row in rows:
            self._aside[row] = (self.lengths[row], self._conv[:, row].clone(), self._ssm[:, row].clone())

    def take_back(self) -> None:
        """Return the rows that were put aside to where they were then."""
        for row, (length, conv, ssm) in self._aside.items():
            self.lengths[row] = length
            self._conv[:, row], self._ssm[:, row] = conv, ssm
        self._aside = {}

    def _select(self, index: torch.Tensor) -> None:
        rows, where = index.tolist(), index.to(self._device)
        if len(rows) == self._conv.shape[1]:
            torch.index_select(self._conv, 1, where, out=self._next_conv)
            torch.index_select(self._ssm, 1, where, out=self._next_ssm)
            self._swap()
        else:
            self._conv, self._ssm = self._conv.index_select(1, where), self._ssm.index_select(1, where)
            self._next_conv, self._next_ssm = torch.empty_like(self._conv), torch.empty_like(self._ssm)
            self.max_batch_size = max(self.max_batch_size, len(rows))
        if self._trial is not None:
            trial = self._trial
            trial.lengths = [trial.lengths[row] for row in rows]
            trial.conv, trial.ssm = trial.conv.index_select(1, where), trial.ssm.index_select(1, where)
            for kept in trial.passes:
                kept.select(index, rows)

    @property
    def is_trying(self) -> bool:
        return self._trial is not None

    def _join(self, other: MambaCache) -> None:
        mine = len(self.lengths)
        if self._conv.shape[0] != other._conv.shape[0] or self._conv.shape[2:] != other._conv.shape[2:]:
            raise SettingError("states of another model can't join these; make both caches from one config")
        self._conv = torch.cat((self._conv[:, :mine], other._conv[:, : len(other.lengths)]), dim=1)
        self._ssm = torch.cat((self._ssm[:, :mine], other._ssm[:, : len(other.lengths)]), dim=1)
        self._next_conv, self._next_ssm = torch.empty_like(self._conv), torch.empty_like(self._ssm)
        self.max_batch_size = max(self.max_batch_size, self._conv.shape[1])

    def _reserve(self, stop: int) -> None:
        """Nothing: states do not grow."""

    # --- copies and files ----------------------------------------------------------------------------------
    def _shared(self) -> list[Any]:
        """How the trial's passes are read again belongs to the model."""
        passes = self._trial.passes if self._trial is not None else []
        return [replay for kept in passes for _, replay in kept.inputs.values()]

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return {}, {"conv": self._conv, "ssm": self._ssm}

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> MambaCache:  # noqa: ARG003 - the shapes say it all
        conv, ssm = tensors["conv"], tensors["ssm"]
        layers, rows, kernel, inner = conv.shape
        if ssm.shape[:2] != (layers, rows) or ssm.shape[3:] != (inner,) or (lengths and len(lengths) != rows):
            raise ValueError(f"states of shapes {list(conv.shape)} and {list(ssm.shape)} for {len(lengths)} rows")
        sizes = SimpleNamespace(
            num_hidden_layers=layers, intermediate_size=inner, conv_kernel=kernel, state_size=ssm.shape[2]
        )
        cache = cls(sizes, rows, conv.dtype, conv.device)
        cache._conv.copy_(conv)
        cache._ssm.copy_(ssm)
        cache.lengths = list(lengths)
        return cache

    def find_misfit(self, shape: Any) -> str | None:
        sizes = shape.config
        if not hasattr(sizes, "state_size"):
            return "it holds states and no keys, and the model has attention; give it a DynamicCache"
        for name, mine, its in (
            ("layers", self.num_layers, shape.num_layers),
            ("intermediate_size", self.intermediate_size, sizes.intermediate_size),
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

    # --- the reference's surface ---------------------------------------------------------------------------
    def update_conv_state(
        self, layer_idx: int, new_conv_state: torch.Tensor, cache_position: torch.Tensor
    ) -> torch.Tensor:
        """Append inputs (rows, intermediate_size, 1 to conv_kernel_size) to a layer's window; return the window."""
        rows, _, num_new = self._check_state(layer_idx, new_conv_state, "conv_kernel_size", self.conv_kernel_size)
        held = self._conv[layer_idx]
        new = new_conv_state.transpose(1, 2).to(held)
        held.copy_(torch.cat((held[:, num_new:], new), dim=1))
        self.lengths = [int(cache_position.max()) + 1] * rows
        return self.conv_states[layer_idx]

    def update_ssm_state(self, layer_idx: int, new_ssm_state: torch.Tensor) -> torch.Tensor:
        """Replace a layer's recurrent state (rows, intermediate_size, state_size); return it."""
        self._check_state(layer_idx, new_ssm_state, "state_size", self.ssm_state_size)
        self._ssm[layer_idx].copy_(new_ssm_state.transpose(1, 2))
        return self.ssm_states[layer_idx]

    def _check_state(self, layer: int, state: torch.Tensor, name: str, most: int) -> tuple[int, int, int]:
        rows, inner = self._conv.shape[1], self.intermediate_size
        if not 0 <= layer < self.num_layers:
            raise SettingError(f"the cache has {self.num_layers} layers; layer {layer} was given")
        least = 1 if name == "conv_kernel_size" else most
        if state.dim() != 3 or state.shape[:2] != (rows, inner) or not least <= state.shape[2] <= most:
            raise SettingError(
                f"a state of shape {list(state.shape)} does not fit a cache of {rows} rows with "
                f"intermediate_size={inner} and {name}={most}"
            )
        return rows, inner, int(state.shape[2])

    def reset(self) -> None:
        """Forget everything: the cache is as it was made."""
        self.lengths, self._trial, self._pass, self._aside = [], None, None, {}
        self._conv.zero_()
        self._ssm.zero_()

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise self._refuse_keys()

    def get_seq_length(self, layer_idx: int | None = 0) -> int:  # noqa: ARG002 - all layers have read as much
        return max(self.lengths, default=0)

    def __len__(self) -> int:
        return self.num_layers


def refuse_without_states(info: Any) -> str | None:
    """Why a model (its `info`) can't be served by states; None where it can."""
    if "state" in info.layer_kinds:
        return None
    return f"it holds the states of Mamba models, and {info.family} is none; leave it out, or use 'dynamic'"


def _take_windows(whole: torch.Tensor, counts: Sequence[int], kernel: int) -> torch.Tensor:
    """Each row's `kernel` inputs up to its own last real one: (rows, kernel, inner)."""
    rows = torch.arange(len(counts), device=whole.device)[:, None]
    places = torch.tensor(list(counts), device=whole.device)[:, None] + torch.arange(kernel, device=whole.device)
    return whole[rows, places]
