"""A step's matrix product by the fastest method for its shape: a kernel of ours, or cuBLAS with kernels around it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F

from unspool.kernels.gpu.products.activations import NONE
from unspool.kernels.gpu.products.arranging import arrange
from unspool.kernels.gpu.products.float_product import multiply_floats
from unspool.kernels.gpu.products.gating import gate
from unspool.kernels.gpu.products.held_product import multiply_held
from unspool.kernels.gpu.products.nibble_product import multiply_nibbles
from unspool.kernels.gpu.products.norm_product import choose_warp_tiling, multiply_normed
from unspool.kernels.gpu.products.norms import normalise
from unspool.kernels.gpu.products.parallel_product import Branch, multiply_sum, multiply_twins
from unspool.kernels.gpu.products.parts import add_parts
from unspool.kernels.gpu.products.result import Addend
from unspool.kernels.gpu.products.row_product import multiply_row
from unspool.kernels.gpu.products.rows_product import RowsTiling, multiply_rows
from unspool.kernels.gpu.products.rows_tilings import MOST_ROWS as MOST_TILED
from unspool.kernels.gpu.products.rows_tilings import MOST_SPLITS, choose_rows_tiling, starts_early
from unspool.kernels.gpu.products.scaled_product import can_scale, multiply_scaled
from unspool.kernels.gpu.products.tilings import (
    choose_float_tiling,
    choose_held_tiling,
    choose_nibble_tiling,
    choose_tiling,
    choose_words_tiling,
)
from unspool.kernels.gpu.products.words import Words, rounds_inputs
from unspool.kernels.gpu.products.words_product import MOST_ROWS, multiply_words, unpack_words

if TYPE_CHECKING:
    from unspool.kernels.gpu.attention.output_parts import Parts
    from unspool.kernels.gpu.products.few_product import FewTiling
    from unspool.kernels.gpu.products.staged_product import StagedTiling

FEW_ROWS: Final = 6  # up to this many in float32, a quantised matrix is read again for every two rows
MOST_UNPACKED: Final = 1 << 26  # numbers at a time
_FEW_OUTPUTS: Final = 2048  # with more, a product is whole before a sum of parts would have started
_WIDENS: Final = "dtype_out" in torch.ops.aten.mm.overloads()  # cuBLAS can write float32: from torch 2.8 on


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
    is_arranged: bool = False,
    order: int = 0,
) -> None:
    """out = activation(weight @ norm(x + addend) + bias), times the gated half; added to `out` if `adds`.

    The norm is one of root mean squares, or a layer norm (`centres`, with or without `norm` and `shift`). Addends are
    for shapes that `takes_addends` names, and so is `kept`: what the layer norm makes of x is written there. If
    `is_arranged`, x has the order that `find_order` says; with an `order` the output is arranged, for products that
    `find_order` says anything of.
    """
    around: dict[str, Any] = {"bias": bias, "activation": activation, "is_gated": is_gated, "adds": adds}
    before: dict[str, Any] = {"norm": norm, "eps": eps, "centres": centres, "shift": shift}
    if not isinstance(weight, Words):
        is_plain = x.shape[0] == 1 and addend is None and not adds
        is_normed = kept is not None and not is_gated if centres else norm is not None  # as was measured
        warps = choose_warp_tiling(weight, centres=centres) if is_plain and is_normed else None
        if warps is not None:
            after: dict[str, Any] = {"bias": bias, "activation": activation, "is_gated": is_gated, "kept": kept}
            multiply_normed(weight, x, out, warps, **before, **after)
            return
        is_added = adds and norm is None and not centres and addend is None and activation == NONE and not is_gated
        staged = _find_staged_tiling(weight, x) if is_added else None
        if staged is not None:
            from unspool.kernels.gpu.products.staged_product import multiply_staged

            multiply_staged(weight, x, out, staged, bias=bias)
            return
        held = choose_held_tiling(weight.shape[0], weight.shape[1], x.shape[0], weight.dtype, is_gated=is_gated)
        if held is not None:
            multiply_held(weight, x, out, held, **around, **before)
            return
        tiling = choose_tiling(weight.shape[0], weight.shape[1], x.shape[0], weight.dtype, is_gated=is_gated)
        if tiling is not None:
            multiply_row(weight, x, out, tiling, addend=addend, kept=kept, **around, **before)
            return
    assert addend is None and kept is None, "the input of a product of several rows is added up before"
    if isinstance(weight, Words) and x.shape[0] <= _count_few(x.dtype):
        if centres:
            x = _norm_apart(x, norm, eps, centres=centres, shift=shift)
            norm = None
        _multiply_few_words(weight, x, out, norm=norm, eps=eps, **around)
        return
    wanted = 0 if is_arranged else find_order(weight, x)
    if norm is not None or centres:
        x = _norm_apart(x, norm, eps, centres=centres, shift=shift, order=wanted)
    elif wanted:
        x = arrange(x, wanted)
    _multiply_many(weight, x, out, order=order, **around)


def find_few_tiling(
    weight: torch.Tensor | Words, num_rows: int, *, has_norm: bool = False, is_gated: bool = False
) -> FewTiling | None:
    """The tiling of a small matrix and up to eight rows on the tensor cores (`few_product`); None if it can't be."""
    if isinstance(weight, Words) or not starts_early():
        return None
    from unspool.kernels.gpu.products.few_product import choose_few_tiling

    return choose_few_tiling(weight, num_rows, has_norm=has_norm, is_gated=is_gated)


