from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.beams.toy_search import draw_case, run_search
from tests.constraints.test_constraints import AnyOrder

import unspool
from unspool.beams import ConstrainedBeamSearchScorer
from unspool.constraints import ConstraintListState, DisjunctiveConstraint, PhrasalConstraint
from unspool.errors import InputError, SettingError, UnsupportedError

BATCH, BEAMS, LENGTH, VOCAB, EOS, PAD = 3, 4, 10, 99, 100, 0
WORDS = [[11, 12], [[21, 22], [31, 32]]]


def make_scorer(**changes: Any) -> ConstrainedBeamSearchScorer:
    constraints = [PhrasalConstraint([11, 12]), DisjunctiveConstraint([[21, 22], [31, 32]])]
    defaults = {"length_penalty": 2.0, "do_early_stopping": True, "num_beam_hyps_to_keep": 2}
    return ConstrainedBeamSearchScorer(BATCH, BEAMS, constraints, "cpu", **{**defaults, **changes})


@pytest.fixture(params=range(3))
def step(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    """One step's inputs; every sequence has fulfilled the constraints."""
    draw = torch.Generator().manual_seed(request.param)
    shape = (BATCH, 2 * BEAMS)
    input_ids = torch.randint(VOCAB, (BATCH * BEAMS, LENGTH), generator=draw)
    input_ids[:, :4] = torch.tensor([11, 12, 31, 32])
    return {
        "input_ids": input_ids,
        "next_scores": (-torch.rand(shape, generator=draw)).sort(descending=True).values,
        "next_tokens": torch.randint(VOCAB, shape, generator=draw),
        "next_indices": torch.randint(BEAMS, shape, generator=draw),
        "scores_for_all_vocab": -torch.rand(BATCH * BEAMS, VOCAB, generator=draw),
    }


def test_with_the_constraints_fulfilled_it_is_plain_search(step: dict[str, torch.Tensor]) -> None:
    step["next_tokens"][:, 1] = EOS
    scorer = make_scorer()
    answer = scorer.process(**step, eos_token_id=EOS)
    kept = [0, 2, 3, 4]
    assert answer["next_beam_tokens"].tolist() == step["next_tokens"][:, kept].flatten().tolist()
    assert answer["next_beam_scores"].tolist() == step["next_scores"][:, kept].flatten().tolist()
    first = torch.arange(BATCH)[:, None] * BEAMS
    assert answer["next_beam_indices"].tolist() == (step["next_indices"] + first)[:, kept].flatten().tolist()
    for row, hypotheses in enumerate(scorer._beam_hyps):
        parent = row * BEAMS + int(step["next_indices"][row, 1])
        assert [one.tokens.tolist() for one in hypotheses.beams] == [step["input_ids"][parent].tolist()]


def test_ends(step: dict[str, torch.Tensor]) -> None:
    done = {**step, "next_tokens": step["next_tokens"].clone()}
    done["next_tokens"][:, :BEAMS] = EOS
    scorer = make_scorer()
    scorer.process(**done, eos_token_id=EOS)
    assert scorer.is_done
    with pytest.raises(InputError, match="pad_token_id"):
        scorer.process(**done, eos_token_id=EOS)
    assert scorer.process(**done, eos_token_id=EOS, pad_token_id=7)["next_beam_tokens"].tolist() == [7] * BATCH * BEAMS
    # Where the constraints are not fulfilled, an end ends nothing.
    done["input_ids"] = done["input_ids"].clone()
    done["input_ids"][:, 1] = 0
    scorer = make_scorer()
    scorer.process(**done, eos_token_id=EOS)
    assert not scorer.is_done and [len(one) for one in scorer._beam_hyps] == [0] * BATCH
    done["next_tokens"][0] = EOS
    with pytest.raises(InputError, match="beams must go on"):
        make_scorer().process(**done, eos_token_id=EOS)


def test_finalize(step: dict[str, torch.Tensor]) -> None:
    step["next_tokens"][0, 0], step["next_scores"][0, 0] = EOS, 0.0
    scorer = make_scorer(num_beam_hyps_to_keep=1, length_penalty=1.0, do_early_stopping=False)
    answer = scorer.process(**step, eos_token_id=EOS)
    parents, tokens, scores = (answer[f"next_beam_{name}"] for name in ("indices", "tokens", "scores"))
    input_ids = torch.cat([step["input_ids"][parents], tokens[:, None]], dim=-1)
    ends = {"pad_token_id": PAD, "eos_token_id": EOS, "max_length": LENGTH + 1}
    result = scorer.finalize(input_ids, scores, tokens, parents, **ends)
    assert result["sequences"].shape == (BATCH, LENGTH + 1) and result["sequence_scores"].shape == (BATCH,)
    assert result["sequences"][0, -1] == EOS and (result["sequences"][1:, -1] != EOS).all()
    assert all(map(scorer.check_completes_constraints, result["sequences"].tolist()))
    scorer = make_scorer(num_beam_hyps_to_keep=BEAMS, length_penalty=1.0, do_early_stopping=False)
    result = scorer.finalize(input_ids, scores, tokens, parents, **ends)
    assert result["sequences"].shape == (BATCH * BEAMS, LENGTH + 1)


def test_beams_are_shared_out_between_the_banks() -> None:
    """Worked out by hand: one row, two beams, the phrase 3, 4."""
    scorer = ConstrainedBeamSearchScorer(1, 2, [PhrasalConstraint([3, 4])], "cpu")
    vocab_scores = torch.tensor([[-1.0, -2.0, -3.0, -9.0, -4.0], [-5.0, -6.0, -7.0, -8.0, -9.0]])
    likeliest = (torch.tensor([-1.0, -2.0]), torch.tensor([0, 1]), torch.tensor([0, 0]))
    # Neither beam has begun: 3 is put forward for both, and the better of the two goes into bank 1.
    scores, tokens, beams = scorer.step_sentence_constraint(0, torch.tensor([[0, 1], [1, 0]]), vocab_scores, *likeliest)
    assert (scores.tolist(), tokens.tolist(), beams.tolist()) == ([-8.0, -1.0], [3, 0], [1, 0])
    # The second has begun: its 4 completes (bank 2), the first's 3 begins (bank 1), nothing of bank 0 is left over.
    scores, tokens, beams = scorer.step_sentence_constraint(0, torch.tensor([[0, 1], [1, 3]]), vocab_scores, *likeliest)
    assert (scores.tolist(), tokens.tolist(), beams.tolist()) == ([-9.0, -9.0], [4, 3], [1, 0])


def test_all_alternatives_that_go_on_are_steps() -> None:
    """The reference counts the first only, as its copies share a list."""
    scorer = ConstrainedBeamSearchScorer(1, 2, [DisjunctiveConstraint([[1, 2], [1, 3]])], "cpu")
    vocab_scores = torch.tensor([[-9.0, -9.0, -7.0, -5.0], [-9.0, -9.0, -9.0, -9.0]])
    scores, tokens, beams = scorer.step_sentence_constraint(
        0,
        torch.tensor([[1], [0]]),
        vocab_scores,
        torch.tensor([-1.0, -2.0]),
        torch.tensor([0, 0]),
        torch.tensor([0, 1]),
    )
    # Complete: 3 (-5), then 2 (-7). Begun: 1 after 0. The best of every bank: 3, 1.
    assert (scores.tolist(), tokens.tolist(), beams.tolist()) == ([-5.0, -9.0], [3, 1], [0, 1])


def test_push_progress_puts_complete_beams_forward() -> None:
    scorer = ConstrainedBeamSearchScorer(2, 2, [PhrasalConstraint([3])], "cpu")
    input_ids = torch.tensor([[0], [0], [3], [0]])
    vocab_scores = torch.tensor([[-1.0, -2.0, -3.0, -4.0]] * 4)
    likeliest = (torch.tensor([-0.5, -0.6]), torch.tensor([1, 2]), torch.tensor([3, 3]))
    plain = scorer.step_sentence_constraint(1, input_ids, vocab_scores, *likeliest)
    assert [one.tolist() for one in plain[1:]] == [[3, 1], [3, 3]]
    pushed = scorer.step_sentence_constraint(1, input_ids, vocab_scores, *likeliest, push_progress=True)
    assert [one.tolist() for one in pushed[1:]] == [[0, 1], [2, 3]]  # beam 2 goes on with its likeliest token


def test_states() -> None:
    scorer = make_scorer()
    states = scorer.make_constraint_states(3)
    assert len({id(state) for state in states}) == 3 and all(isinstance(state, ConstraintListState) for state in states)
    states[0].add(11)
    assert [state.get_bank() for state in states] == [1, 0, 0]
    assert scorer.check_completes_constraints([0, 31, 32, 5, 11, 12])
    assert not scorer.check_completes_constraints([11, 12, 31])


@settings(max_examples=30)
@given(st.integers(0, 10**6).map(lambda number: 3 * number + 2))
def test_remembering_the_progress_changes_nothing(seed: int) -> None:
    case = draw_case(seed)
    assert case["words"]

    class Forgetful(ConstrainedBeamSearchScorer):
        def process(self, *args: Any, **kwargs: Any) -> Any:
            self._progress = {}
            return super().process(*args, **kwargs)

    class Library:
        PhrasalConstraint, DisjunctiveConstraint = PhrasalConstraint, DisjunctiveConstraint
        ConstrainedBeamSearchScorer = Forgetful

    traces: list[list[Any]] = [[], []]
    results = [run_search(case, library, trace) for library, trace in zip((unspool, Library), traces, strict=True)]
    assert results[0] == results[1] and traces[0] == traces[1]


def test_the_progress_of_the_last_step_is_not_read_again() -> None:
    read: list[int] = []

    class Watched(PhrasalConstraint):
        def does_advance(self, token_id: int) -> bool:
            read.append(token_id)
            return super().does_advance(token_id)

    scorer = ConstrainedBeamSearchScorer(1, 2, [Watched([3, 4, 5])], "cpu")
    input_ids, scores = torch.arange(200)[None].repeat(2, 1) + 6, torch.tensor([0.0, -1e9])
    for number in range(4):
        read.clear()
        totals = scores[:, None] - torch.arange(1.0, 9.0)
        best, places = totals.view(1, -1).topk(4)
        answer = scorer.process(input_ids, best, places % 8, places // 8, totals)
        scores, parents = answer["next_beam_scores"], answer["next_beam_indices"]
        input_ids = torch.cat([input_ids[parents], answer["next_beam_tokens"][:, None]], dim=1)
        assert len(read) > 200 if number == 0 else len(read) < 20
    assert scorer.check_completes_constraints(input_ids[0].tolist())


def test_a_constraint_that_a_user_wrote() -> None:
    case = {**draw_case(2), "vocabulary": 12, "prompt_length": 1, "max_length": 8, "steps": 7, "eos_token_id": 1}
    case |= {"num_beams": 4, "keep": 1}

    def want_all(_word: list[int]) -> AnyOrder:
        return AnyOrder([3, 5, 9])

    library = SimpleNamespace(
        PhrasalConstraint=want_all,
        DisjunctiveConstraint=want_all,
        ConstrainedBeamSearchScorer=ConstrainedBeamSearchScorer,
    )
    for sequence in run_search(case, library)["sequences"]:
        assert {3, 5, 9} <= set(sequence)


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_what_was_asked_for_is_returned_where_it_was_found(number: int) -> None:
    draw = random.Random(number)
    phrases = [[draw.randrange(6, 12) for _ in range(draw.randint(1, 3))] for _ in range(2)]
    written = sum(map(len, phrases)) + 2
    case = {**draw_case(3 * number + 2), "vocabulary": 12, "words": phrases, "prompt_length": 1, "eos_token_id": [1, 2]}
    case |= {"max_length": 1 + written, "steps": written, "num_beams": 6, "keep": 1}
    scorers = []

    def make(**given: Any) -> Any:
        scorers.append(ConstrainedBeamSearchScorer(**given))
        return scorers[0]

    library = SimpleNamespace(PhrasalConstraint=PhrasalConstraint, ConstrainedBeamSearchScorer=make)
    for row, sequence in enumerate(run_search(case, library)["sequences"]):
        shown = "," + ",".join(map(str, sequence)) + ","
        if scorers[0].check_completes_constraints(sequence):
            assert all("," + ",".join(map(str, phrase)) + "," in shown for phrase in phrases)
        else:
            found = [hypothesis.tokens.tolist() for hypothesis in scorers[0]._beam_hyps[row].beams]
            assert not any(map(scorers[0].check_completes_constraints, found))


def test_what_cannot_be() -> None:
    with pytest.raises(SettingError, match="constraints"):
        ConstrainedBeamSearchScorer(1, 2, [], "cpu")
    with pytest.raises(UnsupportedError, match="num_beam_groups"):
        make_scorer(num_beam_groups=2)
    with pytest.raises(SettingError, match="num_beam_groups"):
        make_scorer(num_beam_groups=3)
    scorer = ConstrainedBeamSearchScorer(1, 2, [PhrasalConstraint([9])], "cpu")
    candidates = [torch.tensor([values]) for values in ([-1.0, -2.0, -3.0, -4.0], [0, 1, 2, 3], [0, 0, 0, 0])]
    with pytest.raises(SettingError, match=r"\[9\]"):
        scorer.process(torch.tensor([[1], [1]]), *candidates, torch.zeros(2, 9))
