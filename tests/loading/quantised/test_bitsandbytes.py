"""Checkpoints that bitsandbytes saved: its own numbers to the bit, its matrices' tokens, and damaged ones refused.

The folders beside are models of transformers that bitsandbytes 0.50.2 quantised and saved; `matrices` are its own
dequantised numbers, logits and tokens those of a model of them in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conformance.cases import GOLDENS

import unspool
from unspool.errors import LoadError, UnsupportedError
from unspool.kernels.cpu import TableBlocks, find_library, quantise_table
from unspool.loading.source import open_source
from unspool.models.weights import Linear

HERE = Path(__file__).parent / "bitsandbytes"
CASES = ("one_layer", "fp4_f16", "int8_f16")
Tensors = dict[str, torch.Tensor]
MATRIX = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{MATRIX}.quant_state.bitsandbytes__nf4"


def rewrite(folder: Path, name: str, change: Callable[[Tensors], object]) -> Path:
    shutil.copytree(HERE / name, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_state(tensors: Tensors, **values: Any) -> None:
    state = json.loads(bytes(tensors[STATE].tolist())) | values
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_tokens_are_those_of_bitsandbytes(name: str) -> None:
    case = json.loads((HERE / f"{name}.json").read_text())
    recorded = np.load(HERE / f"{name}.npz")
    tensors = open_source(HERE / name).tensors
    for matrix in case["matrices"]:
        made = tensors.read(f"{matrix}.weight", dtype=torch.float32)
        assert np.array_equal(made.numpy(), recorded[matrix])
        assert torch.equal(tensors.read(f"{matrix}.weight", dtype=torch.float32, rows=(3, 9)), made[3:9])
        own = tensors.blocks(f"{matrix}.weight")
        assert (
            own is None if name == "int8_f16" else isinstance(own, TableBlocks) and torch.equal(own.dequantise(), made)
        )
    model = unspool.load(HERE / name, device="cpu").model
    if find_library() is not None and name != "int8_f16":
        assert model.weights_format == f"{name[:3] if name[1] == 'p' else 'nf4'} and float32" and model.is_quantised
    for place, prompt in enumerate(case["prompts"]):
        ids = torch.tensor([prompt["ids"]])
        answer = unspool.generate(
            model, ids, max_new_tokens=16, eos_token_id=None, return_dict_in_generate=True, output_logits=True
        )
        assert answer.sequences[0, ids.shape[1] :].tolist() == prompt["greedy"]
        expected = torch.from_numpy(recorded[f"logits.{place}"])
        assert (answer.logits[0][0] - expected).abs().max() < 1e-5 * expected.abs().max()


def test_codes_or_numbers_as_asked() -> None:
    plain = unspool.load(HERE / "one_layer", device="cpu", quantize=None).model
    packed = unspool.load(HERE / "one_layer", device="cpu", quantize="nf4").model
    assert not plain.is_quantised and packed.weights.layers[0].up.kind == "nf4"
    ids = torch.tensor([[5, 6, 7]])
    made = [unspool.generate(model, ids, max_new_tokens=8, eos_token_id=None) for model in (plain, packed)]
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({f"{MATRIX}.absmax": t[f"{MATRIX}.absmax"][:-1]}), "absmax"),
        (lambda t: write_state(t, blocksize=0), "blocks of 0"),
        (lambda t: write_state(t, blocksize=48), "blocks of 48"),
        (lambda t: write_state(t, nested_offset="a"), "nested_offset"),
        (lambda t: write_state(t, shape=[128, 128]), "codes"),
        (lambda t: write_state(t, shape=[-64, -64]), "shape"),
        (lambda t: write_state(t, shape=[64]), "shape"),
        (lambda t: write_state(t, quant_type="fp4"), "its name nf4"),
        (lambda t: t.update({MATRIX: t[MATRIX][:-9]}), "codes"),
        (lambda t: t.update({f"{MATRIX}.quant_map": t[f"{MATRIX}.quant_map"][:8]}), "quant_map"),
        (lambda t: t[f"{MATRIX}.nested_quant_map"].fill_(float("inf")), "not finite"),
        (lambda t: t[f"{MATRIX}.nested_absmax"].fill_(float("nan")), "NaN"),
        (lambda t: t.pop(f"{MATRIX}.nested_absmax"), "is missing"),
        (lambda t: t.pop(MATRIX), "codes are none"),
        (lambda t: t.update({STATE: torch.zeros(1 << 17, dtype=torch.uint8)}), "quant_state has the shape"),
    ],
)
def test_damaged_matrices_are_refused(tmp_path: Path, change: Callable[[Tensors], object], words: str) -> None:
    folder = rewrite(tmp_path / "model", "one_layer", change)
    with pytest.raises(LoadError, match=words):
        unspool.load(folder, device="cpu")


def test_matrices_of_8_bits_that_can_t_be_read(tmp_path: Path) -> None:
    module = MATRIX.removesuffix(".weight")
    short = rewrite(tmp_path / "a", "int8_f16", lambda t: t.update({f"{module}.SCB": t[f"{module}.SCB"][1:]}))
    with pytest.raises(LoadError, match="SCB has the shape"):
        unspool.load(short, device="cpu")
    turned = rewrite(
        tmp_path / "b", "int8_f16", lambda t: t.update({f"{module}.weight_format": torch.tensor(1, dtype=torch.uint8)})
    )
    with pytest.raises(UnsupportedError, match="matrix units"):
        unspool.load(turned, device="cpu")


def test_other_tables_and_blocks_become_plain_numbers(tmp_path: Path) -> None:
    """A table of its own is read, and not mistaken for nf4's."""

    def double(tensors: Tensors) -> None:
        tensors[f"{MATRIX}.quant_map"] *= 2

    folder = rewrite(tmp_path / "model", "one_layer", double)
    made, before = (
        open_source(where).tensors.read(MATRIX, dtype=torch.float32) for where in (folder, HERE / "one_layer")
    )
    assert torch.equal(made, 2 * before)
    assert open_source(folder).tensors.blocks(MATRIX) is None
    layer = unspool.load(folder, device="cpu").model.weights.layers[0]
    assert layer.qkv.weight.shape == (128, 64) and not hasattr(layer.qkv, "kind") and layer.up.kind == "nf4"


