"""A tokenizer's vocabulary as the grammar library reads it, made once a tokenizer."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from unspool.errors import SettingError, UnsupportedError
from unspool.forks import make_lock
from unspool.grammar.haste import refuse_in_haste
from unspool.grammar.sources import require_library
from unspool.grammar.spelling import drops_first_space, spell_out

_LARGEST_QUICK: Final = 4096  # tokens of a vocabulary that is read in no time


@dataclass(frozen=True, eq=False)
class GrammarVocabulary:
    """A vocabulary, and what a helper process needs to build the same."""

    tokens: Any  # llguidance's LLTokenizer
    text: str  # the tokenizer as JSON
    size: int  # the width of the model's scores
    ends: tuple[int, ...]  # the end tokens that it knows of
    drops_space: bool = False  # a text is decoded without the space before its first word
    compiled: OrderedDict[str, Any] = field(default_factory=OrderedDict)  # grammars over it, the latest last
    refused: dict[str, tuple[str, float]] = field(default_factory=dict)  # why grammars can't be, and until when
    lock: Any = field(init=False)  # around the two, for a moment
    compiling: Any = field(init=False)  # while a grammar is compiled that may take long

    def __post_init__(self) -> None:
        for name in ("lock", "compiling"):
            object.__setattr__(self, name, make_lock(self, name))

    @property
    def num_words(self) -> int:
        """32-bit words of a mask."""
        return (self.size + 31) // 32


@dataclass
class _Made:
    """The vocabularies of one tokenizer."""

    by_size: dict[tuple[int, int], GrammarVocabulary] = field(default_factory=dict)
    making: Any = field(init=False)

    def __post_init__(self) -> None:
        self.making = make_lock(self, "making")


_made: weakref.WeakKeyDictionary[Any, _Made] = weakref.WeakKeyDictionary()
_lock = make_lock(sys.modules[__name__], "_lock")  # around the dictionary, for a moment


def find_vocabulary(tokenizer: Any, size: int, ends: Sequence[int] = ()) -> GrammarVocabulary:
    """The vocabulary of a tokenizer for a model whose scores have `size` columns.

    `ends` are a call's end tokens, one of which stands for the end of a text if the tokenizer names none.
    """
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
    end = _choose_end(tokenizer, min(size, backend.get_vocab_size()), ends)
    with _lock:
        held = _made.setdefault(tokenizer, _Made())
    if (size, end) not in held.by_size:
        if backend.get_vocab_size() > _LARGEST_QUICK:
            refuse_in_haste("reading a vocabulary for grammars")
        with held.making:
            if (size, end) not in held.by_size:
                held.by_size[size, end] = _make(backend, size, end)
    return held.by_size[size, end]


def _choose_end(tokenizer: Any, num_tokens: int, ends: Sequence[int]) -> int:
    """The token that stands for the end of a text, among those that the tokenizer has."""
    own = getattr(tokenizer, "eos_token_id", None)
    return next((one for one in (own, *ends) if isinstance(one, int) and 0 <= one < num_tokens), num_tokens - 1)


def _make(backend: Any, size: int, end: int) -> GrammarVocabulary:
    library = require_library()
    copied = type(backend).from_str(backend.to_str())  # what is switched off below is the caller's
    copied.no_padding()
    copied.no_truncation()
    text = spell_out(copied.to_str())
    try:
        tokens = library.LLTokenizer(text, n_vocab=size, eos_token=[end])
    except (ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"structured output can't read this tokenizer's vocabulary for a model of {size} tokens: {error}"
        ) from error
    return GrammarVocabulary(tokens, text, size, (end,), drops_first_space(backend))


def list_specials(tokenizer: Any) -> dict[str, int]:
    """The special tokens of a tokenizer, by which a grammar names them, and their ids."""
    found = getattr(tokenizer, "all_special_tokens", None) or ()
    return {str(token): int(tokenizer.convert_tokens_to_ids(token)) for token in found}
