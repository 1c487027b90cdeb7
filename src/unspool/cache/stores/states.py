"""The states of all layers of a state-space model: of one size however long the text gets.

New states are written beside the old ones and take their place when a pass ends, so that a pass that fails changes
nothing. A state can't be taken apart: a trial keeps the states that it began with and what its passes were given, and
going back is reading the first part of them again. What a step of one token per row began with stays beside its result
until the next pass, so that one step can be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch

from unspool.cache.span import Span
from unspool.cache.stores.memory import Allocate, KeyFormat, take_memory
from unspool.cache.stores.store import Store
from unspool.errors import SettingError, UnsupportedError

Inputs = tuple[torch.Tensor, ...]
Replay = Callable[[torch.Tensor, Inputs, Sequence[int]], torch.Tensor]
"""The state after each row's first `counts[row]` positions of a pass, from the state before it and its inputs."""


@dataclass(slots=True)
class _Pass:
    """What one forward pass of a trial was given, so that its first part alone can be computed again."""

    counts: list[int]
    windows: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer: (rows, kernel + new, inner)
    inputs: dict[int, tuple[Inputs, Replay]] = field(default_factory=dict)  # by layer, rows first

    def select(self, index: torch.Tensor) -> None:
        self.counts = [self.counts[row] for row in index.tolist()]
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

    @property
    def reached(self) -> list[int]:
        """The lengths that rows have now."""
        return [length + sum(kept.counts[row] for kept in self.passes) for row, length in enumerate(self.lengths)]


