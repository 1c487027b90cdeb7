"""The library's products as custom operators, because torch.compile can't trace C."""

from __future__ import annotations

import torch

from unspool.kernels.cpu.library import find_library
from unspool.kernels.cpu.structures import describe_matrix
from unspool.kernels.cpu.supers import AnyKind
from unspool.kernels.cpu.tiles import unpack_tiles


@torch.library.custom_op(
    "unspool::multiply_packed",
    mutates_args=(),
    schema="(Tensor x, Tensor tiles, Tensor? bias, str kind, int num_rows) -> Tensor",
)
def multiply_packed(
    x: torch.Tensor, tiles: torch.Tensor, bias: torch.Tensor | None, kind: AnyKind, num_rows: int
) -> torch.Tensor:
    """x (…, columns) times a quantised matrix: (…, num_rows)."""
    library = find_library()
    if library is None:
        return torch.nn.functional.linear(x, unpack_tiles(tiles, kind, num_rows).dequantise(), bias)
    matrix = describe_matrix(tiles, bias, kind, num_rows, x.shape[-1])
    return library.multiply(matrix, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], num_rows)


@multiply_packed.register_fake
def _(
    x: torch.Tensor,
    tiles: torch.Tensor,
    bias: torch.Tensor | None,
    kind: AnyKind,
    num_rows: int,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], num_rows)


@torch.library.custom_op(
    "unspool::read_packed_rows",
    mutates_args=(),
    schema="(Tensor index, Tensor tiles, str kind, int num_rows, int num_columns) -> Tensor",
)
def read_packed_rows(
    index: torch.Tensor, tiles: torch.Tensor, kind: AnyKind, num_rows: int, num_columns: int
) -> torch.Tensor:
    """Rows of a quantised matrix as numbers: index (…) to (…, num_columns)."""
    library, flat = find_library(), index.reshape(-1)
    if library is None:
        found = unpack_tiles(tiles, kind, num_rows).dequantise()[flat]
    else:
        found = library.read_rows(describe_matrix(tiles, None, kind, num_rows, num_columns), flat)
    return found.view(*index.shape, num_columns)


@read_packed_rows.register_fake
def _(
    index: torch.Tensor,
    tiles: torch.Tensor,
    kind: AnyKind,
    num_rows: int,
    num_columns: int,
) -> torch.Tensor:
    return index.new_empty(*index.shape, num_columns, dtype=torch.float32)


def multiply_halves_plainly(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (…, columns) times a matrix (rows, columns), plus a bias, in half precision, by torch's float32 product: what
    the library's is compared with."""
    wide = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(x.dtype)


@torch.library.custom_op(
    "unspool::multiply_halves",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)
def multiply_traced_halves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (…, columns) times a matrix (rows, columns), plus a bias, in half precision: (…, rows)."""
    library = find_library()
    if library is None:
        return multiply_halves_plainly(x, weight, bias)
    made = library.multiply_halves(x.reshape(-1, x.shape[-1]), weight.contiguous(), bias)
    return made.view(*x.shape[:-1], weight.shape[0])


@multiply_traced_halves.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
