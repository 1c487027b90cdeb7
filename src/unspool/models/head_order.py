"""The order of a fused matrix's heads: from that of a checkpoint to queries, keys, values, with pairs as neighbours."""

from __future__ import annotations

from typing import Final, Literal

import torch

QkvLayout = Literal["stacked", "grouped", "codegen"]
CODEGEN_PARTS: Final = 4  # that CodeGen was trained in


def split_groups_(fused: torch.Tensor, num_heads: int, num_kv_heads: int, layout: QkvLayout) -> None:
    """Bring a fused QKV (rows, …) into the order q, k, v.

    "grouped" has each key head beside its queries; "codegen" has parts with some heads' q, v and k.
    """
    if layout == "stacked":
        return
    if layout == "codegen":
        query, value, key = fused.view(CODEGEN_PARTS, 3, -1).clone().unbind(1)
        fused.view(3, CODEGEN_PARTS, -1).copy_(torch.stack((query, key, value)))
        return
    group = num_heads // num_kv_heads
    parts = fused.view(num_kv_heads, group + 2, -1).clone()  # (kv_heads, queries and key and value, rest)
    rows = fused.shape[0] // (num_kv_heads * (group + 2))
    ends = (0, num_heads * rows, (num_heads + num_kv_heads) * rows, fused.shape[0])
    for place, part in enumerate((parts[:, :group], parts[:, group], parts[:, group + 1])):
        fused[ends[place] : ends[place + 1]].view(part.shape).copy_(part)


def pair_neighbours_(heads: torch.Tensor, head_dim: int, width: int) -> None:
    """Reorder rows (heads · head_dim, …) so that the two numbers of a rope pair are neighbours."""
    turned = heads.view(-1, head_dim, heads[0].numel())[:, :width]
    num_heads, rest = turned.shape[0], turned.shape[2]
    halves = turned.view(num_heads, 2, width // 2, rest).transpose(1, 2).clone()
    turned.view(num_heads, width // 2, 2, rest).copy_(halves)
