"""Rows that follow one another: what is copied from the parting on equals what is copied whole."""

from __future__ import annotations

import random

import torch

from unspool.cache import DynamicCache, EncoderDecoderCache
from unspool.cache.write_log import WriteLog


def test_rows_part_where_they_wrote_their_own() -> None:
    log = WriteLog(2)
    log.note([3, 3])
    assert log.find_parting([0, 1]) == 3 and log.find_parting([1, 1]) == 0
    log.select([0, 0])
    assert log.find_parting([1, 0]) == 3
    log.note([5, 5])
    assert log.find_parting([1, 0]) == 3 and log.find_parting([0, 1]) == 5
    log.truncate([4, 4])
    assert log.find_parting([0, 0]) == 3
    log.truncate([2, 2])
    assert log.find_parting([0, 0]) == 2


def step(cache: EncoderDecoderCache, rows: int, written: torch.Tensor) -> None:
    cache.begin(rows, 1)
    for layer in range(2):
        cache.write(layer, written[layer])
    cache.end()


def test_beams_of_a_pair_hold_what_whole_copies_would_hold() -> None:
    choose, generator = random.Random(3), torch.Generator().manual_seed(3)
    sources, beams = 3, 4
    rows = sources * beams
    cross = DynamicCache()
    cross.begin(sources, 5)
    for layer in range(2):
        cross.write(layer, torch.randn(sources, 5, 2, 2, 4, generator=generator))
    cross.end()
    pair, plain = EncoderDecoderCache(DynamicCache(), cross), DynamicCache()
    first = torch.randn(2, sources, 1, 2, 2, 4, generator=generator)
    step(pair, sources, first)
    pair = pair.branch(beams)
    spread = [row // beams for row in range(rows)]
    plain.begin(rows, 1)
    for layer in range(2):
        plain.write(layer, first[layer][spread])
    plain.end()
    for _ in range(30):
        made = torch.randn(2, rows, 1, 2, 2, 4, generator=generator)
        step(pair, rows, made)
        plain.begin(rows, 1)
        for layer in range(2):
            plain.write(layer, made[layer])
        plain.end()
        index = [row // beams * beams + choose.randrange(beams) for row in range(rows)]
        pair.select_rows(index)
        plain.select_rows(index)
        if choose.random() < 0.2:
            lengths = [length - 1 for length in pair.lengths]
            pair.truncate(lengths)
            plain.truncate(lengths)
        own = pair.self_attention_cache
        assert isinstance(own, DynamicCache) and own.lengths == plain.lengths and pair.num_branches == beams
        for mine, whole in zip(own, plain, strict=True):
            assert torch.equal(mine[0], whole[0]) and torch.equal(mine[1], whole[1])
