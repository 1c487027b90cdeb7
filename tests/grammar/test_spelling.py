"""Tokenizers of every form write what a grammar describes, to the letter."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from tests.grammar.tiny import make_tokenizer
from unspool.errors import SettingError, UnsupportedError
from unspool.grammar import guard
from unspool.grammar.compiling import compile_grammar
from unspool.grammar.processor import GrammarLogitsProcessor
from unspool.grammar.sources import read_source
from unspool.grammar.vocabulary import find_vocabulary
from unspool.text import Tokenizer
from unspool.text.backend import build_sentencepiece, build_unigram

SPECIALS = ["<pad>", "</s>", "<unk>"]
LETTERS = [*"▁abcdefnosy013[],", "▁a", "▁yes", "yes", "no", "▁no", "es", "▁[", "0,", "▁▁", "<0x41>"]
END = 1


def make_unigram(*, adds_space: bool) -> tokenizers.Tokenizer:
    pieces = [(piece, 0.0) for piece in SPECIALS] + [(piece, -1.0 - len(piece) / 9) for piece in LETTERS[:-1]]
    return build_unigram(pieces, unk_id=2, charsmap=None, adds_space_prefix=adds_space, removes_extra_spaces=True)


def make_bytes() -> tokenizers.Tokenizer:
    """Sentencepiece with a byte for every character that it has no piece for, as Llama's."""
    names = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS[:-1]]
    merges = [("e", "s"), ("n", "o"), ("y", "es"), ("▁", "a"), ("▁", "yes"), ("▁", "no"), ("▁", "["), ("0", ",")]
    places = {name: place for place, name in enumerate(names)}
    return build_sentencepiece(places, [*merges, ("▁", "▁")], unk_token="<unk>", adds_space_prefix=True)


def make_words(decoder: Any) -> tokenizers.Tokenizer:
    """A list of pieces that somebody else finds, as Marian's, of which one looks like a byte."""
    places = {name: place for place, name in enumerate([*SPECIALS, *LETTERS])}
    made = tokenizers.Tokenizer(models.WordLevel(places, unk_token="<unk>"))
    made.decoder = decoder
    return made


def make_letters() -> tokenizers.Tokenizer:
    made = make_words(decoders.Fuse())
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    return made


FORMS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "unigram": lambda: make_unigram(adds_space=True),
    "unigram without a first space": lambda: make_unigram(adds_space=False),
    "bytes": make_bytes,
    "words": lambda: make_words(decoders.Metaspace()),
    "letters": make_letters,
    "byte-level": lambda: tokenizers.Tokenizer.from_str(make_tokenizer().backend_tokenizer.to_str()),
}
TEXTS: dict[str, Any] = {
    "regex": r"[a-f]{1,3}( yes| no)?",
    "choice": ["yes", "no", " no", "a yes", "nose"],
    "json_schema": {"type": "array", "items": {"enum": [0, 1, 3]}, "maxItems": 3},
    "grammar": 'start: "a" ("b" | " c")* "d"',
}


def keeps(setting: str, value: Any, text: str) -> bool:
    if setting == "choice":
        return text in value
    if setting == "json_schema":
        return set(json.loads(text)) <= {0, 1, 3} and text.lstrip() == text
    return re.fullmatch(value if setting == "regex" else "a(b| c)*d", text) is not None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", TEXTS)
def test_what_is_decoded_is_what_was_asked_for(form: str, setting: str) -> None:
    backend = FORMS[form]()
    backend.add_special_tokens(SPECIALS)
    tokenizer, size = Tokenizer(backend), backend.get_vocab_size() + 5  # models have more columns than tokens
    values = dict(TEXTS)
    if form == "letters":  # of which none is a space
        values |= {"regex": "[a-f]{1,3}(yes|no)?", "choice": ["yes", "no", "ano"], "grammar": 'start: "a" "b"* "d"'}
    source = read_source(setting, values[setting])
    assert source is not None
    grammar = compile_grammar(source, find_vocabulary(tokenizer, size, [END]))
    texts = set()
    for seed in range(30):
        rng, ids = random.Random(seed), [7]
        processor = GrammarLogitsProcessor([grammar], 1, [END])
        for _ in range(60):
            allowed = processor(torch.tensor([ids]), torch.zeros(1, size))[0].isfinite().nonzero().flatten().tolist()
            ids.append(END if END in allowed and rng.random() < 0.5 else rng.choice(allowed))
            if ids[-1] == END:
                texts.add(tokenizer.decode(ids[1:], skip_special_tokens=True))
                break
    assert texts and all(keeps(setting, values[setting], text) for text in texts)
    assert len(texts) > 2 or (setting == "choice" and len(texts) > 1)


def test_forced_text_is_spelled_as_the_tokenizer_would() -> None:
    """A text's first word has its space, which decoding leaves out."""
    tokenizer = Tokenizer(FORMS["unigram"]())
    source = read_source("choice", ["yes"])
    assert source is not None
    matcher = compile_grammar(source, find_vocabulary(tokenizer, 40, [END])).start()
    assert [tokenizer.convert_ids_to_tokens(one) for one in matcher.compute_ff_tokens()][:1] == ["▁yes"]


@pytest.mark.parametrize("form", ["unigram", "words", "letters"])
@pytest.mark.parametrize(("setting", "value"), [("json_object", True), ("choice", ["yes", "a{no}"]), ("regex", "Z+")])
def test_texts_without_tokens_are_refused_when_they_are_compiled(form: str, setting: str, value: Any) -> None:
    source = read_source(setting, value)
    assert source is not None
    with pytest.raises(SettingError, match=f"`{setting}` asks for a text that this model has no tokens for"):
        compile_grammar(source, find_vocabulary(Tokenizer(FORMS[form]()), 60, [END]))


def test_a_tokenizer_that_puts_texts_together_by_rules_is_named() -> None:
    backend = make_words(decoders.WordPiece())
    with pytest.raises(UnsupportedError, match=r"by other rules \(WordPiece\)"):
        find_vocabulary(Tokenizer(backend), 40)


@pytest.mark.parametrize("ends", list(itertools.permutations([2, 40, 400])))
def test_the_end_of_a_text_is_a_token_that_the_tokenizer_has(ends: tuple[int, ...]) -> None:
    """A tokenizer that names none, for a model with more columns than tokens, as Whisper's without its config."""
    tokenizer = Tokenizer(FORMS["unigram"]())
    assert find_vocabulary(tokenizer, 500, ends).ends == (2,)
    num_tokens = tokenizer.backend_tokenizer.get_vocab_size()
    assert find_vocabulary(tokenizer, 500, [400]).ends == (num_tokens - 1,)


def test_a_text_that_is_too_complex_is_not_taken_for_one_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "SECONDS", 60.0)  # the machine may be busy
    source = read_source("regex", "a{9999999}")
    assert source is not None
    with pytest.raises(SettingError, match=r"`regex` can't be kept: lexer error: too many expressions constructed$"):
        compile_grammar(source, find_vocabulary(make_tokenizer(), 160))


def test_an_error_shows_the_pattern_once() -> None:
    source = read_source("regex", "a[")
    assert source is not None
    with pytest.raises(SettingError, match=r"unclosed character class$"):
        compile_grammar(source, find_vocabulary(make_tokenizer(), 160))
