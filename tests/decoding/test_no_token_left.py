"""Scores that leave nothing to choose: every strategy says so, and who left them so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unspool
from tests.fakes import FakeLayers
from unspool import generate
from unspool.errors import NoTokenLeftError

PROMPT = [1, 2, 3]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 1},
    "sampling from all": {"do_sample": True, "seed": 1, "top_k": 0},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "drawn beams": {"num_beams": 3, "do_sample": True, "seed": 1},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constraints": {"num_beams": 3, "constraints": [unspool.PhrasalConstraint([4])]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "dola": {"dola_layers": "low"},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "guidance": {"guidance_scale": 1.5},
}
BEAMS = [name for name, settings in WAYS.items() if "num_beams" in settings]


def spoil(change: Callable[[torch.Tensor], Any], *, end: int | None = None) -> Any:
    """A processor that changes the scores of the fourth new token; with `end` the first beam ends two steps before."""

    def spoiler(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        place = input_ids.shape[1] - len(PROMPT)
        if place == 3:
            change(scores)
        elif end is not None:
            scores[:, end] = -torch.inf
            scores[: place == 1, end] = 5.0
        return scores

    return spoiler


def write(name: str, change: Callable[[torch.Tensor], Any], *, end: int | None = None, **more: Any) -> torch.Tensor:
    told = {"max_new_tokens": 6, "logits_processor": [spoil(change, end=end)], **WAYS[name], **more}
    return generate(FakeLayers(), [PROMPT], eos_token_id=end, pad_token_id=0, **told)


@pytest.mark.parametrize("name", WAYS)
def test_nothing_is_left(name: str) -> None:
    with pytest.raises(NoTokenLeftError, match=r"row 0, at position 6: spoiler .* forbade all 23"):
        write(name, lambda scores: scores.fill_(-torch.inf))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("tokens", [slice(None), 5])
def test_what_is_no_number_is_no_token(name: str, tokens: Any) -> None:
    with pytest.raises(NoTokenLeftError, match=r"at position 6: spoiler made scores NaN"):
        write(name, lambda scores: scores[:, tokens].fill_(torch.nan))


@pytest.mark.parametrize("name", ["beams", "drawn beams", "constraints"])
def test_one_beam_is_enough_to_spoil_a_search(name: str) -> None:
    with pytest.raises(NoTokenLeftError, match=r"row 1, at position 6: spoiler made scores NaN"):
        write(name, lambda scores: scores[1].fill_(torch.nan))


@pytest.mark.parametrize("name", BEAMS)
def test_a_finished_text_hides_no_nan(name: str) -> None:
    with pytest.raises(NoTokenLeftError, match=r"at position 6: spoiler made scores NaN"):
        write(name, lambda scores: scores.fill_(torch.nan), end=7)


def test_a_finished_text_is_returned_where_nothing_is_left() -> None:
    written = write("beams", lambda scores: scores.fill_(-torch.inf), end=7)[:, len(PROMPT) :]
    assert written.shape == (3, 2) and set(written[:, 1].tolist()) == {7}


@pytest.mark.parametrize("name", WAYS)
def test_who_forbade_is_named_where_another_makes_nan_of_it(name: str) -> None:
    def take_logarithms(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.log_softmax(dim=-1)

    with pytest.raises(NoTokenLeftError, match=r"at position 6: spoiler .* forbade all 23"):
        processors = [spoil(lambda scores: scores.fill_(-torch.inf)), take_logarithms]
        write(name, torch.Tensor.zero_, logits_processor=processors)


@pytest.mark.parametrize("name", ["beams", "drawn beams"])
def test_a_beam_without_a_token_drops_out_where_scores_are_normalised(name: str) -> None:
    def forbid(scores: torch.Tensor) -> None:
        scores[1] = -torch.inf

    assert torch.equal(write(name, forbid, renormalize_logits=True), write(name, forbid))