def multiply_small(
    weight: torch.Tensor | Words, x: torch.Tensor | Parts, out: torch.Tensor, *, is_gated: bool = False, **around: Any
) -> None:
    """As `multiply`, for a matrix and rows that `find_few_tiling` says a tiling of."""
    has_norm = around.get("norm") is not None or around.get("centres", False)
    tiling = find_few_tiling(weight, out.shape[0], has_norm=has_norm, is_gated=is_gated)
    assert tiling is not None and isinstance(weight, torch.Tensor)
    from unspool.kernels.gpu.products.few_product import multiply_few

    multiply_few(weight, x, out, tiling, is_gated=is_gated, **around)


def _find_staged_tiling(weight: torch.Tensor, x: torch.Tensor) -> StagedTiling | None:
    """The tiling of a product that is added to one row, if a part of the matrix goes to shared memory."""
    if x.shape[0] > 1 or weight.dtype == torch.float32 or not starts_early():
        return None
    from unspool.kernels.gpu.products.staged_product import MEASURED

    return MEASURED.get((weight.shape[0], weight.shape[1]))


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


def find_order(weight: torch.Tensor | Words, x: torch.Tensor) -> int:
    """The order in which a product reads the rows of its input: bits of words (`arranging`), 0: as they are."""
    if not isinstance(weight, Words) or x.shape[0] <= _count_few(x.dtype):
        return 0
    return weight.bits if find_rows_tiling(weight, x) is not None else 0


def _norm_apart(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    *,
    centres: bool,
    shift: torch.Tensor | None,
    order: int = 0,
) -> torch.Tensor:
    normed = torch.empty_like(x)
    normalise(x, norm, eps, normed, centres=centres, shift=shift, order=order)
    return normed


def _count_few(dtype: torch.dtype) -> int:
    """Up to how many rows quantised numbers are multiplied one by one: the tensor cores have no exact float32."""
    return FEW_ROWS if dtype == torch.float32 else 1


def _multiply_few_words(weight: Words, x: torch.Tensor, out: torch.Tensor, *, is_gated: bool, **around: Any) -> None:
    outputs, inputs = weight.shape
    if x.shape[0] == 1 and weight.kind == "int4" and x.dtype != torch.float32:
        rounds = rounds_inputs()
        found = choose_nibble_tiling(outputs, inputs, rounds=rounds, is_gated=is_gated)
        if found is not None:
            multiply_nibbles(weight, x, out, found, rounds=rounds, is_gated=is_gated, **around)
            return
    for first in range(0, x.shape[0], MOST_ROWS):
        some = slice(first, first + MOST_ROWS)
        if weight.kind == "fp8":
            floats = choose_float_tiling(outputs, weight.words.shape[1], is_gated=is_gated)
            multiply_floats(weight, x[some], out[some], floats, is_gated=is_gated, **around)
        else:
            tiling = choose_words_tiling(outputs, weight.words.shape[1], is_short=weight.kind == "int4")
            multiply_words(weight, x[some], out[some], tiling, is_gated=is_gated, **around)


