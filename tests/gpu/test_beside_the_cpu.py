"""Random calls of native models: a GPU writes and returns what a CPU does."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tests.fuzz.beside.calls import draw
from tests.fuzz.beside.trying import try_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of transformers
]
# Mamba-2 without a cache that ends while a step is under way; DoLa over uneven prompts read token by token.
FOUND = (12033, 23891, 30607, 54837)


@pytest.mark.parametrize("first", [*FOUND, *range(0, 400, 20)])
def test_a_gpu_answers_as_a_cpu(first: int) -> None:
    for seed in (first,) if first in FOUND else range(first, first + 20):
        call = draw(Random(f"beside_transformers:{seed}"))
        assert try_devices(call, "cuda") == [], (seed, call)
