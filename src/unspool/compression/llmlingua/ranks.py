"""Which contexts matter most: by losses, by words they share with the question, by how well they pack together."""

from __future__ import annotations

import gzip
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from unspool.compression.llmlingua.scorer import Scorer

Ranks = list[tuple[int, float]]
"""Places of texts and their scores, the text to keep first."""

# What the package appends to the question when contexts are ranked by losses.
_HINT = " We can get the answer to this question in the given documents."


def rank_contexts(scorer: Scorer, texts: Sequence[str], question: str, method: str, condition: str) -> Ranks:
    """Contexts in the order in which they are to be kept."""
    if method == "bm25":
        return [(place, 0.0) for place in np.argsort(-_bm25(texts, question), kind="stable").tolist()]
    if method == "gzip":
        distances = [_gzip_distance(text, question) for text in texts]
        return [(place, 0.0) for place in np.argsort(distances, kind="stable").tolist()]
    return sort_scores(scorer.perplexities(texts, question + _HINT, condition), condition)


def sort_scores(scores: Sequence[float], condition: str) -> Ranks:
    """High losses first where texts are scored alone, low ones where they are given the question or give it."""
    sign = -1 if condition == "none" else 1
    return sorted(enumerate(scores), key=lambda pair: sign * pair[1])


def _gzip_distance(text: str, question: str) -> float:
    alone, other = (len(gzip.compress(part.encode())) for part in (text, question))
    both = len(gzip.compress(f"{text} {question}".encode()))
    return (both - min(alone, other)) / max(alone, other)


def _bm25(texts: Sequence[str], question: str, k1: float = 1.5, b: float = 0.75, floor: float = 0.25) -> np.ndarray:
    """Okapi BM25; words of more than half of the texts count a quarter of what words count on average."""
    counts = [Counter(text.split(" ")) for text in texts]
    lengths = np.array([sum(count.values()) for count in counts], dtype=np.float64)
    holding = Counter(word for count in counts for word in count)
    weights = {word: math.log(len(texts) - n + 0.5) - math.log(n + 0.5) for word, n in holding.items()}
    least = floor * (sum(weights.values()) / len(weights)) if weights else 0.0
    weights = {word: least if weight < 0 else weight for word, weight in weights.items()}
    scores = np.zeros(len(texts))
    damping = k1 * (1 - b + b * lengths / lengths.mean())
    for word in question.split(" "):
        found = np.array([count.get(word, 0) for count in counts], dtype=np.float64)
        scores += weights.get(word, 0.0) * found * (k1 + 1) / (found + damping)
    return scores
