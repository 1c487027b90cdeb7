"""Full blocks of keys, found again by what they hold: the tokens from a text's beginning to a block's end.

A block's name is a hash over its tokens and the name of the block before it, so it names the whole text up to there.
The first name is the tenant's: what one tenant's requests have read is never found by another's.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np

from unspool.cache import BlockPool

_NAME_BYTES: Final = 16
_MOST_RECENT: Final = 64  # texts whose names are kept
_LONGEST_RECENT: Final = 1 << 16  # tokens of such a text


class BlockNames:
    """The names of a text's full blocks, in order, worked out once."""

    def __init__(self, tenant: str) -> None:
        self._last = blake2b(tenant.encode(), digest_size=_NAME_BYTES).digest()
        self._names: list[bytes] = []

    def take(self, tokens: Sequence[int] | np.ndarray, count: int, size: int) -> list[bytes]:
        """The names of the first `count` blocks of `size` tokens; the text may have grown since the last call."""
        names, first = self._names, len(self._names) * size
        if count > len(names):
            part = tokens[first : count * size]  # as 32 bits: half as much to hash
            held = (part.astype(np.int32) if isinstance(part, np.ndarray) else array("i", part)).tobytes()
            num_bytes = size * np.dtype(np.int32).itemsize
            for at in range(0, len(held), num_bytes):
                self._last = blake2b(self._last + held[at : at + num_bytes], digest_size=_NAME_BYTES).digest()
                names.append(self._last)
        return names[:count]

    def adopt(self, known: Sequence[bytes]) -> None:
        """Take the names of a text that begins alike, as far as they are known to be this one's too."""
        if len(known) > len(self._names):
            self._names = list(known)
            self._last = known[-1]

    def copy(self) -> BlockNames:
        """The names of a text that begins alike."""
        made = copy(self)
        made._names = list(self._names)
        return made


class _Named(NamedTuple):
    """A text and the names of its full blocks."""

    tokens: np.ndarray
    names: list[bytes]


class PrefixIndex:
    """The full blocks that were read and are kept while memory lasts; the index is one of their users."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # by name; the first was used least recently
        self._recent: dict[bytes, _Named] = {}  # by its first block's name: the newest text that begins so
        self.num_asked = 0  # tokens of prompts that were looked for,
        self.num_found = 0  # and found

    def __len__(self) -> int:
        return len(self._blocks)

    def name(self, tokens: np.ndarray, names: BlockNames) -> int:
        """Work out the names of a text's blocks before they are looked for: no other thread needs to wait for it.

        Returns how many tokens `find` would find now; by then there may be more or fewer.
        """
        size = self._pool.block_size
        self._take_all(tokens, names, size)
        known = names.take(tokens, (len(tokens) - 1) // size, size)
        missing = next((place for place, name in enumerate(known) if name not in self._blocks), len(known))
        return missing * size

    def _take_all(self, tokens: np.ndarray, names: BlockNames, size: int) -> None:
        """Work out all names; those of a beginning that a recent text of the tenant has too are taken from there."""
        count = len(tokens) // size
        if not 1 < count <= _LONGEST_RECENT // size:
            names.take(tokens, count, size)
            return
        tokens = tokens.copy()  # whoever gave them may write over them
        first = names.take(tokens, 1, size)[0]  # the tenant's own
        recent = self._recent.get(first)
        if recent is not None:
            names.adopt(recent.names[: _count_common(tokens, recent.tokens) // size])
        elif len(self._recent) >= _MOST_RECENT:
            self._recent.clear()
        self._recent[first] = _Named(tokens, names.take(tokens, count, size))

    def find(self, tokens: Sequence[int], names_of: BlockNames) -> list[int]:
        """The blocks that hold the beginning of a text; at least one token is left to be read."""
        found: list[int] = []
        size = self._pool.block_size
        names = names_of.take(tokens, (len(tokens) - 1) // size, size)
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        self._touch(names[: len(found)])
        self.num_asked += len(tokens)
        self.num_found += len(found) * self._pool.block_size
        return found

    def enter(self, tokens: Sequence[int], blocks: Sequence[int], names_of: BlockNames) -> None:
        """Keep the blocks that hold a text, as far as they are full; those that are known stay as they are."""
        size = self._pool.block_size
        names = names_of.take(tokens, min(len(tokens) // size, len(blocks)), size)
        for name, block in zip(names, blocks, strict=False):
            if name not in self._blocks:
                self._pool.share([block])
                self._blocks[name] = block
        self._touch(names)

    def _touch(self, names: Sequence[bytes]) -> None:
        """Note a use; a text's end goes before its beginning, without which it can't be found."""
        for name in reversed(names):
            self._blocks.move_to_end(name)

    def list_blocks(self) -> set[int]:
        """All blocks that it holds."""
        return set(self._blocks.values())

    def count_idle(self) -> int:
        """Blocks that nobody else uses."""
        return sum(self._pool.count_users(block) == 1 for block in self._blocks.values())

    def evict(self, count: int) -> int:
        """Give up to `count` blocks back that nobody else uses, those used least recently first; how many it were."""
        gone: list[bytes] = []
        for name, block in self._blocks.items():
            if len(gone) >= count:
                break
            if self._pool.count_users(block) == 1:
                gone.append(name)
        self._pool.give_back([self._blocks.pop(name) for name in gone])
        return len(gone)

    def clear(self) -> None:
        """Give all blocks back."""
        blocks = list(self._blocks.values())
        self._blocks.clear()
        self._recent.clear()
        self._pool.give_back(blocks)


def _count_common(first: np.ndarray, second: np.ndarray) -> int:
    """How many tokens two texts begin with alike."""
    count = min(len(first), len(second))
    differ = first[:count] != second[:count]
    place = int(differ.argmax())
    return place if differ[place] else count
