"""Regular expressions that are said to take time in proportion to the text: they must, on texts of long runs."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

from tokenizers import Regex, pre_tokenizers

from tests.fuzz.findings import Difference
from unspool.errors import LoadError
from unspool.text.patterns import find_cost

NAME = "tokenizer_pattern"
SHARE = 0.5
SHORT = 40

_LENGTH = 6_000
_SECONDS = 0.06  # a square of 6,000 takes 0.1 s and more; in proportion to it, some milliseconds
_CLASSES = ("a", "b", " ", r"\s", r"\S", "[ab]", "[^a]", r"\p{L}", r"[\r\n]", r"[^\s\p{L}]", ".", r"\w", "[a-c&&[^b]]")
_SIGNS = ("", "", "?", "*", "+", "+", "*", "{1,3}", "{2,}", "+?", "*?", "++", "*+", "?+", "{1,3}+", "{2}")
_GROUPS = ("(?:{0}|{1})", "({0}{1})", "(?i:{0}{1}|b)", "(?!{0})", "(?={0})", r"(?!\S)", r"(?<!{0})", "$", "^", r"\b")
_TEXTS = ("a", "b", " ", "ab", " a", "a ", "\n", " \n", "\n ", "aab", "A", "a\n", "ba", "1", "a1")
_ENDS = ("", "c", "b", "\n", "a", "1", " x")


def make(rng: Random) -> tuple[str, list[str]]:
    """A pattern, and texts of long runs that may end in what it needs or in what it does not."""
    rows = [_make_row(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
    for index in range(len(rows) - 1):  # a row often has a fellow that begins alike
        if rng.random() < 0.4:
            cut = rng.randrange(len(rows[index]) + 1)
            rows[index + 1] = [*rows[index][:cut], *rng.choice(([], [_make_step(rng)]))] or rows[index + 1]
    texts = [rng.choice(_TEXTS) for _ in range(4)]
    longs = [text * (_LENGTH // len(text)) + rng.choice(_ENDS) for text in texts]
    return "|".join("".join(row) for row in rows), longs


def _make_row(rng: Random) -> list[str]:
    return [_make_step(rng) for _ in range(rng.choice((1, 1, 2, 3)))]


def _make_step(rng: Random) -> str:
    if rng.random() < 0.15:
        group = rng.choice(_GROUPS).format(rng.choice(_CLASSES), rng.choice(_CLASSES))
        return group + (rng.choice(("", "?", "+")) if "|" in group else "")
    return rng.choice(_CLASSES) + rng.choice(_SIGNS)


def run(given: tuple[str, list[str]], folder: Path) -> None:
    """Refuse what has no proof; time the others."""
    pattern, texts = given
    if find_cost(pattern).degree != 1:
        raise LoadError("no proof")
    try:
        split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    except Exception as error:  # the library raises plain Exception for what it can't compile
        raise LoadError("it can't be compiled") from error
    for text in texts:
        seconds = min(_time(split, text) for _ in range(2))
        if seconds > _SECONDS:
            raise Difference(f"{pattern!r} takes {seconds:.3f} s for {len(text)} characters of {text[:4]!r}")


def _time(split: pre_tokenizers.PreTokenizer, text: str) -> float:
    start = time.thread_time()
    split.pre_tokenize_str(text)
    return time.thread_time() - start
