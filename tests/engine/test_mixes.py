"""Requests of every strategy, in any mix, order and memory, get what `lm.generate` gives them alone."""

from __future__ import annotations

import random
import threading
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unspool
from tests.conformance.cases import GOLDENS, load_model
from tests.engine.fakes import BLOCK_BYTES, Fake, FakePair, FakeWithLayers, Terse, make_engine, make_lm
from unspool.api import LanguageModel
from unspool.decoding import choice
from unspool.decoding.scorer import Scorer
from unspool.engine.memory import BlockLayout, count_position_bytes
from unspool.engine.passes import Passes
from unspool.kernels import sending

make_passes = Passes.__init__

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "long": {"max_new_tokens": 40},
    "penalised": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "new tokens": {"min_new_tokens": 3, "presence_penalty": 0.5},
    "forced end": {"forced_eos_token_id": 2, "begin_suppress_tokens": [9, 10]},
    "sampled": {"do_sample": True, "seed": 5, "top_k": 12, "temperature": 1.3},
    "sampled too": {"do_sample": True, "seed": 6, "top_k": 7, "temperature": 0.6, "repetition_penalty": 1.2},
    "nucleus": {"do_sample": True, "seed": 4, "top_k": 0, "top_p": 0.8, "min_p": 0.02},
    "xtc": {"do_sample": True, "seed": 3, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    "copies": {"do_sample": True, "seed": 9, "top_k": 0, "num_return_sequences": 3},
    "watermark": {"do_sample": True, "seed": 2, "watermarking_config": {"bias": 3.0}},
    "logprobs": {"logprobs": 2},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 1},
    "beams": {"num_beams": 3},
    "beam samples": {"num_beams": 2, "do_sample": True, "seed": 8, "num_return_sequences": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
    "low memory": {"num_beams": 2, "low_memory": True},
    "forced words": {"num_beams": 3, "force_words_ids": [[7, 8]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "guidance": {"guidance_scale": 1.7},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "no cache": {"use_cache": False},
    "output": {"return_dict_in_generate": True, "output_scores": True},
    "static": {"cache_implementation": "static"},
}
MARK = {"watermarking_config": {"bias": 3.0}}
# Requests of a line are stepped as one set of rows, as far as their processors are alike.
CROWDS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"num_beams": 3}, {"num_beams": 3, "max_new_tokens": 30}, {"num_beams": 3, "eos_token_id": None}),
    ({"num_beams": 2, "repetition_penalty": 1.4}, {"num_beams": 2, "repetition_penalty": 1.1, "min_new_tokens": 4}),
    tuple({"num_beams": 2, "do_sample": True, "seed": seed, "num_return_sequences": 2} for seed in range(3)),
    ({"num_beams": 3, "early_stopping": True, "length_penalty": 0.3, "num_return_sequences": 2},),
    ({"penalty_alpha": 0.6, "top_k": 4}, {"penalty_alpha": 0.6, "top_k": 4, "eos_token_id": None}),
    ({"penalty_alpha": 0.4, "top_k": 3, "suppress_tokens": [7], "logprobs": 1},),
    ({"guidance_scale": 1.7}, {"guidance_scale": 1.7, "max_new_tokens": 33}, {"guidance_scale": 0.5}),
    ({"guidance_scale": 1.3, "do_sample": True, "top_k": 9, "seed": 4}, {"guidance_scale": 1.3, "logprobs": 2}),
    ({"prompt_lookup_num_tokens": 3}, {"prompt_lookup_num_tokens": 3, "eos_token_id": None, "max_new_tokens": 40}),
    tuple({"prompt_lookup_num_tokens": 2, "do_sample": True, "seed": seed, "top_k": 9} for seed in range(2)),
    ({"prompt_lookup_num_tokens": 3, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "logprobs": 2},),
    ({"prompt_lookup_num_tokens": 3, "num_return_sequences": 2, "do_sample": True, "seed": 3, **MARK},),
    ({"dola_layers": "high"}, {"dola_layers": "high", "max_new_tokens": 30}, {"dola_layers": [0, 2]}),
    tuple({"dola_layers": "low", "do_sample": True, "seed": seed, "num_return_sequences": 2} for seed in range(2)),
    ({"dola_layers": "high", "repetition_penalty": 1.3, "min_new_tokens": 6, "logprobs": 1},),
    ({"num_beams": 2, **MARK}, {"num_beams": 2, "forced_eos_token_id": 2}),
)
LAYERED = {
    **REQUESTS,
    "dola": {"dola_layers": "high"},
    "dola at": {"dola_layers": [0, 2], "do_sample": True, "seed": 1},
}


