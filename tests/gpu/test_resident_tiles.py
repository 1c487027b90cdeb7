"""The order in which tiles come and go in the kernel for all blocks, played through without a GPU.

Barriers are played as the hardware has them: a wait knows the parity of a phase alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
Tile = tuple[int, int, int]  # matrix, part, layer
LAYERS = 5


class Barrier:
    """How many of its phases have ended."""

    def __init__(self) -> None:
        self.ended = 0

    def has_ended(self, parity: int) -> bool:
        """What a wait for a phase of a parity sees."""
        return (self.ended - 1) & 1 == parity


class Play:
    """The warp that brings tiles, the others that take them, and the copies under way."""

    def __init__(self, hidden: int, inner: int, programs: int, seed: int) -> None:
        from unspool.kernels.gpu.resident import tiles

        self.tiles, self.random = tiles, random.Random(seed)
        self.counts = tiles.count_tiles(hidden, inner, programs)
        self.ready = [Barrier() for _ in range(tiles.count_slots(self.counts))]
        self.used = [Barrier() for _ in range(5 + self.counts[1])]
        self.under_way: list[Tile] = []
        self.slots: dict[int, Tile] = {}  # what stands in each
        self.left: set[Tile] = set()
        self.taken: list[Tile] = []
        self.most_under_way = 0

    def is_there(self, matrix: int, part: int, layer: int) -> bool:
        turn, uses = self.tiles._find_turn(matrix, part, self.counts)
        return self.ready[self.tiles.find_slot(matrix, part, self.counts)].has_ended((layer * uses + turn) & 1)

    def bring(self) -> Iterator[None]:
        """As `bring_tiles`; yields while it waits."""
        order = self.tiles._list_tiles(self.counts)
        for matrix, part, is_next in order:
            if is_next:
                yield from self.begin_copy(matrix, part, 0)
        ahead = self.tiles.UNDER_WAY.value
        for layer in range(LAYERS):
            for index, (matrix, part, is_next) in enumerate(order):
                *tile, was_next = order[(index - ahead) % len(order)]
                former = layer + was_next - (1 if index < ahead else 0)
                while former < LAYERS and not self.is_there(*tile, former):
                    yield
                if layer + is_next < LAYERS:
                    yield from self.begin_copy(matrix, part, layer + is_next)
                    if layer:
                        self.most_under_way = max(self.most_under_way, len(self.under_way))

    def begin_copy(self, matrix: int, part: int, layer: int) -> Iterator[None]:
        group, is_before = self.tiles._find_user(matrix, part, self.counts)
        while not self.used[group].has_ended((layer + (1 if is_before else 0)) & 1):
            yield
        slot = self.tiles.find_slot(matrix, part, self.counts)
        assert slot not in self.slots or self.slots[slot] in self.left, "a tile comes where another is still needed"
        self.slots[slot] = (matrix, part, layer)
        self.under_way.append((matrix, part, layer))

    def take(self) -> Iterator[None]:
        """As `_run_layers`: each group of tiles is waited for, and left."""
        for layer in range(LAYERS):
            for matrix, count in enumerate(self.counts):
                parts: dict[int, list[int]] = {}
                for part in range(count):
                    parts.setdefault(self.tiles.find_group(matrix, part, self.counts), []).append(part)
                for group, own in parts.items():
                    for part in own:
                        while not self.is_there(matrix, part, layer):
                            yield
                        slot = self.tiles.find_slot(matrix, part, self.counts)
                        tile = (matrix, part, layer)
                        assert self.slots[slot] == tile and tile not in self.under_way
                        self.taken.append(tile)
                        yield
                    self.left |= {(matrix, part, layer) for part in own}
                    self.used[group].ended += 1

    def run(self) -> None:
        """Let one of them go on at a time, until none can."""
        sides: list[Any] = [self.bring(), self.take()]
        for _ in range(100_000):
            which = self.random.randrange(len(sides) + 1) if self.under_way else self.random.randrange(len(sides))
            if which == len(sides):
                matrix, part, _ = self.under_way.pop(self.random.randrange(min(2, len(self.under_way))))
                self.ready[self.tiles.find_slot(matrix, part, self.counts)].ended += 1
            elif next(sides[which], "over") == "over":
                del sides[which]
                if not sides:
                    return
        raise AssertionError("they wait for each other")


@pytest.mark.parametrize(
    ("hidden", "times", "programs"),
    [(512, 1, 64), (512, 4, 64), (768, 4, 96), (1024, 1, 128), (1024, 2, 128), (1024, 4, 128)]
    + [(1280, times, programs) for times in (1, 2, 4) for programs in (110, 128, 140)]
    + [(1024, 4, 110)],
)
def test_every_tile_is_there_when_it_is_taken(hidden: int, times: int, programs: int) -> None:
    for seed in range(20):
        play = Play(hidden, times * hidden, programs, seed)
        play.run()
        tiles = [(m, part, layer) for layer in range(LAYERS) for m, n in enumerate(play.counts) for part in range(n)]
        assert play.taken == tiles
        assert play.most_under_way <= play.tiles.UNDER_WAY.value
