"""Rope's sines and cosines of a pass's tokens: the same in every layer, so they are computed once per pass.

The reference is `kernels.rotary.RotaryTable`. An exact sine of a large angle takes a hundred instructions: computed
inside an attention kernel, again for every head and part, sines would cost more than reading the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input


@triton.jit
def _find_turns(LENGTHS, FREQS, OUT, gain, NEW: tl.constexpr, AHEAD: tl.constexpr, PAIRS: tl.constexpr,
                BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    token = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    position = tl.load(LENGTHS + token // NEW) + token % NEW * AHEAD
    angle = position.to(tl.float32) * tl.load(FREQS + pair, mask=pair < PAIRS, other=0.0)
    tl.store(OUT + token * 2 * PAIRS + pair, tl.cos(angle) * gain, mask=pair < PAIRS)
    tl.store(OUT + token * 2 * PAIRS + PAIRS + pair, tl.sin(angle) * gain, mask=pair < PAIRS)


def find_turns(
    lengths: torch.Tensor,  # (rows,) int32: position of a row's first new token
    frequencies: torch.Tensor,  # (pairs,) float32
    gain: float,
    out: torch.Tensor,  # (tokens, 2, pairs) float32: cosines, then sines
    *,
    is_forked: bool = False,  # all new tokens of a row have the same position
) -> None:
    """Write cosines and sines of every new token's angles, times rope's gain, to `out`."""
    tokens, _, pairs = out.shape
    launch(
        _find_turns,
        (tokens,),
        lengths,
        frequencies,
        out,
        gain,
        NEW=tokens // lengths.numel(),
        AHEAD=0 if is_forked else 1,
        PAIRS=pairs,
        BLOCK=triton.next_power_of_2(pairs),
        num_warps=1 if pairs <= 64 else 4,
        **launch_options(),
    )