class StateStore(Store):
    """What each layer's convolution and recurrence remember: (layers, rows, kernel or width, channels).

    Channels lie innermost, so that everything the recurrence broadcasts runs along them. Its states are float32,
    whatever the model computes in: a state is rounded again with every token.
    """

    def __init__(
        self,
        conv_shape: tuple[int, int, int, int],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        take: Allocate = take_memory,
        inner: int | None = None,  # channels of the recurrence, if the convolution has others
    ) -> None:
        layers, rows, _, channels = conv_shape
        self._take = take
        self.conv = take(conv_shape, dtype, device)
        self.ssm = take((layers, rows, width, channels if inner is None else inner), torch.float32, device)
        self.can_undo = False  # the next states' memory holds those before the last pass, which read one token per row
        self._make_next()
        self._trial: _Trial | None = None
        self._pass: _Pass | None = None  # the one under way, if a trial is on
        self._is_step = False  # the pass under way reads one token per row
        self._aside: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}  # by row: its length and states

    def _make_next(self) -> None:
        self.next_conv, self.next_ssm = torch.empty_like(self.conv), torch.empty_like(self.ssm)
        self.can_undo = False

    @property
    def num_layers(self) -> int:
        return self.conv.shape[0]

    def add_layer(self, layer: int, rows: int, keys: KeyFormat) -> None:
        """Nothing to do: all layers' states are there."""

    @property
    def is_trying(self) -> bool:
        return self._trial is not None

    # --- a pass: `extend` and `next_ssm` in every layer, instead of `write` ---------------------------
    def open(self, rows: int) -> None:
        layers, held, kernel, channels = self.conv.shape
        if held != rows:
            (width, inner), device = self.ssm.shape[2:], self.conv.device
            self.conv = self._take((layers, rows, kernel, channels), self.conv.dtype, device)
            self.ssm = self._take((layers, rows, width, inner), torch.float32, device)
            self._make_next()

    def reserve(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        """Nothing to do: states do not grow."""

    def begin(self, span: Span) -> None:
        self._pass = None  # of a pass that failed
        self.can_undo, self._is_step = False, span.num_new == 1 and min(span.counts) == 1
        if (trial := self._trial) is not None:
            if not trial.lengths:  # the trial began before the first pass
                trial.lengths = [0] * len(span.starts)
                trial.conv, trial.ssm = self.conv.clone(), self.ssm.clone()
            self._pass = _Pass(list(span.counts))

    def extend(self, layer: int, span: Span, inputs: torch.Tensor) -> torch.Tensor:
        """What a layer's convolution reads: the inputs before `inputs` (rows, new, inner), and these after them.

        Returns (rows, kernel - 1 + new, inner), and keeps each row's last real inputs for the next pass.
        """
        held, kept, num_new = self.conv[layer], self.next_conv[layer], span.num_new
        if num_new == 1 and self._pass is None and min(span.counts) == 1:
            return torch.cat((held[:, 1:], inputs), dim=1, out=kept)
        whole = torch.cat((held, inputs), dim=1)  # (rows, kernel + new, inner)
        if min(span.counts) == num_new:
            kept.copy_(whole[:, num_new:])
        else:
            kept.copy_(_take_windows(whole, span.counts, held.shape[1]))
        if self._pass is not None:
            self._pass.windows[layer] = whole
        return whole[:, 1:]

    def keep_inputs(self, layer: int, inputs: Inputs, replay: Replay) -> None:
        """While a trial is on: what the recurrence was given (rows first), and how to run it again over a part."""
        if self._pass is not None:
            self._pass.inputs[layer] = (inputs, replay)

    def end(self, lengths: Sequence[int]) -> None:  # states have none
        self._swap()
        self.can_undo = self._is_step and self._trial is None
        if self._trial is not None and self._pass is not None:
            self._trial.passes.append(self._pass)
        self._pass = None

    def undo(self) -> None:
        """Return to the states before the last pass, which `can_undo` says are there."""
        self._swap()
        self.can_undo = False

    def _swap(self) -> None:
        self.conv, self.next_conv = self.next_conv, self.conv
        self.ssm, self.next_ssm = self.next_ssm, self.ssm

    def write(self, layer: int, span: Span, kv: torch.Tensor) -> NoReturn:
        raise refuse_keys()

    def read(self, layer: int, rows: int, length: int) -> NoReturn:
        raise refuse_keys()

    # --- rows ----------------------------------------------------------------------------------------
    def begin_trial(self, lengths: Sequence[int]) -> None:
        self._trial = _Trial(list(lengths), self.conv.clone(), self.ssm.clone())
        self.can_undo = False

    def check_truncation(self, held: Sequence[int], lengths: Sequence[int]) -> None:
        trial, wanted = self._trial, list(lengths)
        if wanted == list(held) or not any(wanted):
            return
        if trial is None or any(new < old for new, old in zip(wanted, trial.lengths, strict=True)):
            reach = trial.lengths if trial is not None else list(held)
            raise UnsupportedError(
                f"can't roll back from lengths {list(held)} to {wanted}: a state can't be taken apart. Rows can go "
                f"back to {reach}, or all of them to 0; call begin_trial() before tokens that may be taken back"
            )

    def truncate(self, lengths: Sequence[int]) -> None:
        trial, self._trial = self._trial, None
        self.can_undo = False
        if lengths and not any(lengths):
            self.conv.zero_()
            self.ssm.zero_()
        elif trial is not None and trial.reached != list(lengths):
            self._replay(trial, lengths)

    def _replay(self, trial: _Trial, wanted: Sequence[int]) -> None:
        """Read the trial's passes again from where it began, each row as far as it is to get."""
        self.conv, self.ssm = trial.conv, trial.ssm
        at, kernel = list(trial.lengths), self.conv.shape[2]
        for kept in trial.passes:
            counts = [min(count, end - here) for count, end, here in zip(kept.counts, wanted, at, strict=True)]
            at = [here + count for here, count in zip(at, counts, strict=True)]
            goes_on = torch.tensor([count > 0 for count in counts], device=self.conv.device)[:, None, None]
            for layer, window in kept.windows.items():
                inputs, replay = kept.inputs[layer]
                # A row that stopped in an earlier pass has read less than this pass's window says.
                self.conv[layer] = torch.where(goes_on, _take_windows(window, counts, kernel), self.conv[layer])
                self.ssm[layer] = replay(self.ssm[layer], inputs, counts)

    def put_aside(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Copy rows that go on as padding. They are known by their places, which they must have when they return."""
        for row in rows:
            self._aside[row] = (lengths[row], self.conv[:, row].clone(), self.ssm[:, row].clone())

    def take_back(self) -> dict[int, int]:
        """Return the rows that were put aside to where they were then; the lengths that they had, by row."""
        aside, self._aside = self._aside, {}
        self.can_undo = self.can_undo and not aside
        for row, (_, conv, ssm) in aside.items():
            self.conv[:, row], self.ssm[:, row] = conv, ssm
        return {row: length for row, (length, _, _) in aside.items()}

    def select(self, index: Sequence[int], lengths: Sequence[int]) -> None:  # states have none
        chosen = torch.tensor(list(index), dtype=torch.int64)
        where = chosen.to(self.conv.device)
        if len(index) == self.conv.shape[1]:
            torch.index_select(self.conv, 1, where, out=self.next_conv)
            torch.index_select(self.ssm, 1, where, out=self.next_ssm)
            self._swap()
            self.can_undo = False
        else:
            self.conv, self.ssm = self.conv.index_select(1, where), self.ssm.index_select(1, where)
            if self.can_undo:
                self.next_conv, self.next_ssm = (
                    state.index_select(1, where) for state in (self.next_conv, self.next_ssm)
                )
            else:
                self._make_next()
        if (trial := self._trial) is not None:
            trial.lengths = [trial.lengths[row] for row in index]
            trial.conv, trial.ssm = trial.conv.index_select(1, where), trial.ssm.index_select(1, where)
            for kept in trial.passes:
                kept.select(chosen)

    def join(self, other: StateStore, mine: Sequence[int], theirs: Sequence[int]) -> None:
        pairs = ((self.conv, other.conv), (self.ssm, other.ssm))
        if any(ours.shape[0] != its.shape[0] or ours.shape[2:] != its.shape[2:] for ours, its in pairs):
            raise SettingError("states of another model can't join these; make both caches from one config")
        self.conv = torch.cat((self.conv[:, : len(mine)], other.conv[:, : len(theirs)]), dim=1)
        self.ssm = torch.cat((self.ssm[:, : len(mine)], other.ssm[:, : len(theirs)]), dim=1)
        self._make_next()

    def clear(self) -> None:
        self._trial, self._pass, self._aside, self.can_undo = None, None, {}, False
        self.conv.zero_()
        self.ssm.zero_()

    def clone(self) -> StateStore:
        shape = (self.conv.shape[0], self.conv.shape[1], self.conv.shape[2], self.conv.shape[3])
        made = StateStore(
            shape, self.ssm.shape[2], self.conv.dtype, self.conv.device, self._take, inner=self.ssm.shape[3]
        )
        made.fill(self.conv, self.ssm)
        made._aside = dict(self._aside)
        if (trial := self._trial) is not None:  # what passes were given is read, and never written to
            passes = [replace(kept) for kept in trial.passes]
            made._trial = _Trial(list(trial.lengths), trial.conv.clone(), trial.ssm.clone(), passes)
        return made

    def fill(self, conv: torch.Tensor, ssm: torch.Tensor) -> None:
        """Take over states of the same shapes."""
        self.can_undo = False
        self.conv.copy_(conv)
        self.ssm.copy_(ssm)

    # --- memory --------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """Bytes that the states take, those in the making included."""
        return sum(state.nbytes for state in (self.conv, self.ssm, self.next_conv, self.next_ssm))

    def held(self) -> list[torch.Tensor]:
        return []


def refuse_keys() -> UnsupportedError:
    """The error for callers that bring keys."""
    return UnsupportedError(
        "a MambaCache holds states and no keys: it serves Mamba models alone. Give a model with attention a "
        "DynamicCache, or leave the cache out"
    )


def _take_windows(whole: torch.Tensor, counts: Sequence[int], kernel: int) -> torch.Tensor:
    """Each row's `kernel` inputs up to its own last real one: (rows, kernel, inner)."""
    rows = torch.arange(len(counts), device=whole.device)[:, None]
    places = torch.tensor(list(counts), device=whole.device)[:, None] + torch.arange(kernel, device=whole.device)
    return whole[rows, places]
