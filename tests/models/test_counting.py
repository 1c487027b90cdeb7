"""Parameters are counted as the checkpoint has them, however they are held."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loading.checkpoints import write_checkpoint
from tests.models.conftest import CASES, make_pair

import unspool
from unspool.kernels.cpu.blocks import quantise_rows
from unspool.models.counting import count_parameters, iterate_held, name_formats
from unspool.models.registry import build_model
from unspool.models.weights import (
    Linear,
    MemorySource,
    MxLinear,
    PackedLinear,
    WordEmbedding,
    WordLinear,
)


def split(formats: str) -> list[str]:
    return formats.replace(" and ", ", ").split(", ")


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "gpt2", "qwen2_moe", "gpt_oss", "falcon-40b"])
def test_packed_models_have_the_references_parameters(name: str, tmp_path: Path) -> None:
    pair = make_pair(CASES[name], tmp_path)
    assert pair.native.num_parameters() == pair.reference.num_parameters()
    assert pair.native.weights_format == "float32"
    for packing, names in (("int8", "int8"), ("int4", "int4 and int8")):
        packed = build_model(pair.config, MemorySource(pair.weights), packing=packing)
        assert packed.num_parameters() == pair.reference.num_parameters()
        assert {*split(names)} <= {*split(packed.weights_format)}
        assert f"{packed.num_parameters():,} parameters, {packed.weights_format} weights, float32, cpu" in repr(packed)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_who_holds_a_model_says_how(name: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / name, name, torch.bfloat16)
    plain, packed, half = (
        unspool.load(path, quantize=None),
        unspool.load(path, quantize="int8"),
        unspool.load(path, quantize=None, dtype="bfloat16"),
    )
    counts = {lm.model.num_parameters() for lm in (plain, packed, half)}
    assert len(counts) == 1
    assert repr(plain).endswith(", float32, cpu)") and repr(half).endswith(", bfloat16, cpu)")
    assert ", int8" in repr(packed) and repr(packed).endswith(" weights, float32, cpu)")


def test_every_form_counts_its_numbers() -> None:
    weight, bias = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)), torch.zeros(40)
    four, eight = quantise_rows(weight, "int4"), quantise_rows(weight[:16], "int8")
    cpu = torch.device("cpu")
    words = torch.zeros(40, 8, dtype=torch.int32), torch.zeros(40, 2, dtype=torch.uint8)
    held: dict[str, Any] = {
        "float32": Linear(weight, bias),
        "int4": PackedLinear.of(four, bias=bias),
        "int4 and int8": PackedLinear.of(four, eight, bias=torch.zeros(56)),
        "int8": WordEmbedding.of(eight, cpu, torch.bfloat16),
        "fp8": WordLinear.round(weight, bias),
        "mxfp4": MxLinear(*words, torch.bfloat16, bias),
    }
    rows = dict.fromkeys(held, 40) | {"int4 and int8": 56, "int8": 16}
    for name, holder in held.items():
        assert is_dataclass(holder) and fields(holder)
        found = list(iterate_held([holder, holder]))  # a shared one is counted once
        expected = rows[name] * 64 + (0 if name == "int8" else rows[name])
        assert count_parameters(found) == expected, name
        assert {*split(name_formats(found)), "float32"} == {*split(name), "float32"}
