"""Compiling grammars: within limits, at first in a process that can be killed, and remembered."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from unspool.errors import SettingError, excerpt
from unspool.grammar.guard import check_guarded
from unspool.grammar.haste import refuse_in_haste
from unspool.grammar.schemas import find_path
from unspool.grammar.sources import GrammarSource, require_library
from unspool.grammar.vocabulary import GrammarVocabulary
from unspool.wording import about

MOST_COMPILED: Final = 128  # per vocabulary, and as many that were refused
_REFUSED_SECONDS: Final = 60.0  # in which a grammar that was refused is not tried again: the machine may have been busy
_FARTHEST: Final = 64  # tokens that can't but come, which are looked at before a call
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


def compile_grammar(source: GrammarSource, vocabulary: GrammarVocabulary) -> Grammar:
    """The grammar of a source over a vocabulary, from memory if it was compiled before."""
    found = _find(source, vocabulary)
    if found is not None:
        return found
    if source.is_simple:
        return _remember(_compile(source, vocabulary))
    refuse_in_haste("compiling a grammar")
    with vocabulary.compiling:  # one at a time: several over one vocabulary would wait for the same process
        found = _find(source, vocabulary)
        if found is not None:
            return found
        return _remember(_compile(source, vocabulary))


def _find(source: GrammarSource, vocabulary: GrammarVocabulary) -> Grammar | None:
    """A grammar that was compiled before; raises for one that was refused a moment ago."""
    with vocabulary.lock:
        known = vocabulary.compiled
        if source.text in known:
            known.move_to_end(source.text)
            found: Grammar = known[source.text]
            return found
        reason, until = vocabulary.refused.get(source.text, ("", 0.0))
    if time.monotonic() < until:
        raise _refuse(source, reason)
    return None


def _remember(made: Grammar) -> Grammar:
    known = made.vocabulary.compiled
    with made.vocabulary.lock:
        known[made.source.text] = made
        while len(known) > MOST_COMPILED:
            known.popitem(last=False)
    return made


def _compile(source: GrammarSource, vocabulary: GrammarVocabulary) -> Grammar:
    text = _begin_with_space(source.text) if vocabulary.drops_space and not source.is_free else source.text
    if not source.is_simple:
        reason = check_guarded(vocabulary, text, LIMITS)
        if reason:
            _note_refused(source, vocabulary, reason)
            raise _refuse(source, reason)
    library = require_library()
    matcher = library.LLMatcher(vocabulary.tokens, text, log_level=0, limits=library.LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise _refuse(source, matcher.get_error())
    _check_choices(source, vocabulary)
    _check_beginning(source, matcher.deep_copy(), vocabulary)
    return Grammar(source, vocabulary, matcher)


def _note_refused(source: GrammarSource, vocabulary: GrammarVocabulary, reason: str) -> None:
    with vocabulary.lock:
        refused = vocabulary.refused
        refused[source.text] = (reason, time.monotonic() + _REFUSED_SECONDS)
        while len(refused) > MOST_COMPILED:
            refused.pop(next(iter(refused)))


def _begin_with_space(text: str) -> str:
    """A grammar of texts behind a space, which is not there when they are decoded."""
    grammars = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    first = {"lark_grammar": '%llguidance {}\nstart: " " @behind_space'}
    return json.dumps({"grammars": [first, {**grammars[0], "name": "behind_space"}, *grammars[1:]]})


def _check_beginning(source: GrammarSource, matcher: Any, vocabulary: GrammarVocabulary) -> None:
    """Raise if a vocabulary has no tokens for what every text of a grammar begins with."""
    for _ in range(_FARTHEST):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: vocabulary.size]).tolist()
        if len(allowed) > 1 or allowed == list(vocabulary.ends):
            return
        if not allowed or matcher.try_consume_tokens(allowed) != 1:  # a tokenizer's unknown token stands for no text
            if matcher.is_error():  # the text is too complex for the limits
                raise _refuse(source, matcher.get_error())
            forced = matcher.compute_ff_bytes().decode(errors="replace")
            lacking = f"none for {excerpt(forced)}" if forced else "none that may come next"
            raise _refuse_text(source, lacking)


def _check_choices(source: GrammarSource, vocabulary: GrammarVocabulary) -> None:
    """Raise for a choice that could be begun but never ended."""
    tokens = vocabulary.tokens
    for text in source.choices:
        if tokens.decode_bytes(tokens.tokenize_str(text)) != text.encode():
            raise _refuse_text(source, f"not for all of {excerpt(text)}")


def _refuse_text(source: GrammarSource, lacking: str) -> SettingError:
    return SettingError(
        about(
            source.setting,
            f"asks for a text that this model has no tokens for: {lacking}; ask for texts of other characters, or "
            "use another model",
        )
    )


def read_error(message: str) -> str:
    """What the grammar library says, on one line, without its state and the line that it read."""
    said = " ".join(message.split("<state>")[0].replace("<non-verbose/>", "").split())
    return re.sub(r" \d+ \| .*", "", said)[:600]


def _refuse(source: GrammarSource, message: str) -> SettingError:
    reason = read_error(message)
    where = ""
    if source.schema:
        path = find_path(json.loads(source.schema), reason)
        where = f" (at {path})" if path != "#" else ""
    return SettingError(about(source.setting, f"can't be kept{where}: {reason}"))
