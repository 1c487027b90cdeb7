"""GPTQ: 4 or 8 bits, packed along the columns of a matrix, in groups that may take columns in any order.

Frantar et al., 2022, https://arxiv.org/abs/2210.17323; the layout is that of AutoGPTQ and GPTQModel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from unspool.loading.quantised.format import Format, Found, Method, Parts, count_groups, list_modules
from unspool.loading.quantised.matrix import Codes, GroupedMatrix, QuantisedMatrix, split_words
from unspool.loading.tensors import TensorFile

_GROUP_SIZES: Final = (-1, 16, 32, 64, 128, 256, 512, 1024)


@dataclass
class GptqMatrix(GroupedMatrix):
    """A matrix whose words hold 8 or 4 columns of one row."""

    words: torch.Tensor  # (columns * bits / 32, rows) int32
    zeros: torch.Tensor  # (groups, rows) int16
    scales: torch.Tensor  # (groups, rows) float32

    def read_codes(self, first: int, end: int) -> Codes:
        """Some rows as they are stored, unpacked."""
        values = split_words(self.words[:, first:end].t(), self.bits)
        return Codes(values, self.zeros[:, first:end].t(), self.scales[:, first:end].t())


def _find(method: Method, tensors: TensorFile) -> Found:
    bits = method.require("bits", (4, 8), None)
    group_size = method.require("group_size", _GROUP_SIZES, -1)
    layout = method.require("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    method.require("pack_dtype", ("int32",), "int32")
    method.refuse_any("dynamic", "adapter")
    found: dict[str, QuantisedMatrix] = {}
    for module in list_modules(tensors, "qweight"):
        parts = Parts(tensors, module)
        # The first layout stores a zero point less one.
        found[f"{module}.weight"] = _read(parts, bits, group_size, add_to_zeros=int(layout == "gptq"))
    return Found(found)


def _read(parts: Parts, bits: int, group_size: int, *, add_to_zeros: int) -> GptqMatrix:
    per_word = 32 // bits
    shape = parts.shape("qweight")
    if len(shape) != 2:
        parts.fail(f"qweight has {len(shape)} dimensions")
    columns, rows = per_word * shape[0], shape[1]
    if parts.has("g_idx") and parts.shape("g_idx") != (columns,):
        parts.fail(f"qweight has {columns} columns of {bits} bits, and g_idx has {list(parts.shape('g_idx'))}")
    groups = count_groups(columns, group_size)
    words = parts.map("qweight", torch.int32, "I32", shape)
    packed = parts.take("qzeros", torch.int32, ("I32",), (groups, -(-rows // per_word)))
    zeros = split_words(packed, bits)[:, :rows] + add_to_zeros
    scales = parts.take_scales("scales", (groups, rows))
    group_of = parts.take_groups("g_idx", columns, groups) if parts.has("g_idx") else None
    if group_of is not None and torch.equal(group_of, torch.arange(columns) // -(-columns // groups)):
        group_of = None
    return GptqMatrix((rows, columns), tuple(parts.names), bits, groups, group_of, words, zeros, scales)


GPTQ: Final = Format("gptq", _find)
