"""The regular expressions of tokenizers: those in use are proved to be fast, hostile ones can't be."""

from __future__ import annotations

import json
import math
import time

import pytest
from tokenizers import Regex, pre_tokenizers

from unspool.text.backend import SPLITS
from unspool.text.patterns import find_cost

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
HAN = r"[\p{Han}]+"
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

LINEAR = {
    "gpt-2, whisper, olmo": GPT2,
    "llama 3, cl100k, glm 4, smollm 3": CL100K,
    "cl100k, possessive": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
        r"\s+(?!\S)|\s"
    ),
    "qwen 2 and 3": CL100K.replace("{1,3}", ""),
    "o200k, gpt-oss, llama 4, phi 4 mini": O200K,
    "tekken, nemotron": O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", ""),
    "kimi": f"{HAN}|" + O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]"),
    "deepseek v3, digits": r"\p{N}{1,3}",
    "deepseek v3, characters": "[一-龥぀-ゟ゠-ヿ]+",
    "deepseek v3, words": (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "deepseek llm, lines": "[\r\n]",
    "deepseek llm, words": r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽ]+",
    "deepseek llm, signs": r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    "falcon": "[0-9][0-9][0-9]",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "clip": r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "spaces of t5 and albert": " {2,}",
    "spaces of clip": r"\s+",
    "xlnet, mbart": r" +",
    "superbpe, digits": r"\p{N}+",
    "gemma 3n, minicpm": "▁+",
    "roberta-like": r"(?i)'s|\p{L}+|\s+",
}
# Patterns in use that take the square of a run: their texts are bounded, not the patterns refused.
SQUARE = {
    "deepseek llm, ends": r"\s+$",
    "superbpe, threes": r"(?=(\d{3})+(?!\d))",
    "superbpe, lines": r"(?:\r?\n)+(?!\r?\n)",
}
SLOW = {
    "a square": "a*b",
    "a square behind one that takes little": "a*b|a|a+",
    "a cube": "a*a*b",
    "a square by looking back": r"a+(?<!a)",
    "a lazy one": "a*?b",
    "a possessive one": r"\s++(?!\S)|\s",
    "one cut off before its fellow": r"\s*[\r\n]+|\p{L}+|\s+",
    "another run than the one looked at": r"\s*x|[ ]+",
}
UNBOUNDED = {
    "nested": "(a+)+b",
    "nested twice": "((a*)*)*b",
    "ambiguous": "(a|aa)+b",
    "ambiguous, optional": "(a?b?)*c",
    "counted": "(a{1,30}){1,30}b",
    "optional": "(a?){60}a{60}",
    "a reference": r"(a*)b\1",
    "recursion": r"(?<x>a\g<x>*)b",
    "a conditional": r"(a)?(?(1)b|c)",
    "an absence": r"(?~abc)",
    "inline flags": "a(?i)b*",
    "extended": "(?x: a + b )",
    "many ways": "|".join("a?b?c?" for _ in range(200)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_patterns_in_use_take_time_in_proportion(name: str) -> None:
    work = find_cost(LINEAR[name])
    assert work.degree == 1
    assert work.tries < 100
    assert work.shortest >= 1


@pytest.mark.parametrize("name", SPLITS)
def test_families_take_time_in_proportion(name: str) -> None:
    for step in SPLITS[name].cut(False):
        pattern = json.loads(step.__getstate__()).get("pattern", {}).get("Regex")
        assert pattern is None or find_cost(pattern).degree == 1


@pytest.mark.parametrize("name", LINEAR)
def test_the_proof_holds_on_long_texts(name: str) -> None:
    split = pre_tokenizers.Split(Regex(LINEAR[name]), "isolated")
    runs = ("a", "A", " ", "\n", "1", "日", ".", "'", "é\u0301", "Aa", " \n", "\n ", " a", "▁", "aA1. \n")
    for text in [run * (10_000 // len(run)) + end for run in runs for end in ("a", "1")]:
        least = math.inf  # of three: a collection of garbage counts as this thread's time
        for _ in range(3):
            start = time.thread_time()
            split.pre_tokenize_str(text)
            least = min(least, time.thread_time() - start)
            if least < 0.12:
                break
        assert least < 0.12, text[:10]  # a square of 10,000 takes twice as long


@pytest.mark.parametrize("name", SQUARE)
def test_squares_in_use(name: str) -> None:
    assert find_cost(SQUARE[name]).degree == 2


@pytest.mark.parametrize("name", SLOW)
def test_slow_patterns_are_known_as_such(name: str) -> None:
    degree = find_cost(SLOW[name]).degree
    assert degree is not None
    assert degree >= 2


@pytest.mark.parametrize("name", UNBOUNDED)
def test_patterns_without_a_bound(name: str) -> None:
    assert find_cost(UNBOUNDED[name]).degree is None


def test_the_shortest_match() -> None:
    assert find_cost(" {2,}").shortest == 2
    assert find_cost("abc?|(?:x|yz)+").shortest == 0  # not understood, so nothing is promised
    assert find_cost("abc?|(?:xy|yzz){2}").shortest == 2
    assert find_cost(r"(?=a)\b").shortest == 0
