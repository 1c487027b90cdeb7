"""Hostile values and mutations: of JSON, of strings, of bytes. All randomness comes from `rng`."""

from __future__ import annotations

import copy
import json
import re
from random import Random
from typing import Any

INTEGERS = (
    *(0, 1, -1, 2, 3, 7, 8, 127, 255, 256, 1000, 65_535, 65_536, 1 << 20, (1 << 24) + 1),
    *((1 << 31) - 1, 1 << 31, -(1 << 31), (1 << 32) - 1, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, 10**400),
    *(-(1 << 63), -(10**400)),
)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-45, 5e-324, 1e-300, 1e38, 3.5e38, 1.7e308, -1e308)
ENDLESS = (float("nan"), float("inf"), float("-inf"))
STRINGS = (
    *("", " ", "\x00", "\n", "a", "true", "None", "0", "-1", "1e999", "nan", "auto", "../../etc/passwd", "/dev/zero"),
    *("\ud800", "\udfff", "a\ud800b", "\ufffd", "\u202e", "\u2028", "é", "e\u0301", "\U0001f9d1\u200d\U0001f680"),
    *("\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\x7f", "%s%n", "{0}", "{{ 1 }}", "{% for %}", "<s>", "</s>"),
    *("__class__", "__proto__", "torch.float99", "x" * 300, "é" * 5_000, "x" * 70_000),
)


MOST_PARTS = 200_000  # of a JSON value that is written


class Raw(str):
    """Text that stands in JSON as it is: a number of 5,000 digits, nesting that has no end."""

    __slots__ = ()


RAW = (
    Raw("9" * 5_000),
    Raw("-" + "9" * 5_000),
    Raw("1e99999"),
    Raw("0." + "1" * 5_000),
    Raw("[" * 100_000),
    Raw("[" * 900 + "]" * 900),
    Raw('{"a":' * 900 + "1" + "}" * 900),
    Raw('{"a": 1, "a": 2}'),
    Raw("[" + "0," * 100_000 + "0]"),
    Raw('"' + "\\u0000" * 100 + '"'),
    Raw("nul"),
)


def hostile_number(rng: Random) -> int | float:
    """A number at the edge of something."""
    roll = rng.random()
    if roll < 0.6:
        return rng.choice(INTEGERS) + rng.choice((0, 0, 0, 1, -1))
    if roll < 0.9:
        return rng.choice(FLOATS)
    return rng.choice(ENDLESS)


def hostile_string(rng: Random) -> str:
    """A string that something may stumble over."""
    if rng.random() < 0.8:
        return rng.choice(STRINGS)
    return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) for _ in range(rng.randrange(20)))


def hostile_value(rng: Random, depth: int = 0) -> Any:
    """Any JSON value: also those of another type than expected."""
    roll = rng.random()
    if roll < 0.35:
        return hostile_number(rng)
    if roll < 0.55:
        return hostile_string(rng)
    if roll < 0.7:
        return rng.choice((None, True, False))
    if roll < 0.75:
        return rng.choice(RAW)
    if depth > 2:
        return []
    if roll < 0.9:
        return [hostile_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 5)))]
    return {hostile_string(rng): hostile_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2)))}


def mutate_json(rng: Random, value: Any, times: int = 1) -> Any:
    """A copy of a JSON value in which something is replaced, removed, added, repeated or renamed, `times` over."""
    value = copy.deepcopy(value)
    for _ in range(times):
        places = list(_list_places(value))
        if not places:
            return value if isinstance(value, dict | list) else hostile_value(rng)
        holder, key = rng.choice(places)
        _change(rng, holder, key)
    return value


def mutate_string(rng: Random, text: str) -> str:
    """A copy of a text in which something is cut, repeated or put in."""
    start = rng.randrange(len(text) + 1)
    stop = min(len(text), start + rng.choice((1, 3, 20)))
    roll = rng.randrange(4)
    if roll == 0:
        return text[:start] + text[stop:]
    if roll == 1:
        return text[:start] + text[start:stop] * rng.choice((2, 10, 1000)) + text[stop:]
    if roll == 2:
        return text[:start] + hostile_string(rng) + text[start:]
    return text[:start]


def mutate_bytes(rng: Random, data: bytes, times: int = 1) -> bytes:
    """A copy of some bytes with bits flipped, runs cut, repeated or overwritten, numbers made huge, `times` over."""
    changed = bytearray(data)
    for _ in range(times):
        if not changed:
            return bytes(rng.randrange(256) for _ in range(rng.randrange(64)))
        at = rng.randrange(len(changed)) if rng.random() < 0.5 else rng.randrange(min(len(changed), 256))
        roll = rng.randrange(7)
        if roll == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif roll == 1:
            changed[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif roll == 2:
            del changed[at : at + rng.choice((1, 4, 8, 64))]
        elif roll == 3:
            changed[at:at] = changed[at : at + rng.choice((1, 8, 64))] * rng.choice((1, 2, 50))
        elif roll == 4:
            width = rng.choice((2, 4, 8))
            number = rng.choice(INTEGERS) % (1 << 8 * width)
            changed[at : at + width] = number.to_bytes(width, "little")
        elif roll == 5:
            del changed[at:]
        else:
            other = rng.randrange(len(changed))
            size = rng.choice((4, 8, 32))
            changed[at : at + size] = changed[other : other + size]
    return bytes(changed)


def dump_json(value: Any) -> bytes:
    """JSON with all that Python can write and more: NaN, lone surrogates (escaped), and `Raw` texts as they are."""
    raws: list[str] = []
    num_marked = 0

    def mark(part: Any) -> Any:
        nonlocal num_marked
        num_marked += 1
        if num_marked > MOST_PARTS:  # a part may hold another many times over
            return None
        if isinstance(part, Raw):
            raws.append(part)
            return f"@raw{len(raws) - 1}@"
        if isinstance(part, dict):
            return {str(key): mark(one) for key, one in part.items()}
        if isinstance(part, (list, tuple)):
            return [mark(one) for one in part]
        return part

    text = json.dumps(mark(value))
    text = re.sub(r'"@raw(\d+)@"', lambda found: raws[int(found[1])], text)
    return text.encode("utf-8", "surrogatepass")


def _list_places(value: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key) in a JSON value whose content can be changed."""
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        part = stack.pop()
        keys: list[Any] = []
        if isinstance(part, dict):
            keys = list(part)
        elif isinstance(part, list):
            keys = list(range(len(part)))
        places += [(part, key) for key in keys]
        stack += [part[key] for key in keys]
    return places


def _change(rng: Random, holder: Any, key: Any) -> None:
    old = holder[key]
    roll = rng.random()
    if roll < 0.6:
        holder[key] = hostile_value(rng)
    elif roll < 0.7:
        del holder[key]
    elif roll < 0.8 and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = rng.choice((old + 1, old - 1, -old, old * 2, str(old), [old], {"a": old}))
    elif roll < 0.9 and isinstance(old, str):
        holder[key] = mutate_string(rng, old)
    elif isinstance(holder, list):
        holder[key:key] = [old] * rng.choice((1, 3, 1000))
    else:
        holder[hostile_string(rng)] = old
