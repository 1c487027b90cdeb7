"""Beginnings that requests have in common are read once."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unspool
from tests.conformance.cases import load_model
from tests.engine.fakes import make_engine
from unspool.cache import BlockPool
from unspool.engine.prefixes import BlockNames, PrefixIndex


def test_prompts_that_begin_alike_share_blocks(lm: unspool.LanguageModel, engine: unspool.Engine) -> None:
    begin = [3 + place % 19 for place in range(50)]  # three full blocks
    alone = lm.generate([*begin, 7], max_new_tokens=5).token_ids
    assert engine.submit([*begin, 7], max_new_tokens=5).result(10).token_ids == alone
    read = engine.stats.prompt_tokens
    assert read == 51 and engine.stats.blocks_kept == 3
    assert engine.submit([*begin, 7], max_new_tokens=5).result(10).token_ids == alone
    assert engine.stats.prompt_tokens - read == 3 and engine.stats.prefix_hit_rate == pytest.approx(48 / 102)
    beams = engine.submit([*begin, 7], max_new_tokens=5, num_beams=2).result(10)
    assert beams.token_ids == lm.generate([*begin, 7], max_new_tokens=5, num_beams=2).token_ids
    assert engine.stats.prompt_tokens - read == 6
    assert engine.submit([*begin, 7], max_new_tokens=5, tenant="another").result(10).token_ids == alone
    assert engine.stats.prompt_tokens - read == 57


def test_a_next_turn_finds_what_was_written(lm: unspool.LanguageModel, engine: unspool.Engine) -> None:
    first = engine.submit([3, 4], max_new_tokens=40, eos_token_id=None).result(10).token_ids[0]
    read = engine.stats.prompt_tokens
    text = [3, 4, *first, 9]
    assert engine.submit(text, max_new_tokens=3).result(10).token_ids == lm.generate(text, max_new_tokens=3).token_ids
    assert engine.stats.prompt_tokens - read == len(text) - 32


def test_kept_blocks_make_room(lm: unspool.LanguageModel) -> None:
    with make_engine(lm, num_blocks=6) as engine:
        for place in range(5):
            text = [3 + (place + at) % 19 for at in range(40)]
            alone = lm.generate(text, max_new_tokens=5, eos_token_id=None).token_ids
            assert engine.submit(text, max_new_tokens=5, eos_token_id=None).result(10).token_ids == alone
        assert 0 < engine.stats.blocks_kept <= 6 and not engine.stats.blocks_used
    assert engine._memory.pool.num_free == 6


def test_prefixes_of_the_caller_and_draft_models() -> None:
    lm = load_model("llama")
    prefix = lm.prefix([5, 6, 7, 8])
    with unspool.Engine(lm, max_rows=4, memory=1 << 20) as engine:
        request = engine.submit([9, 10], prefix=prefix, max_new_tokens=6)
        drafted = engine.submit([5, 6, 7], assistant_model=copy.deepcopy(lm), max_new_tokens=8)
        assert request.result(20).token_ids == lm.generate([9, 10], prefix=prefix, max_new_tokens=6).token_ids
        assert drafted.result(20).token_ids == lm.generate([5, 6, 7], max_new_tokens=8).token_ids


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "a"]), st.integers(0, 99), st.lists(st.integers(1, 2), max_size=40), st.booleans()
        ),
        max_size=12,
    )
)
def test_names_are_the_same_whatever_was_named_before(texts: list[tuple[str, int, list[int], bool]]) -> None:
    index, size = PrefixIndex(BlockPool(16)), 16
    for tenant, num_common, rest, is_overwritten in texts:
        text = np.array([1] * num_common + rest, dtype=np.int64)
        if not len(text):
            continue
        named, alone, count = BlockNames(tenant), BlockNames(tenant), len(text) // size
        index.name(text, named)
        expected = alone.take(text.tolist(), count, size)
        assert named.take(text, count, size) == expected
        longer = [*text.tolist(), *[7] * size]
        assert named.take(longer, count + 1, size) == alone.take(longer, count + 1, size)
        if is_overwritten:
            text[:] = 2