def try_call(function: Any, *args: Any, **asked: Any) -> Any:
    """What a call returns, or the error that it raises."""
    try:
        return function(*args, **asked)
    except unspool.UnspoolError as error:
        return error


def check(one: Any, other: Any) -> None:
    if isinstance(other, Exception):
        assert type(one) is type(other)
        return
    assert one.token_ids == other.token_ids
    assert one.finish_reasons == other.finish_reasons and one.texts == other.texts
    assert one.prompt_token_ids == other.prompt_token_ids and one.dola_layers == other.dola_layers
    for told, expected in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
        assert (told is None) == (expected is None)
        if told is not None and expected is not None:
            ids = [[None if item is None else item.token_id for item in row] for row in told]
            assert ids == [[None if item is None else item.token_id for item in row] for row in expected]


@st.composite
def requests(draw: st.DrawFn, kinds: dict[str, dict[str, Any]], longest: int) -> tuple[Any, dict[str, Any]]:
    asked = {"max_new_tokens": draw(st.integers(1, 20)), **kinds[draw(st.sampled_from(sorted(kinds)))]}
    row = st.lists(st.integers(3, 22), min_size=1, max_size=40)
    if longest > 40:  # lists of so many numbers take hypothesis long
        text = [3 + (7 * place) % 20 for place in range(longest)]
        row = st.tuples(st.integers(1, 8), st.integers(9, longest)).map(lambda ends: text[ends[0] : ends[1]])
    prompt = draw(row) if draw(st.integers(0, 3)) else draw(st.lists(row, min_size=1, max_size=3))
    return prompt, asked


def run_mix(
    data: st.DataObject,
    lm: LanguageModel,
    kinds: dict[str, dict[str, Any]],
    num_blocks: int,
    *,
    memory: int | None = None,
    longest: int = 40,
    **options: Any,
) -> None:
    """Run random requests at once in an engine of so many blocks; with `options`, of a kind that calls get too."""
    chosen = {name: options[name] for name in ("cache_implementation", "cache_config") if name in options}
    count = data.draw(st.integers(1, 8))
    asked = [data.draw(requests(kinds, longest)) for _ in range(count)]
    cancelled = {place for place in range(count) if data.draw(st.integers(0, 7)) == 0}
    order = random.Random(data.draw(st.integers(0, 99)))
    engine = unspool.Engine(
        lm,
        memory=BLOCK_BYTES * num_blocks if memory is None else memory,
        max_rows=data.draw(st.sampled_from([12, 16])),
        tokens_per_pass=data.draw(st.sampled_from([7, 64, 512])),
        **{"block_size": 16, "share_prefixes": None if options else data.draw(st.booleans()), **options},
    )
    with engine:
        made = []
        for place, (prompt, settings) in enumerate(asked):
            request = try_call(engine.submit, prompt, priority=order.randint(-1, 1), **settings)
            if isinstance(request, unspool.ResourceError):
                continue  # it could never fit
            if isinstance(request, Exception):
                check(request, try_call(lm.generate, prompt, **{**chosen, **settings}))
                continue
            made.append((place, request))
            if order.random() < 0.5:
                try_call(lambda request=request: next(iter(request), None))  # let some steps pass
            if place in cancelled:
                request.cancel()
        for place, request in made:
            prompt, settings = asked[place]
            alone = try_call(lm.generate, prompt, **{**chosen, **settings})
            result = try_call(request.result, 30)
            if place in cancelled and not isinstance(result, Exception) and not isinstance(alone, Exception):
                for got, whole in zip(result.token_ids, alone.token_ids, strict=True):
                    assert got == whole[: len(got)]
            elif place not in cancelled:
                check(result, alone)
        stats = engine.stats
        assert stats.requests_done + stats.requests_cancelled + stats.requests_failed == len(made)
        assert not stats.rows_running and not stats.blocks_used and not stats.blocks_moved
    pools = [engine._memory.pool, engine._memory.counted]
    assert all(pool is None or pool.num_free == pool.num_blocks for pool in pools)


