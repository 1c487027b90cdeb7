"""The engine's door: pieces, results, faults, deadlines, many prompts, shared prefixes, and its end."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unspool
from tests.conformance.cases import load_model
from tests.engine.fakes import BLOCK_BYTES, Fake, FakePair, make_lm
from unspool.engine import inbox, special
from unspool.errors import NoTokenLeftError


@pytest.fixture
def lm() -> unspool.LanguageModel:
    return make_lm()


@pytest.fixture
def engine(lm: unspool.LanguageModel) -> Iterator[unspool.Engine]:
    with make_engine(lm) as made:
        yield made


def make_engine(lm: Any, num_blocks: int = 200, **options: Any) -> unspool.Engine:
    return unspool.Engine(lm, **{"memory": BLOCK_BYTES * num_blocks, "block_size": 16, **options})


ENDLESS = {"max_new_tokens": 1000, "eos_token_id": None}


class Slow(Fake):
    """A model that takes its time."""

    def forward(self, *args: Any, **named: Any) -> Any:
        time.sleep(0.002)
        return super().forward(*args, **named)


# --- what a request gives ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_pieces_are_those_of_a_stream(asked: dict[str, Any]) -> None:
    lm = make_lm(Fake(vocab=160), has_tokenizer=True)
    with make_engine(lm) as engine:
        request = engine.submit("hello world", max_new_tokens=12, **asked)
        pieces = list(request)
        expected = list(lm.stream("hello world", max_new_tokens=12, **asked))
        assert "".join(pieces) == "".join(expected)
        assert [token for piece in pieces for token in piece.token_ids] == [
            token for piece in expected for token in piece.token_ids
        ]
        assert request.result().text == "".join(expected)
        assert pieces[-1].finish_reason == expected[-1].finish_reason


def test_stop_strings_end_a_request_as_alone() -> None:
    lm = make_lm(Fake(vocab=160), has_tokenizer=True)
    whole = lm.generate("hello", max_new_tokens=30, eos_token_id=None).text
    stop = whole[8:11]
    alone = lm.generate("hello", max_new_tokens=30, eos_token_id=None, stop_strings=stop)
    assert alone.finish_reasons == ["stop_string"]
    with make_engine(lm) as engine:
        others = [engine.submit("world", max_new_tokens=30, eos_token_id=None) for _ in range(2)]
        result = engine.submit("hello", max_new_tokens=30, eos_token_id=None, stop_strings=stop).result(10)
        assert result.texts == alone.texts and result.finish_reasons == alone.finish_reasons
        assert result.token_ids == alone.token_ids
        assert all(
            other.result(10).text == lm.generate("world", max_new_tokens=30, eos_token_id=None).text for other in others
        )


def test_readers_that_come_late_get_every_piece() -> None:
    lm = make_lm(Slow())
    alone = lm.generate([3, 4], max_new_tokens=40, eos_token_id=None).token_ids[0]
    with make_engine(lm) as engine:
        for seconds in (0.0, 0.03, 0.5):  # before the first token, in between, after the end
            request = engine.submit([3, 4], max_new_tokens=40, eos_token_id=None)
            time.sleep(seconds)
            pieces = list(request)
            assert [token for piece in pieces for token in piece.token_ids] == alone
            assert request.result().token_ids == [alone] and request.stats.new_tokens == 40
            assert pieces[-1].finish_reason == "length" and 0 < request.stats.first_token_seconds < 10


def test_async_programs(lm: unspool.LanguageModel, engine: unspool.Engine) -> None:
    async def read(prompt: list[int]) -> list[int]:
        return [token async for piece in engine.submit(prompt, max_new_tokens=8) for token in piece.token_ids]

    async def main() -> list[Any]:
        prompts = [[3 + place % 19, 4] for place in range(50)]
        tokens = await asyncio.gather(*map(read, prompts))
        results = await asyncio.gather(*(engine.submit(prompt, max_new_tokens=8) for prompt in prompts[:5]))
        assert [result.token_ids[0] for result in results] == tokens[:5]
        return list(zip(prompts, tokens, strict=True))

    for prompt, tokens in asyncio.run(main()):
        assert tokens == lm.generate(prompt, max_new_tokens=8).token_ids[0]


def test_a_request_is_cancelled_within_a_step() -> None:
    lm = make_lm(Slow())
    with make_engine(lm) as engine:
        for asked in ({}, {"num_beams": 2}):
            request = engine.submit([3, 4], **ENDLESS, **asked)
            other = engine.submit([5, 6], max_new_tokens=20, eos_token_id=None)
            if not asked:
                next(iter(request))
            request.cancel()
            request.cancel()
            result = request.result(10)
            assert result.finish_reasons == ["cancelled"] and len(result.token_ids[0]) < 200
            assert other.result(10).token_ids == lm.generate([5, 6], max_new_tokens=20, eos_token_id=None).token_ids
        assert engine.stats.requests_cancelled == 2 and not engine.stats.blocks_used


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    lm = make_lm(Slow())
    with make_engine(lm) as engine:
        result = engine.submit([3, 4], deadline=0.15, **ENDLESS).result(10)
        assert result.finish_reasons == ["deadline"] and 0 < len(result.token_ids[0]) < 999
        waiting = make_engine(lm, max_rows=1)
        with waiting:
            first = waiting.submit([3], **ENDLESS)
            second = waiting.submit([4], deadline=0.1, **ENDLESS)
            assert second.result(10).token_ids == [[]] and not first.is_done


def test_a_streamer_is_fed(lm: unspool.LanguageModel, engine: unspool.Engine) -> None:
    class Keeper:
        def __init__(self) -> None:
            self.values: list[list[int]] = []
            self.ended = threading.Event()

        def put(self, value: torch.Tensor) -> None:
            self.values.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended.set()

    keeper = Keeper()
    result = engine.submit([3, 4], max_new_tokens=6, streamer=keeper).result(10)
    assert keeper.ended.wait(10) and keeper.values[0] == [3, 4]
    assert [token for value in keeper.values[1:] for token in value] == result.token_ids[0]


# --- faults ------------------------------------------------------------------------------------------------------


class Refuse:
    """Raises at the third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("by a caller's own code")
        return scores if scores is not None and scores.dim() == 2 else False


