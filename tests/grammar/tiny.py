"""The reference's tiny models with a tokenizer of as many tokens."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

from tests import fakes
from tests.conformance.cases import load_model
from unspool.text import Tokenizer


@lru_cache(maxsize=1)
def make_tokenizer() -> Tokenizer:
    """One for all tests: its vocabulary is read once."""
    return fakes.make_tokenizer()


@lru_cache(maxsize=8)
def load_tiny(name: str) -> Any:
    """A reference model with that tokenizer."""
    lm = copy.copy(load_model(name))
    lm.tokenizer = make_tokenizer()
    return lm
