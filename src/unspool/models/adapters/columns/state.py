"""What a column model holds of a call: the columns read so far, and transformers' own cache behind our contract."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from unspool.cache import RAGGED, ROLL_BACK, SELECT_ROWS, TRIAL, Cache
from unspool.errors import UnsupportedError
from unspool.models.adapters.columns.held import move_held
from unspool.models.adapters.columns.inner import Inner, pick_states
from unspool.models.adapters.columns.rows import is_memory, pick, pick_all, reorder_past, repeat_inputs

CACHE_NAMES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")
_PLAIN_LAYERS = frozenset({"DynamicLayer"})  # keys of every position, which can be cut off at the end
_WINDOW_LAYERS = frozenset({"DynamicSlidingWindowLayer", "StaticSlidingWindowLayer"})  # what leaves a window is gone
_FIXED_LAYERS = frozenset({"StaticLayer"})  # the same in memory taken at once, with a count of what is in use
_INDEXED_LAYERS = frozenset({"DynamicIndexedLayer", "StaticIndexedLayer"})  # and what keys are found by, which stays
_BY_COLUMN = {"keys": -2, "values": -2, "indexer_keys": -2}  # tensors of layers
_COUNTS = ("cumulative_length", "indexer_cumulative_length")


@dataclass
class Columns:
    """Token columns as transformers has them: padding and refused tokens are masked, not left out."""

    ids: torch.Tensor  # (rows, columns)
    mask: torch.Tensor  # (rows, columns), bool
    positions: torch.Tensor | None  # (…, rows, columns); None if the model is given none
    num_read: int = 0  # columns that the cache holds

    @property
    def width(self) -> int:
        """All columns."""
        return self.mask.shape[1]

    @property
    def lengths(self) -> list[int]:
        """Real tokens, one number per row."""
        counts: list[int] = self.mask.sum(dim=-1).tolist()
        return counts

    @classmethod
    def right_aligned(cls, tokens: torch.Tensor, counts: Sequence[int], *, counts_positions: bool) -> Columns:
        """Rows of tokens (rows, width), of which the first `counts` are real, moved to the last column."""
        width = max(counts)
        column = torch.arange(width, device=tokens.device)
        first = width - _column(counts, tokens)  # (rows, 1)
        mask = column >= first
        ids = tokens.gather(1, (column - first).clamp(min=0)) * mask
        return cls(ids, mask, (mask.long().cumsum(dim=-1) - 1).clamp(min=0) if counts_positions else None)

    def join(self, others: Columns) -> Columns:
        """These rows and others below them, all of which end in one column."""
        width = max(self.width, others.width)
        parts = [(one, width - one.width, one.mask.shape[0]) for one in (self, others)]
        ids = torch.cat([F.pad(one.ids, (more, 0)) for one, more, _ in parts])
        mask = torch.cat([F.pad(one.mask, (more, 0)) for one, more, _ in parts])
        if self.positions is None or others.positions is None:
            return Columns(ids, mask, None)
        lead = self.positions.shape[:-2]
        known = [
            F.pad(one.positions, (more, 0)).expand(*lead, rows, width)
            for one, more, rows in parts
            if one.positions is not None
        ]
        return Columns(ids, mask, torch.cat(known, dim=-2))

    def find_last(self) -> torch.Tensor:
        """The column of each row's last real token: (rows,)."""
        column = torch.arange(self.width, device=self.mask.device)
        return torch.where(self.mask, column, 0).amax(dim=-1)

    def append(self, ids: torch.Tensor, is_real: torch.Tensor) -> None:
        """Add columns (rows, new); positions go on from each row's last real token."""
        if self.positions is not None:
            rows = self.mask.shape[0]
            known = self.positions.expand(*self.positions.shape[:-2], rows, self.positions.shape[-1])
            index = self.find_last()[:, None].expand(*known.shape[:-1], 1)
            steps = is_real.long().cumsum(dim=-1)
            self.positions = torch.cat((known, known.gather(-1, index) + steps), dim=-1)
        self.ids = torch.cat((self.ids, ids), dim=1)
        self.mask = torch.cat((self.mask, is_real), dim=1)

    def move(self, index: torch.Tensor) -> None:
        """Give each row its own columns in the order of `index` (rows, columns)."""
        self.ids, self.mask = self.ids.gather(1, index), self.mask.gather(1, index)
        if self.positions is not None:
            known = self.positions.expand(*self.positions.shape[:-2], *index.shape)
            self.positions = known.gather(-1, index.expand_as(known))

    def cut(self, width: int) -> None:
        """Keep the first columns."""
        self.ids, self.mask = self.ids[:, :width], self.mask[:, :width]
        self.positions = None if self.positions is None else self.positions[..., :width]

    def leave_out(self, count: int) -> None:
        """Go on without the first columns."""
        self.ids, self.mask = self.ids[:, count:], self.mask[:, count:]
        self.positions = None if self.positions is None else self.positions[..., count:]
        self.num_read = max(self.num_read - count, 0)

    def select(self, index: torch.Tensor) -> None:
        """Keep, repeat or reorder rows."""
        self.ids, self.mask = self.ids.index_select(0, index), self.mask.index_select(0, index)
        if self.positions is not None and self.positions.shape[-2] > 1:
            self.positions = self.positions.index_select(-2, index)

    def copy(self) -> Columns:
        """The same columns, to go their own way: tensors are never written in place."""
        return copy.copy(self)


