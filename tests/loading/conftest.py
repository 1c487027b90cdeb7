from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

GGML_IDS = {kind.name: int(kind) for kind in gguf.GGMLQuantizationType}


def pack_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pack_value(value: object) -> bytes:
    """A metadata value with its type, as GGUF stores it."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + pack_string(value)
    assert isinstance(value, list)
    items = [pack_value(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def build_gguf(
    metadata: dict[str, object] | None = None,
    tensors: list[tuple[str, tuple[int, ...], int, bytes]] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    offsets: list[int] | None = None,
    alignment: int = 32,
    extra_keys: bytes = b"",
) -> bytes:
    """The bytes of a GGUF file by hand; tensors are (name, ggml's dimensions, type id, data)."""
    metadata = {"general.architecture": "llama"} if metadata is None else metadata
    tensors = [] if tensors is None else tensors
    out = magic + struct.pack("<I", version)
    out += struct.pack("<Q", len(tensors) if num_tensors is None else num_tensors)
    out += struct.pack("<Q", len(metadata) if num_keys is None else num_keys)
    out += b"".join(pack_string(key) + pack_value(value) for key, value in metadata.items()) + extra_keys
    data = b""
    for index, (name, dimensions, kind, content) in enumerate(tensors):
        data += b"\0" * (-len(data) % alignment)
        out += pack_string(name) + struct.pack("<I", len(dimensions))
        out += b"".join(struct.pack("<Q", dimension) for dimension in dimensions)
        out += struct.pack("<IQ", kind, len(data) if offsets is None else offsets[index])
        data += content
    return out + b"\0" * (-len(out) % alignment) + data


@pytest.fixture
def gguf_bytes() -> Callable[..., bytes]:
    return build_gguf


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    def write(*args: object, **kwargs: object) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(build_gguf(*args, **kwargs))
        return path

    return write


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little file of every kind of metadata, made with the gguf package."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_uint64("big", 2**40)
    writer.add_int8("little", -3)
    writer.add_float64("double", 0.1)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "é", "▁hello", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0, 0.0])
    writer.add_array("flags", [True, False, True])
    writer.add_eos_token_id(2)
    numbers = np.random.default_rng(0)
    writer.add_tensor("plain", numbers.standard_normal((3, 5)).astype(np.float32))
    writer.add_tensor("half", numbers.standard_normal((2, 4, 3)).astype(np.float16))
    writer.add_tensor("vector", numbers.standard_normal(7).astype(np.float32))
    for kind in ("Q8_0", "Q4_1"):
        quantised = gguf.quants.quantize(
            numbers.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType[kind]
        )
        writer.add_tensor(kind.lower(), quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def default_model(default_model_file: Path) -> Path:
    """The default model's file."""
    return default_model_file


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(4, generator=generator).to(torch.bfloat16),
        "c": torch.randn(2, 3, 4, generator=generator).to(torch.float16),
        "steps": torch.arange(6),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
