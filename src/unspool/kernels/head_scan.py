"""The recurrence of Mamba-2 (Dao and Gu, 2024): one decay per head, so chunks of positions are matrix products.

A state (rows, state, inner) decays and is fed at every position; `inner` is heads times a head's size:
    h_t = 2^(s_t - s_(t-1)) h_(t-1) + x_t b_t        y_t = c_t h_t        s_t = s_(t-1) + dt_t a
`a`, one number per head, is given times log2(e). Heads are divided among groups, which have their own `b` and `c`.
Every exponent is a sum of decays, and so at most 0: nothing can overflow.
"""

from __future__ import annotations

import torch

CHUNK = 64  # positions whose products are made at once


def scan_heads(
    state: torch.Tensor,  # (rows, state, inner)
    dt: torch.Tensor,  # (rows, new, heads); 0 if a position must leave the state as it is
    a: torch.Tensor,  # (heads,)
    u: torch.Tensor,  # (rows, new, inner)
    b: torch.Tensor,  # (rows, new, groups, state)
    c: torch.Tensor | None,  # (rows, new, groups, state); None if only the state is wanted
    *,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in order: y (rows, new, inner), empty without `c`, and the state after the last."""
    rows, num_new, heads = dt.shape
    groups, width, size = b.shape[2], state.shape[1], u.shape[2] // heads
    each = heads // groups
    held = state.view(rows, width, groups, each, size)
    outputs = []
    for first in range(0, num_new, chunk):
        part = slice(first, min(first + chunk, num_new))
        fading = (dt[:, part] * a).cumsum(dim=1)  # (rows, part, heads)
        fading = fading.view(rows, -1, groups, each).permute(0, 2, 3, 1)  # (rows, groups, each, part)
        fed = (u[:, part].reshape(rows, -1, heads, size) * dt[:, part, :, None]).view(rows, -1, groups, each, size)
        fed = fed.permute(0, 2, 3, 1, 4)  # (rows, groups, each, part, size)
        keys = b[:, part].transpose(1, 2)  # (rows, groups, part, state)
        if c is not None:
            queries = c[:, part].transpose(1, 2)
            pairs = torch.matmul(queries, keys.transpose(-1, -2))[:, :, None]  # (rows, groups, 1, part, part)
            gaps = fading[..., :, None] - fading[..., None, :]
            future = torch.ones(gaps.shape[-2:], dtype=torch.bool, device=gaps.device).triu_(1)
            weights = torch.exp2(gaps.masked_fill(future, -torch.inf)) * pairs
            before = torch.einsum("rgps,rsgen->rgepn", queries, held) * torch.exp2(fading)[..., None]
            made = torch.matmul(weights, fed) + before  # (rows, groups, each, part, size)
            outputs.append(made.permute(0, 3, 1, 2, 4).reshape(rows, -1, heads * size))
        left = torch.exp2(fading[..., -1:] - fading)  # what is left of each position's input at the end
        fresh = torch.einsum("rgps,rgepn->rsgen", keys, fed * left[..., None])
        held = held * torch.exp2(fading[..., -1])[:, None, :, :, None] + fresh
    y = torch.cat(outputs, dim=1) if outputs else u.new_empty(0)
    return y, held.reshape(rows, width, heads * size)
