"""An end token that is also a piece of text neither ends a structured text midway nor stands behind it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.grammar.tiny import load_tiny
from unspool.errors import NoTokenLeftError

PATTERN = "[a-e]{6,9}"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no drafter": {"drafter": False},
    "sampling": {"do_sample": True, "seed": 3, "top_k": 0},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_letter_that_ends_texts(way: str) -> None:
    lm = load_tiny("llama")
    for number, letter in enumerate("abc"):
        (end,) = lm.tokenizer.encode(letter, add_special_tokens=False)[-1:]
        told = {"eos_token_id": [2, end], "max_new_tokens": 24, **WAYS[way]}
        found = lm.generate([[5 + number, 6]], regex=PATTERN, **told)
        assert found.finish_reasons == ["eos"] and end not in found.token_ids[0]
        assert re.fullmatch(PATTERN, found.texts[0].strip()), found.texts[0]


def test_a_text_that_needs_the_token_says_so() -> None:
    lm = load_tiny("llama")
    (end,) = lm.tokenizer.encode("a", add_special_tokens=False)[-1:]
    with pytest.raises(NoTokenLeftError, match="GrammarLogitsProcessor"):
        lm.generate([[5, 6]], regex="b[a]c", eos_token_id=[2, end], max_new_tokens=9)
