"""One prompt, several continuations: the prompt's keys are held once, each branch holds only its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unspool.cache.base import Cache
from unspool.cache.contract.capabilities import DIVIDE, RAGGED, ROLL_BACK, SELECT_ROWS
from unspool.cache.places import Places
from unspool.cache.rows import RowCache
from unspool.cache.span import Mask, Span
from unspool.cache.stores.memory import KeyFormat, join
from unspool.cache.write_log import WriteLog
from unspool.errors import SettingError, UnsupportedError
from unspool.kernels.sending import send


@dataclass(slots=True)
class BranchedKeys:
    """Keys (or values) of branches: what they share, one per prompt, and what is their own, one per row."""

    shared: torch.Tensor  # (prompts, heads, prompt positions, width)
    own: torch.Tensor  # (prompts * branches, heads, own positions, width)


class BranchingCache(Cache):
    """The cache of beams: `num_branches` rows a prompt over one copy of the prompt's keys.

    Reordering moves only what differs: two beams share the positions before they parted, so only later ones are
    copied. An own position `j` of a row stands for position `prompt length + j`. Under captured steps nothing is
    copied at all: keys stay in the row that wrote them, and an ancestry says which one that was.
    """

    can = frozenset({ROLL_BACK, SELECT_ROWS, RAGGED, DIVIDE})
    is_in_order = False

    def __init__(self, prompt: RowCache, num_branches: int) -> None:
        super().__init__()
        self.num_branches = num_branches
        self._prompt = prompt
        self._own = prompt.new_like(1)
        self._prompt_lengths = [length for length in prompt.lengths for _ in range(num_branches)]
        self._log: WriteLog | None = WriteLog(len(self._prompt_lengths))  # of own positions; None if not known
        self._ancestry: torch.Tensor | None = None  # (rows, own capacity) int32: whose key stands at a row's position
        self._places: Places | None = None
        self.lengths = list(self._prompt_lengths)

    # --- a forward pass ------------------------------------------------------------------------------
    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        self._gather_own()
        own = self._own.begin(rows, num_new, counts, device)
        if not own.is_uniform:
            raise UnsupportedError("branches of one prompt grow together; roll them back to one length first")
        starts = [first + start for first, start in zip(self._prompt_lengths, own.starts, strict=True)]
        firsts = torch.tensor(self._prompt_lengths, device=device)[:, None]
        stop = max(starts) + num_new
        self._span = Span(starts, num_new, own.counts, stop, min(starts) == max(starts), own.positions + firsts)
        return self._span

    def write(self, layer: int, kv: torch.Tensor) -> Any:
        """Store a row's own keys and values; return both as `BranchedKeys`."""
        own_keys, own_values = self._own.write(layer, kv)
        shared_keys, shared_values = self._prompt._show(layer)
        return BranchedKeys(shared_keys, own_keys), BranchedKeys(shared_values, own_values)

    def open_layers(self, num_layers: int, rows: int, keys: KeyFormat) -> None:
        self._own.open_layers(num_layers, rows, keys)

    def end(self) -> None:
        super().end()
        self._own.end()
        self._log_writes()

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:  # all keys are in view
        """The shared positions and, after them, the row's own: (rows, keys)."""
        device = span.positions.device
        num_shared, num_own = self._prompt.get_seq_length(), max(self._own.lengths, default=0) + span.num_new
        firsts = torch.tensor(self._prompt_lengths, device=device)[:, None]
        shared = torch.arange(num_shared, device=device).expand(len(self.lengths), num_shared)
        return torch.cat((shared, torch.arange(num_own, device=device) + firsts), dim=1)

    def mask(self, span: Span, window: int | None = None) -> Mask:
        """A boolean mask over the shared positions and, after them, the own ones: (rows, 1, new, keys)."""
        lengths, num_shared = self._prompt_lengths, self._prompt.get_seq_length()
        if window is None and span.num_new == 1 and min(lengths) == num_shared:
            return None
        positions = self.key_positions(span)
        firsts = torch.tensor(lengths, device=positions.device)[:, None]
        column = torch.arange(positions.shape[1], device=positions.device)
        is_held = (column >= num_shared) | (column < firsts)  # a shorter prompt has nothing at the last shared places
        queries = span.positions[:, None, :, None]
        visible = is_held[:, None, None, :] & (positions[:, None, None, :] <= queries)
        if window is not None:
            visible &= positions[:, None, None, :] > queries - window
        return visible

    # --- a captured step -----------------------------------------------------------------------------
    def places(self, *, in_order: bool = False) -> Places | None:
        """Where prompts and own keys lie; from now on reordering moves an index instead of keys, unless `in_order`."""
        prompt, own = self._prompt.places(), self._own.places()
        if prompt is None or own is None or not own.buffers or len(set(self._own.lengths)) > 1:
            return None
        if in_order:
            self._gather_own()
        known = self._places
        if known is not None and known.buffers is own.buffers and known.shared is prompt.buffers:
            has_index = known.ancestry is not None
            if has_index != in_order and known.prompt_lengths == self._prompt_lengths:
                return known
        if in_order:
            self._places = Places(own.buffers, self.num_branches, prompt.buffers, list(self._prompt_lengths))
            return self._places
        buffer = own.buffers[0]
        rows, capacity = len(self.lengths), buffer.shape[1]
        itself = torch.arange(rows, dtype=torch.int32, device=buffer.device)[:, None].repeat(1, capacity)
        if self._ancestry is not None:  # the buffers have grown
            itself[:, : self._ancestry.shape[1]] = self._ancestry
        self._ancestry = itself
        self._places = Places(own.buffers, self.num_branches, prompt.buffers, list(self._prompt_lengths), itself)
        return self._places

    def advance(self, rows: int) -> None:
        self._own.advance(rows)
        self.lengths = [first + own for first, own in zip(self._prompt_lengths, self._own.lengths, strict=True)]
        self._log_writes()

    def _gather_own(self) -> None:
        """Bring every row's own keys together again, which captured steps leave with the rows that wrote them."""
        if self._ancestry is None:
            return
        held = max(self._own.lengths, default=0)
        position = torch.arange(held, device=self._ancestry.device)
        whose = self._ancestry[:, :held].long()
        for buffer in self._own._buffers:
            buffer[: whose.shape[0], :held] = buffer[whose, position]
        self._ancestry = self._places = None

    # --- rows ----------------------------------------------------------------------------------------
    def truncate(self, lengths: Sequence[int]) -> None:
        own = [length - first for length, first in zip(lengths, self._prompt_lengths, strict=True)]
        if min(own) < 0:
            raise SettingError(f"can't roll back to {list(lengths)}: the prompts' {self._prompt_lengths} are shared")
        self._own.truncate(own)
        super().truncate(lengths)
        if self._log is not None:
            self._log.truncate(own)

    def select_rows(self, index: Sequence[int]) -> None:
        """Let branches go on from others of the same prompt, or keep whole prompts with all their branches."""
        branches = self.num_branches
        prompts = [index[place] // branches for place in range(0, len(index), branches)]
        if len(index) % branches or any(
            row // branches != prompts[place // branches] for place, row in enumerate(index)
        ):
            raise UnsupportedError(f"rows of branches stay with their prompt, {branches} rows each; got {list(index)}")
        if prompts != list(range(len(self.lengths) // branches)):
            self._gather_own()
            self._prompt.select_rows(prompts)
            self._own.select_rows(index)
        elif self._ancestry is not None:
            if list(index) != list(range(len(self.lengths))):
                held = max(self._own.lengths, default=0)
                rows = send(index, self._ancestry.device)
                self._ancestry[:, :held] = self._ancestry[:, :held][rows]
        else:
            self._own.copy_rows(index, 0 if self._log is None else self._log.find_parting(index))
        self._prompt_lengths = [self._prompt_lengths[row] for row in index]
        if self._log is not None:
            self._log.select(index)
        self.lengths = [self.lengths[row] for row in index]

    @property
    def can_follow(self) -> bool:
        """Under captured steps, where keys stay where they are; else if a branch's own keys can be moved."""
        return self._ancestry is not None or self._own.can_follow

    def follow_rows(self, index: torch.Tensor) -> None:
        self._log = None  # who wrote what is on the device alone from now on
        if self._ancestry is None:
            self._own.follow_rows(index)
            return
        held = max(self._own.lengths, default=0)
        known = self._ancestry[:, :held]
        known.copy_(known.index_select(0, index))

    def _log_writes(self) -> None:
        if self._log is not None:
            self._log.note(self._own.lengths)

    def divide(self, num_parts: int, num_new: int) -> list[Cache]:
        """One branch of every prompt at a time: each part reads all prompts' keys, which stay where they are."""
        if num_parts != self.num_branches:
            raise UnsupportedError(f"{self.num_branches} branches a prompt divide into as many parts, not {num_parts}")
        if not self._own.lengths:
            self._open_own()
        parts: list[Cache] = []
        for first, own in enumerate(self._own.divide(num_parts, num_new)):
            part = BranchingCache(self._prompt, 1)
            assert isinstance(own, RowCache)
            part._own = own
            part.lengths = self.lengths[first::num_parts]
            part._log = WriteLog(len(part.lengths))  # who wrote what is noted for all branches together
            parts.append(part)
        return parts

    def rejoin(self, parts: Sequence[Cache]) -> None:
        super().rejoin(parts)
        self._own.rejoin([part._own for part in parts if isinstance(part, BranchingCache)])
        self._log_writes()

    def _open_own(self) -> None:
        """Make the branches' own buffers before the first pass, which would make them for the rows it is given."""
        rows = len(self.lengths)
        for layer, keys in enumerate(self._prompt.key_cache):
            self._own._store.add_layer(layer, rows, KeyFormat.of(keys.transpose(1, 2)))
        self._own.lengths = [0] * rows

    def _reserve(self, stop: int) -> None:
        self._own._reserve(stop - min(self._prompt_lengths, default=0))

    def _select(self, index: torch.Tensor) -> None:
        self.select_rows(index.tolist())

    def __len__(self) -> int:
        return len(self._own)

    def get_seq_length(self, layer_idx: int | None = 0) -> int:  # all layers hold as much
        return max(self.lengths, default=0)

    def merge(self) -> Cache:
        """A plain cache in which every row holds its prompt's keys and its own."""
        self._gather_own()
        rows = len(self.lengths)
        whole = self._prompt.new_like(max(self.lengths))
        for layer in range(len(self._prompt)):
            shared = join(*self._prompt._show(layer))  # (prompts, positions, 2, …)
            own = join(*self._own._show(layer)) if len(self._own) else None  # None if no branch has grown
            whole._store.add_layer(layer, rows, KeyFormat.of(shared))
            buffer = whole._buffers[layer]
            for row, (first, length) in enumerate(zip(self._prompt_lengths, self.lengths, strict=True)):
                buffer[row, :first] = shared[row // self.num_branches, :first]
                if own is not None:
                    buffer[row, first:length] = own[row, : length - first]
        whole.lengths = list(self.lengths)
        return whole

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return self._prompt.nbytes + self._own.nbytes


def branch_rows(cache: Cache, num_branches: int) -> Cache:
    """A cache in which `num_branches` rows continue every row of `cache`, over one copy of what they share."""
    return cache.branch(num_branches)