def _multiply_many(
    weight: torch.Tensor | Words,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    activation: int,
    is_gated: bool,
    adds: bool,
    order: int,
) -> None:
    """A product of several rows: on the tensor cores by our kernel or by cuBLAS, with kernels around it."""
    is_split = activation == NONE and order == 0 and weight.shape[0] <= _FEW_OUTPUTS
    tiling = find_rows_tiling(weight, x, is_gated=is_gated, is_split=is_split)
    assert tiling is not None or order == 0, "only our kernels write arranged rows"
    if tiling is not None and tiling.splits > 1:
        parts = x.new_empty((tiling.splits, *out.shape), dtype=torch.float32)
        multiply_rows(weight, x, parts, tiling)
        add_parts(parts, out, bias=bias, adds=adds)
    elif tiling is not None:
        around: dict[str, Any] = {"activation": activation, "is_gated": is_gated, "adds": adds, "order": order}
        multiply_rows(weight, x, out, tiling, bias=bias, **around)
    elif isinstance(weight, Words) and not can_scale(weight, x):
        _multiply_unpacked(weight, x, out, bias=bias, activation=activation, is_gated=is_gated, adds=adds)
    elif isinstance(weight, Words):
        is_made = activation == NONE and not adds and out.dtype == x.dtype
        product = multiply_scaled(weight, x, out if is_made else None)
        product = product if bias is None else product.add_(bias)
        if activation != NONE:
            gate(product, activation, out)
        elif adds:
            out.add_(product)
        elif not is_made:
            out.copy_(product)
    elif activation != NONE:
        gate(F.linear(x, weight, bias), activation, out)
    elif bias is None and out.dtype == x.dtype:
        torch.addmm(out, x, weight.t(), beta=1.0 if adds else 0.0, out=out)
    elif bias is None and not adds and out.dtype == torch.float32 and _WIDENS and x.is_cuda:  # logits
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    elif not adds:
        out.copy_(F.linear(x, weight, bias))
    else:
        out.add_(F.linear(x, weight, bias))


def find_rows_tiling(
    weight: torch.Tensor | Words, x: torch.Tensor, *, is_gated: bool = False, is_split: bool = False
) -> RowsTiling | None:
    """The tiling of our kernel for several rows, with its columns split or not; None if it is not used."""
    if x.dtype == torch.float32 or x.shape[0] > MOST_TILED:
        return None
    if not isinstance(weight, Words) and weight.dtype != x.dtype:
        return None
    kind = weight.kind if isinstance(weight, Words) else None
    outputs, inputs = weight.shape
    return choose_rows_tiling(outputs, inputs, x.shape[0], kind, is_gated=is_gated, is_split=is_split)


def find_parts_tiling(weight: torch.Tensor | Words, x: torch.Tensor, most: int = MOST_SPLITS) -> RowsTiling | None:
    """The tiling of a product of several rows whose columns are split, into `most` parts; None if they are not."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if rows == 1 or (not isinstance(weight, Words) and choose_tiling(outputs, inputs, rows, weight.dtype) is not None):
        return None
    tiling = find_rows_tiling(weight, x, is_split=True)
    if tiling is None or tiling.splits == 1:
        return None
    return replace(tiling, splits=min(tiling.splits, most))


def multiply_parts(
    weight: torch.Tensor | Words, x: torch.Tensor, *, is_arranged: bool = False, most: int = MOST_SPLITS
) -> torch.Tensor | None:
    """The parts of a product of several rows, which `add_parts` adds up; None if its columns are not split."""
    tiling = find_parts_tiling(weight, x, most)
    if tiling is None:
        return None
    wanted = 0 if is_arranged else find_order(weight, x)
    parts = x.new_empty((tiling.splits, x.shape[0], weight.shape[0]), dtype=torch.float32)
    multiply_rows(weight, arrange(x, wanted) if wanted else x, parts, tiling)
    return parts


def _multiply_unpacked(
    weight: Words, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None, is_gated: bool, **around: Any
) -> None:
    """A product with a temporary dequantised copy."""
    outputs, inputs = weight.shape
    step = outputs if is_gated else max(1, MOST_UNPACKED // inputs)  # a head is unpacked part by part
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
