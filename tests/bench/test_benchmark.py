"""What a benchmark can be asked, and the bytes that a step reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unspool
from unspool.bench import list_scenarios, make_benchmark
from unspool.bench.floor import count_step_bytes, find_floors, measure_bandwidth
from unspool.errors import ModelNotFoundError, SettingError

MODELS = Path(__file__).parents[1] / "conformance" / "goldens" / "models"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"new": 1}, "--new 1 is no whole number from 2 to 4096"),
        ({"new": 10**9}, "--new 1000000000"),
        ({"rounds": 0}, "--rounds 0"),
        ({"threads": -1}, "--threads -1"),
        ({"prompt": float("nan")}, "--prompt nan"),
        ({"batch": True}, "--batch True"),
        ({"only": ["decode", "sleep"]}, "--only 'sleep' is not known; use decode, prefill, beam, batch"),
        ({"only": []}, "--only names each of its words once"),
        ({"quantize": ["int8", "int8"]}, "--quantize names each of its words once"),
        ({"quantize": ["int3"]}, "--quantize 'int3' is not known"),
    ],
)
def test_absurd_numbers_and_names_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make_benchmark(str(MODELS / "llama"), **asked)


def test_a_model_is_found_before_anything_else() -> None:
    with pytest.raises(ModelNotFoundError):
        make_benchmark("no/such/folder")
    benchmark = make_benchmark(str(MODELS / "llama"), new=None, only=["beam", "decode"])
    assert benchmark.kind == "folder" and benchmark.location == MODELS / "llama" and benchmark.new == 64
    assert [scenario.label for scenario in list_scenarios(benchmark)] == ["decode ×1", "decode ×8", "beam 4"]
    assert (benchmark.longest, benchmark.most_rows) == (513, 8)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_step_reads_every_matrix_and_the_keys_in_view(name: str) -> None:
    model, config = (
        unspool.load(MODELS / name, device="cpu").model,
        json.loads((MODELS / name / "config.json").read_text()),
    )
    table = config["vocab_size"] * config["hidden_size"]
    is_tied = model.info.has_tied_embeddings
    matrices = 4 * (model.num_parameters() - (0 if is_tied else table))
    windows = [config["sliding_window"] if kind == "sliding" else 10**9 for kind in model.info.layer_kinds]
    keys = (
        sum(min(100, window) for window in windows) * 2 * config["num_key_value_heads"] * model.key_shape.head_dim * 4
    )
    assert count_step_bytes(model, 3, 100) == matrices + 3 * keys


def test_a_mamba_reads_its_matrices_whatever_the_context() -> None:
    model = unspool.load(MODELS / "mamba", device="cpu").model
    assert count_step_bytes(model, 1, 10) == count_step_bytes(model, 1, 1000) == 4 * model.num_parameters()


def test_floors_are_bytes_over_bandwidth() -> None:
    benchmark = make_benchmark(str(MODELS / "llama"), prompt=10, new=20, only=["decode", "prefill"])
    model = unspool.load(MODELS / "llama", device="cpu").model
    assert find_floors(model, list_scenarios(benchmark), 2e6) == {
        f"decode ×{rows}": count_step_bytes(model, rows, 20) / 2e3 for rows in (1, 8)
    }


def test_bandwidth_is_of_this_world() -> None:
    assert 1e8 < measure_bandwidth(torch.device("cpu")) < 1e13