class ColumnCache(Cache):
    """A cache of transformers behind our contract, with the columns that it holds and the model's further inputs."""

    takes_padding = True

    def __init__(self, model: Any, prompt: Columns, inputs: dict[str, Any], *, keeps_past: bool, name: str) -> None:
        super().__init__()
        self.model = model
        self.prompt = prompt
        self.columns: Columns | None = None  # None until the prompt is read
        self.inputs = inputs  # what else the model's forward takes; its cache among them
        self.first_inputs = dict(inputs)
        self.keeps_past = keeps_past
        self.name = name  # of the argument that takes the cache
        self.answers_once = False  # the model predicts at a column that it adds itself, so once a pass
        self.output: Any = None  # of the last pass: transformers' code takes from it what the next pass needs
        # Makes the inputs of so many rows that begin anew, with a cache of transformers' that holds nothing.
        self.begin_inputs: Callable[[dict[str, Any], int], dict[str, Any]] | None = None
        self.has_followed = False  # the inputs are those of the next column already
        self.was_repeated = False  # rows were repeated since the last pass
        self.begins_texts = False  # whatever is read first is a text, so all of it can be taken back
        self.may_gap = False  # rows have taken different numbers of drafted tokens
        self.num_ahead = 0  # columns that a longer negative prompt has put before the prompts' own
        self.has_inner = False  # the model's modules keep states themselves
        self.has_hook = False  # passes are prepared by somebody's own rule, which may add to what the cache holds
        self.inner: Inner = ()
        self._snapshot: tuple[Any, Inner, Columns, dict[str, Any], list[int]] | None = None

    # --- the past ------------------------------------------------------------------------------------
    @property
    def past(self) -> Any:
        """transformers' own cache; None if there is none."""
        return self.inputs.get(self.name)

    def _name_layers(self) -> frozenset[str]:
        past = self.past
        past = getattr(past, "self_attention_cache", past)
        return frozenset(type(layer).__name__ for layer in getattr(past, "layers", ()))

    @property
    def _is_standard(self) -> bool:
        """Whether the cache is of transformers' common kind; a class of a model's own may keep states beside keys."""
        has_layers = hasattr(self.past, "layers") or hasattr(self.past, "self_attention_cache")
        return has_layers and not type(self.past).__module__.startswith("transformers.models.")

    @property
    def can(self) -> frozenset[str]:  # type: ignore[override]  # it depends on the layers that the model has
        """What transformers' cache allows."""
        always = frozenset({SELECT_ROWS, RAGGED, TRIAL})
        if (self.has_inner or self.has_hook) and self.keeps_past:
            return always
        if not self.keeps_past or (self._is_standard and self._name_layers() <= _PLAIN_LAYERS | _FIXED_LAYERS):
            return always | {ROLL_BACK}
        return always

    @property
    def reads_whole(self) -> bool:
        """Until the prompt is read: it is one pass over the columns that the caller gave."""
        return self.columns is None or self.columns.num_read < self.prompt.width

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep states, which models begin anew with several tokens at once."""
        known = _PLAIN_LAYERS | _FIXED_LAYERS | _WINDOW_LAYERS | _INDEXED_LAYERS
        return self.keeps_past and (
            self.has_inner or self.has_hook or not (self._is_standard and self._name_layers() <= known)
        )

    # --- rows ----------------------------------------------------------------------------------------
    def truncate(self, lengths: Sequence[int]) -> None:
        """Roll every row back to the given length: what it loses is masked, and cut off if no row has it."""
        snapshot, self._snapshot = self._snapshot, None
        if list(lengths) == self.lengths:
            return
        self._check_lengths(lengths)
        if not any(lengths) or self.columns is None:
            self._begin_again()
            return
        if ROLL_BACK not in self.can:
            self._return_to(snapshot, lengths)
            return
        columns = self.columns
        columns.mask = columns.mask & (columns.mask.long().cumsum(dim=-1) <= _column(lengths, columns.mask))
        self.may_gap |= len(lengths) > 1
        if self.past is None or self._name_layers() <= _PLAIN_LAYERS or self._counts_fixed():
            self._cut(columns, int(columns.find_last().max()) + 1)
        self.lengths = list(lengths)

    def _counts_fixed(self) -> bool:
        """Whether all layers are fixed ones that count what is in use; releases before 5.18 look at the keys."""
        layers = getattr(getattr(self.past, "self_attention_cache", self.past), "layers", ())
        return self._name_layers() <= _FIXED_LAYERS and all(hasattr(layer, "cumulative_length") for layer in layers)

    def _cut(self, columns: Columns, width: int) -> None:
        width = max(width, self.prompt.width)
        if self.past is not None and columns.num_read > width:
            num_cut = columns.num_read - width
            if self._name_layers() <= _PLAIN_LAYERS:
                self.past.crop(-num_cut)  # a negative number is how many go, in every release
            else:
                for layer in getattr(self.past, "self_attention_cache", self.past).layers:
                    layer.cumulative_length.sub_(num_cut)  # what is read next is written over them
            columns.num_read = width
        self.inputs = {name: _cut_columns(value, columns.width, width) for name, value in self.inputs.items()}
        columns.cut(width)

    def close_gaps(self) -> None:
        """Move each row's columns behind the prompt together, so that none of a refused draft stands among them.

        They are then the columns of the sequences that are returned, and a further turn finds the keys where these
        have their tokens.
        """
        columns, first = self.columns, self.prompt.width
        if not self.may_gap or columns is None or not self._name_layers() <= _PLAIN_LAYERS:
            return
        if self.keeps_past and columns.num_read < columns.width:
            return
        is_real = columns.mask[:, first:]
        if not bool((is_real[:, 1:] & ~is_real[:, :-1]).any()):
            return
        order = is_real.long().argsort(dim=-1, descending=True, stable=True) + first
        ahead = torch.arange(first, device=order.device).expand(len(order), -1)
        columns.move(torch.cat((ahead, order), dim=1))
        for layer in getattr(self.past, "layers", ()):
            for name in ("keys", "values"):
                held = getattr(layer, name)  # (rows, heads, columns, width)
                if held is None:  # of a model that takes no cache, which transformers makes one for
                    continue
                index = order[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3]).to(held.device)
                setattr(layer, name, torch.cat((held[:, :, :first], held.gather(2, index)), dim=2))
        self._cut(columns, int(columns.find_last().max()) + 1)

    def leave_out_ahead(self) -> None:
        """Leave out the columns before the prompts' own, so that a further turn finds the keys where sequences have
        their tokens."""
        count, self.num_ahead = self.num_ahead, 0
        if not count or self.columns is None or not self.columns.num_read:
            return
        num_read = self.columns.num_read
        for layer in getattr(self.past, "layers", ()):
            _leave_out(layer, count, num_read)
        self.columns.leave_out(count)
        self.prompt = self.prompt.copy()
        self.prompt.leave_out(count)
        move_held(self.past, self.past, self.inner, num_fewer=count)

    def begin_again(self, lengths: Sequence[int]) -> bool:
        """Take a fresh cache of transformers', so that the next pass reads the prompt; False if it can't be had."""
        if self.begin_inputs is None:
            return False
        self.inputs = self.begin_inputs(_without(self.first_inputs, self.name), len(lengths))
        self.columns = self.output = None
        self.inner, self.has_followed = (), False
        self.lengths = list(lengths)
        return True

    def _begin_again(self) -> None:
        """Hold nothing: the next pass reads the prompt."""
        if self.begins_texts and self.begin_again([0] * len(self.lengths)):
            return
        if self.past is not None and self.columns is not None and self.columns.num_read:
            raise UnsupportedError(f"the {type(self.past).__name__} of transformers can't be emptied; use a fresh one")
        self.lengths = [0] * len(self.lengths)
        self.columns, self.inner, self.has_followed = None, (), False
        self.inputs = dict(self.first_inputs)

    def begin_trial(self) -> None:
        """Keep what is needed to come back: a copy of the states, if positions can't be taken out of them."""
        if ROLL_BACK in self.can or self._snapshot is not None:
            return
        assert self.columns is not None
        past, columns = copy.deepcopy(self.past), self.columns.copy()
        self._snapshot = (past, self.inner, columns, dict(self.inputs), list(self.lengths))

    @property
    def is_trying(self) -> bool:
        """Whether a copy of the states is kept."""
        return self._snapshot is not None

    def _return_to(self, snapshot: Any, lengths: Sequence[int]) -> None:
        """Take the copy back; what was accepted since then is read again in the next pass."""
        if snapshot is None or any(new < held for new, held in zip(lengths, snapshot[-1], strict=True)):
            self.require(ROLL_BACK)
        past, self.inner, before, inputs, _ = snapshot
        assert self.columns is not None
        columns = self.columns
        columns.mask = columns.mask & (columns.mask.long().cumsum(dim=-1) <= _column(lengths, columns.mask))
        columns.cut(max(int(columns.find_last().max()) + 1, before.width))
        columns.num_read = before.num_read
        self.inputs = {**inputs, self.name: past}
        self._put_into_output(lambda _: past)
        self.lengths = list(lengths)

    def _put_into_output(self, find: Callable[[Any], Any]) -> None:
        """Change the cache in the last pass's output, from which the model's own code takes it over."""
        for name in CACHE_NAMES if isinstance(self.output, Mapping) else ():
            made = self.output.get(name)
            if made is not None:
                setattr(self.output, name, find(made))

    def _select(self, index: torch.Tensor) -> None:
        rows = len(self.lengths)
        is_repeat = len(index) > rows and len(index) % rows == 0
        copies = len(index) // rows
        past = self.inputs.pop(self.name, None)
        self.inner = pick_states(self.inner, index)
        self.was_repeated |= is_repeat
        if is_repeat and index.tolist() == [row for row in range(rows) for _ in range(copies)]:
            self.inputs = repeat_inputs(self.model, self.inputs, self.prompt.ids, copies)
            self.inputs |= {name: pick(made, index, rows) for name, made in self.inputs.items() if is_memory(made)}
            self.first_inputs = repeat_inputs(
                self.model, _without(self.first_inputs, self.name), self.prompt.ids, copies
            )
        else:
            self.inputs = {name: pick(value, index, rows) for name, value in self.inputs.items()}
            self.first_inputs = {
                name: pick(value, index, rows) for name, value in _without(self.first_inputs, self.name).items()
            }
        moved = None if past is None else reorder_past(self.model, past, index, rows)
        if moved is not None:
            move_held(past, moved, self.inner)
            self.inputs[self.name] = moved
        for name, made in list(self.output.items()) if isinstance(self.output, Mapping) else ():
            # What the next pass takes over from it: caches, and what was computed of images and sounds.
            if made is past or name in CACHE_NAMES:
                made = moved if made is past else reorder_past(self.model, made, index, rows)
            else:
                made = pick_all(made, index, rows)
            setattr(self.output, name, made)
        self.prompt = self.prompt.copy()
        device = self.prompt.mask.device
        self.prompt.select(index.to(device))
        if self.columns is not None:
            self.columns.select(index.to(device))

    # --- the rest of the contract --------------------------------------------------------------------
    def write(self, layer: int, kv: torch.Tensor) -> tuple[Any, Any]:
        """Never called: the model writes into its own cache."""
        raise NotImplementedError("transformers writes its own cache")

    def _reserve(self, stop: int) -> None:
        """transformers makes room itself."""

    def clone(self) -> ColumnCache:
        """A cache that holds the same and goes its own way from here."""
        made = copy.copy(self)
        made.columns = None if self.columns is None else self.columns.copy()
        made.lengths = list(self.lengths)
        made.inputs = dict(self.inputs)
        if self.past is not None:
            made.inputs[self.name] = copy.deepcopy(self.past)
        return made

    def __copy__(self) -> ColumnCache:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    @property
    def room(self) -> int | None:
        """The most columns that transformers' fixed layers hold; None if there are none."""
        past = getattr(self.past, "self_attention_cache", self.past)
        fixed = (layer for layer in getattr(past, "layers", ()) if type(layer).__name__ in _FIXED_LAYERS)
        return min((int(layer.max_cache_len) for layer in fixed), default=None)

    def get_max_cache_shape(self) -> int | None:
        """The most positions: transformers bounds them itself."""
        return None

    def __len__(self) -> int:
        past = self.past
        return len(past) if hasattr(past, "__len__") else 0


