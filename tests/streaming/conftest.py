"""The default model's tokenizer, for the streamers."""

from __future__ import annotations

from pathlib import Path

import pytest

from unspool.loading.gguf import GGUFFile
from unspool.text import Tokenizer, tokenizer_from_gguf


@pytest.fixture(scope="session")
def tokenizer(default_model_file: Path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(default_model_file).metadata)
