"""Walks over constraints, made the same way by the reference (record_walks.py) and by the tests."""

from __future__ import annotations

import random
from typing import Any


def draw_case(seed: int) -> dict[str, Any]:
    """Constraints over a few tokens, and a walk that keeps running into them."""
    draw = random.Random(seed)
    vocabulary = draw.randint(3, 6)
    words = [draw_word(draw, vocabulary) for _ in range(draw.randint(1, 3))]
    tokens: list[int] = []
    while len(tokens) < 24:
        word = draw.choice(words)
        phrase = draw.choice(word) if isinstance(word[0], list) else word
        tokens += draw.choice([phrase, phrase[: draw.randint(1, len(phrase))], [draw.randrange(vocabulary)]])
    return {"seed": seed, "words": words, "tokens": tokens}


def draw_word(draw: random.Random, vocabulary: int) -> list[Any]:
    """A phrase, or phrases none of which begins another."""
    if draw.random() < 0.5:
        return [draw.randrange(vocabulary) for _ in range(draw.randint(1, 4))]
    phrases: list[list[int]] = []
    for _ in range(draw.randint(1, 4)):
        phrase = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 4))]
        if not any(phrase[: len(other)] == other[: len(phrase)] for other in phrases):
            phrases.append(phrase)
    return phrases


def make(library: Any, word: list[Any]) -> Any:
    """A library's constraint for a word."""
    nested = isinstance(word[0], list)
    return library.DisjunctiveConstraint(word) if nested else library.PhrasalConstraint(word)


def walk_constraint(library: Any, word: list[Any], tokens: list[int]) -> list[Any]:
    """What one constraint says after every token."""
    constraint, seen = make(library, word), []
    for token in tokens:
        does_advance = constraint.does_advance(token)
        answer = [int(flag) for flag in constraint.update(token)]
        if answer[2]:
            # The reference's phrase resets to its second token (and to nowhere, if it has one only); all who use it
            # take a fresh copy instead.
            constraint = constraint.copy()
        seen.append([int(does_advance), *answer, constraint.remaining(), constraint.advance()])
    return seen


def walk_list(library: Any, words: list[list[Any]], tokens: list[int]) -> list[Any]:
    """What a list of constraints says after every token; it is copied and read again on the way."""
    state, seen = library.ConstraintListState([make(library, word) for word in words]), []
    for step, token in enumerate(tokens):
        if not state.completed and step % 5 == 3:
            state = state.copy(stateful=True)
        complete, stepped = state.add(token)
        counts = [len(state.complete_constraints), len(state.pending_constraints)]
        seen.append([int(complete), int(stepped), int(state.completed), state.get_bank(), *counts, state.advance()])
    again = library.ConstraintListState([make(library, word) for word in words])
    again.reset(tokens)
    assert (again.completed, again.get_bank()) == (state.completed, state.get_bank())
    return seen
