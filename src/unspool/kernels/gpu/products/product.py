"""A step's matrix product by the fastest method for its shape: a kernel of ours, or cuBLAS with kernels around it."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from unspool.kernels.gpu.products.activations import NONE
from unspool.kernels.gpu.products.gating import gate
from unspool.kernels.gpu.products.held_product import multiply_held
from unspool.kernels.gpu.products.nibble_product import multiply_nibbles
from unspool.kernels.gpu.products.norms import normalise
from unspool.kernels.gpu.products.row_product import multiply_row
from unspool.kernels.gpu.products.tilings import (
    choose_held_tiling,
    choose_nibble_tiling,
    choose_tiling,
    choose_words_tiling,
)
from unspool.kernels.gpu.products.words import Words, rounds_inputs
from unspool.kernels.gpu.products.words_product import MOST_ROWS, multiply_words, unpack_words

FEW_ROWS: Final = 6  # up to this many, a quantised matrix is read again for every two rows
MOST_UNPACKED: Final = 1 << 26  # numbers at a time


def multiply(
    weight: torch.Tensor | Words,  # (outputs, inputs); gate above value if gated
    x: torch.Tensor,  # (rows, inputs)
    out: torch.Tensor,  # (rows, outputs), half as many if gated
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: int = NONE,
    is_gated: bool = False,
    adds: bool = False,
) -> None:
    """out = activation(weight @ norm(x) + bias), times the gated half; added to `out` if `adds`."""
    around: dict[str, Any] = {"norm": norm, "eps": eps, "bias": bias, "activation": activation, "adds": adds}
    if isinstance(weight, Words):
        _multiply_words(weight, x, out, is_gated=is_gated, **around)
        return
    held = choose_held_tiling(weight.shape[0], weight.shape[1], x.shape[0], weight.dtype, is_gated=is_gated)
    if held is not None:
        multiply_held(weight, x, out, held, is_gated=is_gated, **around)
        return
    tiling = choose_tiling(weight.shape[0], weight.shape[1], x.shape[0], weight.dtype, is_gated=is_gated)
    if tiling is not None:
        multiply_row(weight, x, out, tiling, is_gated=is_gated, **around)
        return
    if norm is not None:
        normed = torch.empty_like(x)
        normalise(x, norm, eps, normed)
        x = normed
    if activation != NONE:
        gate(F.linear(x, weight, bias), activation, out)
    elif bias is None and out.dtype == x.dtype:
        torch.addmm(out, x, weight.t(), beta=1.0 if adds else 0.0, out=out)
    elif not adds:
        out.copy_(F.linear(x, weight, bias))
    else:
        out.add_(F.linear(x, weight, bias))


def _multiply_words(weight: Words, x: torch.Tensor, out: torch.Tensor, *, is_gated: bool, **around: Any) -> None:
    """A few rows multiply the words directly; more multiply a temporary dequantised copy."""
    outputs, inputs = weight.shape
    if x.shape[0] == 1 and weight.kind == "int4" and x.dtype != torch.float32:
        rounds = rounds_inputs()
        found = choose_nibble_tiling(outputs, inputs, rounds=rounds, is_gated=is_gated)
        if found is not None:
            multiply_nibbles(weight, x, out, found, rounds=rounds, is_gated=is_gated, **around)
            return
    if x.shape[0] <= FEW_ROWS:
        tiling = choose_words_tiling(outputs, weight.words.shape[1], weight.kind)
        for first in range(0, x.shape[0], MOST_ROWS):
            some = slice(first, first + MOST_ROWS)
            multiply_words(weight, x[some], out[some], tiling, is_gated=is_gated, **around)
        return
    step = outputs if is_gated else max(1, MOST_UNPACKED // inputs)  # a head is unpacked part by part
    bias = around.pop("bias")
    for first in range(0, outputs, step):
        part = weight.narrow(first, min(step, outputs - first))
        numbers = unpack_words(part, torch.empty(part.shape, dtype=x.dtype, device=x.device))
        its_bias = None if bias is None else bias[first : first + step]
        if step >= outputs:
            multiply(numbers, x, out, bias=its_bias, is_gated=is_gated, **around)
        else:
            made = out.new_empty(x.shape[0], part.shape[0])
            its_out = out[:, first : first + step]
            if around["adds"]:
                made.copy_(its_out)
            multiply(numbers, x, made, bias=its_bias, **around)
            its_out.copy_(made)