def _leave_out(layer: Any, count: int, num_read: int) -> None:
    """Take the first columns out of what a layer of transformers' holds of those that were read; states have none."""
    for name, dim in {**_BY_COLUMN, "indexer_position_ids": -1}.items():
        held = getattr(layer, name, None)
        if not isinstance(held, torch.Tensor):
            continue
        size, num_kept = held.shape[dim], num_read - count
        num_gone = count - max(num_read - size, 0)  # a window may have lost them before
        if "Static" in type(layer).__name__ and name in _BY_COLUMN:  # memory taken at once
            if num_gone > 0:
                moved = held.narrow(dim, num_gone, size - num_gone).clone()
                held.zero_().narrow(dim, 0, size - num_gone).copy_(moved)
        elif size > num_kept:
            setattr(layer, name, held.narrow(dim, size - num_kept, num_kept).clone())
    for name in _COUNTS:
        if getattr(layer, name, None) is not None:
            setattr(layer, name, getattr(layer, name) - count)


def _column(lengths: Sequence[int], mask: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(lengths), device=mask.device)[:, None]


def _without(inputs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in inputs.items() if key != name}


def _cut_columns(value: Any, old: int, new: int) -> Any:
    """A tensor (rows, old columns, …) with the first columns alone; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == old and not value.is_floating_point():
        return value[:, :new]
    return value
