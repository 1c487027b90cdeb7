"""Calls of models with a tokenizer: stop strings mean what they say, and a stream's text is the whole text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.fuzz import relations, texts
from tests.fuzz.calls import VOCAB, Call, draw_call
from tests.fuzz.findings import Difference
from tests.fuzz.kinds import decoder_settings

NAME = "text_settings"
PAIRS = ["spelled t5", "spelled bart"]
MODELS = ["spelled gpt2", "spelled llama", "spelled mamba", "spelled qwen2", *PAIRS]
RELATIONS = ("alone", "order", "stream", "stream")
SHORT = 12


def warm() -> None:
    """Load the models."""
    for model in MODELS:
        relations.load(model)


def make(rng: random.Random) -> tuple[Call, str, Any]:
    """A call, the relation to check, and what it needs."""
    call = draw_call(rng, MODELS, [name for name in decoder_settings.STRATEGIES if name != "dola"])
    call = call.set(max_new_tokens=rng.randint(1, 12))
    if rng.random() < 0.8:
        call = call.set(stop_strings=texts.draw_stops(rng))
        if rng.random() < 0.3:
            call = call.set(keep_stop_strings=True)
    if rng.random() < 0.2 and call.model not in PAIRS:
        call = call.set(token_healing=True)
    if rng.random() < 0.2:
        call = call.set(skip_special_tokens=False)
    has_meaning = not {"num_beams", "token_healing"} & call.settings.keys()
    if has_meaning and rng.random() < 0.5:
        return call, "meaning", None
    return decoder_settings.draw_relation(rng, call, RELATIONS)


def run(given: tuple[Call, str, Any], folder: Path) -> None:
    """Make the call two ways and compare, or look at what it wrote."""
    if given[1] == "meaning":
        check_meaning(given[0])
    else:
        decoder_settings.run(given, folder)


def check_meaning(call: Call) -> None:
    """With stop strings a row is that without, up to the first that ends; its text ends before it."""
    stops = call.settings.get("stop_strings", [])
    found = relations.run(call)
    free = relations.run(call.set(stop_strings=None, keep_stop_strings=None))
    if found.refusal is not None or free.refusal is not None:
        relations.check(call, free, found, what="without stop strings")
        return
    for row, tokens in enumerate(free.tokens):
        prompt = [] if call.model in PAIRS else call.rows[row // call.copies]
        cut = next(
            (num for num in range(1, len(tokens) + 1) if texts.ends_at(prompt + tokens[:num], stops, VOCAB)), None
        )
        mine = found.tokens[row]
        if mine != tokens[:cut] and not relations.is_near_tie(call, row, mine, tokens[:cut]):
            raise Difference(f"row {row} wrote {mine}, and {tokens} without stop strings: {cut} of them\n{call}")
        if mine == tokens[:cut] and "skip_special_tokens" not in call.settings:
            check_text(call, row, mine, found.texts[row] if found.texts else "", stops)


def check_text(call: Call, row: int, tokens: list[int], written: str, stops: list[str]) -> None:
    """A row's text is that of its tokens, up to the first stop string in it."""
    text = texts.read(tokens, VOCAB)
    found = min(((text.find(stop), -len(stop)) for stop in stops if stop in text), default=None)
    if found is not None:
        text = text[: found[0] - found[1] if "keep_stop_strings" in call.settings else found[0]]
    if text != written:
        raise Difference(f"row {row} of {tokens} reads {written!r}, and not {text!r}\n{call}")
