"""A tokenizer of 160 tokens for the reference's tiny models, and the models with it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

from tests.conformance.cases import load_model
from unspool.text import Tokenizer

SPECIAL = ("<pad>", "<s>", "</s>")
PAIRS = ('{"', '":', '",', '"}', "[]", "},", "],", "ab", "yes", "no", "12", "true", "false", "null", "nam", "name")


@lru_cache(maxsize=1)
def make_tokenizer() -> Tokenizer:
    """Printable ASCII one by one, a few longer tokens, and names for the rest."""
    byte_level = {byte: chr(byte) for byte in range(33, 127)} | {32: "\u0120", 10: "\u010a"}
    words = [*SPECIAL, *byte_level.values(), *PAIRS]
    words += [f"\u00f0{number}" for number in range(160 - len(words))]  # bytes that no text here has
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, special_tokens={"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"})


@lru_cache(maxsize=8)
def load_tiny(name: str) -> Any:
    """A reference model with that tokenizer."""
    import copy

    lm = copy.copy(load_model(name))
    lm.tokenizer = make_tokenizer()
    return lm
