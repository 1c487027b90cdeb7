"""The kernel over packed keys reads what the reference reads, and quantised caches decode on a GPU as on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conformance.cases import GOLDENS
from tests.kernels.test_packed import Case, mask_of

import unspool
from unspool.cache import QuantizedCacheConfig, QuantizedStaticCache
from unspool.kernels.packed import attend_in_blocks, attend_packed, attend_plainly

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES: list[dict[str, Any]] = [
    {"counts": [640], "width": 64},
    {"counts": [1024, 64, 0], "width": 128, "heads": 8, "kv_heads": 2},
    {"counts": [128, 64], "width": 64, "nbits": 2, "num_new": 3},
    {"counts": [128, 64], "width": 128, "nbits": 8, "num_new": 16, "num_recent": 200},
    {"counts": [256, 64], "width": 128, "keys_by_channel": False},
    {"counts": [256, 64], "width": 64, "values_by_channel": True, "nbits": 8},
    {"counts": [8192 + 64], "width": 128, "heads": 32, "kv_heads": 8, "num_recent": 180},
    {"counts": [64, 320], "width": 256, "heads": 6, "kv_heads": 2},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_reads_what_the_reference_reads(shape: dict[str, Any], dtype: torch.dtype) -> None:
    from unspool.kernels.gpu.attention import packed_reading

    case = Case(**{"block": 64, **shape}, device="cuda", dtype=dtype)
    queries, keys, values = case.make()
    assert packed_reading.can_read(queries, keys, values)
    for window, softcap, is_masked in ((None, None, False), (70, None, False), (None, 5.0, False), (90, None, True)):
        options: dict[str, Any] = {"scale": case.width**-0.5, "window": window, "softcap": softcap}
        wide = dict(options)
        if is_masked:
            mask = mask_of(keys.view.positions, case.heads, window).to(dtype)
            options |= {"mask": mask, "window": None}
            wide |= {"mask": mask.float(), "window": None}  # torch's attention wants the dtype of its queries
        expected, _ = attend_plainly(queries.float(), *(_widen(each) for each in (keys, values)), **wide)
        window, softcap = options["window"], options["softcap"]
        read = packed_reading.attend(queries, keys, values, options["scale"], options.get("mask"), window, softcap)
        blocks = attend_in_blocks(queries, keys, values, **options)
        tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(read.float(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(blocks.float(), expected, atol=tolerance, rtol=tolerance)


def _widen(keys: Any) -> Any:
    from dataclasses import replace

    return replace(keys, recent=keys.recent.float())


@pytest.mark.parametrize("kind", ["quantized", "quantized_static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "mistral", "gpt2"])
def test_quantised_caches_decode_as_on_the_cpu(name: str, kind: str) -> None:
    ids = torch.randint(3, 160, (3, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    common = {
        "attention_mask": mask,
        "max_new_tokens": 30,
        "cache_implementation": kind,
        "cache_config": {"nbits": 8, "q_group_size": 16, "residual_length": 8},
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    folder = GOLDENS / "models" / name
    there = unspool.generate(unspool.load(folder, device="cuda").model, ids, **common)
    here = unspool.generate(unspool.load(folder, device="cpu").model, ids, **common)
    spread = here.logits[0].max() - here.logits[0].min()
    for mine, theirs in zip(there.logits[:8], here.logits[:8], strict=True):
        assert (mine.cpu() - theirs).abs().max() < 0.05 * spread


def test_a_static_step_can_be_captured() -> None:
    """Buffers stay where they are: a graph captured once replays the steps of a block on new tokens."""
    heads, width = 2, 64
    sizes = type("Sizes", (), {"num_attention_heads": heads, "hidden_size": heads * width, "num_hidden_layers": 1})
    cache = QuantizedStaticCache(QuantizedCacheConfig("HQQ", axis_value=1), sizes, 1, 1024, "cuda", torch.bfloat16)
    kv = torch.randn(1, 400, 2, heads, width, device="cuda", dtype=torch.bfloat16)
    cache.begin(1, 400, device="cuda")
    cache.write(0, kv)
    cache.end()
    places = [tensor.data_ptr() for store in cache._store.layers for tensor in store.tensors()]
    new = torch.randn(1, 1, 2, heads, width, device="cuda", dtype=torch.bfloat16)
    queries = torch.randn(1, heads, 1, width, device="cuda", dtype=torch.bfloat16)
    cache.begin(1, 1, device="cuda")
    attend_packed(queries, *cache.write(0, new), scale=0.1)  # compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read, _ = attend_packed(queries, *cache.write(0, new), scale=0.1)
    queries.normal_()
    new.normal_()
    graph.replay()
    torch.cuda.synchronize()
    expected, _ = attend_packed(queries, *cache.write(0, new), scale=0.1)
    torch.testing.assert_close(read, expected, atol=1e-2, rtol=1e-2)
    cache.end()
    assert [tensor.data_ptr() for store in cache._store.layers for tensor in store.tensors()] == places
