"""Native models on a CUDA device: the same answers as on the CPU, within what each dtype can hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unspool.models.native import NativeModel
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODELS = Path(__file__).parents[1] / "conformance" / "goldens" / "models"
NAMES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "opt", "bloom", "phi"]
CLOSE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}  # mean error, of the mean logit


def load(name: str, **where: object) -> NativeModel:
    config = json.loads((MODELS / name / "config.json").read_text())
    return build_model(config, MemorySource(load_file(MODELS / name / "model.safetensors")), **where)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().mean() / expected.abs().mean())


def decode(model: NativeModel, kind: str) -> torch.Tensor:
    """Logits of three ragged rows, step by step after their prompts."""
    tokens = torch.randint(3, 160, (3, 20), generator=torch.Generator().manual_seed(0)).to(model.device)
    cache = model.new_cache(kind, rows=3, capacity=32)
    logits = [model.forward(tokens[:, :8], cache, counts=[8, 5, 7]).logits]
    logits += [model.forward(tokens[:, i : i + 1], cache).logits for i in range(8, 20)]
    return torch.stack(logits, 1).float().cpu()


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_decoding_equals_the_cpus(name: str, dtype: torch.dtype) -> None:
    expected = decode(load(name), "dynamic")
    model = load(name, device="cuda", dtype=dtype)
    assert model.device.type == "cuda" and model.dtype == dtype
    for kind in ("dynamic", "static"):
        assert error(decode(model, kind), expected) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_t5_equals_the_cpus(dtype: torch.dtype) -> None:
    source = torch.randint(3, 160, (2, 9), generator=torch.Generator().manual_seed(0))
    target = torch.randint(3, 160, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    expected = load("t5")(source, mask, target).logits
    found = load("t5", device="cuda", dtype=dtype)(source, mask, target).logits.float().cpu()
    assert error(found, expected) < CLOSE[dtype]


def test_moving_there_and_back() -> None:
    model = load("llama")
    before = decode(model, "dynamic")
    model.to("cuda", torch.bfloat16)
    assert decode(model, "dynamic").isfinite().all()
    saved = load("llama", device="cuda")
    assert saved.dtype == torch.float32  # as the checkpoint says
    saved.to("cpu")
    assert torch.equal(decode(saved, "dynamic"), before)


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
def test_mamba_equals_the_cpus(dtype: torch.dtype) -> None:
    expected = decode(load("mamba"), "mamba")
    model = load("mamba", device="cuda", dtype=dtype)
    assert error(decode(model, "mamba"), expected) < CLOSE[dtype]
    tokens = torch.randint(3, 160, (2, 150), generator=torch.Generator().manual_seed(1))  # several chunks of the scan
    found = model(tokens.cuda()).logits.float().cpu()
    assert error(found, load("mamba")(tokens).logits) < CLOSE[dtype]
    cache, clean = model.new_cache("mamba", rows=2), model.new_cache("mamba", rows=2)
    for one in (cache, clean):
        model.forward(tokens[:, :9].cuda(), one, counts=[9, 4])
    cache.begin_trial()
    model.forward(tokens[:, 9:15].cuda(), cache)
    cache.truncate([12, 4])
    model.forward(tokens[:, 9:12].cuda(), clean, counts=[3, 0])
    torch.testing.assert_close(cache.ssm_states, clean.ssm_states, rtol=1e-2, atol=1e-3)
    assert cache.lengths == clean.lengths
