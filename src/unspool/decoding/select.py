"""Choosing a token from scores."""

from __future__ import annotations

import torch

from unspool.kernels.draws import draw_rows, new_draws
from unspool.kernels.presence import runs_kernels, takes_kernels

NO_TOKEN = -1  # what is chosen where nothing can be
BELOW_ONE = 1 - 2.0**-52  # the largest number whose product with a total stays below it


def take_likeliest(scores: torch.Tensor) -> torch.Tensor:
    """The token with the highest score, one per row; the first of equals, NO_TOKEN if none is possible."""
    if takes_kernels(scores):
        from unspool.kernels.gpu.sampling.tokens import find_likeliest  # Triton is imported where a GPU is used

        return find_likeliest(scores)
    if scores.device.type == "cpu" and scores.dtype == torch.float32:
        # By one thread: torch's others would go on spinning beside the next pass, which takes half as long again then.
        tokens = torch.from_numpy(scores.detach().numpy().argmax(axis=-1))
        highest = scores.gather(-1, tokens[..., None]).squeeze(-1)
    else:
        highest, tokens = scores.max(dim=-1)
    return torch.where(highest > float("-inf"), tokens, NO_TOKEN)


def draw(scores: torch.Tensor, uniforms: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """The token at which the cumulated probability passes a uniform number, one per row.

    `tokens` are those that the scores belong to, rising, if they are not the vocabulary's. One number per row
    decides, nothing synchronises, and a token of probability zero is never drawn; NO_TOKEN stands where no token
    has a probability.
    """
    if tokens is None and scores.dtype == torch.float32 and runs_kernels(scores.device):
        from unspool.kernels.gpu.sampling.row_draw import draw_row  # Triton is imported where a GPU is used

        return draw_row(scores, uniforms)
    if tokens is None:
        drawn = draw_rows(scores, new_draws(len(scores)), uniforms)
        if drawn is not None:
            return drawn
    return draw_plainly(scores, uniforms, tokens)


def draw_plainly(scores: torch.Tensor, uniforms: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """`draw` operator by operator."""
    cumulated = torch.softmax(scores, dim=-1, dtype=torch.float64).cumsum(dim=-1)  # (rows, tokens)
    total = cumulated[:, -1:]
    places = torch.searchsorted(cumulated, uniforms[:, None].clamp(max=BELOW_ONE) * total, right=True)
    if tokens is not None:
        places = tokens.gather(-1, places.clamp(max=tokens.shape[-1] - 1))
    return torch.where(total > 0, places, NO_TOKEN).squeeze(-1)
