"""Language codes of translation models: which a tokenizer has, and how a source or a target is marked with one.

NLLB, mBART and M2M100 have a token for every language: a source carries its own, and a target begins with that of its
language (`forced_bos_token_id`). Marian's models of several targets read the target's code at the head of the source.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import processors

from unspool.errors import SettingError
from unspool.text.marian import MarianTokenizer
from unspool.text.tokenizer import Tokenizer

_CODES: Final = re.compile("([a-z]{3}_[A-Z][a-z]{3}|[a-z]{2}_[A-Z]{2})|__([a-z]{2,3})__")


@dataclass(frozen=True, slots=True)
class LanguageMarks:
    """What a pair of languages changes in a call."""

    prefix: str = ""  # of the source's text
    forced_bos_token_id: int | None = None


def find_languages(tokenizer: Tokenizer) -> dict[str, str]:
    """The languages that a tokenizer has tokens for, and these tokens."""
    if isinstance(tokenizer, MarianTokenizer):
        return tokenizer.languages
    found = ((_CODES.fullmatch(token), token) for token in tokenizer.all_special_tokens)
    return {match[1] or match[2]: token for match, token in found if match is not None}


def mark_languages(tokenizer: Tokenizer | None, source: str | None, target: str | None) -> LanguageMarks:
    """Have a tokenizer mark sources with a language, and say what makes a model write another one.

    The source's language stays set in the tokenizer.
    """
    if tokenizer is None:
        raise SettingError("languages are marked by tokens, and the model came without a tokenizer; leave them out")
    languages = find_languages(tokenizer)
    for name, code in (("source", source), ("target", target)):
        if code is not None and code not in languages:
            known = ", ".join(sorted(languages)[:250])
            raise SettingError(
                f"the {name} language {code!r:.40} is not one that the model knows; "
                + (f"it knows {known}" if known else "it has no language codes, so leave languages out")
            )
    if isinstance(tokenizer, MarianTokenizer):
        if source is not None:
            raise SettingError("a Marian model reads one language and marks none in its sources; leave it out")
        return LanguageMarks(prefix="" if target is None else f"{languages[target]} ")
    if source is not None:
        _mark_source(tokenizer, languages, source)
    return LanguageMarks(
        forced_bos_token_id=None if target is None else tokenizer.convert_tokens_to_ids(languages[target])
    )


def _mark_source(tokenizer: Tokenizer, languages: dict[str, str], source: str) -> None:
    """Put a language's token where the tokenizer's template has that of another."""
    known, backend = set(languages.values()), tokenizer.backend_tokenizer
    rules = backend.post_processor
    state: dict[str, Any] = json.loads(rules.__getstate__()) if rules is not None else {}
    parts = {name: [_name_part(item, known, languages[source]) for item in state.get(name) or ()] for name in _SIDES}
    if languages[source] not in parts["single"]:
        raise SettingError("the tokenizer has no place for a source's language; leave the source language out")
    tokens = dict.fromkeys(part for side in parts.values() for part in side if not part.startswith("$"))
    backend.post_processor = processors.TemplateProcessing(
        single=parts["single"],
        pair=parts["pair"],
        special_tokens=[(token, index) for token in tokens if (index := backend.token_to_id(token)) is not None],
    )


_SIDES: Final = ("single", "pair")


def _name_part(item: Any, known: set[str], chosen: str) -> str:
    """A part of a template in the form in which templates are written."""
    kind, part = next(iter(item.items()))
    if kind == "Sequence":
        return f"${part['id']}:{part['type_id']}"
    return chosen if part["id"] in known else str(part["id"])
