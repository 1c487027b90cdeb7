"""Compiling grammars: within limits, at first in a process that can be killed, and remembered."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any, Final

from unspool.errors import SettingError
from unspool.grammar.guard import check_guarded
from unspool.grammar.schemas import find_path
from unspool.grammar.sources import GrammarSource, require_library
from unspool.grammar.vocabulary import GrammarVocabulary
from unspool.wording import about

MOST_COMPILED: Final = 128  # per vocabulary
LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,  # errors would hold the whole schema
}


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar; `start()` gives the state before the first token."""

    source: GrammarSource
    vocabulary: GrammarVocabulary
    _first: Any  # an LLMatcher that is only ever copied

    def start(self) -> Any:
        """A matcher of its own, before the first token."""
        return self._first.deep_copy()


_lock = threading.Lock()


def compile_grammar(source: GrammarSource, vocabulary: GrammarVocabulary) -> Grammar:
    """The grammar of a source over a vocabulary, from memory if it was compiled before."""
    with _lock:
        known = vocabulary.compiled
        if source.text in known:
            known.move_to_end(source.text)
            found: Grammar = known[source.text]
            return found
    if not source.is_simple:
        refused = check_guarded(vocabulary, source.text, LIMITS)
        if refused:
            raise _refuse(source, refused)
    library = require_library()
    matcher = library.LLMatcher(vocabulary.tokens, source.text, log_level=0, limits=library.LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise _refuse(source, matcher.get_error())
    made = Grammar(source, vocabulary, matcher)
    with _lock:
        known[source.text] = made
        while len(known) > MOST_COMPILED:
            known.popitem(last=False)
    return made


def read_error(message: str) -> str:
    """What the grammar library says, on one line and without its state."""
    return " ".join(message.split("<state>")[0].split())[:600]


def _refuse(source: GrammarSource, message: str) -> SettingError:
    reason = read_error(message)
    where = ""
    if source.schema:
        path = find_path(json.loads(source.schema), reason)
        where = f" (at {path})" if path != "#" else ""
    return SettingError(about(source.setting, f"can't be kept{where}: {reason}"))
