"""A prompt's tokens through experts in MXFP4: the kernels of a step's many tokens, some thousand tokens at a time."""

from __future__ import annotations

from typing import Any

import torch

from unspool.kernels.gpu.experts.many_fours import multiply_listed_fours
from unspool.kernels.gpu.experts.many_rows import MOST_PAIRS, Lists, add_shares, list_pairs
from unspool.kernels.gpu.experts.routing import Routes
from unspool.kernels.mx import MxWords


def feed_fours(
    up: MxWords,  # (experts * 2 * ffn, hidden)
    down: MxWords,  # (experts * hidden, ffn)
    x: torch.Tensor,  # (tokens, hidden)
    chosen: torch.Tensor,  # (tokens, chosen)
    shares: torch.Tensor,  # (tokens, chosen): weights of the experts' outputs
    *,
    num_experts: int,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    **gate: Any,  # activation, limit and gain
) -> torch.Tensor:
    """The experts' outputs, weighted and added up: (tokens, hidden)."""
    num_chosen, inner = chosen.shape[1], up.shape[0] // (2 * num_experts)
    made = torch.zeros_like(x)
    for first in range(0, x.shape[0], MOST_PAIRS // num_chosen):
        some = x[first : first + MOST_PAIRS // num_chosen].contiguous()
        tokens = some.shape[0]
        mine = slice(first, first + tokens)
        routes = Routes(some, chosen[mine].int().contiguous(), shares[mine].float().contiguous(), some, False, 1.0)
        lists = Lists.make(num_experts, tokens * num_chosen, x.device)
        lengths = torch.zeros(tokens, dtype=torch.int32, device=x.device)
        list_pairs(routes, lengths, lists)
        fed = x.new_empty(tokens * num_chosen, inner)
        multiply_listed_fours(
            up, some, lists, fed, share=num_chosen, num_tokens=tokens, bias=biases[0], is_gated=True, **gate
        )
        out = x.new_empty(tokens * num_chosen, x.shape[1])
        multiply_listed_fours(down, fed, lists, out, share=1, num_tokens=tokens, bias=biases[1])
        add_shares(out, routes, lengths, made[mine])
    return made
