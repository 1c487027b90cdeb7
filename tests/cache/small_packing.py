"""Quantised caches as small as they can be: two layers, blocks of four positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from unspool.cache import QuantizedCacheConfig

LAYERS, HEADS, WIDTH, BLOCK, RESIDUAL = 2, 2, 3, 4, 3
SMALL = {"nbits": 8, "q_group_size": BLOCK, "residual_length": RESIDUAL}
SIZES = SimpleNamespace(num_attention_heads=HEADS, hidden_size=HEADS * WIDTH, num_hidden_layers=LAYERS)


def configure(backend: str = "unspool", **more: Any) -> QuantizedCacheConfig:
    axes = {"unspool": (0, 1), "quanto": (-1, 0), "HQQ": (0, 1)}[backend]
    return QuantizedCacheConfig(backend, axis_key=axes[0], axis_value=axes[1], **{**SMALL, **more})
