"""What a watermark reads off the text, in one kernel: the hash of each row's last tokens, and whether the text had them
before. The references are `watermark.contexts.is_last_repeated` and the marks' own hashes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.contexts import Text
from unspool.kernels.gpu.arguments import lay_in_rows
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.mixing import mix

BLOCK = 128  # windows that are compared at once


@triton.jit
def _take(IDS, at, pad, is_asked):
    """Tokens of the text; zeros before its beginning, and where there is padding."""
    return tl.load(IDS + at, mask=is_asked & (at >= 0) & (at >= pad), other=0)


@triton.jit(do_not_specialize=["row_stride", "num_tokens", "start", "first", "width"])
def _read_contexts(
    IDS, PADS, FIRSTS, SEED, STATES, REPEATED, row_stride, num_tokens, start, first, width,
    HAS_PADS: tl.constexpr, HAS_FIRSTS: tl.constexpr, MIXES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    IDS += row * row_stride + start
    let_next_start(PDL)
    state = tl.load(SEED).to(tl.uint64)
    pad = tl.zeros((), tl.int64)
    wait_for_input(PDL)
    if HAS_PADS:
        pad = tl.load(PADS + row) - start
    if HAS_FIRSTS:
        first = tl.load(FIRSTS + row).to(tl.int32)
    for place in range(width):
        token = _take(IDS, num_tokens - width + place, pad, True).to(tl.uint64)
        if MIXES:
            state = mix(state + (token + 1) * 0x9E3779B97F4A7C15)
        else:
            state = (state + token) * 6364136223846793005 + 1
    num_found = tl.zeros((BLOCK,), tl.int32)
    for begin in range(first, num_tokens, BLOCK):
        window = begin + tl.arange(0, BLOCK)
        is_same = window < num_tokens
        for place in range(width):
            held = _take(IDS, num_tokens - width + place, pad, True)
            is_same = is_same & (_take(IDS, window - width + place, pad, window < num_tokens) == held)
        num_found += is_same.to(tl.int32)
    tl.store(STATES + row, state.to(tl.int64))
    tl.store(REPEATED + row, (tl.max(num_found, 0) > 0).to(tl.int32))


def read_contexts(text: Text, seed: torch.Tensor, *, mixes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The hashes (rows,) int64 of the last windows, from `seed` (1,) on, and whether they are repeated: (rows,) int32.

    With `mixes` tokens are mixed in as Gumbel's noise wants them, otherwise by SynthID-Text's generator.
    """
    ids = lay_in_rows(text.ids)
    rows, columns = ids.shape
    states = torch.empty(rows, dtype=torch.int64, device=ids.device)
    repeated = torch.empty(rows, dtype=torch.int32, device=ids.device)
    launch(
        _read_contexts,
        (rows,),
        ids,
        ids if text.pads is None else text.pads,
        ids if text.firsts is None else text.firsts,
        seed,
        states,
        repeated,
        ids.stride(0),
        columns - text.start,
        text.start,
        text.first,
        text.width,
        HAS_PADS=text.pads is not None,
        HAS_FIRSTS=text.firsts is not None,
        MIXES=mixes,
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(),
    )
    return states, repeated
