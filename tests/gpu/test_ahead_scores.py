"""Scores that are kept of steps that run ahead of the host: one row, and as many as it has tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import needs_gpu
from tests.gpu.test_captured_pairs import draw_sources, load

import unspool
from unspool.decoding.strategies.ahead import AheadTurns

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("ends", [False, True])
def test_scores_are_those_of_the_tokens(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    here, there, source = load("bart", "cpu"), load("bart", "cuda"), draw_sources("bart", 1, 9)
    told: dict[str, Any] = {"max_new_tokens": 12, "repetition_penalty": 3.0, "output_scores": True, "pad_token_id": 1}
    told |= {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    whole = unspool.generate(here, **source, **told)
    if ends:
        told["eos_token_id"] = int(whole.sequences[0, 6])
        whole = unspool.generate(here, **source, **told)
    turns, turn = [], AheadTurns.turn
    monkeypatch.setattr(AheadTurns, "turn", lambda self: (turns.append(1), turn(self))[1])
    found = unspool.generate(there, **{key: value.cuda() for key, value in source.items()}, **told)
    assert turns
    assert found.sequences.tolist() == whole.sequences.tolist()
    assert len(found.scores) == len(found.logits) == len(whole.scores) == whole.sequences.shape[1] - 1
    for one, two in zip((*found.scores, *found.logits), (*whole.scores, *whole.logits), strict=True):
        torch.testing.assert_close(one.cpu(), two, atol=1e-3, rtol=1e-3)
