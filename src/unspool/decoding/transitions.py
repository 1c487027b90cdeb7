"""The scores of the tokens that were chosen, out of a generation's per-step scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unspool.errors import InputError


def compute_transition_scores(
    sequences: torch.Tensor,
    scores: Sequence[torch.Tensor],
    beam_indices: torch.Tensor | None = None,
    normalize_logits: bool = False,
) -> torch.Tensor:
    """The score of every new token: (rows, new); 0 after a sequence's end.

    `sequences`, `scores` and, for beam methods, `beam_indices` are those of an output object. With
    `normalize_logits` they are log-probabilities, whatever the scores were.
    """
    if not scores:
        raise InputError("there are no scores: generate with return_dict_in_generate=True and output_scores=True")
    steps = torch.stack(tuple(scores))  # (steps, rows or beams, vocab)
    if normalize_logits:
        steps = steps.log_softmax(dim=-1)
    if beam_indices is None:
        num_rows = steps.shape[1]
        if sequences.shape[0] != num_rows:
            raise InputError(
                f"{sequences.shape[0]} sequences and scores of {num_rows} rows: pass the output's beam_indices too"
            )
        origins = torch.arange(num_rows, device=steps.device)[:, None].expand(num_rows, steps.shape[0])
    else:
        origins = beam_indices.to(steps.device)
    is_over = origins < 0
    num_new = int((~is_over).sum(dim=1).max())
    origins, is_over = origins[:, :num_new].clamp(min=0), is_over[:, :num_new]
    tokens = sequences[:, sequences.shape[1] - num_new :].to(steps.device)
    place = torch.arange(num_new, device=steps.device)
    chosen = steps[place, origins, tokens]  # (rows, new)
    return chosen.masked_fill(is_over, 0.0)
