from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from unspool.loading.catalogue import find_entry
from unspool.loading.gguf import GGUFFile
from unspool.loading.source import open_source


def test_it_opens_quickly(default_model: Path) -> None:
    started = time.process_time()
    file = GGUFFile(default_model)
    assert time.process_time() - started < 1.0
    assert file.architecture == "llama"
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list) and len(tokens) == 49152 and tokens[1] == "<|im_start|>"


def test_its_metadata_and_tensors_are_those_of_the_gguf_package(default_model: Path) -> None:
    ours, theirs = GGUFFile(default_model), gguf.GGUFReader(default_model)
    for key, value in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == value.contents()
    assert ours.names() == [tensor.name for tensor in theirs.tensors]
    entry = find_entry("default")
    assert entry is not None
    assert sum(math.prod(ours.info(name).shape) for name in ours.names()) == entry.parameters
    for tensor in theirs.tensors[1::60]:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.read(tensor.name, dtype=torch.float32).numpy(), expected)
    embeddings = theirs.tensors[0]
    expected = gguf.quants.dequantize(embeddings.data[1000:1010], embeddings.tensor_type)
    found = ours.read("token_embd.weight", dtype=torch.float32, rows=(1000, 1010))
    assert np.array_equal(found.numpy(), expected)


def test_its_special_ids(default_model: Path) -> None:
    settings = open_source(default_model).generation_config
    assert settings == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "unk_token_id": 0}


MEASURE = """
import json, sys
import torch
from unspool.loading.gguf import GGUFFile

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

torch.zeros(1024, 1024).sum().item()  # let torch set itself up
before = peak()
file = GGUFFile(sys.argv[1])
weights = {}
for name in file.names():
    weights[name] = torch.empty(file.info(name).shape)
    file.copy_into(name, weights[name])
    file.release(name)
total = sum(weight.nbytes for weight in weights.values())
print(json.dumps({"weights": total, "extra": peak() - before - total}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
def test_loading_takes_little_more_memory_than_the_weights(default_model: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(default_model)]
    result = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert result["weights"] == 4 * 134_515_008
    assert result["extra"] < 0.2 * result["weights"]