@settings(max_examples=20)
@given(st.data())
def test_any_mix_of_a_fake_model(data: st.DataObject) -> None:
    run_mix(data, make_lm(), REQUESTS, data.draw(st.sampled_from([400, 30, 12])))


@settings(max_examples=10)
@given(st.data())
def test_any_mix_of_a_fake_model_with_layers(data: st.DataObject) -> None:
    run_mix(data, make_lm(FakeWithLayers()), LAYERED, 400)


@settings(max_examples=20)
@given(st.data())
def test_any_crowd_of_a_few_kinds(data: st.DataObject) -> None:
    """Rows that are stepped as sets come and go at any step, and are sent back when memory is short."""
    lines = data.draw(st.lists(st.sampled_from(CROWDS), min_size=1, max_size=2))
    kinds = {str(place): one for place, one in enumerate(one for line in lines for one in line)}
    run_mix(data, make_lm(FakeWithLayers()), kinds, data.draw(st.sampled_from([400, 30, 14])))


def can_run_ahead(scorer: Any, strategy: Any, rows: Any, finish: Any, *, rows_may_leave: bool) -> bool:
    """As on a GPU."""
    is_free = not finish.needs_device and not scorer.record.keeps_steps and not scorer.has_custom_processors
    return bool(is_free and rows_may_leave and strategy.can_forget)


def can_search_ahead(scorer: Any, rows: Any, finish: Any, *, rows_may_leave: bool, num_prompts: int) -> bool:
    is_free = not finish.needs_history and not scorer.record.keeps_any and not scorer.has_custom_processors
    return bool(is_free and not scorer.reads_host and (rows_may_leave or num_prompts == 1))


@settings(max_examples=15)
@given(st.data())
def test_any_crowd_whose_steps_are_launched_ahead(data: st.DataObject) -> None:
    """A step that was launched before others came, or before rows were sent back, is taken again."""
    lines = data.draw(st.lists(st.sampled_from(CROWDS), min_size=1, max_size=2))
    kinds = {str(place): one for place, one in enumerate(one for line in lines for one in line)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "can_run_ahead", can_run_ahead)
        patch.setattr(choice, "can_search_ahead", can_search_ahead)
        patch.setattr(Passes, "__init__", lambda self, memory, *, mixes: make_passes(self, memory, mixes=False))
        run_mix(data, make_lm(FakeWithLayers()), kinds, data.draw(st.sampled_from([400, 14])))


@pytest.mark.parametrize("asked", [line[0] for line in CROWDS[:4]] + [line[-1] for line in CROWDS[4::2]], ids=str)
def test_steps_are_taken_once_for_all_requests_of_a_kind(asked: dict[str, Any]) -> None:
    lm, prompts = make_lm(FakeWithLayers()), [[3 + place, 9, 4, 7, 9, 4, 7] for place in range(6)]
    common = {**asked, "max_new_tokens": 12, "eos_token_id": None}
    scored: list[int] = []
    with pytest.MonkeyPatch.context() as patch, make_engine(lm, num_blocks=400) as engine:
        for name in ("next_logits", "next_unprocessed", "score_places"):
            real = getattr(Scorer, name)
            patch.setattr(Scorer, name, lambda *a, _real=real, **k: (scored.append(1), _real(*a, **k))[1])
        with engine.expecting():
            requests = [engine.submit(prompt, **common) for prompt in prompts]
        results = [request.result(30) for request in requests]
        assert len(scored) <= 12 + 4 + 4 * ("prompt_lookup_num_tokens" in asked) * 12  # drafts: position by position
    for prompt, result in zip(prompts, results, strict=True):
        check(result, lm.generate(prompt, **common))


def test_a_row_without_a_token_ends_its_own_request() -> None:
    """What goes wrong in a turn of a set ends the request at fault; the others begin again, unseen."""
    lm = make_lm(FakeWithLayers())
    for asked in (
        {"num_beams": 2},
        {"dola_layers": "high"},
        {"guidance_scale": 1.5},
        {"penalty_alpha": 0.6, "top_k": 3},
    ):
        common = {**asked, "max_new_tokens": 20, "eos_token_id": None}
        with make_engine(lm) as engine, engine.expecting():
            good = [engine.submit([3 + place, 4], suppress_tokens=[9], **common) for place in range(3)]
            bad = engine.submit([5, 6], suppress_tokens=list(range(23)), **common)
            streamed = [token for piece in good[0] for token in piece.token_ids]
            with pytest.raises(unspool.NoTokenLeftError):
                bad.result(30)
            for place, request in enumerate(good):
                check(request.result(30), lm.generate([3 + place, 4], suppress_tokens=[9], **common))
            assert streamed == good[0].result(30).token_ids[0]
            assert engine.stats.requests_failed == 1


