"""Kernels that are compiled while weights are read: all that a first call of one row launches, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import unspool
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are compiled for a GPU"),
]

# Sizes that no other test has, so that nothing was compiled in this process before.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 208, "intermediate_size": 304,
    "num_hidden_layers": 3, "num_attention_heads": 13, "num_key_value_heads": 13, "vocab_size": 1337,
    "max_position_embeddings": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    from triton import knobs

    names: list[str] = []
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda **told: names.append(told["src"].name)
    yield names
    knobs.compilation.listener = before


def make_tensors() -> dict[str, torch.Tensor]:
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {"model.embed_tokens": (CONFIG["vocab_size"], hidden), "model.norm": (hidden,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        shapes |= {start + name: (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {start + f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {start + f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[start + "mlp.down_proj"] = (hidden, inner)
    return {f"{name}.weight": torch.randn(shape) * 0.05 for name, shape in shapes.items()}


def test_a_first_call_compiles_nothing_itself(compiled: list[str]) -> None:
    from unspool.kernels.gpu.launching import can_compile_ahead, wait_for_compilers

    if not can_compile_ahead():
        pytest.skip("this Triton can't compile ahead")
    torch.cuda.init()
    model = build_model(CONFIG, MemorySource(make_tensors()), device="cuda", dtype=torch.bfloat16)
    for _ in range(200):  # the thread that starts them imports kernels first
        wait_for_compilers()
        if len(compiled) >= 12:
            break
        torch.cuda._sleep(20_000_000)
        torch.cuda.synchronize()
    wait_for_compilers()
    ahead = set(compiled)
    assert {"_rotate", "_gate", "_attend", "_multiply_row", "_embed", "_find_turns", "_take_highest"} <= ahead
    compiled.clear()
    ids = torch.randint(3, 1337, (1, 37)).cuda()
    call = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    greedy = unspool.generate(model, ids, **call, do_sample=False)
    assert compiled == []
    unspool.generate(model, ids, **call, do_sample=True, seed=3)
    assert sorted(compiled) == sorted(set(compiled)) and "_draw" in compiled  # each of them once
    compiled.clear()
    unspool.generate(model, ids[:, :16], **call, do_sample=True, seed=4)
    assert compiled == []
    assert torch.equal(greedy, unspool.generate(model, ids, **call, do_sample=False))
