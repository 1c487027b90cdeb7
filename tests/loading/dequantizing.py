"""Whole tensors of a file's formats as numbers; the library reads them part by part."""

from __future__ import annotations

import math

import torch

from unspool.loading.dequantize import STORED_TYPES, iterate_rows


def dequantize(raw: torch.Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a tensor (uint8, rows first) as numbers of `dtype`."""
    rows = raw.reshape(math.prod(shape[:-1]), -1)
    return torch.cat([part for _, part in iterate_rows(rows, STORED_TYPES[kind])]).view(shape).to(dtype)
