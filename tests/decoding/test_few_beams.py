"""Beam searches with fewer sequences than asked for: processors leave one token, or all beams end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.cases import load_model
from unspool.errors import NoTokenLeftError

ROW = [56, 56, 37, 56]
ONLY = 54  # the one token that is left
FORBIDDEN: dict[str, Any] = {"suppress_tokens": [token for token in range(160) if token != ONLY]}
ONE_TOKEN: list[dict[str, Any]] = [FORBIDDEN, {**FORBIDDEN, "do_sample": True, "seed": 5}]


@pytest.mark.parametrize("settings", ONE_TOKEN, ids=["search", "sampling"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
def test_the_only_sequence_is_repeated(settings: dict[str, Any], penalty: float) -> None:
    lm = load_model("gemma2")
    told = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 4, "eos_token_id": None, **settings}
    outputs = {"return_dict_in_generate": True, "output_scores": True}
    result = lm.generate([ROW, ROW[:2]], **told, length_penalty=penalty, **outputs)
    assert result.token_ids == [[ONLY] * 4] * 6
    assert result.finish_reasons == ["length"] * 6
    assert result.output.beam_indices.shape == (6, 4)
    # What the reference's beams that do not exist have: -1e9, over the length raised to the penalty.
    scores = result.output.sequences_scores.view(2, 3)
    assert (scores[:, 0] > -1e4).all()
    assert (scores[:, 1:] + 1e9 / 4**penalty).abs().max() < 1e4 / 4**penalty


def test_streamed_copies_are_whole_too() -> None:
    lm = load_model("gemma2")
    told: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4, **ONE_TOKEN[0]}
    rows: list[list[int]] = [[], []]
    for piece in lm.stream([ROW], **told, eos_token_id=None):
        rows[piece.row] += piece.token_ids
    assert rows == lm.generate([ROW], **told, eos_token_id=None).token_ids == [[ONLY] * 4] * 2


def test_a_search_whose_only_beam_has_ended_is_over() -> None:
    lm = load_model("gemma2")
    told: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 9, **ONE_TOKEN[0]}
    result = lm.generate([ROW], **told, eos_token_id=ONLY)
    assert (result.token_ids, result.finish_reasons) == ([[ONLY]], ["eos"])


def test_a_search_without_any_sequence_is_an_error() -> None:
    lm = load_model("gemma2")
    everything = list(range(160))
    with pytest.raises(NoTokenLeftError):
        lm.generate([ROW], num_beams=2, max_new_tokens=3, suppress_tokens=everything)


@pytest.mark.parametrize("forbidden", [[56], [3, 56, 60], list(range(0, 160, 2))], ids=["one", "few", "many"])
@pytest.mark.parametrize("groups", [{}, {"num_beam_groups": 3, "diversity_penalty": 0.7}], ids=["plain", "diverse"])
def test_forbidden_tokens_are_what_processors_make_of_them(forbidden: list[int], groups: dict[str, Any]) -> None:
    """A search that ranks logits without the forbidden tokens ends as one whose steps are kept, which processes all."""
    lm = load_model("gemma2")
    told: dict[str, Any] = {
        "num_beams": 3,
        "num_return_sequences": 3,
        "max_new_tokens": 7,
        "min_new_tokens": 3,
        **groups,
    }
    told |= {"suppress_tokens": forbidden, "forced_eos_token_id": 5, "eos_token_id": 5, "return_dict_in_generate": True}
    ranked = lm.generate([ROW, ROW[:2]], **told).output
    processed = lm.generate([ROW, ROW[:2]], **told, output_scores=True).output
    assert torch.equal(ranked.sequences, processed.sequences)
    assert not set(forbidden) & set(ranked.sequences[:, len(ROW) :].flatten().tolist())
