"""When rows end: limits, criteria of the caller's own, and the reason that is told."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.fakes import FakeModel, decode_slowly, pad_left
from unspool import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    generate,
    stream,
)
from unspool.errors import InputError, SettingError

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]


def reasons(model: FakeModel, **settings: Any) -> dict[int, str]:
    return {row: why for emitted in stream(model, **settings) for row, why in emitted.finished.items()}


def length_of(model: FakeModel, **settings: Any) -> int:
    return generate(model, [[1, 2, 3]], **settings).shape[1]


# --- length -------------------------------------------------------------------------------------------------


def make_model(**settings: Any) -> FakeModel:
    model = FakeModel()
    model.generation_config = GenerationConfig(**settings)
    return model


@pytest.mark.parametrize(
    ("of_model", "of_config", "of_call", "length"),
    [
        ({}, {}, {}, 23),  # the reference's default: 20 after the prompt
        ({"max_length": 9}, {}, {}, 9),
        ({"max_new_tokens": 2}, {}, {}, 5),
        ({"max_length": 9}, {"max_length": 7}, {}, 7),
        ({"max_length": 9}, {"max_length": 7}, {"max_length": 5}, 5),
        ({"max_length": 9}, {"max_new_tokens": 1}, {}, 4),
        ({"max_new_tokens": 2}, {"max_length": 9}, {}, 9),
        ({"max_new_tokens": 2}, {}, {"max_length": 9}, 9),
        ({}, {"max_new_tokens": 2}, {"max_length": 9}, 9),
        ({}, {"max_length": 9}, {"max_new_tokens": 2}, 5),
        ({"max_length": 4}, {"max_new_tokens": 3}, {"max_new_tokens": 8}, 11),
        ({"max_new_tokens": 2}, {}, {"max_new_tokens": None, "max_length": 9}, 9),
        ({}, {}, {"max_new_tokens": 5, "max_length": 6}, 6),  # asked for together, both hold
        ({}, {}, {"max_new_tokens": 2, "max_length": 9}, 5),
    ],
)
def test_the_later_origin_decides_the_length(
    of_model: dict[str, Any], of_config: dict[str, Any], of_call: dict[str, Any], length: int
) -> None:
    config = {"generation_config": GenerationConfig(**of_config)} if of_config else {}
    assert length_of(make_model(**of_model), **config, **of_call) == length


def test_padding_counts_for_max_length() -> None:
    """As in the reference: columns are counted, so a short row gets no more new tokens than a long one."""
    model = FakeModel()
    assert generate(model, **pad_left(ROWS, width=7), max_length=9).shape == (3, 9)


def test_model_defaults_can_be_left_out() -> None:
    model = make_model(max_length=9)
    assert length_of(model, use_model_defaults=False) == 3 + 20
    assert length_of(model, use_model_defaults=True) == 9


# --- time ---------------------------------------------------------------------------------------------------


def test_time_ends_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # a second passes whenever somebody looks
    monkeypatch.setattr("unspool.stopping.time.time.time", lambda: float(next(clock)))
    model = FakeModel()
    output = generate(model, **pad_left(ROWS), max_time=3, max_new_tokens=50, return_dict_in_generate=True)
    assert output.sequences[:, 5:].tolist() == [decode_slowly(model, row, 4) for row in ROWS]
    assert reasons(model, **pad_left(ROWS), max_time=3, max_new_tokens=50) == {0: "time", 1: "time", 2: "time"}


def test_the_clock_starts_with_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("unspool.stopping.time.time.time", lambda: now[0])
    steps = stream(FakeModel(), [[1, 2]], max_time=5, max_new_tokens=4)
    now[0] = 100.0
    assert len(list(steps)) == 4


def test_no_time_is_still_one_token() -> None:
    assert length_of(FakeModel(), max_time=0.0) == 4


# --- the reasons --------------------------------------------------------------------------------------------


def test_what_the_text_says_comes_before_what_a_limit_says() -> None:
    model = FakeModel()
    new = [decode_slowly(model, row, 6) for row in ROWS]
    eos = new[0][5]
    found = reasons(model, **pad_left(ROWS), max_new_tokens=6, eos_token_id=eos)
    assert found == {row: "eos" if eos in tokens else "length" for row, tokens in enumerate(new)}
    everything = [lambda ids, scores: torch.ones(3, dtype=torch.bool)]
    assert set(reasons(model, **pad_left(ROWS), max_new_tokens=1, stopping_criteria=everything).values()) == {
        "criteria"
    }


# --- criteria of the caller's own ---------------------------------------------------------------------------


class GenerateSqlStoppingCriteria(StoppingCriteria):
    """As users write them: looks at the first row, answers once for all, and is passed without a list."""

    def __init__(self, pair: tuple[int, int]) -> None:
        self.pair = pair

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return len(input_ids[0]) > 1 and input_ids[0][-1] == self.pair[1] and input_ids[0][-2] == self.pair[0]

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        yield self


def test_one_answer_stops_all_rows() -> None:
    model = FakeModel()
    new = [decode_slowly(model, row, 8) for row in ROWS]
    criterion = GenerateSqlStoppingCriteria((new[0][3], new[0][4]))
    assert (new[0][3], new[0][4]) not in list(itertools.pairwise(new[0][:4]))
    for given in (criterion, [criterion], StoppingCriteriaList([criterion])):
        found = generate(model, **pad_left(ROWS), max_new_tokens=8, stopping_criteria=given)
        assert found[:, 5:].tolist() == [tokens[:5] for tokens in new]


def ends_in(*ends: int) -> Any:
    return lambda ids, scores, **_: torch.isin(ids[:, -1], torch.tensor(ends))


@pytest.mark.parametrize("form", ["tensor", "list", "column"])
def test_an_answer_a_row_stops_these_rows(form: str) -> None:
    model = FakeModel()
    new = [decode_slowly(model, row, 8) for row in ROWS]
    ends = (new[0][2], new[1][4])

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        flags = torch.isin(ids[:, -1], torch.tensor(ends))
        return {"tensor": flags, "list": flags.tolist(), "column": flags[:, None]}[form]

    found = generate(model, **pad_left(ROWS), max_new_tokens=8, pad_token_id=0, stopping_criteria=[criterion])
    expected = [decode_slowly(model, row, 8, ends) for row in ROWS]
    longest = max(map(len, expected))
    assert found[:, 5:].tolist() == [tokens + [0] * (longest - len(tokens)) for tokens in expected]


def test_criteria_see_all_rows_left_padded_at_every_step() -> None:
    model = FakeModel()
    new = [decode_slowly(model, row, 6) for row in ROWS]
    seen: list[torch.Tensor] = []
    told: list[Any] = []

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        seen.append(ids.clone())
        told.append(scores)
        return ends_in(new[0][1])(ids, scores)

    settings = {"max_new_tokens": 6, "pad_token_id": 0, "stopping_criteria": [criterion]}
    output = generate(model, **pad_left(ROWS), **settings, return_dict_in_generate=True, output_scores=True)
    for step, ids in enumerate(seen):
        assert torch.equal(ids, output.sequences[:, : 6 + step])
    assert [len(scores) for scores in told] == list(range(1, len(seen) + 1))
    assert all(torch.equal(a, b) for a, b in zip(told[-1], output.scores, strict=True))
    told.clear(), seen.clear()
    generate(model, **pad_left(ROWS), **settings)
    assert told == [None] * len(seen)


def test_the_callers_list_is_not_changed() -> None:
    mine = StoppingCriteriaList([MaxLengthCriteria(7), EosTokenCriteria(3)])
    generate(FakeModel(), [[1, 2]], max_new_tokens=3, max_time=10, stopping_criteria=mine)
    assert [type(one) for one in mine] == [MaxLengthCriteria, EosTokenCriteria]


def test_a_criterion_of_ours_ends_rows_too() -> None:
    model = FakeModel()
    assert length_of(model, max_new_tokens=9, stopping_criteria=[MaxLengthCriteria(6)]) == 6
    eos = decode_slowly(model, [1, 2, 3], 4)[1]
    assert reasons(model, inputs=[[1, 2, 3]], stopping_criteria=EosTokenCriteria(eos)) == {0: "eos"}


@pytest.mark.parametrize("answer", [torch.tensor([True, False]), torch.tensor(0.5), "yes", None])
def test_an_answer_that_says_nothing_is_refused(answer: Any) -> None:
    with pytest.raises(InputError, match="stopping criterion answered"):
        generate(FakeModel(), **pad_left(ROWS), stopping_criteria=[lambda ids, scores: answer])


@pytest.mark.parametrize("criteria", [5, [5], [None]])
def test_what_is_no_criterion_is_refused_before_the_first_pass(criteria: Any) -> None:
    model = FakeModel()
    with pytest.raises(SettingError, match="stopping_criteria"):
        generate(model, [[1, 2]], stopping_criteria=criteria)
    assert model.num_passes == 0


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(SettingError, match="pass the model's `tokenizer` too"):
        generate(FakeModel(), [[1, 2]], stop_strings="x")


@pytest.mark.parametrize("more", [{}, {"num_beam_groups": 2, "diversity_penalty": 0.5}, {"force_words_ids": [[5]]}])
def test_a_trace_and_a_stream_of_beams_say_that_a_forced_end_is_the_limits(more: dict[str, Any]) -> None:
    asked = {"num_beams": 4, "max_new_tokens": 4, "min_new_tokens": 3, "eos_token_id": 7, "forced_eos_token_id": 7}
    asked |= {"pad_token_id": 0, **more}
    given = [[1, 2, 3], [4, 5, 6]]
    assert reasons(FakeModel(), inputs=given, **asked) == dict.fromkeys(range(2), "length")
    traced = generate(FakeModel(), given, **asked, return_dict_in_generate=True, return_beam_trace=True)
    found = traced.beam_trace
    assert {one.reason for one in found.returned} == {"length"}
    ended = {one.reason for step in found.steps for one in step.candidates if one.token == 7 and step.step == 4}
    assert ended == {"length"}
