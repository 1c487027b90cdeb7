"""Models whose memory is not in blocks: encoder-decoders, and those with states."""

from __future__ import annotations

from typing import Any

import pytest

import unspool
from tests.conformance.cases import load_model
from tests.engine.fakes import FakePair, make_engine, make_lm
from unspool.errors import NoTokenLeftError


def test_encoder_decoders_run() -> None:
    lm = make_lm(FakePair())
    lm.generation_config.decoder_start_token_id = 1
    with make_engine(lm, max_rows=8) as engine:
        asked: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"do_sample": True, "seed": 3}]
        requests = [engine.submit([5, 6, 7], max_new_tokens=6, **one) for one in asked]
        for request, one in zip(requests, asked, strict=True):
            assert request.result(10).token_ids == lm.generate([5, 6, 7], max_new_tokens=6, **one).token_ids


@pytest.mark.parametrize("family", ["t5", "mamba"])
def test_models_without_pages(family: str) -> None:
    lm = load_model(family)
    with unspool.Engine(lm, max_rows=8) as engine:
        asked: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"do_sample": True, "seed": 3}]
        requests = [engine.submit([5, 6, 7], max_new_tokens=6, **one) for one in asked]
        for request, one in zip(requests, asked, strict=True):
            assert request.result(20).token_ids == lm.generate([5, 6, 7], max_new_tokens=6, **one).token_ids


@pytest.mark.parametrize("family", ["t5", "mamba", "fake pair"])
def test_rows_of_models_without_pages_share_steps(family: str) -> None:
    lm = make_lm(FakePair()) if family == "fake pair" else load_model(family)
    if family == "fake pair":
        lm.generation_config.decoder_start_token_id = 1
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 12},
        {"max_new_tokens": 20, "do_sample": True, "seed": 3, "temperature": 0.7},
        {"max_new_tokens": 16, "repetition_penalty": 1.3, "num_return_sequences": 2, "do_sample": True, "seed": 5},
        {"max_new_tokens": 5, "logprobs": 1},
        {"max_new_tokens": 24},
        {"max_new_tokens": 8},
    ]
    prompts = [[5 + place, 6, *range(7, 7 + place)] for place in range(len(asked))]
    with unspool.Engine(lm, max_rows=8) as engine, engine._driver.inbox.asking():
        requests = [engine.submit(prompt, eos_token_id=None, **one) for prompt, one in zip(prompts, asked, strict=True)]
        late = None
        for request, prompt, one in zip(requests, prompts, asked, strict=True):
            result, alone = request.result(30), lm.generate(prompt, eos_token_id=None, **one)
            assert result.token_ids == alone.token_ids and result.finish_reasons == alone.finish_reasons
            late = late or engine.submit([9, 8], max_new_tokens=4, eos_token_id=None)
        assert late is not None
        assert late.result(30).token_ids == lm.generate([9, 8], max_new_tokens=4, eos_token_id=None).token_ids
        # A prompt's pass each, and steps that all have in common.
        assert engine.stats.passes < len(asked) + 1 + 24 + 4 + 8
        assert engine.stats.requests_done == len(asked) + 1 and not engine.stats.rows_running


def test_a_fault_in_a_joined_row_is_its_own() -> None:
    lm = load_model("mamba")
    with unspool.Engine(lm, max_rows=8) as engine:
        good = engine.submit([5, 6], max_new_tokens=30, eos_token_id=None)
        bad = engine.submit([7, 8], max_new_tokens=30, suppress_tokens=list(range(lm.model.info.vocab_size)))
        with pytest.raises(NoTokenLeftError, match="SuppressTokens"):
            bad.result(30)
        cancelled = engine.submit([5, 6], max_new_tokens=500, eos_token_id=None)
        next(iter(cancelled))
        cancelled.cancel()
        assert cancelled.result(30).finish_reasons == ["cancelled"]
        assert good.result(30).token_ids == lm.generate([5, 6], max_new_tokens=30, eos_token_id=None).token_ids
