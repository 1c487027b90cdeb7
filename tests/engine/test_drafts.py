"""Requests with one draft model: their passes over it are shared, and each gets what it gets alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unspool
from tests.conformance.cases import load_model
from tests.engine.fakes import BLOCK_BYTES, Fake, FakePair, make_lm
from unspool.api import LanguageModel
from unspool.engine.drafts import DraftPools

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 3, "top_k": 9},
    {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"},
    {"repetition_penalty": 1.2, "assistant_confidence_threshold": 0.0},
    {"do_sample": True, "seed": 4, "num_return_sequences": 2},
)


def make_engine(lm: LanguageModel, num_blocks: int = 200) -> unspool.Engine:
    return unspool.Engine(lm, memory=BLOCK_BYTES * num_blocks, block_size=16, max_rows=16)


def has_drafts(engine: unspool.Engine) -> bool:
    return bool(engine._memory.drafts._held)


def test_passes_are_shared() -> None:
    lm, drafts = make_lm(), make_lm(Fake())  # the drafter knows what the model says: all guesses are right
    asked = {"assistant_model": drafts, "max_new_tokens": 30, "eos_token_id": None}
    prompts = [[3 + place, 4, 5] for place in range(6)]
    alone = [lm.generate(prompt, **asked).token_ids for prompt in prompts]
    num_alone, drafts.model.num_passes = drafts.model.num_passes, 0
    with make_engine(lm) as engine:
        hold = engine.submit([9, 9], max_new_tokens=900, eos_token_id=None)
        next(iter(hold))
        requests = [engine.submit(prompt, **asked) for prompt in prompts]
        assert [request.result(30).token_ids for request in requests] == alone
        hold.cancel()
        assert drafts.model.num_passes <= num_alone // 2
        assert max(drafts.model.rows_of_passes[-num_alone // 2 :]) > 1
        assert not has_drafts(engine)


@settings(max_examples=10)
@given(st.data())
def test_any_mix_with_draft_models(data: st.DataObject) -> None:
    lm = make_lm()
    models = [make_lm(Fake(seed=seed)) for seed in (0, 1)]  # one that is right, one that is wrong more often than not
    asked = [
        {
            "max_new_tokens": data.draw(st.integers(1, 25)),
            "assistant_model": data.draw(st.sampled_from(models)),
            **data.draw(st.sampled_from(WAYS)),
        }
        for _ in range(data.draw(st.integers(1, 6)))
    ]
    prompts = [[3 + data.draw(st.integers(0, 19)) for _ in range(data.draw(st.integers(1, 30)))] for _ in asked]
    cancelled = {place for place in range(len(asked)) if data.draw(st.integers(0, 5)) == 0}
    alone = [lm.generate(prompt, **one).token_ids for prompt, one in zip(prompts, asked, strict=True)]
    with make_engine(lm, data.draw(st.sampled_from([200, 16]))) as engine:  # 16: what the largest of them needs alone
        plain = engine.submit([5, 6], max_new_tokens=9)
        requests = [engine.submit(prompt, **one) for prompt, one in zip(prompts, asked, strict=True)]
        for place in cancelled:
            requests[place].cancel()
        for place, (request, expected) in enumerate(zip(requests, alone, strict=True)):
            found = request.result(30).token_ids
            if place in cancelled:
                assert all(got == whole[: len(got)] for got, whole in zip(found, expected, strict=True))
            else:
                assert found == expected
        assert plain.result(30).token_ids == lm.generate([5, 6], max_new_tokens=9).token_ids
        assert not engine.stats.blocks_used and not has_drafts(engine)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_real_models(family: str) -> None:
    lm = load_model(family)
    drafts = copy.deepcopy(lm)
    rows = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [5, 6, 7, 8, 20, 21]]
    made = [
        (rows[place % 3], {"max_new_tokens": 10, "assistant_model": drafts, **one}) for place, one in enumerate(WAYS)
    ]
    with unspool.Engine(lm, max_rows=16, memory=1 << 20) as engine:
        requests = [engine.submit(prompt, **one) for prompt, one in made]
        found = [request.result(60).token_ids for request in requests]
    assert found == [lm.generate(prompt, **one).token_ids for prompt, one in made]


def test_an_error_of_the_draft_model_is_that_requests_own() -> None:
    class Broken(Fake):
        def forward(self, *given: Any, **more: Any) -> Any:
            raise RuntimeError("broken")

    lm = make_lm()
    with make_engine(lm) as engine:
        broken = engine.submit([3, 4], assistant_model=make_lm(Broken()), max_new_tokens=8)
        whole = engine.submit([3, 4], assistant_model=make_lm(Fake()), max_new_tokens=8)
        with pytest.raises(RuntimeError, match="broken"):
            broken.result(30)
        assert whole.result(30).token_ids == lm.generate([3, 4], max_new_tokens=8).token_ids
        assert not has_drafts(engine)


def test_a_pool_lasts_as_long_as_its_requests() -> None:
    pools, model = DraftPools(16), Fake()
    first, second = pools.open(model), pools.open(model)
    assert first is not None and second is not None and first.pool is second.pool
    pools.close(first)
    drafting = pools.find(model)
    assert drafting is not None and drafting.pool is second.pool
    pools.close(second)
    assert pools.find(model) is None
    assert pools.open(FakePair()) is None  # its keys do not lie in blocks