class Stop(Refuse):
    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        super().__call__(input_ids, None)
        return False


class BrokenStreamer:
    def put(self, _: Any) -> None:
        raise ZeroDivisionError("by a streamer")

    def end(self) -> None: ...


@pytest.mark.parametrize(
    "fault",
    [{"logits_processor": [Refuse]}, {"stopping_criteria": [Stop]}, {"streamer": BrokenStreamer}],
    ids=["processor", "criterion", "streamer"],
)
def test_a_fault_ends_its_own_request(fault: dict[str, Any]) -> None:
    lm = make_lm(Slow())
    made = {name: [kind() for kind in value] if isinstance(value, list) else value() for name, value in fault.items()}
    with make_engine(lm) as engine:
        others = [engine.submit([5, 6], max_new_tokens=20), engine.submit([7], max_new_tokens=20, num_beams=2)]
        with pytest.raises(ZeroDivisionError):
            engine.submit([3, 4], **ENDLESS, **made).result(10)
        assert others[0].result(10).token_ids == lm.generate([5, 6], max_new_tokens=20).token_ids
        assert others[1].result(10).token_ids == lm.generate([7], max_new_tokens=20, num_beams=2).token_ids
        assert engine.submit([3], max_new_tokens=2).result(10).token_ids
        until = time.monotonic() + 10
        while engine.stats.blocks_used and time.monotonic() < until:
            time.sleep(0.01)  # a streamer's fault reaches the driving thread within a step
        assert not engine.stats.blocks_used


class Nan(Fake):
    """Its scores are NaN after the token 7."""

    def forward(self, tokens: torch.Tensor, *args: Any, **named: Any) -> Any:
        forward = super().forward(tokens, *args, **named)
        forward.logits[(tokens[:, -1] == 7)] = math.nan
        return forward


@pytest.mark.parametrize("asked", [{}, {"do_sample": True, "seed": 1, "top_k": 5}, {"num_beams": 2}])
def test_scores_that_are_nan_end_one_request(asked: dict[str, Any]) -> None:
    lm = make_lm(Nan())
    with make_engine(lm) as engine:
        good = engine.submit([4, 5], max_new_tokens=3, suppress_tokens=[7], **asked)
        bad = engine.submit([4, 7], max_new_tokens=3, **asked)
        with pytest.raises(unspool.NoTokenLeftError, match="NaN"):
            bad.result(10)
        assert len(good.result(10).token_ids[0]) >= 1
        assert engine.stats.requests_failed == 1


def test_processors_that_forbid_all_tokens_are_named(engine: unspool.Engine) -> None:
    with pytest.raises(unspool.NoTokenLeftError, match="SuppressTokens"):
        engine.submit([4], suppress_tokens=list(range(23))).result(10)


def test_the_death_of_the_driving_thread_is_known_at_once() -> None:
    lm = make_lm(Slow())
    engine = make_engine(lm)
    requests = [engine.submit([3, 4], **ENDLESS), engine.submit([5], num_beams=2, **ENDLESS)]
    engine._driver.scheduler.plan = lambda now: 1 / 0  # type: ignore[method-assign]
    for request in requests:
        with pytest.raises(unspool.EngineError, match="ZeroDivisionError"):
            request.result(10)
    with pytest.raises(unspool.EngineError, match="driving thread"):
        engine.submit([3])
    assert engine._memory.pool.num_free == 200


