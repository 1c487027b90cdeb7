"""The numbers of a call's tokens, against their definition token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from unspool.kernels.cpu.library import CHUNK
from unspool.models.paths.library_calls import _NAMES, LibraryCalls


@st.composite
def draw_pass(draw: Any) -> tuple[torch.Tensor, Any, Any]:
    counts = draw(st.lists(st.sampled_from([0, 1, 1, 2, 5, CHUNK - 1, CHUNK + 3]), min_size=1, max_size=6).filter(any))
    rows = len(counts)

    def numbers(most: int) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows))

    span = SimpleNamespace(starts=numbers(90), counts=counts, num_new=max(counts))
    sources = SimpleNamespace(rows=numbers(9), lengths=numbers(30)) if draw(st.booleans()) else None
    keys = SimpleNamespace(
        shared_counts=numbers(5),
        shared_rows=numbers(9),
        own_rows=range(rows),
        bases=numbers(7) if draw(st.booleans()) else None,
        sources=sources,
    )
    tokens = torch.arange(rows * span.num_new).view(rows, span.num_new)
    return tokens, span, keys


@given(draw_pass(), st.booleans())
def test_the_numbers_of_tokens(asked: tuple[torch.Tensor, Any, Any], wants_all: bool) -> None:
    tokens, span, keys = asked
    calls = object.__new__(LibraryCalls)  # the table alone: no model
    calls._numbers = np.full((len(_NAMES), CHUNK), -1, dtype=np.int32)
    seen = []
    for ranges in calls._cut(span):
        outputs = calls._fill(ranges, tokens, span, keys, wants_all)
        own = [(row, place) for row, first, last in ranges for place in range(first, last)]
        held = {name: calls._numbers[number].tolist() for number, name in enumerate(_NAMES)}
        for at, (row, place) in enumerate(own):
            position, shared = span.starts[row] + place, keys.shared_counts[row]
            expected = {
                "tokens": int(tokens[row, place]),
                "positions": position,
                "own_rows": row,
                "own_places": position - shared,
                "shared_rows": keys.shared_rows[row],
                "shared_counts": shared,
                "bases": 0 if keys.bases is None else keys.bases[row],
                "firsts": next(other for other, (its, _) in enumerate(own) if its == row),
            }
            if keys.sources is not None:
                expected |= {"sources": keys.sources.rows[row], "source_lengths": keys.sources.lengths[row]}
            assert {name: held[name][at] for name in expected} == expected
        wanted = [
            (at, (row, place if wants_all else 0))
            for at, (row, place) in enumerate(own)
            if wants_all or place == span.counts[row] - 1
        ]
        assert outputs == [output for _, output in wanted]
        assert held["wanted"][: len(wanted)] == [at for at, _ in wanted]
        seen += own
    assert seen == [(row, place) for row, count in enumerate(span.counts) for place in range(count)]
