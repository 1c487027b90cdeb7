"""With several end tokens, every beam method returns the sequence that has the score."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unspool
from tests.fakes import FakeModel

VOCAB, PAD = 17, 0
ENDS = [3, 5, 6, 9, 11]
PROMPTS = [[7, 2, 13], [4], [8, 16, 1, 12]]
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"num_beams": 4},
    # A penalty that decides between equals alone: scores are those of the model.
    "diverse": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1e-6},
    "groups of one": {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 1e-6},
    "constrained": {"num_beams": 4, "force_words_ids": [[2]]},
}


class Stop(unspool.StoppingCriteria):
    """Ends every row after so many columns."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.width)


def weigh(model: FakeModel, prompt: list[int], tokens: list[int]) -> float:
    """The log-probability of a continuation, token by token, by definition."""
    total = 0.0
    for place, token in enumerate(tokens):
        total += float(model.score([*prompt, *tokens[:place]]).log_softmax(-1)[token])
    return total


def cut(tokens: list[int]) -> list[int]:
    """A returned row without what fills it up behind its end."""
    ends = [place for place, token in enumerate(tokens) if token in ENDS]
    if ends:
        return tokens[: ends[0] + 1]
    while tokens and tokens[-1] == PAD:
        tokens = tokens[:-1]
    return tokens


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "more", [{}, {"length_penalty": 0.0, "early_stopping": True}, {"eos_token_id": ENDS[::-1]}], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_sequences_have_the_scores_returned_with_them(method: str, more: dict[str, Any], seed: int) -> None:
    model = FakeModel(VOCAB, seed=seed)
    width = max(map(len, PROMPTS))
    asked = {"max_new_tokens": 7, "num_return_sequences": 4, "eos_token_id": ENDS, "pad_token_id": PAD}
    asked |= {**METHODS[method], **more}
    ids = torch.tensor([[PAD] * (width - len(one)) + one for one in PROMPTS])
    found = unspool.generate(
        model, ids, attention_mask=ids.ne(PAD), return_dict_in_generate=True, output_scores=True, **asked
    )
    for row, sequence in enumerate(found.sequences.tolist()):
        tokens, prompt = cut(sequence[width:]), PROMPTS[row // 4]
        score = weigh(model, prompt, tokens) / len(tokens) ** asked.get("length_penalty", 1.0)
        assert score == pytest.approx(float(found.sequences_scores[row]), abs=1e-4)
    streamed: list[list[int]] = [[] for _ in found.sequences]
    for emitted in unspool.stream(model, ids, attention_mask=ids.ne(PAD), **asked):
        for row, tokens in emitted.tokens.items():
            streamed[row] += tokens
        for row, reason in emitted.finished.items():
            assert (reason == "eos") == (streamed[row][-1] in ENDS)
    assert streamed == [cut(one[width:]) for one in found.sequences.tolist()]


@pytest.mark.parametrize("method", METHODS)
def test_no_end_token_is_put_behind_what_a_stop_ended(method: str) -> None:
    asked = {**METHODS[method], "eos_token_id": ENDS, "num_return_sequences": 4, "max_new_tokens": 9}
    found = unspool.generate(
        FakeModel(VOCAB),
        [[7, 2, 13]],
        stopping_criteria=[Stop(6)],
        pad_token_id=PAD,
        bad_words_ids=[[one] for one in ENDS],
        **asked,
    )
    assert found.shape == (4, 6) and not set(found[:, 3:].flatten().tolist()) & set(ENDS)
