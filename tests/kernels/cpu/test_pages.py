"""Memory for several tensors side by side."""

from __future__ import annotations

import pytest
import torch

from unspool.kernels.cpu import pages
from unspool.kernels.cpu.pages import Arena, count_arena_bytes


@pytest.mark.parametrize("has_huge", [True, False])
def test_parts_lie_side_by_side_and_apart(has_huge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_huge:
        monkeypatch.setattr(pages, "_find_advise", lambda: None)
    shapes = [torch.Size(shape) for shape in ((1500, 1000), (7,), (3, 5), (0, 4), (900, 33))]
    arena = Arena(count_arena_bytes([shape.numel() * 2 for shape in shapes]))
    parts = []
    for number, shape in enumerate(shapes):
        tried = arena.take(shape, torch.bfloat16)
        arena.give_back(tried)
        parts.append(arena.take(shape, torch.bfloat16).fill_(number))
        assert parts[-1].data_ptr() == tried.data_ptr() and parts[-1].data_ptr() % 64 == 0
    assert parts[0].data_ptr() % (2 << 20) == 0
    for number, (shape, part) in enumerate(zip(shapes, parts, strict=True)):
        assert part.shape == shape and bool((part == number).all())