def test_more_than_there_is_memory_for_waits() -> None:
    """Beams, lookups and contrastive searches beside plain requests, with memory for half of them: all are answered."""
    lm, common = make_lm(Fake()), {"max_new_tokens": 12, "eos_token_id": None}
    kinds: list[dict[str, Any]] = [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"penalty_alpha": 0.6, "top_k": 3},
    ]
    asked = [({**common, **kinds[place % 3]} if place < 64 else common) for place in range(264)]
    prompts = [[3 + place % 19, 5 + place // 19 % 17, 4, 9, 4, 9] for place in range(264)]
    alone = {str((prompt, one)): lm.generate(prompt, **one) for prompt, one in zip(prompts, asked, strict=True)}
    with make_engine(lm, num_blocks=220, max_rows=400) as engine:
        requests = [engine.submit(prompt, **one) for prompt, one in zip(prompts, asked, strict=True)]
        for request, prompt, one in zip(requests, prompts, asked, strict=True):
            check(request.result(60), alone[str((prompt, one))])
        assert not engine.stats.requests_failed and not engine.stats.blocks_used


@settings(max_examples=10)
@given(st.data())
def test_any_mix_of_a_model_whose_greedy_steps_have_no_logits(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):  # as on a GPU: prompts are not read with steps
            patch.setattr(Passes, "__init__", lambda self, memory, *, mixes: make_passes(self, memory, mixes=False))
        run_mix(data, make_lm(Terse()), REQUESTS, 400)


def test_greedy_rows_are_joined_by_all_others() -> None:
    """Rows that have no logits are in one step with rows whose first tokens are drawn, or reported, or greedy too."""
    model = Terse()
    lm = make_lm(model)
    others = [{}, {"do_sample": True, "seed": 3}, {"logprobs": 2}, {"repetition_penalty": 1.5}, {"num_beams": 2}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Passes, "__init__", lambda self, memory, *, mixes: make_passes(self, memory, mixes=False))
        for other in others:
            with make_engine(lm) as engine:
                first = engine.submit([5, 6, 7], max_new_tokens=60, eos_token_id=None)
                stream = iter(first)
                for _ in range(3):
                    next(stream)
                told = model.num_told
                second = engine.submit([9, 8], max_new_tokens=9, **other)
                check(second.result(30), lm.generate([9, 8], max_new_tokens=9, **other))
                check(first.result(30), lm.generate([5, 6, 7], max_new_tokens=60, eos_token_id=None))
                assert told > 0


@settings(max_examples=10)
@given(st.data())
def test_any_mix_of_a_fake_encoder_decoder(data: st.DataObject) -> None:
    run_mix(data, make_pair(), REQUESTS, data.draw(st.sampled_from([400, 30])))


def make_pair() -> LanguageModel:
    lm = make_lm(FakePair())
    lm.generation_config.decoder_start_token_id = 1
    return lm


def test_little_memory_preempts_and_gives_the_same_tokens() -> None:
    lm = make_lm(Fake())
    prompts = [[3 + place, 4, 5] for place in range(6)]
    with unspool.Engine(lm, memory=BLOCK_BYTES * 8, block_size=16, max_rows=6) as engine:
        made = [engine.submit(prompt, max_new_tokens=60, eos_token_id=None) for prompt in prompts]
        results = [request.result(30) for request in made]
        assert engine.stats.preemptions > 0
    for prompt, result in zip(prompts, results, strict=True):
        check(result, lm.generate(prompt, max_new_tokens=60, eos_token_id=None))


@pytest.mark.parametrize(
    "asked",
    [
        {"num_beams": 3},
        {"num_beams": 2, "low_memory": True},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"guidance_scale": 1.7},
        {"prompt_lookup_num_tokens": 3},
    ],
)
def test_little_memory_moves_what_is_not_plain(asked: dict[str, Any]) -> None:
    """Requests that can't be read again are moved to other memory, wherever they are, and go on from there."""
    lm, common = make_lm(Fake()), {"max_new_tokens": 60, "eos_token_id": None}
    prompts = [[3 + place, *range(4, 16)] for place in range(4)]
    with unspool.Engine(lm, memory=BLOCK_BYTES * 21, block_size=16, max_rows=16) as engine:
        requests = [engine.submit(prompt, **common, **asked) for prompt in prompts]
        plain = engine.submit([5, 6], **common)
        results = [request.result(60) for request in requests]
        assert engine.stats.preemptions > 0
        check(plain.result(60), lm.generate([5, 6], **common))
        assert not engine.stats.blocks_moved
    for prompt, result in zip(prompts, results, strict=True):
        check(result, lm.generate(prompt, **common, **asked))


OUTSIDE = ("forced words", "static", "low memory", "no cache")
IN_BLOCKS = {name: one for name, one in REQUESTS.items() if name not in OUTSIDE}


@settings(max_examples=6)
@given(st.data())
def test_layers_with_windows_in_blocks(data: st.DataObject) -> None:
    memory = data.draw(st.sampled_from([30_000, 200_000]))
    run_mix(data, load_model("gemma2"), IN_BLOCKS, 0, memory=memory, cache_implementation="paged_hybrid")


@settings(max_examples=6)
@given(st.data())
def test_packed_keys_in_blocks(data: st.DataObject) -> None:
    lm, shape = load_quantised(), load_quantised().model.key_shape
    config = {"nbits": data.draw(st.sampled_from([4, 8])), "residual_length": data.draw(st.sampled_from([0, 16]))}
    plain = 2 * 4 * 64 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    memory = (16 * 3 + data.draw(st.sampled_from([3, 40]))) * plain
    options = {"block_size": 64, "cache_implementation": "paged_quantized", "cache_config": config}
    run_mix(data, lm, IN_BLOCKS, 0, memory=memory, longest=86, **options)


@pytest.mark.parametrize(("kind", "config"), [("paged_hybrid", None), ("paged_quantized", {"residual_length": 0})])
def test_little_memory_in_blocks_of_other_kinds(kind: str, config: dict[str, Any] | None) -> None:
    """Rows are sent back or moved, and come back to the same bits."""
    lm, size = (load_model("gemma2"), 16) if kind == "paged_hybrid" else (load_quantised(), 64)
    layout = BlockLayout(lm.model, kind, config, size)
    blocks = 22 if kind == "paged_hybrid" else 4
    memory = layout.count_block_bytes() * blocks + layout.num_apart * 8 * size * count_position_bytes(lm.model)
    chosen = {"cache_implementation": kind, **({} if config is None else {"cache_config": config})}
    common = {"max_new_tokens": 48 if kind == "paged_hybrid" else 100, "eos_token_id": None}
    ways: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "seed": 3, "num_return_sequences": 2},
        {"num_beams": 2, "max_new_tokens": 80},
        {"repetition_penalty": 1.2},
    ]
    asked = [([5 + place, *range(6, 30)], {**common, **one}) for place, one in enumerate(ways)]
    with unspool.Engine(lm, memory=memory, block_size=size, max_rows=8, **chosen) as engine:
        requests = [engine.submit(prompt, **one) for prompt, one in asked]
        results = [request.result(60) for request in requests]
        assert engine.stats.preemptions > 0 and not engine.stats.blocks_used
    for result, (prompt, one) in zip(results, asked, strict=True):
        check(result, lm.generate(prompt, **one, **chosen))


