from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.loading.damage import check_damaged

from unspool.errors import LoadError, ModelNotFoundError, UnsupportedError
from unspool.loading.safetensors_files import INDEX_NAME, WEIGHTS_NAME, SafetensorsFiles


def write_header(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / WEIGHTS_NAME).write_bytes(struct.pack("<Q", size) + text + data)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_one_file_reads_back(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / WEIGHTS_NAME, metadata={"format": "pt"})
    files = SafetensorsFiles(tmp_path)
    assert files.metadata == {"format": "pt"}
    assert sorted(files.names()) == sorted(tensors)
    stored = {"a": "F32", "b": "BF16", "c": "F16", "steps": "I64", "scalar": "F32", "empty": "F32"}
    for name, tensor in tensors.items():
        info = files.info(name)
        assert (info.shape, info.stored, info.nbytes) == (tuple(tensor.shape), stored[name], tensor.nbytes)
        assert torch.equal(files.read(name, dtype=tensor.dtype), tensor)
        assert torch.equal(files.read(name, dtype=torch.float32), tensor.float())


def test_nothing_is_copied_where_nothing_is_converted(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    files = SafetensorsFiles(tmp_path)
    assert files.read("a", dtype=torch.float32).data_ptr() == files.raw("a").data_ptr()
    assert files.read("a", dtype=torch.float16).data_ptr() != files.raw("a").data_ptr()


def test_unaligned_data_reads_back(tmp_path: Path) -> None:
    header = json.dumps({"w": entry()}).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length, so that the numbers lie at an odd address
    write_header(tmp_path, header, struct.pack("<2f", 1, 2))
    assert SafetensorsFiles(tmp_path).read("w", dtype=torch.float32).tolist() == [1, 2]


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    names = list(tensors)
    weight_map = {}
    for index, part in enumerate((names[:3], names[3:])):
        shard = f"model-0000{index + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return weight_map


def test_shards_read_back(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_shards(tmp_path, tensors)
    files = SafetensorsFiles(tmp_path)
    assert files.names() == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(files.read(name, dtype=tensor.dtype), tensor)


def test_a_missing_shard_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_shards(tmp_path, tensors)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoadError, match=r"lacks model-00002-of-00002\.safetensors.*1 are missing"):
        SafetensorsFiles(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    weight_map = write_shards(tmp_path, tensors)
    weight_map["ghost"] = weight_map["a"]
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(LoadError, match="'ghost'"):
        SafetensorsFiles(tmp_path)


SHARDS_OUTSIDE = [
    "../model.safetensors",
    "a/../../model.safetensors",
    "/etc/model.safetensors",
    "C:\\model.safetensors",
    "..\\model.safetensors",
    "model.safetensors\0.safetensors",
    "pytorch_model.bin",
]


@pytest.mark.parametrize("shard", SHARDS_OUTSIDE)
def test_shards_stay_in_the_folder(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(LoadError, match="within the model's folder"):
        SafetensorsFiles(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"w": 3}, {"w": ["x"]}, {"w": None}])
def test_an_index_without_a_map_is_refused(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(LoadError, match="weight_map"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickles_are_refused_with_the_way_to_convert(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(LoadError, match="is a pickle") as caught:
        SafetensorsFiles(tmp_path)
    assert name in str(caught.value)
    assert "save_pretrained" in str(caught.value) and "save_file" in str(caught.value)


def test_an_empty_or_absent_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="holds no weights"):
        SafetensorsFiles(tmp_path)
    with pytest.raises(ModelNotFoundError, match="is not a folder"):
        SafetensorsFiles(tmp_path / "absent")


DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "not json": (b"{x", b"", "not valid JSON"),
    "not utf-8": (b"\xff\xfe", b"", "not valid JSON"),
    "a list": ([], b"", "an object was expected"),
    "nan": (b'{"w": NaN}', b"", "NaN"),
    "name twice": (b'{"w": {}, "w": {}}', b"", "'w' occurs twice"),
    "deep": (b'{"w": ' + b"[" * 50_000, b"", "nests too deeply|not valid JSON"),
    "long number": (b'{"w": ' + b"9" * 5_000 + b"}", b"", "not valid JSON"),
    "no object": ({"w": 3}, b"", "not described"),
    "no dtype": ({"w": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8), "no dtype"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8), "no valid shape"),
    "negative shape": ({"w": entry(shape=(-1, -2))}, bytes(8), "no valid shape"),
    "bool shape": ({"w": entry(shape=(True, 2))}, bytes(8), "no valid shape"),
    "huge shape": ({"w": entry(shape=(2**62, 4))}, bytes(8), "no valid shape"),
    "many dimensions": ({"w": entry(shape=(1,) * 99)}, bytes(8), "99 dimensions"),
    "three offsets": ({"w": entry(offsets=(0, 8, 16))}, bytes(8), "3 data_offsets"),
    "backwards": ({"w": entry(offsets=(8, 0))}, bytes(8), "takes -8 bytes"),
    "wrong size": ({"w": entry(shape=(3,))}, bytes(12), r"takes 8 bytes, where F32 of shape \[3\] takes 12"),
    "overlap": ({"w": entry(), "v": entry(offsets=(4, 12))}, bytes(12), "'v' overlaps"),
    "past the end": ({"w": entry(offsets=(8, 16))}, bytes(8), "8 bytes are missing"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers_are_refused(case: str, tmp_path: Path) -> None:
    header, data, message = DAMAGED[case]
    write_header(tmp_path, header, data)
    with pytest.raises(LoadError, match=message):
        SafetensorsFiles(tmp_path)


def test_header_lengths_are_checked_against_the_file(tmp_path: Path) -> None:
    write_header(tmp_path, {}, length=10**6)
    with pytest.raises(LoadError, match="ends within its header: 999998 bytes"):
        SafetensorsFiles(tmp_path)
    write_header(tmp_path, {}, length=2**63)
    with pytest.raises(LoadError, match=f"{2**63} bytes long"):
        SafetensorsFiles(tmp_path)


def test_other_dtypes_are_refused_by_name(tmp_path: Path) -> None:
    write_header(tmp_path, {"w": entry("F8_E5M2", (8,))}, bytes(8))
    with pytest.raises(UnsupportedError, match=r"'w' is stored as F8_E5M2.*BF16"):
        SafetensorsFiles(tmp_path)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("safetensors")
    path = folder / WEIGHTS_NAME
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}, path, metadata={"k": "v"})
    copy = folder / "whole"
    copy.write_bytes(path.read_bytes())
    return copy


def check_fuzzed(data: bytes, folder: Path) -> None:
    check_damaged(data, folder / WEIGHTS_NAME, lambda path: SafetensorsFiles(path.parent))


def test_every_truncation_is_told(small_file: Path) -> None:
    whole = small_file.read_bytes()
    for size in range(len(whole)):
        path = small_file.parent / WEIGHTS_NAME
        path.unlink(missing_ok=True)
        path.write_bytes(whole[:size])
        with pytest.raises(LoadError, match=r"missing|is empty"):
            SafetensorsFiles(small_file.parent)


@settings(max_examples=120)
@given(
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.none() | st.integers(0, 10**6),
)
def test_flips_and_cuts_never_surprise(small_file: Path, flips: list[tuple[int, int]], cut: int | None) -> None:
    data = bytearray(small_file.read_bytes())
    for at, value in flips:
        data[at % len(data)] = value
    check_fuzzed(bytes(data if cut is None else data[: cut % len(data)]), small_file.parent)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F8_E5M2", "nonsense"]) | JSON,
        "shape": st.lists(st.integers(-1, 2**70) | st.integers(0, 3), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 64), min_size=2, max_size=2) | JSON,
    },
)


@settings(max_examples=40)
@given(header=st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), ENTRY | JSON, max_size=4))
def test_any_header_never_surprises(small_file: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    check_fuzzed(struct.pack("<Q", len(text)) + text + bytes(64), small_file.parent)
