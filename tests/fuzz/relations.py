"""What must not depend on how a call is made: run two ways, and compare tokens and log-probabilities."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import unspool
from tests.conformance.cases import GOLDENS, load_model
from tests.fuzz import texts
from tests.fuzz.calls import VOCAB, Call
from tests.fuzz.findings import Difference
from unspool.decoding.randomness import derive_seed, draw_uniform
from unspool.errors import NoTokenLeftError, UnfulfilledError, UnspoolError

RAN_OUT = (NoTokenLeftError, UnfulfilledError)  # what only the search can tell
TIE = 1e-4  # scores closer than this may change places by rounding
DRAW_TIE = 1e-5  # and a number closer than this to a boundary of cumulated probabilities may fall on either side
LOGPROB_TOLERANCE = 2e-3
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True}


@lru_cache(maxsize=32)
def load(name: str) -> unspool.LanguageModel:
    """A model of the goldens, loaded once in a process; "adapted X" runs X through transformers, "spelled X" has a
    tokenizer."""
    if name.startswith("spelled "):
        lm = copy.copy(load_model(name.removeprefix("spelled ")))
        lm.tokenizer = texts.make_tokenizer(VOCAB)
        return lm
    if name.startswith("adapted "):
        return unspool.load(GOLDENS / "models" / name.removeprefix("adapted "), native=False)
    return load_model(name)


@dataclass(frozen=True)
class Found:
    """What a call gave: tokens, reasons, log-probabilities and texts, one for each row; or its refusal."""

    tokens: list[list[int]]
    reasons: list[str]
    logprobs: list[list[float]] | None = None
    refusal: UnspoolError | None = None
    texts: list[str] | None = None


@contextmanager
def count_passes(model: Any) -> Iterator[list[str]]:
    """Inside it, the list grows by one item for every pass over the model."""
    passes: list[str] = []

    def watch(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            passes.append(name)
            return method(*args, **kwargs)

        return call

    names = [name for name in ("forward", "encode", "take_steps") if hasattr(model, name)]
    for name in names:
        setattr(model, name, watch(name, getattr(model, name)))
    try:
        yield passes
    finally:
        for name in names:
            delattr(model, name)


def run(call: Call, way: Callable[[Call], Found] | None = None) -> Found:
    """Make a call. One that is refused must be so before the first pass, unless the search found no way on."""
    with count_passes(load(call.model).model) as passes:
        try:
            found = (way or generate)(call)
        except UnspoolError as error:
            if passes and not isinstance(error, RAN_OUT):
                raise Difference(f"refused after {len(passes)} passes: {error}\n{call}") from error
            return Found([], [], refusal=error)
    return found


def generate(call: Call, **more: Any) -> Found:
    """Make a call by `lm.generate`."""
    result = load(call.model).generate(call.rows, **call.settings, **more)
    logprobs = None if result.logprobs is None else [[one.logprob for one in row] for row in result.logprobs]
    return Found(result.token_ids, result.finish_reasons, logprobs, texts=result.texts)


def stream(call: Call) -> Found:
    """Make a call by `lm.stream`."""
    num_rows = len(call.rows) * call.copies
    tokens: list[list[int]] = [[] for _ in range(num_rows)]
    logprobs: list[list[float]] = [[] for _ in range(num_rows)]
    written, reasons = [""] * num_rows, [""] * num_rows
    for piece in load(call.model).stream(call.rows, **call.settings):
        tokens[piece.row] += piece.token_ids
        written[piece.row] += str(piece)
        logprobs[piece.row] += [one.logprob for one in piece.logprobs]
        reasons[piece.row] = piece.finish_reason or reasons[piece.row]
    return Found(tokens, reasons, logprobs if "logprobs" in call.settings else None, texts=written)


def from_file(folder: Path) -> Callable[[Call], Found]:
    """Make a call whose settings were saved and loaded."""

    def way(call: Call) -> Found:
        inputs = {name: value for name, value in call.settings.items() if name == "negative_prompt"}
        told = {name: value for name, value in call.settings.items() if name not in inputs}
        config = unspool.GenerationConfig(**told)
        config.save_pretrained(folder)
        loaded = unspool.GenerationConfig.from_pretrained(folder)
        return generate(Call(call.model, call.rows, inputs), generation_config=loaded)

    return way


def after_prefix(call: Call, length: int) -> Callable[[Call], Found]:
    """Make a call whose rows begin alike, after a prefix that was read before."""
    prefix = load(call.model).prefix([call.rows[0][:length]])

    def way(call: Call) -> Found:
        return generate(Call(call.model, [row[length:] for row in call.rows], call.settings), prefix=prefix)

    return way


def select(found: Found, rows: list[int], copies: int) -> Found:
    """What was found for some rows of a call."""
    if found.refusal is not None:
        return found
    index = [row * copies + copy for row in rows for copy in range(copies)]
    logprobs = None if found.logprobs is None else [found.logprobs[place] for place in index]
    picked = None if found.texts is None else [found.texts[place] for place in index]
    tokens, reasons = [found.tokens[place] for place in index], [found.reasons[place] for place in index]
    return Found(tokens, reasons, logprobs, texts=picked)


def check(call: Call, one: Found, other: Found, *, what: str, alike: bool = True) -> None:
    """Raise the difference between two ways of one call.

    With `alike` both are refused or none is; without, a refusal of one of them says nothing.
    """
    if one.refusal is not None or other.refusal is not None:
        both = one.refusal is not None and other.refusal is not None
        ran_out = any(isinstance(found.refusal, RAN_OUT) for found in (one, other))
        if alike and not both and not ran_out:
            raise Difference(f"{what}: refused one way alone: {one.refusal or other.refusal}\n{call}")
        return
    for row, (mine, theirs) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        if mine != theirs:
            if not is_near_tie(call, row, mine, theirs):
                raise Difference(f"{what}: row {row} wrote {mine} and {theirs}\n{call}")
            continue
        if one.reasons[row] != other.reasons[row]:
            raise Difference(f"{what}: row {row} ended by {one.reasons[row]} and {other.reasons[row]}\n{call}")
        if one.texts is not None and other.texts is not None and one.texts[row] != other.texts[row]:
            raise Difference(f"{what}: row {row} reads {one.texts[row]!r} and {other.texts[row]!r}\n{call}")
        if one.logprobs is None or other.logprobs is None:
            continue
        for mine_told, theirs_told in zip(one.logprobs[row], other.logprobs[row], strict=True):
            if abs(mine_told - theirs_told) > LOGPROB_TOLERANCE * max(1.0, abs(mine_told) / 10):
                raise Difference(f"{what}: row {row} told {one.logprobs[row]} and {other.logprobs[row]}\n{call}")


def is_near_tie(call: Call, row: int, mine: list[int], theirs: list[int]) -> bool:
    """Whether the first token that differs was chosen between two scores closer than `TIE`."""
    alone = call.pick([row // call.copies])
    told = dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size", "cache_implementation"))
    lm = load(call.model)
    result = lm.generate(alone.rows, **alone.set(**told).settings, **OUTPUTS)
    if alone.settings.get("num_beams", 1) > 1:
        return has_near_beams(lm, alone.set(**told)) or score_alike(lm, call.set(**told), row, mine, theirs)
    place = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if place is None or place >= len(result.output.scores) or alone.settings.get("penalty_alpha"):
        return False
    if alone.settings.get("do_sample"):
        seed = derive_seed(alone.settings["seed"][0], row % call.copies)
        number = draw_uniform(torch.tensor([seed]), torch.tensor([len(alone.rows[0]) + place]))
        first, second = sorted((mine[place], theirs[place]))
        sums = result.output.scores[place][row % call.copies].double().softmax(-1).cumsum(-1)
        return bool(sums[first] - DRAW_TIE < number) and bool(number < sums[second - 1] + DRAW_TIE)
    best = result.output.scores[place][0].topk(2).values
    return bool(best[0] - best[1] < TIE)


def has_near_beams(lm: unspool.LanguageModel, alone: Call) -> bool:
    """Whether two of the sequences that a search ends with have nearly the same score."""
    table = alone.set(num_return_sequences=alone.settings["num_beams"])
    scores = getattr(lm.generate(table.rows, **table.settings, **OUTPUTS).output, "sequences_scores", None)
    return scores is not None and bool((scores[:-1] - scores[1:]).abs().min() < TIE)


def score_alike(lm: unspool.LanguageModel, call: Call, row: int, mine: list[int], theirs: list[int]) -> bool:
    """Whether a search that rounds differently finds the other sequence, with nearly the same score."""
    scores: dict[tuple[int, ...], float] = {}
    for change in ({}, {"use_cache": False}, {"prefill_chunk_size": 1}, {"prefill_chunk_size": 3}):
        for some, place in ((call, row), (call.pick([row // call.copies]), row % call.copies)):
            result = lm.generate(some.rows, **some.set(**change).settings, **OUTPUTS)
            scores[tuple(result.token_ids[place])] = float(result.output.sequences_scores[place])
    found = [scores.get(tuple(tokens)) for tokens in (mine, theirs)]
    return found[0] is not None and found[1] is not None and abs(found[0] - found[1]) < TIE
