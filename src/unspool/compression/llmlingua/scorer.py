"""A causal model and its tokenizer, as the compressor asks them: lengths, losses of texts, losses of windows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from unspool.compression.losses import Losses, TextLosses, check_scorer, measure_texts
from unspool.errors import InputError, UnsupportedError
from unspool.protocols import Model
from unspool.text import Tokenizer


class Scorer:
    """What ranks contexts and finds the losses of their tokens."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    @property
    def max_positions(self) -> int | None:
        """Positions that a pass may reach; None if there is no end."""
        return self.model.info.max_context

    def check(self) -> None:
        """Raise for a model without losses."""
        if not hasattr(self.model, "forward"):
            raise UnsupportedError(
                "this is a token classifier, which has no losses; make the compressor with use_llmlingua2=True"
            )
        check_scorer(self.model)

    def encode(self, text: str, *, is_bare: bool = True) -> list[int]:
        """The ids of a text, with the tokenizer's special tokens unless it is bare."""
        return self.tokenizer.encode(text, add_special_tokens=not is_bare)

    def count(self, text: str, *, is_bare: bool = False) -> int:
        """The tokens of a text."""
        return len(self.encode(text, is_bare=is_bare))

    def start(self) -> TextLosses:
        """A text to be read piece by piece."""
        return TextLosses(self.model)

    def measure(self, texts: Sequence[str]) -> list[Losses]:
        """The losses of texts, as far as positions reach."""
        rows = [self.encode(text, is_bare=False)[: self.max_positions] for text in texts]
        for text, row in zip(texts, rows, strict=True):
            if not row:
                raise InputError(f"the text {text[:40]!r} has no tokens, so it can't be ranked; leave it out")
        return measure_texts(self.model, rows)

    def perplexities(self, texts: Sequence[str], question: str, condition: str) -> list[float]:
        """The mean loss of each text, of texts given the question ("before"), or of the question ("after") a text.

        NaN where positions end before what is to be scored.
        """
        if condition == "none":
            whole, firsts = list(texts), [0] * len(texts)
        elif condition == "before":
            whole = [question + text for text in texts]
            firsts = [self.count(question) - 1] * len(texts)
        else:
            whole = [text + question for text in texts]
            firsts = [self.count(text) - 1 for text in texts]
        scored = [losses[first:] for losses, first in zip(self.measure(whole), firsts, strict=True)]
        return [float(np.mean(each)) if len(each) else math.nan for each in scored]
