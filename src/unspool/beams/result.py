"""The best hypotheses of a batch, as one table."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any

import torch

from unspool.beams.hypotheses import Hypothesis
from unspool.beams.offers import Ids, read_ids
from unspool.errors import InputError


def assemble_result(
    rows: list[list[Hypothesis]],
    num_to_keep: int,
    *,
    end_tokens: Mapping[int, int | None] | None = None,
    like: torch.Tensor,
    scores_on: torch.device | str,
    max_length: int | None,
    pad_token_id: int | torch.Tensor | None,
    eos_token_id: Ids | None,
) -> UserDict[str, Any]:
    """The best of every row, the best first: `sequences`, `sequence_scores` and `beam_indices` (or None).

    A sequence that is shorter than the table is closed with the token that ended it, which `end_tokens` has by the
    identity of its hypothesis, or with the first end token if none did, and filled up with padding.
    """
    best = [hypothesis for row in rows for hypothesis in pick_best(row, num_to_keep)]
    lengths = [len(hypothesis.tokens) for hypothesis in best]
    end_ids = read_ids(eos_token_id)
    width = max(lengths) + bool(end_ids)
    if max_length is not None:
        if max_length < max(lengths):
            raise InputError(f"A hypothesis has {max(lengths)} tokens, and `max_length` is {max_length}. Raise it.")
        width = min(width, max_length)
    if pad_token_id is None and min(lengths) != max(lengths):
        raise InputError("The sequences differ in length, and no `pad_token_id` says how to fill them up. Pass one.")

    filler = 0 if pad_token_id is None else int(pad_token_id)
    sequences = like.new_full((len(best), width), filler)  # (batch * keep, width)
    for row, (hypothesis, length) in enumerate(zip(best, lengths, strict=True)):
        sequences[row, :length] = hypothesis.tokens
        if length < width and end_ids:
            own = (end_tokens or {}).get(id(hypothesis))
            sequences[row, length] = end_ids[0] if own is None else own
    return UserDict(
        {
            "sequences": sequences,
            "sequence_scores": torch.tensor([one.score for one in best], dtype=torch.float32, device=scores_on),
            "beam_indices": _tabulate_ancestry(best, like, width),
        }
    )


def pick_best(hypotheses: list[Hypothesis], count: int) -> list[Hypothesis]:
    """The best, the best first; of equals the last one found."""
    if len(hypotheses) < count:
        raise InputError(f"{count} sequences of a row are to be kept, and only {len(hypotheses)} were found.")
    by_score = sorted(hypotheses, key=lambda hypothesis: hypothesis.score)
    return by_score[: -count - 1 : -1]


def _tabulate_ancestry(best: list[Hypothesis], like: torch.Tensor, width: int) -> torch.Tensor | None:
    """The beams of every sequence, filled up with -1; None if they were not followed.

    Groups count a step of their sequences twice, as the reference's do, so a text without a prompt may be shorter.
    """
    ancestry = [[int(beam) for beam in one.beam_indices] for one in best if one.beam_indices is not None]
    if len(ancestry) < len(best):
        return None
    width = max(width, *map(len, ancestry))
    return torch.tensor(
        [beams + [-1] * (width - len(beams)) for beams in ancestry], dtype=like.dtype, device=like.device
    )  # (batch * keep, width)
