"""The little llama, loaded the short way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.cases import GOLDENS
from tests.fakes import make_tokenizer

import unspool
from unspool import LanguageModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The little llama with a little tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    shutil.copytree(GOLDENS / "models" / "llama", folder)
    make_tokenizer().save(folder)
    return folder


@pytest.fixture
def lm(folder: Path) -> LanguageModel:
    return unspool.load(folder, device="cpu")


@pytest.fixture
def passes(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every forward pass."""
    seen: list[int] = []
    forward = lm.model.forward

    def count(tokens: Any, cache: Any, **kwargs: Any) -> Any:
        seen.append(tokens.shape[0])
        return forward(tokens, cache, **kwargs)

    monkeypatch.setattr(lm.model, "forward", count)
    return seen
