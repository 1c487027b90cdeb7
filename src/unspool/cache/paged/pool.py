"""Blocks of positions that rows take from one pool, share and give back: what a paged cache is made of.

As in *Efficient Memory Management for Large Language Model Serving with PagedAttention* (Kwon et al., 2023). A block
has the same number in every layer. Block 0 has no user: it stays zero, and stands in tables where a row has no block.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from unspool.cache.places import Places
from unspool.cache.stores.memory import KeyFormat
from unspool.errors import ResourceError, SettingError
from unspool.forks import make_lock
from unspool.kernels.presence import has_triton
from unspool.kernels.sending import find_stream

if TYPE_CHECKING:
    from unspool.kernels.gpu.attention.block_copies import BlockMover

# A GPU's kernels look at 64 keys at once if there are several rows, and the C library reads keys in parts of 64, so
# no tile crosses a block. A row leaves half a block empty on average: at 2,000 positions 1.6 %.
BLOCK_SIZE: Final = 64
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 1024  # positions; tensor cores take 16 keys at least
MOST_BLOCKS: Final = 2**24
NOBODYS: Final = 0
_LAZY: Final = 1 << 20  # bytes of a buffer whose pages are left to the system
_ALIGNMENT: Final = 64  # bytes, as torch's own
_GROWTH: Final = 16  # a pool that is full grows by this part of itself, at least


class BlockPool:
    """Memory for keys and values in blocks of `block_size` positions, for one cache or several.

    With `num_blocks` it takes all its memory with a layer's first keys and never moves; without, it grows. Blocks are
    counted by their users: a block without users is free. Caches of several threads may share a pool.
    """

    def __init__(
        self, block_size: int = BLOCK_SIZE, num_blocks: int | None = None, *, is_filled_at_once: bool = False
    ) -> None:
        check_pool(block_size, num_blocks)
        self.block_size, self.max_blocks = block_size, num_blocks
        self.buffers: list[torch.Tensor] = []  # (1 + blocks, …); plain: (…, block size, 2, heads, width), one per layer
        self.is_closed = False
        self._is_cleaned = (
            not is_filled_at_once
        )  # the cache that takes a block writes all of it: it need not hold zeros
        self._users = [1] + [0] * (num_blocks or 0)  # how many rows hold each block
        self._free = list(range(1, len(self._users)))  # a heap: low numbers first, so that a lone row's lie in order
        self._worn: set[int] = set()  # free blocks that were written to
        self._left: deque[list[int]] = (
            deque()
        )  # what was left, to be given back by the thread that next takes or counts
        self._mover: tuple[list[torch.Tensor], BlockMover] | None = None
        self._shown: list[weakref.ref[Places]] = []  # who knows where the blocks lie
        self._returns: dict[int, torch.cuda.Event] = {}  # by stream: what it had to do when it last gave back
        # A thread that reads or writes blocks by address holds it, so that none moves meanwhile.
        self.lock = make_lock(self, "lock", threading.RLock)

    # --- what there is -------------------------------------------------------------------------------
    @property
    def is_fixed(self) -> bool:
        """Whether it never grows, and so never moves."""
        return self.max_blocks is not None

    @property
    def num_blocks(self) -> int:
        """Blocks that there is memory for now."""
        return len(self._users) - 1

    @property
    def num_free(self) -> int:
        """Blocks without users."""
        self._collect()
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of memory taken, used or not."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(buffer[0].nbytes for buffer in self.buffers)

    def count_users(self, block: int) -> int:
        """How many rows hold a block."""
        self._collect()
        return self._users[block]

    def count_blocks(self, length: int) -> int:
        """Blocks that so many positions take."""
        return -(-length // self.block_size)

    # --- taking, sharing, giving back ----------------------------------------------------------------
    def take(self, count: int, *, cleaned: Collection[int] | None = None) -> list[int]:
        """So many blocks with one user each: all of them or, if a fixed pool has too few, none.

        They hold zeros, whatever held them before: what is masked may be read, and must be a number. If `cleaned` is
        given, only those at these places of the list do: the caller fills the others at once.
        """
        with self.lock:
            self.ensure(count)
            self._wait_for_others()
            taken = [heappop(self._free) for _ in range(count)]
            for block in taken:
                self._users[block] = 1
            if self._is_cleaned:
                places = range(count) if cleaned is None else cleaned
                self._clean([taken[place] for place in places if taken[place] in self._worn])
            self._worn.difference_update(taken)
            return taken

    def ensure(self, count: int) -> None:
        """See to it that so many blocks are free, or say how many are missing."""
        self._check_open()
        self._collect()
        missing = count - len(self._free)
        if missing > 0 and self.is_fixed:
            raise ResourceError(
                f"{count} more blocks of {self.block_size} positions are needed and {self.num_free} of the pool's "
                f"{self.num_blocks} are free: {missing} are missing. Make it larger (num_blocks or max_cache_len), "
                "read fewer or shorter rows at once, or leave both out, and it grows"
            )
        if missing > 0:
            self._grow(missing)

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more user of each."""
        with self.lock:
            for block in blocks:
                if block == NOBODYS or not self._users[block]:
                    raise SettingError(f"block {block} is nobody's, and can't be shared")
                self._users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Count one user less of each; those without any are free."""
        if not blocks:
            return
        with self.lock:
            for block in blocks:
                if block == NOBODYS or not self._users[block]:
                    raise SettingError(f"block {block} is nobody's, and can't be given back")
                self._users[block] -= 1
                if not self._users[block]:
                    heappush(self._free, block)
                    self._worn.add(block)
            self._note_return()

    def leave(self, blocks: list[int]) -> None:
        """`give_back` for a table that is gone. It takes no lock: a garbage collector may call it at any moment, in a
        thread that holds what the owner of the lock waits for."""
        if blocks:
            self._note_return()
            self._left.append(blocks)

    def _collect(self) -> None:
        while self._left:
            with self.lock:
                if self._left:
                    self.give_back(self._left.popleft())

    def copy(self, blocks: Sequence[int]) -> list[int]:
        """New blocks that hold what the given ones do; the caller gives those back."""
        with self.lock:
            copies = self.take(len(blocks), cleaned=())
            self._move(blocks, copies)
            return copies

    def adopt_copies(self, other: BlockPool, blocks: Sequence[int]) -> list[int]:
        """New blocks that hold what some of another pool's do, with one user each."""
        if other.block_size != self.block_size:
            raise SettingError(
                f"blocks of {other.block_size} positions can't be copied into a pool of blocks of {self.block_size}"
            )
        with self.lock:
            for number, held in enumerate(other.buffers):
                self.open_buffer(number, tuple(held.shape[1:]), held.dtype, held.device)
            copies = self.take(len(blocks), cleaned=())
            for mine, theirs in zip(self.buffers, other.buffers, strict=True):
                mine[copies] = theirs[list(blocks)]
            return copies

    # --- memory --------------------------------------------------------------------------------------
    def open_layer(self, layer: int, keys: KeyFormat) -> torch.Tensor:
        """A layer's blocks of plain keys and values, made if nothing was written to it yet."""
        return self.open_buffer(layer, (self.block_size, 2, keys.heads, keys.width), keys.dtype, keys.device)

    def open_buffer(
        self, number: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The buffer of that number, made if there is none yet: blocks of a shape."""
        with self.lock:
            self._check_open()
            if number > len(self.buffers):
                raise SettingError(f"layer {number} is written before layer {len(self.buffers)}")
            if number == len(self.buffers):
                self.buffers.append(_take_memory((1 + self.num_blocks, *shape), dtype, device))
            return self.buffers[number]

    def adopt(self, buffers: Sequence[torch.Tensor], users: Sequence[int]) -> None:
        """Take over buffers of blocks (blocks, …), each block with so many users."""
        if self.buffers or any(self._users[1:]) or (self.is_fixed and len(users) > self.num_blocks):
            raise SettingError(f"{len(users)} blocks can't be taken over by a pool of {self.num_blocks}")
        if not self.is_fixed:
            self._users = [1] + [0] * len(users)
        self._users[1 : 1 + len(users)] = users
        self._free = [block for block in range(1, len(self._users)) if not self._users[block]]
        for number, held in enumerate(buffers):
            self.open_buffer(number, tuple(held.shape[1:]), held.dtype, held.device)
            self.buffers[number][1 : 1 + len(held)] = held

    def watch(self, places: Places) -> Places:
        """The same places, which lose their buffers once the blocks have moved."""
        self._shown = [shown for shown in self._shown if shown() is not None] + [weakref.ref(places)]
        return places

    def _grow(self, missing: int) -> None:
        more = max(missing, self.num_blocks // _GROWTH)
        if self.num_blocks + more > MOST_BLOCKS:
            raise ResourceError(f"a pool has at most {MOST_BLOCKS} blocks, and {self.num_blocks + more} are needed")
        self._wait_for_device()
        self._forget_places()
        for layer, buffer in enumerate(self.buffers):  # one layer at a time, so that only one is there twice
            grown = _take_memory((len(buffer) + more, *buffer.shape[1:]), buffer.dtype, buffer.device)
            grown[: len(buffer)] = buffer
            self.buffers[layer] = grown
        self._wait_for_device()
        self._free += range(len(self._users), len(self._users) + more)
        heapify(self._free)
        self._users += [0] * more

    def close(self) -> None:
        """Let all memory go, whatever holds the pool or a cache over it: nothing can be read or written then."""
        with self.lock:
            if self.is_closed:
                return
            self._wait_for_device()
            self.is_closed = True
            self._forget_places()
            self.buffers.clear()
            self._returns.clear()

    def _check_open(self) -> None:
        if self.is_closed:
            raise ResourceError("the pool of blocks is closed, and what it held is gone: make another engine or cache")

    def _forget_places(self) -> None:
        """Let no caller hold the buffers that was shown where blocks lie."""
        self._mover = None
        for shown in self._shown:
            if (places := shown()) is not None:
                places.buffers.clear()
                if places.packed is not None:
                    places.packed.layers.clear()
        self._shown = []

    def _clean(self, blocks: Sequence[int]) -> None:
        """Let blocks hold zeros, in all layers."""
        if self.buffers and self.buffers[0].is_cuda:
            self._move([NOBODYS] * len(blocks), blocks)
            return
        for buffer in self.buffers:
            for block in blocks:
                buffer[block].zero_()  # a fifth of the time that indices take

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks to others, in all layers."""
        if not self.buffers or not targets:
            return
        first = self.buffers[0]
        if first.is_cuda and has_triton():
            if self._mover is None or len(self._mover[0]) != len(self.buffers):
                from unspool.kernels.gpu.attention.block_copies import (
                    BlockMover,  # Triton is imported where a GPU is used
                )

                self._mover = (list(self.buffers), BlockMover(self.buffers))
            self._mover[1].move(sources, targets)
            return
        if first.device.type == "cpu":
            for buffer in self.buffers:
                for source, target in zip(sources, targets, strict=True):
                    buffer[target].copy_(buffer[source])  # a quarter of the time that indices take
            return
        index, into = torch.tensor(list(sources)), torch.tensor(list(targets))
        for buffer in self.buffers:
            buffer[into.to(buffer.device)] = buffer[index.to(buffer.device)]

    # --- streams of a GPU ----------------------------------------------------------------------------
    # A block that one stream gave back may be written by another only when the first is done with it.

    def _note_return(self) -> None:
        if self.buffers and self.buffers[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            stream = find_stream(self.buffers[0].device)
            event = self._returns.get(stream.cuda_stream)
            if event is None:
                event = torch.cuda.Event()
                self._returns[stream.cuda_stream] = event
            event.record(stream)  # anew: what waits for it waits for all that the stream has to do by then

    def _wait_for_others(self) -> None:
        if self._returns:
            stream = find_stream(self.buffers[0].device)
            for number, event in self._returns.items():
                if number != stream.cuda_stream:
                    stream.wait_event(event)

    def _wait_for_device(self) -> None:
        """Let every stream end what it has to do with blocks that are about to move, or have just moved."""
        if self.buffers and self.buffers[0].is_cuda:
            torch.cuda.synchronize(self.buffers[0].device)


def _take_memory(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # or it could not be written to outside of that mode
        num_bytes = math.prod(size) * dtype.itemsize
        if device.type != "cpu" or num_bytes < _LAZY:
            return torch.zeros(size, dtype=dtype, device=device)
        # The system hands out zeroed pages where they are first written: a large pool costs what is used of it.
        # torch.zeros would write all of it.
        held = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8))
        start = -held.data_ptr() % _ALIGNMENT
        return held[start : start + num_bytes].view(dtype).view(size)


def check_pool(block_size: int, num_blocks: int | None) -> None:
    """Raise the error that says why there can't be such a pool."""
    is_number = isinstance(block_size, int) and not isinstance(block_size, bool)
    if not is_number or not SMALLEST_BLOCK <= block_size <= LARGEST_BLOCK or block_size & (block_size - 1):
        raise SettingError(
            f"`block_size` of a paged cache must be a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK} positions, "
            f"not {block_size!r}"
        )
    is_number = isinstance(num_blocks, int) and not isinstance(num_blocks, bool)
    if num_blocks is not None and not (is_number and 1 <= num_blocks <= MOST_BLOCKS):
        raise SettingError(f"`num_blocks` of a paged cache must be from 1 to {MOST_BLOCKS}, not {num_blocks!r}")
