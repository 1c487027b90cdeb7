"""Processors in the loop: what they see, when they run, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.fakes import make_lm
from tests.fakes import FakeModel, decode_slowly, pad_left
from unspool import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    generate,
)
from unspool.decoding.preparation import Hooks
from unspool.errors import SettingError

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]


class Look(LogitsProcessor):
    """Keeps what it is shown, and takes 100 from one token."""

    def __init__(self, forbidden: int = 22) -> None:
        self.forbidden = forbidden
        self.seen: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.clone())
        self.scores.append(scores.clone())
        changed = scores.clone()
        changed[:, self.forbidden] -= 100
        return changed


def test_a_processor_sees_all_rows_left_padded_at_every_step() -> None:
    model = FakeModel()
    look = Look()
    eos = [decode_slowly(model, ROWS[0], 3)[2]]
    found = generate(
        model, **pad_left(ROWS), max_new_tokens=7, eos_token_id=eos, pad_token_id=0, logits_processor=[look]
    )
    assert len(look.seen) == found.shape[1] - 5 > 3
    for step, ids in enumerate(look.seen):  # finished rows too, with the padding they get
        assert torch.equal(ids, found[:, : 5 + step])
    for step, scores in enumerate(look.scores):
        for row, ids in enumerate(ROWS):
            new = found[row, 5 : 5 + step].tolist()
            if not set(eos) & set(new):
                torch.testing.assert_close(scores[row], model.score(ids + new))


def test_a_processor_decides() -> None:
    model = FakeModel()
    first = decode_slowly(model, ROWS[0], 1)[0]
    found = generate(model, **pad_left(ROWS), max_new_tokens=8, logits_processor=Look(first))  # one, without a list
    assert not (found[:, 5:] == first).any()

    def without(scores: torch.Tensor, _: int) -> int:
        return int(scores.index_fill(0, torch.tensor([first]), -1e9).argmax())

    assert found[:, 5:].tolist() == [decode_slowly(model, row, 8, choose=without) for row in ROWS]


def test_processors_run_in_their_order_and_before_the_warpers() -> None:
    model = FakeModel()
    log: list[str] = []

    def make(name: str, factor: float, summand: float) -> Any:
        def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            log.append(name)
            return scores * factor + summand

        return process

    custom = LogitsProcessorList([make("first", 2.0, 0.0), make("second", 1.0, 3.0)])
    output = generate(
        model,
        **pad_left(ROWS),
        max_new_tokens=3,
        do_sample=True,
        seed=1,
        temperature=[0.5, 1.0, 2.0],
        top_k=6,
        top_p=0.8,
        logits_processor=custom,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert log == ["first", "second"] * 3
    warp = LogitsProcessorList([TemperatureLogitsWarper([0.5, 1.0, 2.0]), TopKLogitsWarper(6), TopPLogitsWarper(0.8)])
    for step in range(3):
        history = output.sequences[:, : 5 + step]
        for row, ids in enumerate(ROWS):
            expected = model.score(ids + output.sequences[row, 5 : 5 + step].tolist())
            torch.testing.assert_close(output.logits[step][row], expected)
        expected = warp(history, output.logits[step] * 2 + 3)
        torch.testing.assert_close(output.scores[step], expected)
        chosen = output.scores[step].gather(1, output.sequences[:, 5 + step, None])
        assert chosen.isfinite().all()
    assert custom[0:] == list(custom) and len(custom) == 2  # the caller's list is not added to


def test_greedy_search_runs_no_warper() -> None:
    model = FakeModel()
    model.generation_config = GenerationConfig(do_sample=False)
    model.generation_config.temperature = 0.5  # what a model's file suggests for sampling is no request
    output = generate(model, [[1, 2]], max_new_tokens=1, output_scores=True, return_dict_in_generate=True)
    torch.testing.assert_close(output.scores[0][0], model.score([1, 2]))


def test_a_processor_that_writes_into_its_scores_harms_nobody() -> None:
    """Many of those that users have do; the model's own logits and log-probabilities stay the model's own."""

    def careless(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, :20] = -torch.inf
        return scores

    model = FakeModel()
    output = generate(
        model,
        [[1, 2]],
        max_new_tokens=2,
        logits_processor=[careless],
        output_logits=True,
        output_scores=True,
        logprobs=2,
        return_dict_in_generate=True,
    )
    torch.testing.assert_close(output.logits[0][0], model.score([1, 2]))
    assert output.scores[0][0, :20].isneginf().all()
    assert output.sequences[0, 2] >= 20
    expected = torch.log_softmax(model.score([1, 2]), -1)
    told = output.logprobs[0][0]
    assert told.logprob == pytest.approx(float(expected[told.token_id]), abs=1e-5)
    assert told.top[0] == (int(expected.argmax()), pytest.approx(float(expected.max()), abs=1e-5))


def test_an_end_token_can_be_kept_off() -> None:
    model = FakeModel()
    eos = decode_slowly(model, ROWS[0], 3)[0]
    found = generate(model, [ROWS[0]], max_new_tokens=6, eos_token_id=eos, logits_processor=[Look(eos)])
    assert found.shape == (1, 9)


@pytest.mark.parametrize("given", [5, [5], [None]])
def test_what_is_no_processor_is_refused_before_the_first_pass(given: Any) -> None:
    model = FakeModel()
    with pytest.raises(SettingError, match="`logits_processor` holds a"):
        generate(model, [[1, 2]], logits_processor=given)
    assert model.num_passes == 0


def test_processors_of_our_own_are_not_foreign() -> None:
    """They write into nothing that they are given, so no copies are made for them."""

    class Foreign(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    own = TemperatureLogitsWarper(0.5)
    assert not Hooks().has_foreign_processors and not Hooks(processors=[own]).has_foreign_processors
    assert Hooks(processors=[own, Foreign()]).has_foreign_processors


@pytest.mark.parametrize(
    "way", [{}, {"repetition_penalty": 1.4}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str
)
def test_a_forced_first_token_is_that_of_a_row_whatever_stands_beside_it(way: dict[str, Any]) -> None:
    lm, rows = make_lm(), [[1, 2, 3, 4, 5, 6, 7, 8], [5], [9, 1, 2]]
    told = {"forced_bos_token_id": 13, "max_new_tokens": 4, "eos_token_id": None, **way}
    found = lm.generate(rows, **told).token_ids
    assert found[1][0] == 13
    assert found == [lm.generate(row, **told).token_ids[0] for row in rows]