class Copy:
    """A copy from a device that is never there at once."""

    num_awaited = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        Copy.num_awaited += 1


def test_requests_that_wait_for_copies_let_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_down(kind: type[Any]) -> None:
        whole = kind.read

        def read(fetched: Any, *args: Any) -> Any:
            wait = sending._waits.get()
            if wait is not None:
                wait(Copy())  # as a GPU's event
            return whole(fetched, *args)

        monkeypatch.setattr(kind, "read", read)

    lm, common = make_lm(), {"max_new_tokens": 12, "eos_token_id": None}
    asked = [REQUESTS[name] for name in ("beams", "contrastive", "guidance", "lookup", "output", "no cache")]
    expected = [lm.generate([5, 6, 7], **common, **one) for one in asked]
    slow_down(sending.Fetched)
    slow_down(sending.FetchedOnce)
    monkeypatch.setattr(Copy, "num_awaited", 0)
    with unspool.Engine(lm, memory=BLOCK_BYTES * 200, block_size=16, max_rows=16) as engine:
        requests = [engine.submit([5, 6, 7], **common, **one) for one in asked]
        cancelled = engine.submit([5, 6, 7], max_new_tokens=500, eos_token_id=None, guidance_scale=1.5)
        next(iter(cancelled))
        cancelled.cancel()
        for request, alone in zip(requests, expected, strict=True):
            check(request.result(30), alone)
        assert cancelled.result(30).finish_reasons == ["cancelled"]
        assert not engine.stats.blocks_used and Copy.num_awaited > 4 * 12


