"""Watermarks on a GPU are those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unspool.config import GumbelWatermarkingConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIGS: list[Any] = [
    WatermarkingConfig(),
    WatermarkingConfig(seeding_scheme="selfhash", context_width=3),
    SynthIDTextWatermarkingConfig(5, list(range(1000, 1030))),
    GumbelWatermarkingConfig(),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_processors_agree(config: Any) -> None:
    mark = config.construct_processor(32_000, None)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 32_000, (5, 40), generator=generator)
    scores = 3 * torch.randn(5, 32_000, generator=generator)
    expected, found = mark(ids, scores), mark(ids.cuda(), scores.cuda())
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(mark(ids, scores), expected)  # and back again
