"""Folders of tiny models with a tokenizer, as the examples make them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def load_maker() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "seeds" / "make_models.py"
    spec = importlib.util.spec_from_file_location("make_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models")
    load_maker().make_models(target)
    return target