def test_requests_from_many_threads() -> None:
    lm = make_lm()
    failures: list[BaseException] = []

    def ask(engine: unspool.Engine, seed: int) -> None:
        order = random.Random(seed)
        try:
            for _ in range(4):
                prompt = [order.randint(3, 22) for _ in range(order.randint(1, 9))]
                asked = REQUESTS[order.choice(["greedy", "sampled", "beams", "penalised", "copies"])]
                pieces = list(engine.submit(prompt, max_new_tokens=9, **asked))
                expected = list(lm.stream(prompt, max_new_tokens=9, **asked))
                assert sorted((p.row, p.token_ids, p.finish_reason or "") for p in pieces) == sorted(
                    (p.row, p.token_ids, p.finish_reason or "") for p in expected
                )
        except BaseException as error:
            failures.append(error)

    with unspool.Engine(lm, memory=BLOCK_BYTES * 60, block_size=16) as engine:
        threads = [threading.Thread(target=ask, args=(engine, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_real_models(family: str) -> None:
    lm = load_model(family)
    names = [name for name in REQUESTS if name not in ("forced words",)]
    if "early_logits" not in lm.model.info.can:
        names = [name for name in names if not name.startswith("dola")]
    rows = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [5, 6, 7, 8, 20, 21]]
    with unspool.Engine(lm, max_rows=16, tokens_per_pass=9, memory=1 << 20) as engine:
        made = [(rows[place % 3], {"max_new_tokens": 10, **REQUESTS[name]}, name) for place, name in enumerate(names)]
        requests = [engine.submit(prompt, **asked) for prompt, asked, _ in made]
        for request, (prompt, asked, name) in zip(requests, made, strict=True):
            assert request.result(60).token_ids == lm.generate(prompt, **asked).token_ids, name


@settings(max_examples=8)
@given(st.data())
def test_the_same_bits_as_alone_with_weights_in_blocks(data: st.DataObject) -> None:
    """Log-probabilities show every bit of the logits: alone or among others, in pieces or whole, read again or not."""
    lm = load_quantised()
    kinds: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "seed": 3, "temperature": 1.2},
        {"repetition_penalty": 1.2},
        {"num_beams": 2},
        {"prompt_logprobs": 0},
        {"num_return_sequences": 2, "do_sample": True, "seed": 1},
    ]
    shape = lm.model.key_shape
    per_block = 2 * 4 * 16 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    with unspool.Engine(
        lm,
        memory=per_block * data.draw(st.sampled_from([24, 200])),
        block_size=16,
        max_rows=8,
        tokens_per_pass=data.draw(st.sampled_from([5, 40])),
        batch_invariant=True,
    ) as engine:
        asked = []
        for _ in range(data.draw(st.integers(2, 6))):
            prompt = data.draw(st.lists(st.integers(3, 90), min_size=1, max_size=50))
            settings = {"max_new_tokens": data.draw(st.integers(1, 30)), "eos_token_id": None, "logprobs": 1}
            kind = data.draw(st.sampled_from(kinds))
            if "num_beams" in kind:
                del settings["logprobs"]
            asked.append((prompt, settings | kind))
        requests = [engine.submit(prompt, **settings) for prompt, settings in asked]
        for request, (prompt, settings) in zip(requests, asked, strict=True):
            result, alone = request.result(60), lm.generate(prompt, **settings)
            assert result.token_ids == alone.token_ids
            assert result.logprobs == alone.logprobs and result.prompt_logprobs == alone.prompt_logprobs


@lru_cache
def load_quantised() -> LanguageModel:
    return unspool.load(GOLDENS / "models" / "llama", native=True, quantize="int8")
