"""GGUFs of super-blocks (Q4_K, Q5_K, Q6_K), of 5 bits, and of several kinds, from the file to its logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import unspool
from unspool.kernels.cpu.library import find_library
from unspool.models.decoder.model import Decoder
from unspool.models.weights import PackedRows

SIZE, FFN, VOCAB = 256, 512, 40
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": SIZE,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "none",
}
SHAPES = {
    "attn_q": (SIZE, SIZE),
    "attn_k": (SIZE, SIZE // 2),
    "attn_v": (SIZE, SIZE // 2),
    "attn_output": (SIZE, SIZE),
    "ffn_gate": (SIZE, FFN),
    "ffn_up": (SIZE, FFN),
    "ffn_down": (FFN, SIZE),
}  # as a file has them: columns first
TYPES = {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "Q8_0": 8, "Q5_1": 7}
BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "Q8_0": 272, "Q5_1": 192}  # of 256 numbers
MIXES = {
    "Q4_K": {},
    "Q5_K": {},
    "Q6_K": {},
    "Q4_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"},
    "Q5_1": {"attn_v": "Q8_0"},  # what llama.cpp makes of rows that are no multiple of 256
    "Q5_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q8_0", "ffn_up": "Q4_K"},
}


def make_matrix(generator: np.random.Generator, stored: str, shape: tuple[int, int]) -> bytes:
    """Random weights around 0."""
    count = shape[0] * shape[1] // 256
    raw = generator.integers(0, 256, (count, BYTES[stored]), dtype=np.uint8)
    if stored == "Q6_K":
        raw[:, 192:208] = generator.integers(1, 60, (count, 16))
        raw[:, 208:] = np.array([6e-5], dtype=np.float16).view(np.uint8)
    elif stored == "Q8_0":
        raw.reshape(-1, 34)[:, :2] = np.array([6e-4], dtype=np.float16).view(np.uint8)
    elif stored == "Q5_1":
        raw.reshape(-1, 24)[:, :4] = np.array([5e-3, -8e-2], dtype=np.float16).view(np.uint8)
    else:
        raw[:, :4] = np.array([1e-4, 7e-4 if stored == "Q4_K" else 1.4e-3], dtype=np.float16).view(np.uint8)
    return raw.tobytes()


def make_tensors(mix: str) -> list[tuple[str, tuple[int, ...], int, bytes]]:
    generator = np.random.default_rng(4)
    ones = np.ones(SIZE, dtype=np.float32).tobytes()
    made: list[tuple[str, tuple[int, ...], int, bytes]] = [("output_norm.weight", (SIZE,), 0, ones)]
    matrices = [(f"blk.{i}.{name}", shape) for i in range(2) for name, shape in SHAPES.items()]
    for name, shape in [*matrices, ("token_embd", (SIZE, VOCAB))]:
        stored = MIXES[mix].get(name.rpartition(".")[2], mix[:4])
        made.append((f"{name}.weight", shape, TYPES[stored], make_matrix(generator, stored, shape)))
    for i in range(2):
        made += [(f"blk.{i}.{name}.weight", (SIZE,), 0, ones) for name in ("attn_norm", "ffn_norm")]
    return made


@pytest.mark.skipif(find_library() is None, reason="the CPU library is not built")
@pytest.mark.parametrize("mix", MIXES)
def test_a_file_of_super_blocks_is_kept_as_it_is(write_gguf: Callable[..., Path], mix: str) -> None:
    tensors = make_tensors(mix)
    path = write_gguf(METADATA, tensors)
    kept, plain = unspool.load(path), unspool.load(path, quantize=None)
    assert isinstance(kept.model, Decoder) and isinstance(plain.model, Decoder)
    for mine, numbers in zip(kept.model.weights.layers, plain.model.weights.layers, strict=True):
        for part in ("qkv", "out", "up", "down"):
            packed = getattr(mine, part)
            assert isinstance(packed, PackedRows)
            assert torch.equal(packed.weight, getattr(numbers, part).weight), part
    assert torch.equal(kept.model.weights.embedding.weight, plain.model.weights.embedding.weight)
    assert kept.model.weights_bytes == sum(len(raw) for *_, raw in tensors)
    tokens = torch.tensor([[3, 4, 5, 6]])
    made, expected = (lm.model(tokens).logits.float() for lm in (kept, plain))
    assert (made - expected).norm() < 0.02 * expected.norm()
    alone, batch = (
        unspool.generate(kept.model, tokens.repeat(rows, 1), max_new_tokens=12, do_sample=False) for rows in (1, 5)
    )
    assert torch.equal(batch, alone.repeat(5, 1))


@pytest.mark.skipif(find_library() is None, reason="the CPU library is not built")
def test_all_that_reads_products_alone_reads_mixed_matrices(write_gguf: Callable[..., Path]) -> None:
    """torch's operators around the library's products, and the products as custom operators."""
    path = write_gguf(METADATA, make_tensors("Q4_K_M"))
    model = unspool.load(path).model
    assert isinstance(model, Decoder)
    qkv = model.weights.layers[0].qkv
    assert isinstance(qkv, PackedRows) and qkv.rest is not None
    x = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(qkv(x), x @ qkv.weight.T, atol=0.02)
    traced = qkv._multiply_traced(x)
    assert torch.equal(traced, qkv(x))
