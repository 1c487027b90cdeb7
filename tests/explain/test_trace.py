"""The trace: exact, complete, small, and the same after it was saved."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unspool
from tests.explain.traces import PROMPTS, SEARCHES, make_trace, search
from tests.fakes import FakeModel, pad_left
from unspool.decoding.beams.trace import BeamTrace
from unspool.errors import InputError, SettingError


@pytest.mark.parametrize("eos", [None, 3, 7])
@pytest.mark.parametrize("name", SEARCHES)
def test_following_the_trace_gives_the_sequences(name: str, eos: int | None) -> None:
    output = search(name, eos)
    trace, width = output.beam_trace, max(map(len, PROMPTS))
    assert [one.prompt for one in trace.returned] == [prompt for prompt in range(3) for _ in range(4)]
    for row, one in enumerate(trace.returned):
        path = trace.follow(one)
        tokens = [candidate.token for candidate in path]
        new = output.sequences[row, width:].tolist()
        assert new[: len(tokens)] == tokens and set(new[len(tokens) :]) <= {0, eos}
        assert len(path) == one.step and one.score == pytest.approx(output.sequences_scores[row].item(), abs=1e-5)
        assert (tokens[-1] == eos) == (one.reason == "eos") and one.reason in ("eos", "length")
        assert one.score == pytest.approx(path[-1].sum_logprobs / len(path), abs=1e-5) or name == "few"


@pytest.mark.parametrize("name", SEARCHES)
def test_every_step_continues_what_the_one_before_kept(name: str) -> None:
    trace = search(name).beam_trace
    groups = SEARCHES[name].get("num_beam_groups", 1)
    size = 4 // groups
    sums: dict[int, list[list[float]]] = {}
    for step in trace.steps:
        own = range(step.group * size, (step.group + 1) * size)
        assert len(step.kept) == len(set(step.kept)) == size
        beams = sums.setdefault(step.prompt, [[0.0] * 4])
        if len(beams) < step.step + 1:
            beams.append(list(beams[-1]))
        for candidate in step.candidates:
            assert candidate.parent in own
            assert candidate.sum_logprobs <= beams[step.step - 1][candidate.parent] + 1e-5
        for beam, place in zip(own, step.kept, strict=True):
            beams[step.step][beam] = step.candidates[place].sum_logprobs
        for place in step.finished:
            assert step.candidates[place].reason is not None
    assert trace.num_prompts == 3 and trace.num_groups == groups


def test_the_probabilities_are_the_model_s() -> None:
    trace = search("plain", prompts=PROMPTS[:1]).beam_trace
    model = FakeModel()
    beams: list[list[int]] = [[]] * 4
    for step in trace.steps:
        for one in step.candidates:
            ids = [*PROMPTS[0], *beams[one.parent], one.token]
            expected = sum(
                float(model.score(ids[:end]).log_softmax(-1)[ids[end]]) for end in range(len(PROMPTS[0]), len(ids))
            )
            if one.sum_logprobs > -math.inf:
                assert one.sum_logprobs == pytest.approx(expected, abs=1e-4)
        kept = [step.candidates[place] for place in step.kept]
        beams = [[*beams[one.parent], one.token] for one in kept]


def test_what_a_constraint_puts_forward_is_among_the_candidates() -> None:
    trace = search("constrained").beam_trace
    widths = {len(step.candidates) for step in trace.steps}
    assert min(widths) >= 8 and max(widths) > 8  # twice the beams, and those that were forced


def test_groups_are_told_apart() -> None:
    trace = search("grouped").beam_trace
    assert {(step.group, one.parent) for step in trace.steps for one in step.candidates} <= {
        (0, 0), (0, 1), (1, 2), (1, 3),
    }  # fmt: skip
    assert {step.group for step in trace.steps} == {0, 1}


@pytest.mark.parametrize("name", SEARCHES)
def test_the_trace_changes_nothing(name: str) -> None:
    output = search(name)
    plain = unspool.generate(
        FakeModel(),
        **pad_left(PROMPTS),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=9,
        eos_token_id=7,
        pad_token_id=0,
        **SEARCHES[name],
    )
    assert plain.tolist() == output.sequences.tolist()


@pytest.mark.parametrize("name", SEARCHES)
def test_saved_and_loaded_it_is_the_same_and_small(name: str) -> None:
    trace = search(name).beam_trace
    text = trace.to_json()
    assert BeamTrace.from_json(text) == trace == BeamTrace.from_dict(json.loads(text))
    assert BeamTrace.from_json(text.encode()).to_json() == text
    num_candidates = sum(len(step.candidates) for step in trace.steps)
    assert len(text) < 30 * num_candidates + 200 * len(trace.steps) + 1000 and "NaN" not in text and "Inf" not in text


@pytest.mark.parametrize("eos", [3, 7])
@pytest.mark.parametrize("name", SEARCHES)
def test_what_is_streamed_is_what_is_returned(name: str, eos: int) -> None:
    trace = search(name, eos).beam_trace
    rows: list[list[int]] = [[] for _ in trace.returned]
    reasons: dict[int, str] = {}
    common = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 9, "eos_token_id": eos, "pad_token_id": 0}
    for emitted in unspool.stream(FakeModel(), **pad_left(PROMPTS), **common, **SEARCHES[name]):
        reasons |= emitted.finished
        for row, tokens in emitted.tokens.items():
            rows[row] += tokens
    assert rows == [[one.token for one in trace.follow(end)] for end in trace.returned]
    assert [reasons[row] for row in range(len(rows))] == [end.reason for end in trace.returned]


def test_a_stream_has_no_place_for_it() -> None:
    with pytest.raises(SettingError, match="beams='all'"):
        unspool.stream(FakeModel(), **pad_left([[1, 2]]), num_beams=2, return_beam_trace=True)


def test_only_an_output_object_carries_it() -> None:
    with pytest.raises(SettingError, match="return_dict_in_generate=True"):
        unspool.generate(FakeModel(), **pad_left([[1, 2]]), num_beams=2, return_beam_trace=True, max_new_tokens=2)


def _change(values: Any, path: tuple[Any, ...], value: Any) -> Any:
    holder = values
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return values


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "something else"),
        (("version",), 2),
        (("num_beams",), 0),
        (("num_beams",), True),
        (("num_beams",), 10**9),
        (("num_groups",), 3),
        (("steps",), None),
        (("steps", 0), []),
        (("steps", 0, "step"), 2),
        (("steps", 1, "step"), 1),
        (("steps", 0, "tokens"), [1]),
        (("steps", 0, "tokens", 0), -1),
        (("steps", 0, "tokens", 0), 1.5),
        (("steps", 0, "parents", 0), 2),
        (("steps", 0, "sum_logprobs", 0), "low"),
        (("steps", 0, "sum_logprobs", 0), math.nan),
        (("steps", 0, "sum_logprobs", 0), math.inf),
        (("steps", 0, "kept"), [0, 0]),
        (("steps", 0, "kept"), [0]),  # the next step goes on from two
        (("steps", 0, "kept"), [0, 4]),
        (("steps", 0, "kept"), [0, 1, 2]),
        (("steps", 1, "reasons"), [[3, "x" * 100]]),
        (("steps", 1, "reasons"), [[4, "eos"]]),
        (("steps", 2, "finished"), [[0]]),
        (("returned", 0, 3), 9),
        (("returned", 0, 1), 7),
        (("returned", 0, 4), "best"),
        (("returned", 0), [1, 2]),
    ],
)
def test_what_could_not_have_been_written_is_refused(path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(InputError):
        BeamTrace.from_dict(_change(json.loads(make_trace().to_json()), path, value))


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format": "unspool beam trace"}', "[" * 100_000, b"\xff"])
def test_what_is_no_trace_is_refused(text: Any) -> None:
    with pytest.raises(InputError):
        BeamTrace.from_json(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60)
@given(value=JSON, place=st.integers(0, 40))
def test_any_other_value_is_read_or_refused(value: Any, place: int) -> None:
    """Whatever stands in a field: an InputError, or a trace that can be followed."""
    values = json.loads(make_trace().to_json())
    paths = [(key,) for key in values] + [("steps", 1, key) for key in values["steps"][1]]
    path = paths[place % len(paths)]
    try:
        trace = BeamTrace.from_dict(_change(values, path, value))
    except InputError:
        return
    for one in trace.returned:
        assert len(trace.follow(one)) == one.step
