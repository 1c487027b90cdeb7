"""Kernels that are compiled while weights are read: all that a first call of one row launches, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    assert {"_attend", "_multiply_row"} <= ahead  # other tests may have had the rest compiled, for their sizes
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


def make_other(kind: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the weights of a model that is no plain decoder, of sizes that no other test has."""
    transformers = pytest.importorskip("transformers")
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 0}
    sizes: dict[str, dict[str, Any]] = {
        "T5": {"d_model": 176, "d_kv": 16, "d_ff": 272, "num_layers": 2, "num_heads": 11},
        "Bart": {
            "d_model": 176, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 11,
            "decoder_attention_heads": 11, "encoder_ffn_dim": 272, "decoder_ffn_dim": 272,
        },
        "Mamba": {"hidden_size": 176, "num_hidden_layers": 2, "state_size": 16},
        "Mamba2": {
            "hidden_size": 176, "num_hidden_layers": 2, "num_heads": 22, "head_dim": 16, "n_groups": 2,
            "state_size": 16, "chunk_size": 16,
        },
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(vocab_size=1341, **sizes[kind], **ids)
    name = f"{kind}ForConditionalGeneration" if kind in ("T5", "Bart") else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config)
    held = dict(model.state_dict()) | dict(model.named_parameters())
    tied = [one for one in held if one not in dict(model.named_parameters()) and "bias" not in one]
    return {**config.to_dict(), **ids, "architectures": [name]}, {
        one: tensor.detach() for one, tensor in held.items() if one not in tied
    }


@pytest.mark.parametrize("kind", ["T5", "Bart", "Mamba", "Mamba2"])
def test_a_first_step_of_another_model_compiles_nothing_itself(kind: str, compiled: list[str]) -> None:
    from unspool.kernels.gpu.launching import can_compile_ahead, wait_for_compilers

    if not can_compile_ahead():
        pytest.skip("this Triton can't compile ahead")
    torch.cuda.init()
    config, tensors = make_other(kind)
    model = build_model(config, MemorySource(tensors), device="cuda", dtype=torch.bfloat16)
    wait_for_compilers()
    assert "_multiply_row" in compiled
    compiled.clear()
    ids = torch.randint(3, 1341, (1, 37)).cuda()
    call: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    if kind in ("T5", "Bart"):
        call["decoder_start_token_id"] = 0
    unspool.generate(model, ids, **call)
    assert compiled == []


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


def test_threads_that_load_launchers_get_their_own() -> None:
    """As Triton loads them, six threads took another's function some forty times in this test."""
    from triton.runtime.build import compile_module_from_src

    import unspool.kernels.gpu.launching  # noqa: F401 - which has them loaded in turn

    def load(number: int) -> int:
        return int(compile_module_from_src(LAUNCHER % number, "__triton_launcher").launch())

    assert [load(number) for number in range(6)] == list(range(6))
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(load, list(range(6)) * 400))
    finally:
        sys.setswitchinterval(usual)
    assert found == list(range(6)) * 400
