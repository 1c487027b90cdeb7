"""A soak of two seconds; `make soak` takes as long as it is told."""

from __future__ import annotations

from tests.engine.soak import soak


def test_nothing_is_lost_and_no_block_leaks() -> None:
    assert soak(2.0, seed=7) == 0
