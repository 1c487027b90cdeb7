"""Runs of every strategy, suspended where they ask and answered together, give what they give alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.cases import load_model
from tests.decoding.greenlets import Engine
from tests.fakes import FakeEncoderDecoder, FakeLayers, FakeModel, pad_left
from unspool.api.starting import start
from unspool.decoding.run import Run

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "sampled": {"do_sample": True, "seed": 5, "top_k": 12, "temperature": 1.3},
    "two sequences": {"do_sample": True, "seed": 9, "top_k": 0, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
    "low memory beams": {"num_beams": 2, "low_memory": True},
    "forced words": {"num_beams": 3, "force_words_ids": [[7, 8]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "guidance": {"guidance_scale": 1.7},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "logprobs": {"prompt_logprobs": 2, "logprobs": 1, "return_dict_in_generate": True},
}


def make_run(model: Any, engine: Engine | None, rows: list[list[int]], **asked: Any) -> Run:
    asked = {"max_new_tokens": 9, "eos_token_id": [2, 11], "pad_token_id": 0, **asked}
    run = start(model, None, **pad_left(rows), **asked)
    if engine is not None:
        run.answer, run.answer_source = engine.answer, engine.answer_source
    return run


def check(model: Any, requests: list[tuple[list[list[int]], dict[str, Any]]]) -> Engine:
    """Decode all requests alone and together; the engine that decoded them together."""
    alone = [make_run(model, None, rows, **asked) for rows, asked in requests]
    for run in alone:
        list(run)
    engine = Engine()
    together = [make_run(model, engine, rows, **asked) for rows, asked in requests]
    with torch.no_grad():
        engine.drive(together)
    for one, other in zip(together, alone, strict=True):
        assert one.sequences().tolist() == other.sequences().tolist()
        assert one.reasons == other.reasons and one.emitted == other.emitted
        assert one.stats.forward_passes == other.stats.forward_passes
    assert engine.num_asks == sum(run.stats.forward_passes for run in together)
    return engine


PROMPTS = [[[3, 4, 5], [6, 7]], [[8, 9, 3, 4]], [[12]], [[5, 6, 5, 6, 5], [4, 4, 4, 4]]]


def test_all_strategies_at_once() -> None:
    requests = [
        (PROMPTS[place % 4], asked) for place, (name, asked) in enumerate(REQUESTS.items()) if name != "guidance"
    ]
    engine = check(FakeModel(), requests)
    assert engine.num_passes < 0.8 * engine.num_asks and max(engine.rounds) == len(requests)


def test_layers_and_guidance_at_once() -> None:
    asked = [{"dola_layers": "high"}, {"dola_layers": [0, 2]}, {"guidance_scale": 1.7}, {}, {"num_beams": 2}]
    check(FakeLayers(), list(zip(PROMPTS * 2, asked, strict=False)))


def test_draft_models_ask_too() -> None:
    engine = Engine()
    model, drafter = FakeModel(), FakeModel(seed=0)
    run = make_run(model, engine, PROMPTS[0], assistant_model=drafter, num_assistant_tokens=3)
    with torch.no_grad():
        engine.drive([run, make_run(model, engine, PROMPTS[1])])
    alone = make_run(FakeModel(), None, PROMPTS[0], assistant_model=FakeModel(seed=0), num_assistant_tokens=3)
    list(alone)
    assert run.sequences().tolist() == alone.sequences().tolist()
    assert drafter.num_passes > 0 and run.stats.speculation is not None


def test_sources_of_several_runs_are_encoded_in_one_pass() -> None:
    model = FakeEncoderDecoder()
    asked: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"do_sample": True, "seed": 3}]
    asked = [{**one, "decoder_start_token_id": 1} for one in asked]
    requests = list(zip(PROMPTS, asked, strict=False))
    alone = [make_run(model, None, rows, **one) for rows, one in requests]
    for run in alone:
        list(run)
    assert model.num_encodings == 3
    engine = Engine()
    together = [make_run(model, engine, rows, **one) for rows, one in requests]
    with torch.no_grad():
        engine.drive(together)
    assert model.num_encodings == 4
    assert [run.sequences().tolist() for run in together] == [run.sequences().tolist() for run in alone]


@settings(max_examples=12)
@given(st.data())
def test_any_mix_gives_each_run_its_own_tokens(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 6))
    requests = []
    for _ in range(count):
        rows = data.draw(st.lists(st.lists(st.integers(3, 22), min_size=1, max_size=6), min_size=1, max_size=3))
        name = data.draw(st.sampled_from(sorted(REQUESTS)))
        requests.append((rows, {**REQUESTS[name], "max_new_tokens": data.draw(st.integers(3, 8))}))
    check(FakeModel(), requests)


@pytest.mark.parametrize("family", ["llama"])
def test_a_real_model_decodes_them_at_once(family: str) -> None:
    model = load_model(family).model
    names = ("greedy", "sampled", "beams", "contrastive", "lookup", "guidance")
    requests = [(PROMPTS[place % 4], REQUESTS[name]) for place, name in enumerate(names)]
    engine = check(model, requests)
    assert engine.num_passes < engine.num_asks
