"""Checkpoints that other tools quantised, against what those tools make of them (goldens/README.md)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import unspool
from unspool.errors import LoadError, UnspoolError, UnsupportedError
from unspool.loading.source import open_source

GOLDENS = Path(__file__).parent / "goldens"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
INTEGERS = [name for name in CASES if "fp8" not in name]
Tensors = dict[str, torch.Tensor]


def read_matrices(case: str) -> Tensors:
    with np.load(GOLDENS / case / "matrices.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file.files if not name.startswith("logits")}


@pytest.mark.parametrize("case", CASES)
def test_every_matrix_is_what_the_tool_makes_of_it(case: str) -> None:
    tensors = open_source(GOLDENS / case).tensors
    for module, expected in read_matrices(case).items():
        name = f"{module}.weight"
        found = tensors.read(name, dtype=torch.float32)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        rows = tensors.read(name, dtype=torch.float32, rows=(1, 3))
        assert torch.equal(rows, found[1:3])
        out = torch.empty(found.shape[::-1])
        tensors.copy_into(name, out, transpose=True)
        assert torch.equal(out, found.t())


@pytest.mark.parametrize("case", CASES)
def test_plain_numbers_give_the_logits_and_the_tokens(case: str) -> None:
    lm = unspool.load(GOLDENS / case, quantize=None)
    with np.load(GOLDENS / case / "matrices.npz") as file:
        for place, prompt in enumerate(json.loads((GOLDENS / case / "prompts.json").read_text())):
            ids = torch.tensor([prompt["ids"]])
            logits = lm.model(ids).logits[0, -1]
            expected = torch.from_numpy(file[f"logits.{place}"])
            assert (logits - expected).abs().max() < 3e-6 * expected.abs().max()
            if place == 0:
                tokens = unspool.generate(lm.model, ids, max_new_tokens=len(prompt["greedy"]), eos_token_id=None)
                assert tokens[0, ids.shape[1] :].tolist() == prompt["greedy"]


@pytest.mark.parametrize("case", INTEGERS)
def test_bits_are_kept_where_products_read_them(case: str) -> None:
    tensors = open_source(GOLDENS / case).tensors
    bits = 8 if "8" in case.partition("_g")[0] else 4
    for module, expected in read_matrices(case).items():
        blocks = tensors.blocks(f"{module}.weight")
        if blocks is None:
            assert any(word in case for word in ("desc_act", "actorder", "gpt2", "asym_v2"))
            continue
        assert blocks.kind == f"int{bits}"
        # A minimum is rounded to float16: by a 2,048th of itself, and it is at most 16 steps.
        step = expected.abs().amax()
        assert (blocks.dequantise() - expected).abs().max() <= step * 2**-10
    lm = unspool.load(GOLDENS / case)
    assert f"int{bits}" in repr(lm) or "int8" in repr(lm)


def write_case(case: str, folder: Path, change: Callable[[dict[str, Any], Tensors], None]) -> Path:
    """A copy of a case whose config and tensors were changed."""
    shutil.copytree(GOLDENS / case, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def setting(**values: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, _tensors: config["quantization_config"].update(values)


def scheme(**values: Any) -> Callable[[dict[str, Any], Tensors], None]:
    def change(config: dict[str, Any], _tensors: Tensors) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(values)

    return change


def tensor(part: str, made: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[dict[str, Any], Tensors], None]:
    def change(_config: dict[str, Any], tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith(part))
        found = made(tensors.pop(name))
        if found is not None:
            tensors[name] = found

    return change


def put(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(found: torch.Tensor) -> torch.Tensor:
        found.view(-1)[0] = value
        return found

    return make


SOUND_GPTQ, SOUND_AWQ, SOUND_CT = "gptq_w4_g64_asym", "awq_g32", "ct_qwen2_w4a16_g32_asym"
DAMAGE = {
    "bits that sizes deny": (SOUND_GPTQ, setting(bits=8), "8 bits"),
    "three bits": (SOUND_GPTQ, setting(bits=3), "bits=3"),
    "bits that are no number": (SOUND_GPTQ, setting(bits="4"), "bits='4'"),
    "an unknown layout": (SOUND_GPTQ, setting(checkpoint_format="marlin"), "marlin"),
    "another group size": (SOUND_GPTQ, setting(group_size=32), "qzeros has the shape"),
    "a group size beyond reason": (SOUND_GPTQ, setting(group_size=-5), "group_size=-5"),
    "settings for some modules": (SOUND_GPTQ, setting(dynamic={"+:down": {"bits": 8}}), "dynamic"),
    "a scale that is NaN": (SOUND_GPTQ, tensor(".scales", put(float("nan"))), "NaN"),
    "an infinite scale": (SOUND_GPTQ, tensor(".scales", put(float("inf"))), "not finite"),
    "no zero points": (SOUND_GPTQ, tensor(".qzeros", lambda found: None), "qzeros is missing"),
    "no words": (SOUND_GPTQ, tensor(".qweight", lambda found: None), "which the config implies"),
    "a group that is not there": (SOUND_GPTQ, tensor(".g_idx", put(1000)), "names groups"),
    "a group below all": (SOUND_GPTQ, tensor(".g_idx", put(-1)), "names groups"),
    "groups of too few columns": (SOUND_GPTQ, tensor(".g_idx", lambda found: found[1:]), "g_idx has"),
    "words of another kind": (SOUND_GPTQ, tensor(".qweight", lambda found: found.float()), "stored as F32"),
    "a matrix as a vector": (SOUND_GPTQ, tensor(".qweight", lambda found: found.flatten()), "dimensions"),
    "AWQ for vectors": (SOUND_AWQ, setting(version="gemv"), "gemv"),
    "AWQ of 8 bits": (SOUND_AWQ, setting(bits=8), "bits=8"),
    "AWQ without zero points": (SOUND_AWQ, setting(zero_point=False), "zero_point"),
    "a scheme of 5 bits": (SOUND_CT, scheme(num_bits=5), "num_bits=5"),
    "true for a number of bits": (SOUND_CT, scheme(num_bits=True), "num_bits=True"),
    "an unknown kind of numbers": (SOUND_CT, scheme(type="complex"), "complex"),
    "groups that sizes deny": (SOUND_CT, scheme(group_size=64), "no scheme"),
    "zeros that are not there": (SOUND_CT, tensor(".weight_zero_point", lambda found: None), "no weight_zero_point"),
    "a shape that lies": (SOUND_CT, tensor(".weight_shape", lambda found: 2 * found), "weight_shape says"),
    "a negative shape": (SOUND_CT, tensor(".weight_shape", lambda found: -found), "weight_shape says"),
    "too few words": (SOUND_CT, tensor(".weight_packed", lambda found: found[:, 1:]), "no scheme"),
    "an unknown format": (SOUND_CT, setting(format="marlin-24"), "marlin-24"),
    "weights with a rotation": (SOUND_CT, setting(transform_config={"u": 1}), "transform_config"),
    "groups of modules that are a list": (SOUND_CT, setting(config_groups=[]), "config_groups"),
    "blocks beyond reason": ("fp8_llama_short_blocks", setting(weight_block_size=[1 << 40, -1]), "weight_block_size"),
    "blocks that factors deny": ("fp8_llama_short_blocks", setting(weight_block_size=[64, 64]), "factors"),
    "an fp8 factor that is NaN": ("fp8_llama_short_blocks", tensor("scale_inv", put(float("nan"))), "NaN"),
    "an fp8 number that is NaN": (
        "fp8_llama_short_blocks",
        tensor("q_proj.weight", lambda found: found.view(torch.uint8).fill_(127).view(torch.float8_e4m3fn)),
        "NaN",
    ),
    "another fp8": ("fp8_llama_short_blocks", setting(fmt="e5m2"), "e5m2"),
    "an unknown method": (SOUND_GPTQ, setting(quant_method="quip"), "quip"),
    "nothing quantised": (SOUND_GPTQ, setting(quant_method="fp8"), "none of them is"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_does_not_belong_together_is_refused(name: str, tmp_path: Path) -> None:
    case, change, says = DAMAGE[name]
    folder = write_case(case, tmp_path / "model", change)
    with pytest.raises((LoadError, UnsupportedError), match=says):
        unspool.load(folder)


def test_old_files_have_their_settings_beside_the_config(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        method = config.pop("quantization_config")
        old = {key: method[key] for key in ("bits", "group_size", "desc_act", "sym")}
        (tmp_path / "model" / "quantize_config.json").write_text(json.dumps(old))

    folder = write_case("gptq_w4_g32_no_g_idx", tmp_path / "model", change)
    name = "model.layers.0.self_attn.q_proj.weight"
    found = open_source(folder).tensors.read(name, dtype=torch.float32)
    assert torch.equal(found, read_matrices("gptq_w4_g32_no_g_idx")[name.removesuffix(".weight")])


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_another_form_can_be_asked_for(quantize: str) -> None:
    exact = unspool.load(GOLDENS / "fp8_llama_short_blocks", quantize=None)
    packed = unspool.load(GOLDENS / "fp8_llama_short_blocks", quantize=quantize)
    ids = torch.arange(3, 20)[None]
    wanted, found = exact.model(ids).logits, packed.model(ids).logits
    assert 0 < (found - wanted).norm() < (0.05 if quantize == "int8" else 0.4) * wanted.norm()


def test_a_family_that_transformers_runs_refuses_them(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config.update(architectures=["ElsewhereForCausalLM"], model_type="elsewhere")

    with pytest.raises(UnspoolError, match="quantised by gptq"):
        unspool.load(write_case(SOUND_GPTQ, tmp_path / "model", change))


@pytest.mark.parametrize("case", [SOUND_GPTQ, SOUND_AWQ, SOUND_CT, "ct_w8a8_dynamic", "fp8_llama_short_blocks"])
def test_damaged_headers_and_words_never_end_in_another_error(case: str, tmp_path: Path) -> None:
    whole = bytearray((GOLDENS / case / "model.safetensors").read_bytes())
    generator = np.random.default_rng(5)
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / case, folder)
    length = int.from_bytes(whole[:8], "little")
    for turn in range(12):
        data = bytearray(whole)
        for _ in range(3):
            place = int(generator.integers(8, 8 + length if turn % 2 else len(data)))
            data[place] ^= 1 << int(generator.integers(8))
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(data)
        with suppress(LoadError, UnsupportedError):
            unspool.load(folder)
