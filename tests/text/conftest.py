"""Tokenizers for the tests: the default model's, and a small sentencepiece one made here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from unspool.loading.gguf import GGUFFile
from unspool.text import Tokenizer, tokenizer_from_gguf

CORPUS = "the cat sat on the mat and the dog sat on the log while a hen ate the corn that the cat left on the mat"


@pytest.fixture(scope="session")
def smollm2_file(default_model_file: Path) -> Path:
    return default_model_file


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_file: Path) -> dict[str, Any]:
    return GGUFFile(smollm2_file).metadata


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
