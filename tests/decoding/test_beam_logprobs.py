"""Log-probabilities of what beam searches return: those of the model after the text before each token."""

from __future__ import annotations

from typing import Any

import pytest

import unspool
from tests.engine.fakes import Fake, FakePair, make_engine, make_lm
from tests.fakes import FakeModel

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"num_beams": 3},
    "all returned": {"num_beams": 4, "num_return_sequences": 4},
    "early": {"num_beams": 3, "early_stopping": True, "num_return_sequences": 2},
    "drawn": {"num_beams": 3, "do_sample": True, "seed": 4, "temperature": 1.4, "top_k": 9},
    "processed": {"num_beams": 3, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "forced end": {"num_beams": 2, "forced_eos_token_id": 2, "num_return_sequences": 2},
    "in parts": {"num_beams": 3, "low_memory": True},
    "guided": {"num_beams": 2, "guidance_scale": 1.6},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7, "num_return_sequences": 4},
    "alike groups": {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 0.01, "num_return_sequences": 3},
    "constrained": {"num_beams": 4, "force_words_ids": [[7, 8], [12]], "num_return_sequences": 2},
    "constrained at the end": {"num_beams": 3, "force_words_ids": [[7, 8]], "strict_constraints": True},
}
PROMPTS = [[3, 4, 5, 9, 1], [7], [12, 2, 6], [5, 5, 5, 5]]


def check(model: FakeModel, prompt: list[int], tokens: list[int], found: list[unspool.TokenLogprob], top: int) -> None:
    """Each token's report is what the model says after the text before it."""
    assert [one.token_id for one in found] == tokens
    for place, one in enumerate(found):
        logprobs = model.score([*prompt, *tokens[:place]]).log_softmax(-1)
        assert one.logprob == pytest.approx(float(logprobs[one.token_id]), abs=1e-4)
        likeliest = logprobs.topk(top)
        assert [token for token, _ in one.top] == likeliest.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(likeliest.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("ends", [2, [2, 9, 14]], ids=["one end", "three ends"])
@pytest.mark.parametrize("name", METHODS)
def test_every_token_has_what_the_model_says_of_it(name: str, ends: Any) -> None:
    model = Fake()
    settings = {"eos_token_id": ends, "pad_token_id": 0, "max_new_tokens": 7, "logprobs": 2, **METHODS[name]}
    lm = make_lm(model)
    made = lm.generate(PROMPTS, **settings)
    count = len(made.token_ids) // len(PROMPTS)
    assert made.logprobs is not None
    for row, (tokens, found) in enumerate(zip(made.token_ids, made.logprobs, strict=True)):
        check(model, PROMPTS[row // count], tokens, found, 2)
    without = lm.generate(PROMPTS, **{**settings, "logprobs": None})
    assert without.token_ids == made.token_ids


def test_a_pair_s_tokens_too() -> None:
    lm = make_lm(FakePair())
    settings: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 7, "logprobs": 1}
    settings["decoder_start_token_id"] = 1
    made = lm.generate([[3, 4, 5], [9]], **settings)
    greedy = lm.generate([[3, 4, 5], [9]], max_new_tokens=1, logprobs=1, decoder_start_token_id=1)
    assert made.logprobs is not None and greedy.logprobs is not None
    for row, (tokens, found) in enumerate(zip(made.token_ids, made.logprobs, strict=True)):
        assert [one.token_id for one in found] == tokens
        assert found[0].top[0] == pytest.approx(greedy.logprobs[row // 2][0].top[0], abs=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_streams_and_the_engine_tell_the_same(name: str) -> None:
    lm = make_lm()
    settings = {"max_new_tokens": 7, "logprobs": 2, **METHODS[name]}
    whole = lm.generate(PROMPTS[0], **settings)
    assert whole.logprobs is not None
    streamed = [one for piece in lm.stream(PROMPTS[0], **settings) if not piece.row for one in piece.logprobs]
    assert streamed == whole.logprobs[0]
    with make_engine(lm) as engine:
        request = engine.submit(PROMPTS[0], **settings)
        assert [one for piece in request if not piece.row for one in piece.logprobs] == whole.logprobs[0]
        assert request.result().logprobs == whole.logprobs
