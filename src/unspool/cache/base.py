"""The contract every cache fulfils: a key's index is its position, each row has its own length.

What a new kind writes, nineteen methods at most; everything else follows from them:

- always: `write`, `_reserve` (make room), `_select` (rows follow an index), `nbytes`, `_held_tensors` (what must fit a
  model), `__len__` (layers);
- for what it says in `can`: `truncate` (if lowering a length is not enough), `begin_trial` and `is_trying` (`TRIAL`),
  `_join` (`JOIN`), `write_flat` (`FLAT`), `fork` and `keep_fork` (`FORK`), `divide` (`DIVIDE`), `branch` (`BRANCH`);
- to be read by address, which is how every fast path reads keys: `places`, and `open_layers` if it takes its memory
  with the first keys;
- files: `_pack` and `_unpack`, and `types` of its entry in `kinds.py`.

The forward pass is here; the rest of the contract stands in `contract/`, one idea per file: what a pass sees, keys by
address, changes of rows, rows that share keys, copies, capabilities. The reference's methods (`update`, `crop`,
`key_cache`, …) stand in `reference.py`, on `_append` and `_show`. A kind has its name, options and maker in `kinds.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unspool.cache.contract.by_address import ReadByAddress
from unspool.cache.contract.capabilities import FLAT
from unspool.cache.contract.row_changes import RowChanges
from unspool.cache.contract.shared_rows import SharedRows
from unspool.cache.contract.view import KeysInView
from unspool.cache.files import load_cache
from unspool.cache.reference import ReferenceSurface
from unspool.cache.sizes import find_tensor_misfit
from unspool.cache.span import Span
from unspool.errors import InputError, SettingError
from unspool.kernels.ragged import Ragged


class Cache(RowChanges, ReferenceSurface, SharedRows["Cache"], ReadByAddress, KeysInView):
    """Keys and values of the past, layer by layer.

    A forward pass calls `begin` once, `write` in every layer and `end` once. What a short row wrote past its
    end is overwritten before anyone may read it, so rolling back is lowering a length.
    """

    is_compileable: bool = False
    lives_elsewhere: bool = False  # its memory is not on the model's device, and that is its point
    # Rows that ended may hold the padding behind their text, for callers who get it as transformers lays keys out.
    takes_padding: bool = False
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

    def attach(self, rotation: Any) -> None:
        """Called by a model before a pass: how it enters positions into keys, for kinds that place keys anew."""

    @abstractmethod
    def write(self, layer: int, kv: torch.Tensor) -> tuple[Any, Any]:
        """Store `kv` (rows, new, 2, heads, width); return keys and values (rows, heads, stop, width).

        A cache whose rows share keys returns both as `BranchedKeys`, to models that say they can read them.
        """

    def write_flat(self, layer: int, kv: torch.Tensor, ragged: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a ragged pass's real tokens `kv` (tokens, 2, heads, width), and nothing past a row's end; return keys
        and values (rows, room, heads, width), each at the index of its position. For kinds that say `FLAT`."""
        self.require(FLAT)
        raise NotImplementedError(f"{type(self).__name__} says that it can take flat tokens")

    def end(self) -> None:
        """Close the pass: every row grows by the number of its real new tokens."""
        span = self._require_span()
        self.lengths = [start + count for start, count in zip(span.starts, span.counts, strict=True)]
        self._span = None

    @property
    def longest_pass(self) -> int | None:
        """The most positions that one pass may read; None if any number will do."""
        return None

    @property
    def reads_whole(self) -> bool:
        """Whether the next pass must read all that there is of a prompt: its logits are those of the whole."""
        return False

    def check_pass(self, num_new: int) -> None:
        """Raise for a pass of more positions than one may read."""
        longest = self.longest_pass
        if longest is not None and num_new > longest:
            raise InputError(
                f"a pass of {num_new} positions is too long for this {type(self).__name__}, which places keys anew "
                f"after {longest}; read them in parts of at most cache.longest_pass, as generate() does"
            )

    # --- memory --------------------------------------------------------------------------------------
    @property
    def room(self) -> int | None:
        """The most positions that a row can get; None if there is no limit."""
        return self.get_max_cache_shape()

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return 0

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

    def _open(self, rows: int) -> None:
        """Called once, before the first positions of so many rows are written."""

    def _reserve_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        """Make sure that every row can be written from its start to its stop; `stop` is where the pass ends."""
        self._reserve(stop)

    @abstractmethod
    def _reserve(self, stop: int) -> None:
        """Make sure that positions up to `stop` can be written."""

    def find_misfit(self, shape: Any) -> str | None:
        """Why keys of a shape (`KeyShape`) can't be written here, or None if they can."""
        return find_tensor_misfit(self._held_tensors(), shape, lives_elsewhere=self.lives_elsewhere)

    def _held_tensors(self) -> list[torch.Tensor]:
        """One tensor per layer whose last two dimensions are heads and width; empty until there is memory."""
        return []

    def merge(self) -> Cache:
        """A plain cache, in which every row holds all that it reads: this one, if rows share nothing."""
        return self

    @staticmethod
    def load(path: str | Path, *, model: Any = None, device: torch.device | str | None = None) -> Cache:
        """Read what `save` wrote; with `model`, a cache that another model made is refused."""
        cache: Cache = load_cache(path, model=model, device=device).cache
        return cache
