"""What tests of a step's attention share: its rotations, its table of addresses, and the token that it adds."""

from __future__ import annotations

from typing import Any

import torch
from tests.gpu.kernel_checks import DEVICE

from unspool.kernels.norms import rms_norm
from unspool.kernels.rotary import RotaryTable, rotate_


def make_rope(width: int, pairs: int) -> tuple[RotaryTable, torch.Tensor]:
    frequencies = [10_000.0 ** (-2 * i / width) for i in range(pairs)]
    return RotaryTable(frequencies, 1.0, DEVICE), torch.tensor(frequencies, device=DEVICE)


def tell_addresses(base: torch.Tensor, *caches: list[torch.Tensor]) -> list[int]:
    """A table as `StepAttention` reads it, of layers' buffers (rows, capacity, 2, heads, width)."""
    told: list[int] = []
    for buffers in caches:
        told += [(one.data_ptr() - base.data_ptr()) // (8 * one.element_size()) for one in buffers]
        told.append(buffers[0].shape[1])
    return told


def find_new(
    qkv: torch.Tensor,
    shape: Any,
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    rope: RotaryTable | None,
    position: int,
) -> torch.Tensor:
    """A token's queries, keys and values (1, 1, heads + 2 * kv_heads, width) in float32: normed, then rotated."""
    heads, kv_heads = shape.heads, shape.kv_heads
    new = qkv.to(torch.float32, copy=True).view(1, 1, heads + 2 * kv_heads, shape.width)
    if norms[0] is not None and norms[1] is not None:
        new[:, :, :heads] = rms_norm(new[:, :, :heads], norms[0].float(), shape.eps)
        new[:, :, heads:-kv_heads] = rms_norm(new[:, :, heads:-kv_heads], norms[1].float(), shape.eps)
    if rope is not None:
        rotate_(new[:, :, : heads + kv_heads], rope.reserve(position + 1)[None, position : position + 1, None])
    return new
