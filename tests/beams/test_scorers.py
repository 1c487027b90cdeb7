from __future__ import annotations

from typing import Any

import pytest
import torch

from unspool.beams import BeamHypotheses, BeamScorer, BeamSearchScorer
from unspool.errors import InputError, NoTokenLeftError, SettingError

BATCH, BEAMS, LENGTH, VOCAB, EOS, PAD = 3, 4, 10, 99, 100, 0


@pytest.fixture(params=range(3))
def step(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    """One step's inputs, the candidates in order."""
    draw = torch.Generator().manual_seed(request.param)
    shape = (BATCH, 2 * BEAMS)
    return {
        "input_ids": torch.randint(VOCAB, (BATCH * BEAMS, LENGTH), generator=draw),
        "next_scores": (-torch.rand(shape, generator=draw)).sort(descending=True).values,
        "next_tokens": torch.randint(VOCAB, shape, generator=draw),
        "next_indices": torch.randint(BEAMS, shape, generator=draw),
    }


def make_scorer(**settings: Any) -> BeamSearchScorer:
    defaults = {"length_penalty": 2.0, "do_early_stopping": True, "num_beam_hyps_to_keep": 2}
    return BeamSearchScorer(BATCH, BEAMS, "cpu", **{**defaults, **settings})


def test_every_row_has_its_hypotheses() -> None:
    scorer = make_scorer()
    assert isinstance(scorer, BeamScorer)
    assert all(isinstance(hypotheses, BeamHypotheses) for hypotheses in scorer._beam_hyps)
    assert [hypotheses.num_beams for hypotheses in scorer._beam_hyps] == [BEAMS] * BATCH
    assert (scorer._done.tolist(), scorer.is_done, scorer.group_size) == ([False] * BATCH, False, BEAMS)
    groups = make_scorer(num_beam_groups=2)
    assert ([one.num_beams for one in groups._beam_hyps], groups.group_size) == ([2] * 6, 2)


def test_too_many_ends(step: dict[str, torch.Tensor]) -> None:
    step["next_tokens"][0] = EOS
    with pytest.raises(InputError, match="4 beams must go on, but only 0"):
        make_scorer().process(**step, eos_token_id=EOS)


def test_all_rows_can_be_done_at_once(step: dict[str, torch.Tensor]) -> None:
    step["next_tokens"][:, :BEAMS] = EOS
    scorer = make_scorer()
    scorer.process(**step, eos_token_id=EOS)
    assert scorer.is_done and scorer._done.tolist() == [True] * BATCH
    with pytest.raises(InputError, match="pad_token_id"):
        scorer.process(**step, eos_token_id=EOS)
    padded = scorer.process(**step, eos_token_id=EOS, pad_token_id=7)
    assert padded["next_beam_tokens"].tolist() == [7] * BATCH * BEAMS
    assert padded["next_beam_scores"].tolist() == [0.0] * BATCH * BEAMS
    assert padded["next_beam_indices"].tolist() == [0] * BATCH * BEAMS


@pytest.mark.parametrize("eos", [EOS, [EOS], [55555, EOS], torch.tensor([EOS]), torch.tensor(EOS)])
def test_an_end_is_finished_and_the_rest_goes_on(step: dict[str, torch.Tensor], eos: Any) -> None:
    step["next_tokens"][:, 1] = EOS
    step["next_tokens"][:, BEAMS + 1 :] = EOS  # of the spare ones: none of the best
    ancestry = [tuple(range(beam, beam + LENGTH)) for beam in range(BATCH * BEAMS)]
    scorer = make_scorer()
    answer = scorer.process(**step, eos_token_id=eos, beam_indices=ancestry, decoder_prompt_len=3)

    def without_the_end(tensor: torch.Tensor) -> list[Any]:
        return torch.cat([tensor[:, :1], tensor[:, 2 : BEAMS + 1]], dim=1).flatten().tolist()

    first = torch.arange(BATCH)[:, None] * BEAMS
    assert answer["next_beam_tokens"].tolist() == without_the_end(step["next_tokens"])
    assert answer["next_beam_scores"].tolist() == without_the_end(step["next_scores"])
    assert answer["next_beam_indices"].tolist() == without_the_end(step["next_indices"] + first)
    assert answer["next_beam_scores"].dtype == torch.float32
    assert answer["next_beam_tokens"].dtype == answer["next_beam_indices"].dtype == torch.int64
    assert not scorer.is_done
    for row, hypotheses in enumerate(scorer._beam_hyps):
        parent = row * BEAMS + int(step["next_indices"][row, 1])
        ((score, tokens, beam_indices),) = hypotheses.beams
        assert tokens.tolist() == step["input_ids"][parent].tolist()
        assert beam_indices == (*range(parent, parent + LENGTH), parent)
        assert score == pytest.approx(float(step["next_scores"][row, 1]) / (LENGTH + 1 - 3) ** 2)


def test_the_end_token_is_put_behind_what_it_ended(step: dict[str, torch.Tensor]) -> None:
    step["next_tokens"][0, 0] = EOS
    step["next_scores"][0, 0] = 0.0
    scorer = make_scorer(num_beam_hyps_to_keep=1, length_penalty=1.0, do_early_stopping=False)
    answer = scorer.process(**step, eos_token_id=EOS)
    parents, tokens, scores = (answer[f"next_beam_{name}"] for name in ("indices", "tokens", "scores"))
    input_ids = torch.cat([step["input_ids"][parents], tokens[:, None]], dim=-1)
    settings = {"pad_token_id": PAD, "eos_token_id": EOS, "max_length": LENGTH + 1}
    result = scorer.finalize(input_ids, scores, tokens, parents, **settings)
    assert result["sequences"].shape == (BATCH, LENGTH + 1)
    assert result["sequences"][0].tolist() == [*step["input_ids"][step["next_indices"][0, 0]].tolist(), EOS]
    assert (result["sequences"][1:, -1] < VOCAB).all()
    assert result["sequence_scores"].tolist()[0] == 0.0 and (result["sequence_scores"] <= 0).all()
    assert result["beam_indices"] is None
    scorer.num_beam_hyps_to_keep = BEAMS
    result = scorer.finalize(input_ids, scores, tokens, parents, **settings)
    assert result["sequences"].shape == (BATCH * BEAMS, LENGTH + 1)
    assert result["sequence_scores"].shape == (BATCH * BEAMS,)
    by_row = result["sequence_scores"].view(BATCH, BEAMS)
    assert (by_row[:, :-1] >= by_row[:, 1:]).all()


def test_shorter_sequences_are_filled_up() -> None:
    scorer = BeamSearchScorer(1, 2, "cpu", num_beam_hyps_to_keep=2)
    candidates = [torch.tensor([values]) for values in ([-1.0, -2.0, -3.0, -4.0], [9, 3, 4, 9], [0, 1, 0, 0])]
    input_ids = torch.tensor([[5], [6]])
    answer = scorer.process(input_ids, *candidates, eos_token_id=[9, 8], beam_indices=[(), ()], decoder_prompt_len=1)
    assert answer["next_beam_tokens"].tolist() == [3, 4] and answer["next_beam_indices"].tolist() == [1, 0]
    input_ids = torch.tensor([[6, 3], [5, 4]])
    settings = {"eos_token_id": [9, 8], "decoder_prompt_len": 1, "beam_indices": [(1,), (0,)]}
    with pytest.raises(InputError, match="pad_token_id"):
        scorer.finalize(input_ids, torch.tensor([-2.0, -3.0]), *candidates[1:], max_length=None, **settings)
    result = scorer.finalize(
        input_ids, torch.tensor([-2.0, -3.0]), *candidates[1:], max_length=None, pad_token_id=0, **settings
    )
    assert result["sequences"].tolist() == [[5, 9, 0], [6, 3, 9]]
    assert result["sequence_scores"].tolist() == [-1.0, -2.0]
    assert result["beam_indices"].tolist() == [[0, -1, -1], [1, -1, -1]]


def test_without_an_end_token_nothing_is_put_behind() -> None:
    scorer = BeamSearchScorer(1, 2, "cpu")
    zeros = torch.zeros(1, 4, dtype=torch.long)
    result = scorer.finalize(torch.tensor([[1, 2], [3, 4]]), torch.tensor([-2.0, -1.0]), zeros, zeros, max_length=None)
    assert result["sequences"].tolist() == [[3, 4]]
    with pytest.raises(InputError, match="max_length"):
        scorer.finalize(torch.tensor([[1, 2], [3, 4]]), torch.tensor([-2.0, -1.0]), zeros, zeros, max_length=1)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_beams": 1}, "num_beams"),
        ({"num_beams": 2.0}, "num_beams"),
        ({"num_beam_groups": 3}, "num_beam_groups"),
        ({"num_beam_groups": 8}, "num_beam_groups"),
        ({"num_beam_groups": 0}, "num_beam_groups"),
        ({"num_beam_groups": -2}, "num_beam_groups"),
        ({"num_beam_hyps_to_keep": 5}, "num_beam_hyps_to_keep"),
        ({"num_beam_hyps_to_keep": 0}, "num_beam_hyps_to_keep"),
        ({"batch_size": 0}, "batch_size"),
        ({"do_early_stopping": "never"}, "max_length"),
        ({"do_early_stopping": "sometimes"}, "early_stopping"),
        ({"length_penalty": float("inf")}, "length_penalty"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingError, match=name):
        BeamSearchScorer(**{"batch_size": 2, "num_beams": 4, "device": "cpu", **settings})


def test_inputs_of_the_wrong_size(step: dict[str, torch.Tensor]) -> None:
    with pytest.raises(InputError, match="input_ids"):
        make_scorer().process(**{**step, "input_ids": step["input_ids"][1:]})
    with pytest.raises(InputError, match="input_ids"):
        make_scorer(num_beam_groups=2).process(**step)
    with pytest.raises(InputError, match="next_scores"):
        make_scorer().process(**{**step, "next_scores": step["next_scores"][:, 1:]})
    with pytest.raises(InputError, match="next_indices"):
        make_scorer().process(**{**step, "next_indices": step["next_indices"] + BEAMS})
    with pytest.raises(InputError, match="group_index"):
        make_scorer().process(**step, group_index=1)
    with pytest.raises(NoTokenLeftError, match="NaN"):
        step["next_tokens"][0, 0], step["next_scores"][0, 0] = EOS, float("nan")
        make_scorer().process(**step, eos_token_id=EOS)


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BeamScorer()
