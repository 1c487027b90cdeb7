"""How far rope turns a pass's tokens: the same in every layer, so it is worked out once a pass.

The reference is `kernels.rotary.RotaryTable`. Exact sines of large angles take a hundred instructions each: inside an
attention kernel, again for every head and part, they cost more than its reading.
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
    lengths: torch.Tensor,  # (rows,) int32: where a row's first new token stands
    frequencies: torch.Tensor,  # (pairs,) float32
    gain: float,
    out: torch.Tensor,  # (tokens, 2, pairs) float32: cosines, then sines
    *,
    is_forked: bool = False,  # a row's new tokens all stand at one position
) -> None:
    """out = cosines and sines of every new token's angles, times rope's gain."""
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
