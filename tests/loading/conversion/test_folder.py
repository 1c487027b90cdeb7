"""Folders that converted models are written to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from unspool.errors import LoadError
from unspool.loading.conversion.folder import write_model


def test_arrays_of_a_mapped_file_are_written(tmp_path: Path) -> None:
    """Arrays that can't be written to, as those of a mapped file are, and others than contiguous ones."""
    values = np.arange(6, dtype=np.float16).reshape(2, 3)
    values.tofile(tmp_path / "values")
    mapped = np.memmap(tmp_path / "values", np.uint8, mode="r").view(np.float16).reshape(2, 3)
    write_model(tmp_path, {"mapped": mapped, "turned": values.T}, {"eos_token_id": 2, "d_model": 3}, {"max_length": 5})
    found = load_file(tmp_path / "model.safetensors")
    assert np.array_equal(found["mapped"], values) and np.array_equal(found["turned"], values.T)
    assert (tmp_path / "generation_config.json").read_text() == '{\n "eos_token_id": 2,\n "max_length": 5\n}'


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="'head' have a number that is not finite"):
        write_model(tmp_path, {"head": np.array([1, np.inf], np.float32)}, {}, {})
    assert not any(tmp_path.iterdir())
