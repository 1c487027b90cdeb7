"""The best hypotheses of a batch as one table."""

from __future__ import annotations

import torch

from unspool.beams.hypotheses import Hypothesis
from unspool.beams.result import assemble_result


def test_beams_may_be_more_than_tokens() -> None:
    """Groups count a step twice, and after embeddings alone a text has no prompt to make up for it."""
    rows = [
        [Hypothesis(-2.0, torch.tensor([], dtype=torch.int64), (0, 0))],
        [Hypothesis(-4.0, torch.tensor([22]), (2, 2, 2))],
    ]
    result = assemble_result(
        rows,
        1,
        like=torch.zeros(2, 1, dtype=torch.int64),
        scores_on="cpu",
        max_length=20,
        pad_token_id=0,
        eos_token_id=4,
    )
    assert result["sequences"].tolist() == [[4, 0], [22, 4]]
    assert result["beam_indices"].tolist() == [[0, 0, -1], [2, 2, 2]]
