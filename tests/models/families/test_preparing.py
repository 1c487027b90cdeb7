"""Kernels of a model for a GPU are asked for before its weights are read, by a model without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.adapters.tiny import make

from unspool.models.families import entry
from unspool.models.paths.captured_ahead import META, StepModel
from unspool.models.registry import find_family
from unspool.models.weights import MemorySource, iterate_tensors

transformers = pytest.importorskip("transformers")


def make_object(name: str) -> Any:
    if name in ("bart", "t5"):
        return make(name)
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    if name == "Mamba2":
        sizes |= {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).eval()


@pytest.mark.parametrize("name", ["bart", "t5", "Mamba", "Mamba2"])
def test_a_step_is_prepared_for_a_gpu_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(entry, "prepare_step", lambda *given: asked.append(given))
    model = make_object(name)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    held = dict(model.state_dict())
    tensors = {one: held[one] for one in (dict(model.named_parameters()) | dict(model.named_buffers())) if one in held}
    family = find_family(config)
    assert family is not None
    family.build(config, MemorySource(tensors), is_gguf=False, device=torch.device("cpu"), dtype=torch.float32)
    assert asked == []
    family.prepare(config, MemorySource(tensors), torch.device("cuda", 0), torch.bfloat16)
    [(key, device, build)] = asked
    made = build()
    assert device == torch.device("cuda", 0) and isinstance(made, StepModel)
    assert {(tensor.device, tensor.dtype == torch.int64) for tensor in iterate_tensors(made.weights)} == {(META, False)}
    family.prepare(config, MemorySource(tensors), torch.device("cuda", 0), torch.bfloat16)
    family.prepare(config, MemorySource(tensors), torch.device("cuda", 0), torch.float16)
    assert asked[1][0] == key and asked[2][0] != key