def test_closing_ends_what_runs(lm: unspool.LanguageModel) -> None:
    engine = make_engine(make_lm(Slow()))
    with engine:
        requests = [engine.submit([3], **ENDLESS), engine.submit([3], num_beams=2, **ENDLESS)]
        next(iter(requests[0]))
    assert [request.result(10).finish_reasons for request in requests] == [["cancelled"], ["cancelled"]]
    assert engine._memory.pool.num_free == 200
    with pytest.raises(unspool.EngineError, match="closed"):
        engine.submit([3])


def test_without_greenlets_plain_requests_run(engine: unspool.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "greenlet", None)
    assert engine.submit([3], max_new_tokens=2).result(10).token_ids
    with pytest.raises(unspool.MissingExtraError, match=r"unspool\[engine\]"):
        engine.submit([3], num_beams=2)
    assert special.import_greenlet


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"num_beams": 200}, "200 rows"),
        ({"max_new_tokens": 5000}, "blocks"),
        ({"priority": 1000}, "priority"),
        ({"deadline": math.nan}, "deadline"),
        ({"tenant": 7}, "tenant"),
        ({"temperature": -1.0, "do_sample": True}, "temperature"),
        ({"nonsense": 3}, "nonsense"),
    ],
)
def test_what_can_not_be_is_refused_at_submit(engine: unspool.Engine, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(unspool.UnspoolError, match=told):
        engine.submit([3, 4], **asked)


def test_a_full_queue_says_so() -> None:
    with make_engine(make_lm(Slow()), max_rows=1, max_waiting=2) as engine:
        first = engine.submit([3], **ENDLESS)
        next(iter(first))
        waiting = [engine.submit([3], max_new_tokens=1) for _ in range(2)]
        with pytest.raises(unspool.ResourceError, match="max_waiting"):
            engine.submit([3])
        first.cancel()
        assert all(request.result(10).token_ids for request in waiting)


@pytest.mark.parametrize(
    "options", [{"max_rows": 0}, {"memory": 3}, {"memory": "1"}, {"tokens_per_pass": True}, {"block_size": 7}]
)
def test_engines_that_can_not_be(lm: unspool.LanguageModel, options: dict[str, Any]) -> None:
    with pytest.raises(unspool.SettingError):
        make_engine(lm, **options)


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        ("llama", {"cache_implementation": "static"}, "one of 'paged'"),
        ("llama", {"cache_implementation": "paged_quantized", "cache_config": {"nbits": 3}}, "nbits"),
        ("llama", {"cache_implementation": "paged_quantized", "cache_config": {"num_blocks": 3}}, "`memory`"),
        ("llama", {"cache_implementation": "paged_quantized", "memory": 10_000}, "beside"),
        ("gemma2", {"cache_implementation": "paged_hybrid", "share_prefixes": True}, "share_prefixes"),
        ("mamba", {"cache_implementation": "paged_hybrid"}, "can't have"),
        ("t5", {"cache_implementation": "paged_quantized"}, "can't have"),
    ],
)
def test_kinds_of_blocks_that_can_not_be(family: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(unspool.UnspoolError, match=told):
        unspool.Engine(load_model(family), **options)


def test_requests_may_choose_another_kind_than_the_engine() -> None:
    lm = load_model("gemma2")
    asked: list[dict[str, Any]] = [
        {"cache_implementation": "dynamic"},
        {"use_cache": False},
        {"generation_config": unspool.GenerationConfig(cache_implementation="static", max_new_tokens=12)},
        {"return_dict_in_generate": True},
        {"cache_implementation": "paged_hybrid"},
        {},
    ]
    with unspool.Engine(lm, cache_implementation="paged_hybrid", max_rows=8) as engine:
        requests = [engine.submit([5, 6, 7], max_new_tokens=12, **one) for one in asked]
        found = [request.result(30).token_ids for request in requests]
        assert not engine.stats.blocks_used
    assert found == [lm.generate([5, 6, 7], max_new_tokens=12, **one).token_ids for one in asked]


def test_batch_invariance_is_given_or_refused(lm: unspool.LanguageModel) -> None:
    with pytest.raises(unspool.UnsupportedError, match="batch_invariant"):
        make_engine(lm, batch_invariant=True)


# --- many prompts ------------------------------------------------------------------------------------------------


def test_generate_in_order_and_as_they_finish(lm: unspool.LanguageModel, engine: unspool.Engine) -> None:
    prompts = [[3 + place % 19, 4, 5] for place in range(40)]
    alone = [lm.generate(prompt, max_new_tokens=1 + sum(prompt) % 9).token_ids for prompt in prompts]
    requests = [engine.submit(prompt, max_new_tokens=1 + sum(prompt) % 9) for prompt in prompts]
    assert [request.result(10).token_ids for request in requests] == alone
    results = [result.token_ids for result in engine.generate(prompts, max_new_tokens=6)]
    assert results == [lm.generate(prompt, max_new_tokens=6).token_ids for prompt in prompts]
    pairs = dict(engine.generate(prompts, in_order=False, max_new_tokens=6))
    assert [pairs[place].token_ids for place in range(40)] == results


def test_an_endless_iterable_is_read_as_it_is_needed(engine: unspool.Engine) -> None:
    taken = itertools.count()

    def prompts() -> Iterator[list[int]]:
        while True:
            yield [3 + next(taken) % 19]

    results = engine.generate(prompts(), max_new_tokens=2)
    assert len(list(itertools.islice(results, 10))) == 10
    results.close()
    assert next(taken) < 200
    with pytest.raises(unspool.SettingError, match="submit"):
        engine.generate("a text")


def test_errors_of_single_prompts_can_be_results(engine: unspool.Engine) -> None:
    results = list(engine.generate([[3], [99], [4]], return_errors=True, max_new_tokens=2))
    assert isinstance(results[1], unspool.InputError) and len(results[2].token_ids[0]) >= 1
    with pytest.raises(unspool.InputError):
        list(engine.generate([[3], [99]], max_new_tokens=2))


def test_generate_batch(lm: unspool.LanguageModel, engine: unspool.Engine) -> None:
    outputs = engine.generate_batch([[3, 4], [99], [5]], max_new_tokens=4, logprobs=0)
    assert list(outputs) == ["req_0", "req_1", "req_2"]
    assert outputs["req_0"].generated_tokens == lm.generate([3, 4], max_new_tokens=4).token_ids[0]
    assert outputs["req_1"].error and outputs["req_1"].status == "failed"
    assert len(outputs["req_2"].logprobs) == len(outputs["req_2"].generated_tokens)


# --- prefixes ----------------------------------------------------------------------------------------------------


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


# --- other models ------------------------------------------------------------------------------------------------


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


def test_requests_that_come_together_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_LONGEST_WAIT", 20.0)
    monkeypatch.setattr(inbox, "_QUIET", 0.5)
    with make_engine(make_lm()) as engine:
        requests = []
        for place in range(5):  # one after the other, as a script submits them
            requests.append(engine.submit([3 + place, 4], max_new_tokens=3, eos_token_id=None))
            time.sleep(0.01)
        for request in requests:
            request.result(30)
        assert engine.stats.passes == 3


def test_prefixes_of_the_caller_and_draft_models() -> None:
    lm = load_model("llama")
    prefix = lm.prefix([5, 6, 7, 8])
    with unspool.Engine(lm, max_rows=4, memory=1 << 20) as engine:
        request = engine.submit([9, 10], prefix=prefix, max_new_tokens=6)
        drafted = engine.submit([5, 6, 7], assistant_model=copy.deepcopy(lm), max_new_tokens=8)
        assert request.result(20).token_ids == lm.generate([9, 10], prefix=prefix, max_new_tokens=6).token_ids
        assert drafted.result(20).token_ids == lm.generate([5, 6, 7], max_new_tokens=8).token_ids


def test_plain_rows_share_processors_and_passes(lm: unspool.LanguageModel) -> None:
    model = Slow()
    lm = make_lm(model)
    with make_engine(lm, max_rows=16) as engine:
        asked = [
            {"do_sample": True, "seed": place, "temperature": 0.55 + place / 8, "top_k": 3 + place, "top_p": 0.9}
            for place in range(8)
        ]
        hold = engine.submit([3], **ENDLESS)
        next(iter(hold))
        requests = [
            engine.submit(
                [3, 4 + place], max_new_tokens=30, eos_token_id=None, repetition_penalty=1.0 + place / 10 + 0.1, **one
            )
            for place, one in enumerate(asked)
        ]
        for request in requests:
            next(iter(request))
        assert engine._driver._plain.num_chains == 2  # the greedy row's, and one for all others
        before = engine.stats.passes
        results = [request.result(10).token_ids for request in requests]
        assert engine.stats.passes - before < 3 * 30
        hold.cancel()
        for place, (tokens, one) in enumerate(zip(results, asked, strict=True)):
            penalty = 1.0 + place / 10 + 0.1
            alone = lm.generate([3, 4 + place], max_new_tokens=30, eos_token_id=None, repetition_penalty=penalty, **one)
            assert tokens == alone.token_ids


def test_a_script_may_end_without_closing_its_engine() -> None:
    script = (
        "import unspool; from tests.conformance.cases import load_model\n"
        "engine = unspool.Engine(load_model('llama'), memory=1 << 24)\n"
        "requests = [engine.submit([5, 6, 7], max_new_tokens=120, eos_token_id=None) for _ in range(4)]\n"
        "next(iter(requests[0])); print('ends', flush=True)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
