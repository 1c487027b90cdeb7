"""What a benchmark can be asked, and the bytes that a step reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unspool
from unspool.bench import check_sizes, list_scenarios, make_benchmark
from unspool.bench.floor import count_step_bytes, find_floors, measure_bandwidth
from unspool.errors import ModelNotFoundError, SettingError
from unspool.models.weights import iterate_tensors
from unspool.protocols import FeatureShape, ModelInfo

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
    assert (benchmark.longest, benchmark.most_rows) == (128, 8)


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


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_a_step_of_an_encoder_decoder_reads_its_decoder(name: str) -> None:
    """What the encoder and the source's keys were made with was read before the first step."""
    model = unspool.load(MODELS / name, device="cpu").model
    weights = model.weights
    once = [weights.encoder, *(cross.kv for cross in weights.decoder.crosses), weights.decoder.embedding]
    once += [weights.decoder.positions, weights.decoder.biases, weights.decoder.embedding_norm]
    held = {one.data_ptr(): one.nbytes for one in iterate_tensors(weights)}
    for one in iterate_tensors(once):
        held.pop(one.data_ptr(), None)
    held |= {one.data_ptr(): one.nbytes for one in iterate_tensors(weights.head)}
    shape = model.key_shape
    keys = 100 * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 4
    with model.without_paths("library"):
        assert count_step_bytes(model, 3, 100) == sum(held.values()) + 3 * keys


def test_an_encoders_prompt_takes_no_room_from_the_text() -> None:
    pair = ModelInfo("pair", 9, 8, 1, 1, max_context=10, is_encoder_decoder=True, longest_source=40)
    check_sizes(pair, 40, 9, 49, "--new")
    with pytest.raises(SettingError, match="the longest text would have 11 tokens, and the model's context ends at 10"):
        check_sizes(pair, 40, 10, 50, "--new")
    with pytest.raises(SettingError, match="prompt would have 41 tokens, and the model's encoder reads at most 40"):
        check_sizes(pair, 41, 9, 50, "--new")
    with pytest.raises(SettingError, match="context ends at 10; lower --new"):
        check_sizes(replace(pair, is_encoder_decoder=False), 2, 9, 11, "--new")
    with pytest.raises(SettingError, match="a pair model reads sound"):
        check_sizes(replace(pair, features=FeatureShape(80, 30, 15)), 2, 2, 4, "--new")


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
