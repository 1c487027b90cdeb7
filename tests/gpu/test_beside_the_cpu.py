"""Random calls of native models: a GPU writes and returns what a CPU does."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tests.fuzz.beside.calls import Call, draw
from tests.fuzz.beside.trying import try_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of transformers
]
RETURNED = {"do_sample": False, "return_dict_in_generate": True}
ENDS = [2, 7, 9, 13, 15, 16, 18, 21, 25, 27, 34, 41, 44, 45, 48, 55, 57, 63, 69, 71, 73, 79, 81, 82, 93]


@pytest.mark.parametrize("first", range(0, 400, 20))
def test_a_gpu_answers_as_a_cpu(first: int) -> None:
    for seed in range(first, first + 20):
        call = draw(Random(f"beside_transformers:{seed}"))
        assert try_devices(call, "cuda") == [], (seed, call)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "llama"])
def test_a_text_without_a_cache_ends_while_a_step_is_under_way(name: str) -> None:
    for seed in range(3):
        settings = {**RETURNED, "max_new_tokens": 8, "use_cache": False, "eos_token_id": ENDS}
        assert try_devices(Call(name, seed, "greedy", [[84, 66]], settings=settings), "cuda") == []


@pytest.mark.parametrize("name", ["gemma2", "exaone4", "llama"])
def test_dola_after_uneven_prompts_that_are_read_token_by_token(name: str) -> None:
    settings = {**RETURNED, "max_new_tokens": 4, "dola_layers": [1], "prefill_chunk_size": 1}
    ids = [[46, 9, 89, 88, 9, 9], [0, 50, 25, 50, 82, 25], [0, 0, 0, 18, 18, 95]]
    mask = [[int(token != 0) for token in row] for row in ids]
    assert try_devices(Call(name, 0, "dola", ids, mask, settings=settings), "cuda") == []


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static", "quantized", "static"])
@pytest.mark.parametrize("name", ["bart", "marian", "m2m_100"])
def test_an_encoder_decoder_whose_own_keys_lie_elsewhere(name: str, kind: str) -> None:
    """The captured step takes a cache's memory before the first pass begins it."""
    settings = {**RETURNED, "max_new_tokens": 8, "cache_implementation": kind, "eos_token_id": ENDS}
    ids = [[31, 88, 31, 88, 88, 88], [34, 52, 52, 52, 52, 34]]
    for seed in range(3):
        for some in ({}, {"num_beams": 3}):
            call = Call(name, seed, "greedy", ids, settings={**settings, **some})
            assert try_devices(call, "cuda") == []
