"""AWQ: 4 bits with zero points, packed along the rows of a matrix in AutoAWQ's GEMM layout.

Lin et al., 2023, https://arxiv.org/abs/2306.00978
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from unspool.loading.quantised.format import Format, Found, Method, Parts, count_groups, list_modules
from unspool.loading.quantised.matrix import Codes, GroupedMatrix, QuantisedMatrix, split_words
from unspool.loading.tensors import TensorFile

_GROUP_SIZES: Final = (-1, 32, 64, 128, 256)
_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each of eight rows is


@dataclass
class AwqMatrix(GroupedMatrix):
    """A matrix whose words hold 8 rows of one column."""

    words: torch.Tensor  # (columns, rows / 8) int32
    zeros: torch.Tensor  # (groups, rows) int16
    scales: torch.Tensor  # (groups, rows) float32

    @property
    def rows_at_once(self) -> int:
        """Whole words of rows."""
        return -(-super().rows_at_once // 8) * 8

    def read_codes(self, first: int, end: int) -> Codes:
        """Some rows as they are stored, unpacked."""
        begin = first // 8
        values = _split_rows(self.words[:, begin : -(-end // 8)])[:, first - 8 * begin : end - 8 * begin].t()
        return Codes(values, self.zeros[:, first:end].t(), self.scales[:, first:end].t())


def _split_rows(words: torch.Tensor) -> torch.Tensor:
    """The numbers of words (…, words) in the order of the rows: (…, 8 * words)."""
    return split_words(words, 4).view(*words.shape, 8)[..., list(_PLACES)].flatten(-2)


def _find(method: Method, tensors: TensorFile) -> Found:
    method.require("bits", (4,), None)
    group_size = method.require("group_size", _GROUP_SIZES, 128)
    method.require("version", ("gemm",), "gemm")
    method.require("zero_point", (True,), True)
    found: dict[str, QuantisedMatrix] = {
        f"{module}.weight": _read(Parts(tensors, module), group_size) for module in list_modules(tensors, "qweight")
    }
    return Found(found)


def _read(parts: Parts, group_size: int) -> AwqMatrix:
    shape = parts.shape("qweight")
    if len(shape) != 2:
        parts.fail(f"qweight has {len(shape)} dimensions")
    columns, rows = shape[0], 8 * shape[1]
    groups = count_groups(columns, group_size)
    words = parts.map("qweight", torch.int32, "I32", shape)
    zeros = _split_rows(parts.take("qzeros", torch.int32, ("I32",), (groups, shape[1])))
    scales = parts.take_scales("scales", (groups, rows))
    return AwqMatrix((rows, columns), tuple(parts.names), 4, groups, None, words, zeros, scales)


AWQ: Final = Format("awq", _find)
