"""A tokenizer's vocabulary as the grammar library reads it, made once a tokenizer."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from unspool.errors import SettingError, UnsupportedError
from unspool.grammar.sources import require_library


@dataclass(frozen=True, eq=False)
class GrammarVocabulary:
    """A vocabulary, and what a helper process needs to build the same."""

    tokens: Any  # llguidance's LLTokenizer
    text: str  # the tokenizer as JSON
    size: int  # the width of the model's scores
    ends: tuple[int, ...]  # the end tokens that it knows of
    compiled: OrderedDict[str, Any] = field(default_factory=OrderedDict)  # grammars over it, the latest last

    @property
    def num_words(self) -> int:
        """32-bit words of a mask."""
        return (self.size + 31) // 32


_made: weakref.WeakKeyDictionary[Any, dict[int, GrammarVocabulary]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def find_vocabulary(tokenizer: Any, size: int) -> GrammarVocabulary:
    """The vocabulary of a tokenizer for a model whose scores have `size` columns."""
    if tokenizer is None:
        raise SettingError(
            "structured output needs the texts of the tokens, and there is no tokenizer; pass tokenizer=…, or load the "
            "model with unspool.load()"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise UnsupportedError(
            f"structured output reads a vocabulary from a `tokenizers` backend, and a {type(tokenizer).__name__} has "
            "none; use a fast tokenizer"
        )
    with _lock:
        known = _made.setdefault(tokenizer, {})
        if size not in known:
            known[size] = _make(tokenizer, backend, size)
        return known[size]


def _make(tokenizer: Any, backend: Any, size: int) -> GrammarVocabulary:
    library = require_library()
    copied = type(backend).from_str(backend.to_str())  # what is switched off below is the caller's
    copied.no_padding()
    copied.no_truncation()
    text: str = copied.to_str()
    end = getattr(tokenizer, "eos_token_id", None)
    ends = (int(end),) if isinstance(end, int) and 0 <= end < size else ()
    try:
        tokens = library.LLTokenizer(text, n_vocab=size, eos_token=list(ends) or [size - 1])
    except (ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"structured output can't read this tokenizer's vocabulary for a model of {size} tokens: {error}"
        ) from error
    return GrammarVocabulary(tokens, text, size, ends or (size - 1,))


def list_specials(tokenizer: Any) -> frozenset[str]:
    """The special tokens of a tokenizer, as a grammar names them."""
    found = getattr(tokenizer, "all_special_tokens", None) or ()
    return frozenset(str(token) for token in found)
