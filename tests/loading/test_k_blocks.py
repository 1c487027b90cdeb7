"""A GGUF of Q4_K matrices, from the file to its logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import unspool
from unspool.kernels.cpu.library import find_library

SIZE, VOCAB = 256, 32
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": SIZE,
    "llama.feed_forward_length": SIZE,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
MATRICES = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]


def make_tensors() -> list[tuple[str, tuple[int, ...], int, bytes]]:
    generator = np.random.default_rng(4)
    blocks = generator.integers(0, 256, (SIZE, 144), dtype=np.uint8)
    blocks[:, :4] = np.array([1e-4, 7e-4], dtype=np.float16).view(np.uint8)  # weights around 0
    plain = generator.normal(size=(VOCAB, SIZE)).astype(np.float32).tobytes()
    ones = np.ones(SIZE, dtype=np.float32).tobytes()
    made = [
        (f"blk.0.{name}.weight", (SIZE, SIZE), 12, np.roll(blocks, at, 0).tobytes()) for at, name in enumerate(MATRICES)
    ]
    made += [(f"{name}.weight", (SIZE,), 0, ones) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")]
    return [*made, ("token_embd.weight", (SIZE, VOCAB), 0, plain)]


@pytest.mark.skipif(find_library() is None, reason="the CPU library is not built")
def test_a_file_of_q4_k_keeps_four_bits(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(METADATA, make_tensors())
    kept, plain = unspool.load(path), unspool.load(path, quantize=None)
    made, expected = (lm.model(torch.tensor([[3, 4, 5, 6]])).logits.float() for lm in (kept, plain))
    assert (made - expected).norm() < 0.02 * expected.norm()
    matrices = len(MATRICES) * SIZE * SIZE
    assert kept.model.weights_bytes < matrices * 5 / 8 + 5 * VOCAB * SIZE + 4096
