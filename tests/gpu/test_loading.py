"""Weights on their way from a file to a GPU: every number arrives, and NaN is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unspool.errors import LoadError
from unspool.loading import staging
from unspool.loading.safetensors_files import SafetensorsFiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="weights go to a GPU"),
]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"whole": (300, 77), "three": (5, 40, 33), "short": (7,), "none": (0, 4)}
    made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    return {**made, "wide": torch.randn(9, 50, generator=generator), "ids": torch.arange(40)}


@pytest.mark.parametrize("size", [64, 1 << 20])
def test_every_number_arrives(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(staging, "_BUFFER_BYTES", size)
    save_file(tensors, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path)
    for name, tensor in tensors.items():
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
        files.copy_into(name, out)
        assert torch.equal(out.cpu(), tensor)
        if tensor.dim() == 2:
            turned = torch.empty(tensor.shape[::-1], dtype=tensor.dtype, device="cuda")
            files.copy_into(name, turned, transpose=True)
            assert torch.equal(turned.cpu(), tensor.t())
    rounded = torch.empty(9, 50, dtype=torch.bfloat16, device="cuda")
    files.copy_into("wide", rounded)
    assert torch.equal(rounded.cpu(), tensors["wide"].bfloat16())
    part = torch.zeros(300, 80, dtype=torch.bfloat16, device="cuda")
    files.copy_into("whole", part[:, :77])
    assert torch.equal(part[:, :77].cpu(), tensors["whole"]) and not part[:, 77:].any()
    files.finish()


def test_numbers_that_are_none_are_refused_at_the_end(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    tensors["three"][3, 2, 1] = float("nan")
    tensors["short"][2] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path)

    def copy(name: str) -> None:
        files.copy_into(name, torch.empty(tensors[name].shape, dtype=torch.bfloat16, device="cuda"))

    copy("short")
    files.finish()  # infinite numbers are numbers
    copy("whole")
    copy("three")
    with pytest.raises(LoadError, match=r"'three' .* holds NaN"):
        files.finish()
