"""Calls whose rows differ in a setting that one run has one value of: each kind of row is a call of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from numbers import Integral
from typing import Any, Final, NamedTuple

import torch

from unspool.api.prompt import OMITTED
from unspool.api.speaker import Piece
from unspool.config import PARAMETERS
from unspool.config.sampling import list_draw_settings
from unspool.decoding.randomness import derive_seed
from unspool.errors import SettingError
from unspool.outputs import Generation, Stats

APART: Final = ("max_new_tokens", "do_sample")
_WHOLE: Final = ("output", "beam_trace")  # of one run, whose rows are not told apart


class Part(NamedTuple):
    """The rows of a kind: their places among all, their prompts and their settings."""

    places: list[int]
    prompts: list[Any]
    settings: dict[str, Any]


def part_rows(prompt: Any, settings: Mapping[str, Any]) -> list[Part] | None:
    """The calls that a call is made of; None if its rows go together."""
    listed = {name: list(value) for name in APART if isinstance(value := settings.get(name), list | tuple)}
    if not listed:
        return None
    prompts = _list_prompts(prompt)
    for name, values in listed.items():
        if len(values) != len(prompts):
            raise SettingError(
                f"`{name}` has {len(values)} values for {len(prompts)} prompts; give one, or a list with one for each"
            )
        if name == "do_sample" and any(one not in (None, True, False) for one in values):
            raise SettingError(f"`do_sample` must be true or false for each prompt, but is {values!r:.80}")
    if settings.get("past_key_values") is not None or settings.get("attention_mask") is not None:
        name = "past_key_values" if settings.get("past_key_values") is not None else "attention_mask"
        raise SettingError(f"`{next(iter(listed))}` has one value for each prompt, and `{name}` is of all; give texts")
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for place in range(len(prompts)):
        kinds.setdefault(tuple(values[place] for values in listed.values()), []).append(place)
    draws = "do_sample" in listed and any(listed["do_sample"])
    parts = []
    for kind, places in kinds.items():
        chosen = _choose(settings, places, len(prompts)) | dict(zip(listed, kind, strict=True))
        if draws and chosen.get("do_sample") is False:  # the other rows read these
            chosen = {name: value for name, value in chosen.items() if name not in list_draw_settings()}
        parts.append(Part(places, [prompts[place] for place in places], chosen))
    return parts


def join_rows(parts: Sequence[Part], made: Sequence[Generation]) -> Generation:
    """The rows of the calls' answers in their own order."""
    places = [place for part, one in zip(parts, made, strict=True) for place in _spread(part, len(one.texts))]
    order = sorted(range(len(places)), key=places.__getitem__)
    joined: dict[str, Any] = {}
    for field in fields(Generation):
        values = [getattr(one, field.name) for one in made]
        if field.name in _WHOLE or field.name == "stats" or any(value is None for value in values):
            continue
        each = _order_prompts(parts, values) if field.name.startswith("prompt_") else list(chain(*values))
        joined[field.name] = each if field.name.startswith("prompt_") else [each[at] for at in order]
    return Generation(**joined, stats=_add_stats([one.stats for one in made]))


def stream_rows(parts: Sequence[Part], stream: Callable[..., Any]) -> Generator[Piece, None, None]:
    """The pieces of the calls, one call after the other, with the rows' own numbers."""
    for part, pieces in [(part, stream(part.prompts, **part.settings)) for part in parts]:  # all are checked first
        copies = max(int(part.settings.get("num_return_sequences") or 1), 1)
        for piece in pieces:
            piece.row = part.places[piece.row // copies] * copies + piece.row % copies
            yield piece


def _list_prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, torch.Tensor):
        return prompt.tolist() if prompt.dim() == 2 else [prompt.tolist()]
    if isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], Integral | Mapping):
        return list(prompt)
    if prompt is None or prompt is OMITTED or isinstance(prompt, Mapping):
        raise SettingError("a list with one value for each prompt goes with texts, chats or lists of token ids")
    return [prompt]


def _choose(settings: Mapping[str, Any], places: Sequence[int], num_rows: int) -> dict[str, Any]:
    """The settings of some rows, out of those that have one value for each."""
    chosen: dict[str, Any] = {}
    for name, value in settings.items():
        parameter = PARAMETERS.get(name)
        is_listed = parameter is not None and parameter.holds_rows(value)
        if name == "negative_prompt":
            is_listed = (
                isinstance(value, list | tuple) and not isinstance(value[:1], Mapping) and len(value) == num_rows
            )
        if is_listed and len(value) == num_rows:
            value = [value[place] for place in places]
        elif name == "seed" and isinstance(value, int):  # rows that share one are numbered through
            value = [derive_seed(value, place) for place in places]
        elif name == "prefix_allowed_tokens_fn" and callable(value):
            value = _number(value, places)
        chosen[name] = value
    return chosen


def _number(allow: Callable[[int, Any], Any], places: Sequence[int]) -> Callable[[int, Any], Any]:
    """A caller's function that is told a row's place among all."""
    return lambda row, ids: allow(places[row], ids)


def _spread(part: Part, num_texts: int) -> list[tuple[int, int]]:
    copies = num_texts // len(part.places)
    return [(place, copy) for place in part.places for copy in range(copies)]


def _order_prompts(parts: Sequence[Part], values: Sequence[Sequence[Any]]) -> list[Any]:
    """What there is one of for each prompt, in the prompts' order."""
    found: dict[int, Any] = {}
    for part, rows in zip(parts, values, strict=True):
        found |= zip(part.places, rows, strict=False)
    return [found[place] for place in sorted(found)]


def _add_stats(each: Sequence[Stats]) -> Stats:
    total = replace(each[0], speculation=each[0].speculation if len(each) == 1 else None)
    for one in each[1:]:
        for name in ("prompt_tokens", "cached_tokens", "new_tokens", "forward_passes", "total_seconds"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total
