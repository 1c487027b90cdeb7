"""The one verifier: which token comes at a position, given what a drafter guessed there.

Leviathan et al. (2023), arXiv 2211.17192: a guess drawn from q is accepted with probability min(1, p / q), and what
comes in a refused one's place is drawn from the positive part of p - q; together that is a draw from p. A guess that
was the only choice (q is 1 there) needs no rule of its own: drawing from p as ever and accepting the guess where it is
what was drawn is the same, and gives the very tokens that decoding without a drafter gives. Greedy search is the case
in which p, too, has one choice.
"""

from __future__ import annotations

import torch

from unspool.decoding.select import draw


def choose_against(
    scores: torch.Tensor,  # (rows, vocab): the model's, processed
    guesses: torch.Tensor,  # (rows,): the drafted tokens
    drafted: torch.Tensor,  # (rows, vocab): the probabilities they were drawn from; zeros if there is no guess
    uniforms: torch.Tensor,  # (rows,): for what comes in a refused guess's place
    acceptance: torch.Tensor,  # (rows,): for accepting
) -> torch.Tensor:
    """The guess where it is accepted, and elsewhere a draw from what the model likes more than the drafter does."""
    target = torch.softmax(scores, dim=-1, dtype=torch.float64)
    drafted = drafted.to(torch.float64)
    p, q = (each.gather(-1, guesses[:, None]).squeeze(-1) for each in (target, drafted))
    is_accepted = (q > 0) & (acceptance * q < p)
    rest = (target - drafted).clamp_(min=0)
    # If both agree to the last digit nothing remains, and nothing is refused but by rounding.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
    return torch.where(is_accepted, guesses, draw(rest.log(), uniforms))