def test_a_config_that_says_so_and_weights_that_are_plain(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(HERE / "one_layer", folder)
    plain = open_source(folder).tensors
    save_file({name: plain.read(name, dtype=torch.float32) for name in plain.names()}, folder / "model.safetensors")
    with pytest.raises(LoadError, match="none of them is"):
        unspool.load(folder, device="cpu")


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "t5"])
@pytest.mark.parametrize("quantize", ["nf4", "fp4-double"])
def test_numbers_of_a_plain_checkpoint_become_codes(name: str, quantize: str) -> None:
    """A model of codes says what a model of the numbers says that they stand for; the rest stays as it is."""
    folder = GOLDENS / "models" / name
    packed = unspool.load(folder, device="cpu", quantize=quantize).model
    kind, _, rest = quantize.partition("-")
    tensors = open_source(folder).tensors
    down = {
        "gpt2": "transformer.h.0.mlp.c_proj.weight",
        "gpt_neox": "gpt_neox.layers.0.mlp.dense_4h_to_h.weight",
        "llama": "model.layers.0.mlp.down_proj.weight",
        "t5": "decoder.block.0.layer.2.DenseReluDense.wo.weight",
    }[name]
    weights = packed.weights.decoder if name == "t5" else packed.weights
    layers = weights.layers
    number = tensors.read(down, dtype=torch.float32)
    expected = quantise_table(number.t() if name == "gpt2" else number, kind, is_nested=bool(rest)).dequantise()  # type: ignore[arg-type]
    assert layers[0].down.kind == kind and torch.equal(layers[0].down.weight, expected)
    assert packed.get_input_embeddings().weight.dtype == torch.float32
    ids = torch.tensor([[5, 6, 7, 8]])
    common: dict[str, Any] = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    made = unspool.generate(packed, ids, **common)
    for holder in layers:
        for part in ("qkv", "out", "up", "down"):
            one = getattr(holder, part)
            setattr(holder, part, Linear(one.weight, one.bias))
    packed._refresh()
    plain = unspool.generate(packed, ids, **common)
    assert torch.equal(made.sequences, plain.sequences)
    assert torch.allclose(torch.stack(made.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4)
