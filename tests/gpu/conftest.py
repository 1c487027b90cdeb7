"""Without a device every file here is one skipped test: collecting and reporting 3,000 of them takes a while."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


class SkippedModule(pytest.Module):
    """A file that is imported, so that a name that is no longer there is noticed, and not run."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        assert self.obj is not None
        pytest.skip("needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip whole files if nothing here can run."""
    if torch.cuda.is_available() or IS_INTERPRETED:
        return None
    return SkippedModule.from_parent(parent, path=module_path)
