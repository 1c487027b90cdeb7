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
from unspool.kernels.gpu.products.parallel_product import Branch, multiply_sum, multiply_twins
from unspool.kernels.gpu.products.result import Addend
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
    centres: bool = False,
    shift: torch.Tensor | None = None,
    addend: Addend | None = None,
    kept: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: int = NONE,
    is_gated: bool = False,
    adds: bool = False,
) -> None:
    """out = activation(weight @ norm(x + addend) + bias), times the gated half; added to `out` if `adds`.

    The norm is one of root mean squares, or a layer norm (`centres`, with or without `norm` and `shift`). Addends are
    for shapes that `takes_addends` names, and so is `kept`: what the layer norm makes of x is written there.
    """
    around: dict[str, Any] = {"norm": norm, "eps": eps, "bias": bias, "activation": activation, "adds": adds}
    if isinstance(weight, Words):
        if centres:
            x = _norm_apart(x, norm, eps, centres=centres, shift=shift)
            around["norm"] = None
        _multiply_words(weight, x, out, is_gated=is_gated, **around)
        return
    before: dict[str, Any] = {"centres": centres, "shift": shift}
    held = choose_held_tiling(weight.shape[0], weight.shape[1], x.shape[0], weight.dtype, is_gated=is_gated)
    if held is not None:
        multiply_held(weight, x, out, held, is_gated=is_gated, **around, **before)
        return
    tiling = choose_tiling(weight.shape[0], weight.shape[1], x.shape[0], weight.dtype, is_gated=is_gated)
    if tiling is not None:
        multiply_row(weight, x, out, tiling, is_gated=is_gated, addend=addend, kept=kept, **around, **before)
        return
    assert addend is None and kept is None, "the input of a product of several rows is added up before"
    if norm is not None or centres:
        x = _norm_apart(x, norm, eps, centres=centres, shift=shift)
    if activation != NONE:
        gate(F.linear(x, weight, bias), activation, out)
    elif bias is None and out.dtype == x.dtype:
        torch.addmm(out, x, weight.t(), beta=1.0 if adds else 0.0, out=out)
    elif not adds:
        out.copy_(F.linear(x, weight, bias))
    else:
        out.add_(F.linear(x, weight, bias))


def multiply_beside(
    x: torch.Tensor,  # (1, inputs)
    first: Branch,
    second: Branch,
    outs: tuple[torch.Tensor, torch.Tensor],
    *,
    eps: float,
    centres: bool,
) -> None:
    """Two products of one row, by the tiling for their matrices as one."""
    outputs, inputs = first.weight.shape[0] + second.weight.shape[0], first.weight.shape[1]
    tiling = choose_tiling(outputs, inputs, 1, first.weight.dtype)
    assert tiling is not None
    multiply_twins(x, first, second, outs, tiling, eps=eps, centres=centres)


def multiply_both(first: Branch, x: torch.Tensor, second: Branch, y: torch.Tensor, out: torch.Tensor) -> None:
    """Two products added to one row, by the tiling for their matrices side by side."""
    outputs, inputs = first.weight.shape[0], first.weight.shape[1] + second.weight.shape[1]
    tiling = choose_tiling(outputs, inputs, 1, first.weight.dtype)
    assert tiling is not None
    multiply_sum(first, x, second, y, out, tiling)


def takes_addends(weight: torch.Tensor | Words, num_rows: int) -> bool:
    """Whether a product of so many rows can add a normalised term to its input itself."""
    return num_rows == 1 and not isinstance(weight, Words)


def _norm_apart(
    x: torch.Tensor, norm: torch.Tensor | None, eps: float, *, centres: bool, shift: torch.Tensor | None
) -> torch.Tensor:
    normed = torch.empty_like(x)
    normalise(x, norm, eps, normed, centres=centres, shift=shift)
    return normed


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
