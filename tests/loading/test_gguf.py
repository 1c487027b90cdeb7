from __future__ import annotations

import gc
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loading.damage import check_damaged

from unspool.errors import LoadError, UnsupportedError
from unspool.loading.gguf import GGUFFile

F32, Q4_1 = 0, 3


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_metadata_and_tensors_are_those_of_the_gguf_package(small_gguf: Path) -> None:
    ours, theirs = GGUFFile(small_gguf), gguf.GGUFReader(small_gguf)
    assert ours.architecture == "llama"
    assert ours.metadata == {
        key: value.contents() for key, value in theirs.fields.items() if not key.startswith("GGUF.")
    }
    assert ours.metadata["tokenizer.ggml.tokens"] == ["<s>", "é", "▁hello", ""]
    assert ours.names() == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.info(tensor.name)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert info.shape == expected.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert (info.stored, info.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert np.array_equal(ours.read(tensor.name, dtype=torch.float32).numpy(), expected)
        assert np.array_equal(ours.raw(tensor.name).numpy(), tensor.data.view(np.uint8).ravel())


def test_version_2_reads_the_same(write_gguf: Callable[..., Path]) -> None:
    file = GGUFFile(write_gguf(tensors=[("w", (2,), F32, floats(1, 2))], version=2))
    assert file.read("w", dtype=torch.float32).tolist() == [1, 2]


def test_own_alignment_is_kept(write_gguf: Callable[..., Path]) -> None:
    tensors = [("a", (1,), F32, floats(1)), ("b", (2,), F32, floats(2, 3))]
    path = write_gguf({"general.alignment": 8, "nested": [[1, 2], [3]]}, tensors, alignment=8)
    file = GGUFFile(path)
    assert file.metadata["nested"] == [[1, 2], [3]]
    assert file.read("b", dtype=torch.float32).tolist() == [2, 3]


def test_every_truncation_is_told_with_the_bytes_missing(small_gguf: Path, tmp_path: Path) -> None:
    whole = small_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(1, len(whole)):
        path.unlink(missing_ok=True)
        path.write_bytes(whole[:size])
        with pytest.raises(LoadError, match=r"missing|begins with"):
            GGUFFile(path)
    missing = GGUFFile(small_gguf).info("q4_1").nbytes
    path.unlink()
    path.write_bytes(whole[: len(whole) - 100])
    with pytest.raises(LoadError, match=r"its tensors need \d+: (\d+) bytes are missing") as caught:
        GGUFFile(path)
    assert missing > 100 and "100 bytes" in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(LoadError, match="is empty"):
        GGUFFile(tmp_path / "empty.gguf")
    with pytest.raises(LoadError, match="can't be read"):
        GGUFFile(tmp_path)


W = ("w", (2,), F32, floats(1, 2))
DAMAGED: dict[str, tuple[dict[str, object], str]] = {
    "magic": ({"magic": b"GGML"}, "begins with b'GGML'"),
    "many keys": ({"num_keys": 2**60}, "metadata keys it announces"),
    "many tensors": ({"num_tensors": 2**63}, "tensors it announces"),
    "key twice": (
        {"num_keys": 2, "extra_keys": struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<II", 4, 1)},
        "key 'general.architecture' occurs twice",
    ),
    "long key": ({"num_keys": 2, "extra_keys": struct.pack("<Q", 10**6) + b"x" * 64}, "1000000 bytes long"),
    "unknown value type": (
        {"num_keys": 2, "extra_keys": struct.pack("<Q", 1) + b"x" + struct.pack("<IQQ", 99, 1, 1)},
        "unknown type 99",
    ),
    "long array": (
        {"num_keys": 2, "extra_keys": struct.pack("<Q", 1) + b"x" + struct.pack("<IIQ", 9, 4, 2**61)},
        "at least .* more are missing",
    ),
    "long string array": (
        {"num_keys": 2, "extra_keys": struct.pack("<Q", 1) + b"x" + struct.pack("<IIQ", 9, 8, 2**61)},
        "strings",
    ),
    "string array that ends early": (
        {"num_keys": 2, "extra_keys": struct.pack("<Q", 1) + b"x" + struct.pack("<IIQQ", 9, 8, 2, 9) + b"y" * 12},
        "string 1 of the array 'x'",
    ),
    "bad utf-8": (
        {"num_keys": 2, "extra_keys": struct.pack("<Q", 1) + b"x" + struct.pack("<IQ", 8, 2) + b"\xff\xff"},
        "not UTF-8",
    ),
    "bad utf-8 in an array": (
        {"num_keys": 2, "extra_keys": struct.pack("<Q", 1) + b"x" + struct.pack("<IIQQ", 9, 8, 1, 1) + b"\xff"},
        "string 0 of the array 'x' is not UTF-8",
    ),
    "bad bool": (
        {"num_keys": 2, "extra_keys": struct.pack("<Q", 1) + b"x" + struct.pack("<IB", 7, 5)},
        "true or false",
    ),
    "nan": ({"metadata": {"x": float("nan")}}, "holds NaN"),
    "deep arrays": ({"metadata": {"x": [[[[[1]]]]]}}, "more than 4 deep"),
    "alignment": ({"metadata": {"general.alignment": 24}}, "power of two"),
    "alignment zero": ({"metadata": {"general.alignment": 0}}, "power of two"),
    "alignment text": ({"metadata": {"general.alignment": "32"}}, "power of two"),
    "no dimensions": ({"tensors": [("w", (), F32, floats(1))]}, "0 dimensions"),
    "many dimensions": ({"tensors": [("w", (1,) * 5, F32, floats(1))]}, "5 dimensions"),
    "dimension zero": ({"tensors": [("w", (2, 0), F32, b"")]}, r"shape \[0, 2\]"),
    "huge dimensions": ({"tensors": [("w", (2**63, 2**63), F32, floats(1))]}, "bytes are missing"),
    "wrap-around": ({"tensors": [("w", (2**32, 2**32), F32, floats(1))]}, "bytes are missing"),
    "part of a block": ({"tensors": [("w", (48,), Q4_1, b"\0" * 40)]}, "not whole blocks of Q4_1"),
    "tensor twice": ({"tensors": [W, W]}, "tensor 'w' occurs twice"),
    "crooked offset": ({"tensors": [W], "offsets": [4]}, "no multiple of the alignment 32"),
    "far offset": ({"tensors": [W], "offsets": [2**40]}, "bytes are missing"),
    "overlap": ({"tensors": [W, ("v", (2,), F32, floats(1, 2))], "offsets": [0, 0]}, "overlaps"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers_are_refused(case: str, write_gguf: Callable[..., Path]) -> None:
    arguments, message = DAMAGED[case]
    with pytest.raises(LoadError, match=message):
        GGUFFile(write_gguf(**arguments))


UNSUPPORTED: dict[str, tuple[dict[str, object], str]] = {
    "version 1": ({"version": 1}, "version 1"),
    "version 4": ({"version": 4}, "version 4"),
    "big endian": ({"version": 3 << 24}, "big-endian"),
    "split": ({"metadata": {"split.count": 3}}, "one of 3 parts"),
    "NVFP4": ({"tensors": [("blk.0.w", (64,), 40, b"\0" * 36)]}, "'blk.0.w' is stored as NVFP4.*Q6_K"),
    "unknown": ({"tensors": [("w", (256,), 99, b"")]}, "unknown GGUF type 99"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_known_and_not_read_is_named(case: str, write_gguf: Callable[..., Path]) -> None:
    arguments, message = UNSUPPORTED[case]
    with pytest.raises(UnsupportedError, match=message):
        GGUFFile(write_gguf(**arguments))


def test_a_file_without_architecture_says_so(write_gguf: Callable[..., Path]) -> None:
    file = GGUFFile(write_gguf({"x": 1}))
    with pytest.raises(LoadError, match=r"general\.architecture"):
        _ = file.architecture


def check_fuzzed(data: bytes, folder: Path) -> None:
    check_damaged(data, folder / "fuzzed.gguf", GGUFFile)


@settings(max_examples=120)
@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes_never_surprise(small_gguf: Path, flips: list[tuple[int, int]]) -> None:
    data = bytearray(small_gguf.read_bytes())
    for at, value in flips:
        data[at % len(data)] = value
    check_fuzzed(bytes(data), small_gguf.parent)


@settings(max_examples=80)
@given(at=st.integers(8, 900), value=st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]), size=st.integers(0))
def test_huge_numbers_and_cuts_never_surprise(small_gguf: Path, at: int, value: int, size: int) -> None:
    data = small_gguf.read_bytes()
    data = data[:at] + struct.pack("<Q", value) + data[at + 8 :]
    check_fuzzed(data[: 1 + size % len(data)] if size % 3 == 0 else data, small_gguf.parent)


@settings(max_examples=60)
@given(tail=st.binary(max_size=300))
def test_random_headers_never_surprise(small_gguf: Path, tail: bytes) -> None:
    check_fuzzed(b"GGUF" + struct.pack("<IQQ", 3, len(tail) % 5, len(tail) % 7) + tail, small_gguf.parent)


def test_a_large_vocabulary_is_parsed_quickly(tmp_path: Path, gguf_bytes: Callable[..., bytes]) -> None:
    tokens = [f"token {index}" for index in range(150_000)]
    path = tmp_path / "large.gguf"
    path.write_bytes(gguf_bytes({"tokenizer.ggml.tokens": tokens, "scores": [0.5] * len(tokens)}))
    started = time.process_time()
    file = GGUFFile(path)
    assert time.process_time() - started < 1.0
    assert file.metadata["tokenizer.ggml.tokens"] == tokens


def test_views_outlive_the_file(small_gguf: Path) -> None:
    file = GGUFFile(small_gguf)
    expected = file.read("plain", dtype=torch.float32).clone()
    view, raw = file.read("plain", dtype=torch.float32), file.raw("q8_0")
    before = raw.clone()
    file.close()
    assert file.names() == [] and "plain" not in file
    del file
    gc.collect()
    assert torch.equal(view, expected) and torch.equal(raw, before)
