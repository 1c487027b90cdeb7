"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def default_model_file() -> Path:
    """The GGUF file of the default model."""
    from unspool.loading.catalogue import find_model

    path = find_model("smollm2-135m")
    assert path is not None, "run `unspool pull smollm2-135m` (make test does)"
    return path
