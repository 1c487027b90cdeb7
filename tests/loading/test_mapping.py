from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unspool.errors import LoadError
from unspool.loading import dequantize
from unspool.loading.gguf import GGUFFile
from unspool.loading.mapping import MappedTensors
from unspool.loading.safetensors_files import WEIGHTS_NAME, SafetensorsFiles
from unspool.loading.tensors import TensorFile


@pytest.fixture
def files(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> TensorFile:
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    return SafetensorsFiles(tmp_path)


@pytest.fixture(params=["one chunk", "a row a chunk"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "a row a chunk":
        monkeypatch.setattr(dequantize.iterate_rows, "__defaults__", (1,))


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_copy_into_converts(files: TensorFile, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    for name, tensor in tensors.items():
        out = torch.full(tensor.shape, 99.0).to(dtype)
        files.copy_into(name, out)
        assert torch.equal(out, tensor.to(dtype))


@pytest.mark.usefixtures("_chunks")
def test_copy_into_a_part_of_a_larger_tensor(files: TensorFile, tensors: dict[str, torch.Tensor]) -> None:
    fused = torch.zeros(7, 5)  # as query, key and value share one matrix
    files.copy_into("a", fused[2:5])
    assert torch.equal(fused[2:5], tensors["a"]) and not fused[:2].any() and not fused[5:].any()
    wide = torch.zeros(2, 3, 8)
    files.copy_into("c", wide[:, :, ::2])
    assert torch.equal(wide[:, :, ::2], tensors["c"].float()) and not wide[:, :, 1::2].any()


@pytest.mark.usefixtures("_chunks")
def test_copy_into_transposes(small_gguf: Path, files: TensorFile, tensors: dict[str, torch.Tensor]) -> None:
    out = torch.empty(5, 3)
    files.copy_into("a", out, transpose=True)
    assert torch.equal(out, tensors["a"].t())
    file = GGUFFile(small_gguf)
    turned = torch.empty(64, 4)
    file.copy_into("q4_1", turned, transpose=True)
    assert torch.equal(turned.t(), file.read("q4_1", dtype=torch.float32))


@pytest.mark.usefixtures("_chunks")
def test_rows_are_a_slice_of_the_whole(small_gguf: Path, files: TensorFile) -> None:
    for file in (files, GGUFFile(small_gguf)):
        for name in file.names():
            shape = file.info(name).shape
            whole = file.read(name, dtype=torch.float32)
            for first in range(shape[0] + 1 if shape else 0):
                for last in range(first, shape[0] + 1):
                    part = file.read(name, dtype=torch.float32, rows=(first, last))
                    assert torch.equal(part, whole[first:last])


def test_rows_of_a_quantised_vector(write_gguf: Callable[..., Path]) -> None:
    blocks = b"".join(struct.pack("<e32b", 0.5, *range(32)) for _ in range(2))
    file = GGUFFile(write_gguf(tensors=[("v", (64,), 8, blocks)]))
    assert file.read("v", dtype=torch.float32, rows=(30, 34)).tolist() == [15.0, 15.5, 0.0, 0.5]


@pytest.mark.parametrize("rows", [(-1, 2), (2, 1), (0, 4), (4, 4)])
def test_rows_that_are_not_there_are_refused(files: TensorFile, rows: tuple[int, int]) -> None:
    with pytest.raises(LoadError, match=f"rows {rows[0]} to {rows[1]} of tensor 'a'.*it has 3"):
        files.read("a", dtype=torch.float32, rows=rows)


def test_wrong_shapes_are_refused_by_name(files: TensorFile) -> None:
    with pytest.raises(LoadError, match=r"tensor 'a' .*expected \[5, 3\], found \[3, 5\]"):
        files.copy_into("a", torch.empty(5, 3))
    with pytest.raises(LoadError, match=r"tensor 'a' .*expected \[3, 5\], found \[5, 3\] once transposed"):
        files.copy_into("a", torch.empty(3, 5), transpose=True)
    with pytest.raises(LoadError, match="only matrices can be transposed"):
        files.copy_into("b", torch.empty(4), transpose=True)


def test_unknown_tensors_are_refused_by_name(files: TensorFile) -> None:
    assert "nope" not in files and "a" in files
    for use in (files.info, files.raw, files.release):
        with pytest.raises(LoadError, match="no tensor 'nope'"):
            use("nope")


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    bad = torch.ones(6, 4, dtype=dtype)
    bad[4, 3] = math.nan
    save_file({"good": torch.ones(2, dtype=dtype), "bad": bad}, tmp_path / WEIGHTS_NAME)
    files = SafetensorsFiles(tmp_path)
    files.copy_into("good", torch.empty(2))
    assert files.read("bad", dtype=torch.float32, rows=(0, 4)).sum() == 16
    for target in (torch.float32, torch.bfloat16):
        with pytest.raises(LoadError, match=r"tensor 'bad' .* holds NaN"):
            files.read("bad", dtype=target)
        with pytest.raises(LoadError, match=r"tensor 'bad' .* holds NaN"):
            files.copy_into("bad", torch.empty(6, 4, dtype=target))


def test_nan_from_a_block_scale_is_refused(write_gguf: Callable[..., Path]) -> None:
    block = struct.pack("<e32b", math.nan, *range(32))
    file = GGUFFile(write_gguf(tensors=[("v", (32, 1), 8, block)]))
    with pytest.raises(LoadError, match=r"tensor 'v' .* holds NaN"):
        file.read("v", dtype=torch.float32)


def test_infinities_and_overflowing_sums_are_not_nan(tmp_path: Path) -> None:
    extremes = {"inf": torch.tensor([math.inf, -math.inf, 1.0]), "large": torch.full((9,), 3e38)}
    save_file(extremes, tmp_path / WEIGHTS_NAME)
    files = SafetensorsFiles(tmp_path)
    for name, tensor in extremes.items():
        assert torch.equal(files.read(name, dtype=torch.float32), tensor)


def test_released_tensors_read_the_same(tmp_path: Path) -> None:
    tensor = torch.randn(300, 100, generator=torch.Generator().manual_seed(0))
    save_file({"w": tensor}, tmp_path / WEIGHTS_NAME)
    files = SafetensorsFiles(tmp_path)
    out = torch.empty_like(tensor)
    for _ in range(2):
        files.copy_into("w", out.zero_())
        assert torch.equal(out, tensor)
        files.release("w")


def test_release_leaves_a_lent_view_alone(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(100, 100)}, tmp_path / WEIGHTS_NAME)
    files = SafetensorsFiles(tmp_path)
    view = files.read("w", dtype=torch.float32)
    view += 1  # private to this process
    files.release("w")
    assert view.eq(1).all()
    assert SafetensorsFiles(tmp_path).read("w", dtype=torch.float32).eq(0).all()


def test_both_kinds_are_tensor_files(small_gguf: Path, files: TensorFile) -> None:
    for file in (GGUFFile(small_gguf), files):
        assert isinstance(file, MappedTensors)
