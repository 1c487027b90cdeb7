"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


def pytest_configure() -> None:
    """Two threads in all: for one process, or shared out by those that pytest-xdist starts.

    Said before tests are collected, for the CPU library asks once, when it is first looked for.
    """
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, 2 // num_processes))


@pytest.fixture(scope="session")
def default_model_file() -> Path:
    """The GGUF file of the default model."""
    from unspool.loading.catalogue import find_model

    path = find_model("smollm2-135m")
    assert path is not None, "run `unspool pull smollm2-135m` (make test does)"
    return path
