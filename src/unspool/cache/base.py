"""The contract every cache fulfils: a key's index is its position, each row has its own length.

What a new kind writes, nineteen methods at most; everything else follows from them:

- always: `write`, `_reserve` (make room), `_select` (rows follow an index), `nbytes`, `_held_tensors` (what must fit a
  model), `__len__` (layers);
- for what it says in `can`: `truncate` (if lowering a length is not enough), `begin_trial` and `is_trying` (`TRIAL`),
  `_join` (`JOIN`), `write_flat` (`FLAT`), `fork` and `keep_fork` (`FORK`), `divide` (`DIVIDE`), `branch` (`BRANCH`);
- to be read by address, which is how every fast path reads keys: `places`, and `open_layers` if it takes its memory
  with the first keys;
- files: `_pack` and `_unpack`, and `types` of its entry in `kinds.py`.

The reference's methods (`update`, `crop`, `key_cache`, …) stand in `reference.py`, on `_append` and `_show`. A kind has
its name, options and maker in `kinds.py`.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, Self, cast

import torch

from unspool.cache.files import Savable, load_cache
from unspool.cache.places import Places
from unspool.cache.reference import ReferenceSurface
from unspool.cache.span import Mask, Span, see_positions
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.kernels.ragged import Ragged

ROLL_BACK: Final = "roll_back"  # a row's length can be lowered
TRIAL: Final = "try_tokens"  # a row's length can be lowered to where it was when a trial began
UNDO: Final = "undo_step"  # the last pass can be taken back, if it read one token per row and nothing has moved since
SELECT_ROWS: Final = "select_rows"  # rows can leave, be repeated and be reordered
JOIN: Final = "join_rows"  # rows of another cache of the kind can be taken in, and rows handed out
DIVIDE: Final = "divide_rows"  # a pass can run over some of the rows at a time
RAGGED: Final = "ragged"  # rows can have different lengths
FORK: Final = "fork_rows"  # several tokens can be tried after a row, over one copy of its keys
FLAT: Final = "take_flat_tokens"  # a pass may bring its real tokens alone, one row's behind the other's
BRANCH: Final = "branch_rows"  # rows that continue one prompt can share its keys (`branch`)
BRANCH_SOURCE: Final = "branch_source"  # rows that continue one prompt can share the keys of what an encoder read
LEGACY: Final = "to_legacy"  # keys can be returned as the reference's tuples of tensors
FIXED_SHAPE: Final = "fixed_shape"  # buffers never move, so a step over them can be captured


class Cache(ReferenceSurface, Savable):
    """Keys and values of the past, layer by layer.

    A forward pass calls `begin` once, `write` in every layer and `end` once. What a short row wrote past its
    end is overwritten before anyone may read it, so rolling back is lowering a length.
    """

    can: frozenset[str] = frozenset({ROLL_BACK, SELECT_ROWS, RAGGED})
    is_compileable: bool = False
    num_forks: int = 1  # rows of a pass that read the keys of one row held here
    first_fork: int | None = None  # the number of the first of them; None: this is no view of forks
    sees_by_position: bool = False  # keys are packed, and their attention works out itself what may be seen
    is_in_order: bool = True  # the keys in view stand at the indices of their positions, for all rows alike
    rolls_back_exactly: bool = True  # a row that is rolled back holds what it held then, bit by bit
    lives_elsewhere: bool = False  # its memory is not on the model's device, and that is its point
    is_endless: bool = False  # holds what it holds however long a text gets: no context ends it

    def __init__(self) -> None:
        self.lengths: list[int] = []  # positions held, one per row; empty until the first pass
        self._span: Span | None = None

    # --- a forward pass ------------------------------------------------------------------------------
    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        """Make room for `num_new` positions after each row's length; mutates nothing that can be read."""
        starts = list(self.lengths) or [0] * rows
        if len(starts) != rows:
            raise SettingError(
                f"the cache holds {len(starts)} rows and the forward pass has {rows}; "
                "use the cache that was made for this batch, or select_rows() first"
            )
        real = list(counts) if counts is not None else [num_new] * rows
        if len(real) != rows or any(not 0 <= count <= num_new for count in real):
            raise SettingError(f"counts {real} do not fit {rows} rows of {num_new} new positions")
        stop = max(starts) + num_new
        is_uniform = min(starts) == stop - num_new
        self._open_pass(starts, [start + count for start, count in zip(starts, real, strict=True)], stop)
        self.lengths = starts
        self._span = Span(starts, num_new, real, stop, is_uniform, device=device)
        self._begin(self._span)
        return self._span

    def _begin(self, span: Span) -> None:
        """Work out once what all layers of a pass need."""

    def attach(self, turns: Any) -> None:
        """Called by a model before a pass: how it enters positions into keys, for kinds that place keys anew."""

    @abstractmethod
    def write(self, layer: int, kv: torch.Tensor) -> tuple[Any, Any]:
        """Store `kv` (rows, new, 2, heads, width); return keys and values (rows, heads, stop, width).

        A cache whose rows share keys returns both as `BranchedKeys`, to models that say they can read them.
        """

    def write_flat(self, layer: int, kv: torch.Tensor, ragged: Ragged) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        """Store a ragged pass's real tokens `kv` (tokens, 2, heads, width), and nothing past a row's end; return keys
        and values (rows, room, heads, width), each at the index of its position. For kinds that say `FLAT`."""
        self.require(FLAT)
        raise NotImplementedError(f"{type(self).__name__} says that it can take flat tokens")

    def end(self) -> None:
        """Close the pass: every row grows by the number of its real new tokens."""
        span = self._require_span()
        self.lengths = [start + count for start, count in zip(span.starts, span.counts, strict=True)]
        self._span = None

    def mask(self, span: Span, window: int | None = None) -> Mask:
        """What the span's queries may see among the `span.stop` keys in view."""
        return see_positions(span, window)

    def stands_in_order(self, window: int | None) -> bool:  # noqa: ARG002 - kinds that hold windows apart ask
        """Whether layers with that window (None: without one) find every key at the index of its position."""
        return self.is_in_order

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:  # noqa: ARG002 - likewise
        """The position of every key in view of layers with that window: (rows or 1, keys)."""
        return torch.arange(span.stop, device=span.positions.device)[None]

    def order_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Attention weights (rows, heads, new, keys in view) with a key's weight at the index of its position."""
        return weights

    def holds_buffers(self, num_layers: int) -> bool:
        """Whether every layer's buffer is there already, so that a pass only writes into them."""
        return len(self) == num_layers

    @property
    def longest_pass(self) -> int | None:
        """The most positions that one pass may read; None if any number will do."""
        return None

    def check_pass(self, num_new: int) -> None:
        """Raise for a pass of more positions than one may read."""
        longest = self.longest_pass
        if longest is not None and num_new > longest:
            raise InputError(
                f"a pass of {num_new} positions is too long for this {type(self).__name__}, which places keys anew "
                f"after {longest}; read them in parts of at most cache.longest_pass, as generate() does"
            )

    @property
    def room(self) -> int | None:
        """The most positions that a row can get; None if there is no limit."""
        return self.get_max_cache_shape()

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return 0

    def open_layers(self, num_layers: int, rows: int, heads: int, width: int, dtype: torch.dtype) -> None:
        """Take the memory of layers that nothing was written to yet, in a CPU's memory, for a pass that writes by
        address; for kinds that take it with the first keys."""

    def make_room(self, rows: int, num_new: int) -> None:
        """Let so many positions past every row's length be written, in a pass that counts none of them."""

    @property
    def longest_stretch(self) -> int | None:
        """Steps that may be taken at once before the cache changes what it holds; None if it never does, 0 if even one
        must be taken alone."""
        return None

    # --- a captured step -----------------------------------------------------------------------------
    def steady(self) -> AbstractContextManager[Any]:
        """Inside it nothing moves that another thread could move: from `places` until a step has been launched."""
        return nullcontext()

    def places(self, *, in_order: bool = False) -> Places | None:  # noqa: ARG002 - kinds whose rows read others' keys ask
        """Where the keys lie, for a pass that reads and writes them by address; None for kinds that need `write`.

        With `in_order`, every row's own keys lie in its own row: reordering moves keys, not an index.
        """
        return None

    def advance(self, rows: int) -> None:
        """Make room for one position a row and count it as held: a captured step writes it by address."""
        if type(self).places is Cache.places:
            raise UnsupportedError(f"a {type(self).__name__} is written through begin(), write() and end()")
        starts = list(self.lengths) or [0] * rows
        if len(starts) != rows:
            raise SettingError(f"the cache holds {len(starts)} rows and the step has {rows}; select_rows() first")
        stops = [start + 1 for start in starts]
        self._open_rows(starts, stops, max(stops))
        self.lengths = stops

    # --- rows ----------------------------------------------------------------------------------------
    def truncate(self, lengths: Sequence[int]) -> None:
        """Roll every row back to the given length."""
        self.require(ROLL_BACK)
        self._check_lengths(lengths)
        self.lengths = list(lengths)

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        if len(lengths) != len(self.lengths) or any(
            not 0 <= new <= held for new, held in zip(lengths, self.lengths, strict=True)
        ):
            raise SettingError(f"can't roll back from lengths {self.lengths} to {list(lengths)}")

    def begin_trial(self) -> None:
        """Keep from now on what it takes to roll every row back to any length it gets to; `truncate` ends the trial.

        Speculation writes drafts that may be refused. Where positions are kept, there is nothing to do; a kind that
        overwrites or folds them (a ring, a state, packed blocks) remembers them here and declares `TRIAL`.
        """
        if ROLL_BACK not in self.can:
            self.require(TRIAL)

    def put_aside(self, rows: Sequence[int]) -> None:
        """Remember rows that have ended and go on as padding, so that `take_back` returns them to where they are now.

        Nothing to do if a row can be rolled back.
        """

    def take_back(self) -> None:
        """Return the rows that were put aside to where they were then."""

    def select_rows(self, index: Sequence[int]) -> None:
        """Keep, repeat or reorder rows: row `i` becomes what row `index[i]` was."""
        self.require(SELECT_ROWS)
        if not self.lengths or list(index) == list(range(len(self.lengths))):
            return  # nothing held yet, or nothing moves
        self._select(torch.tensor(list(index), dtype=torch.int64))
        self.lengths = [self.lengths[i] for i in index]

    @property
    def can_follow(self) -> bool:
        """Whether `follow_rows` moves rows without a look at the index, which is on the device."""
        return False

    def follow_rows(self, index: torch.Tensor) -> None:
        """`select_rows` for beams, which go on from others of their prompt: an index (rows,) on the device."""
        self.select_rows(index.tolist())

    def fork(self, forks: range) -> Cache:  # noqa: ARG002 - kinds that can, do
        """A view for one pass in which every row is followed by `len(forks)` tokens, each seeing the row and itself.

        The view's rows are the forks of the first row, then those of the second. Several views with other numbers in
        `forks` may be read one after the other; then `keep_fork` takes one fork of each row over. Changes no length.
        """
        self.require(FORK)
        raise NotImplementedError(f"{type(self).__name__} says that it can fork")

    def keep_fork(self, chosen: torch.Tensor) -> None:  # noqa: ARG002 - likewise
        """Let every row grow by its fork `chosen[row]`, a number out of the views' `forks`."""
        self.require(FORK)
        raise NotImplementedError(f"{type(self).__name__} says that it can fork")

    def branch(self, num_branches: int) -> Cache:  # noqa: ARG002 - likewise
        """A cache in which every row goes on in `num_branches` rows over one copy of its keys; it owns this one."""
        self.require(BRANCH)
        raise NotImplementedError(f"{type(self).__name__} says that it can branch")

    def take_rows(self, index: Sequence[int]) -> Self:
        """A cache of the same kind that holds what some of the rows do, and goes its own way from here."""
        self.require(JOIN)
        part = self.clone()
        part.select_rows(list(index))
        return part

    def join(self, other: Any) -> None:
        """Take in the rows of another cache of the same kind, after one's own; the other keeps what it holds.

        Raises and changes nothing if there is no room for them, or one of the two is amid a trial.
        """
        self.require(JOIN)
        if type(other) is not type(self):
            raise SettingError(f"the rows of a {type(other).__name__} can't join those of a {type(self).__name__}")
        if self.is_trying or other.is_trying:
            raise SettingError("rows can't join while tokens are tried; end the trial with truncate() first")
        if other.lengths:
            self._check_rows(len(self.lengths) + len(other.lengths))
            self._join(other)
            self.lengths = [*self.lengths, *other.lengths]

    def _join(self, other: Any) -> None:
        """Store the rows of another cache, which has some, after one's own."""
        raise NotImplementedError(f"{type(self).__name__} says that it can join rows")

    @property
    def is_trying(self) -> bool:
        """Whether a trial has begun that keeps what its passes write over."""
        return False

    def divide(self, num_parts: int, num_new: int) -> list[Cache]:  # noqa: ARG002 - kinds that can't say so
        """Caches over every `num_parts`-th row, with room for `num_new` positions, that write into this one's keys.

        A pass is run over each of them, and `rejoin` ends the division.
        """
        self.require(DIVIDE)
        raise NotImplementedError

    def rejoin(self, parts: Sequence[Cache]) -> None:
        """Take over the lengths of the parts, now that each has had its pass."""
        self.lengths = [length for rows in zip(*(part.lengths for part in parts), strict=True) for length in rows]

    def merge(self) -> Cache:
        """A plain cache, in which every row holds all that it reads: this one, if rows share nothing."""
        return self

    def require(self, capability: str) -> None:
        """Raise the error that names what this kind of cache can't do."""
        if capability not in self.can:
            raise UnsupportedError(f"{type(self).__name__} can't {capability.replace('_', ' ')}")

    def _check_batch(self, rows: int, most: int, instead: str) -> None:
        """Raise if more rows come than memory was taken for."""
        if rows > most:
            raise SettingError(
                f"{rows} rows do not fit a {type(self).__name__} of max_batch_size={most}; "
                f"make it larger or use cache_implementation={instead!r}"
            )

    def _require_span(self) -> Span:
        if self._span is None:
            raise RuntimeError("write() and end() belong between begin() and end() of one forward pass")
        return self._span

    def _open_pass(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        """`_open_rows` for a pass that writes all positions from start to stop in every layer before it reads them."""
        self._open_rows(starts, stops, stop)

    def _open_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        self._check_rows(len(starts))
        if not self.lengths:
            self._open(len(starts))
        self._reserve_rows(starts, stops, stop)

    def _check_rows(self, rows: int) -> None:
        """Raise if more rows come than memory was taken for."""

    def _open(self, rows: int) -> None:
        """Called once, before the first positions of so many rows are written."""

    def _reserve_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:  # noqa: ARG002
        """Make sure that every row can be written from its start to its stop; `stop` is where the pass ends."""
        self._reserve(stop)

    @abstractmethod
    def _reserve(self, stop: int) -> None:
        """Make sure that positions up to `stop` can be written."""

    @abstractmethod
    def _select(self, index: torch.Tensor) -> None:
        """Reorder the stored rows."""

    # --- copies, other processes and files -------------------------------------------------------------
    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(cast("dict[str, Any]", self.__getstate__()))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(cast("dict[str, Any]", self.__getstate__()), memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds copies of what a file would hold: torch's own pickler shares the memory it is given, and two
        processes would write into it."""
        facts, tensors = self._pack()
        return _restore, (
            type(self),
            facts,
            {name: held.detach().clone() for name, held in tensors.items()},
            self.lengths,
        )

    def clone(self) -> Self:
        """A cache that holds the same and goes its own way from here."""
        return copy.deepcopy(self)

    @staticmethod
    def load(path: str | Path, *, model: Any = None, device: torch.device | str | None = None) -> Cache:
        """Read what `save` wrote; with `model`, a cache that another model made is refused."""
        cache: Cache = load_cache(path, model=model, device=device).cache
        return cache

    def find_misfit(self, shape: Any) -> str | None:
        """Why keys of a shape (`KeyShape`) can't be written here, or None if they can."""
        for layer, held in enumerate(self._held_tensors()):
            if held.device.type != shape.device.type and not self.lives_elsewhere:
                return f"its keys are on {held.device} and the model on {shape.device}"
            if held.dtype != shape.dtype:
                return f"its keys are {held.dtype} and the model's {shape.dtype}"
            if tuple(held.shape[-2:]) != (shape.num_kv_heads, shape.head_dim):
                found = f"{held.shape[-2]} heads of width {held.shape[-1]}"
                return f"layer {layer} has {found} and the model {shape.num_kv_heads} of width {shape.head_dim}"
        num_held = len(self._held_tensors())
        if num_held and num_held != shape.num_layers:
            return f"it has {num_held} layers and the model {shape.num_layers}"
        return None

    def _held_tensors(self) -> list[torch.Tensor]:
        """One tensor per layer whose last two dimensions are heads and width; empty until there is memory."""
        return []

    def return_to(self, copied: Cache) -> None:
        """Become what a clone holds, which must not be used any more."""
        self.__dict__.update(copied.__dict__)


def _restore(kind: type[Cache], facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> Cache:
    made: Cache = kind._unpack(facts, tensors, lengths)
    return made
