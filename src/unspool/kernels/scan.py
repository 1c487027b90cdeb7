"""The recurrence of selective state spaces (Gu and Dao, 2023), and the short convolution before it.

A state (rows, state, inner) decays and is fed at every position:
    h_t = exp(dt_t a) h_{t-1} + dt_t u_t b_t        y_t = c_t h_t
`a` is given times log2(e), because powers of 2 are cheaper than powers of e.
"""

from __future__ import annotations

import torch

CHUNK = 64  # positions whose states are held at a time


def convolve(window: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A causal depthwise convolution: (rows, taps - 1 + new, inner) by (taps, inner) → (rows, new, inner)."""
    taps = kernel.shape[0]
    num_new = window.shape[1] - taps + 1
    if num_new == 1:
        sums = (window * kernel).sum(dim=1, keepdim=True)
        return sums if bias is None else sums.add_(bias)
    # One pass per tap over rows of channels: torch's grouped convolution would want the channels before the positions.
    sums = window[:, :num_new] * kernel[0]
    for tap in range(1, taps):
        sums.addcmul_(window[:, tap : tap + num_new], kernel[tap])
    return sums if bias is None else sums.add_(bias)


def step(
    state: torch.Tensor,  # (rows, state, inner)
    dt: torch.Tensor,  # (rows, inner)
    a: torch.Tensor,  # (state, inner)
    u: torch.Tensor,  # (rows, inner)
    b: torch.Tensor,  # (rows, state)
    c: torch.Tensor,  # (rows, state)
    out: torch.Tensor,  # (rows, state, inner)
) -> torch.Tensor:
    """One position: writes the new state to `out`, returns y (rows, inner)."""
    decay = torch.exp2_(dt[:, None] * a)
    torch.addcmul(b[:, :, None] * (dt * u)[:, None], decay, state, out=out)
    return torch.bmm(c[:, None], out)[:, 0]


def scan(
    state: torch.Tensor,  # (rows, state, inner)
    dt: torch.Tensor,  # (rows, new, inner); 0 if a position must leave the state as it is
    a: torch.Tensor,  # (state, inner)
    u: torch.Tensor,  # (rows, new, inner)
    b: torch.Tensor,  # (rows, new, state)
    c: torch.Tensor | None,  # (rows, new, state); None if only the state is wanted
    *,
    chunk: int = CHUNK,
    width: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Many positions: y (rows, new, inner), empty without `c`, and the state after the last.

    `width` neighbouring positions are combined before the incoming state is applied: 1 is the definition, one
    operation per position. That is the least work, and best on a CPU; a GPU is faster with fewer, larger operations.
    """
    num_new = dt.shape[1]
    width = width or _choose_width(dt.device)
    dt = dt.transpose(0, 1).contiguous()  # (new, rows, inner): a position's numbers are contiguous
    fed, b = dt * u.transpose(0, 1), b.transpose(0, 1)
    outputs = []
    for first in range(0, num_new, chunk):
        part = slice(first, min(first + chunk, num_new))
        decay = torch.exp2_(dt[part, :, None] * a)  # (part, rows, state, inner)
        states = b[part, :, :, None] * fed[part, :, None]
        joined = (part.stop - first) // width * width
        state = _accumulate(states[:joined], decay[:joined], state, width)
        state = _accumulate(states[joined:], decay[joined:], state, 1)
        if c is not None:
            outputs.append(torch.matmul(c[:, part].transpose(0, 1)[:, :, None], states)[:, :, 0])
    y = torch.cat(outputs).transpose(0, 1) if outputs else dt.new_empty(0)
    return y, state


def _accumulate(states: torch.Tensor, decay: torch.Tensor, state: torch.Tensor, width: int) -> torch.Tensor:
    """Turn the inputs of each position (positions, rows, state, inner) into its state, in place; return the last.

    Products of decays only shrink, so that nothing can overflow; `decay` is overwritten.
    """
    lanes = states.view(-1, width, *states.shape[1:])
    decays = decay.view(lanes.shape)
    for place in range(1, width):
        lanes[:, place].addcmul_(decays[:, place], lanes[:, place - 1])
        decays[:, place].mul_(decays[:, place - 1])
    for lane, fading in zip(lanes.unbind(0), decays.unbind(0), strict=True):
        lane.addcmul_(fading, state)
        state = lane[-1]
    return state


def _choose_width(device: torch.device) -> int:
    return 1 if device.type == "cpu" else 8
