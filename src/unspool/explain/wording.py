"""How tokens, probabilities and texts are written in a picture."""

from __future__ import annotations

import math
import unicodedata

_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·"}
_HIDDEN = frozenset(
    {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
)  # categories that move, hide or reorder other characters


def show_text(text: str) -> str:
    """Text on one line, with control characters made visible; spaces are kept."""
    return "".join(_show_character(character) for character in text)


def show_token(text: str) -> str:
    """A token's text as in `show_text`, with its spaces visible; an empty one is `∅`."""
    return "".join("·" if character == " " else _show_character(character) for character in text) or "∅"


def _show_character(character: str) -> str:
    if character == " ":
        return character
    if character in _NAMED:
        return _NAMED[character]
    if unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else f"\\u{code:04x}"


def shorten(text: str, width: int) -> str:
    """The text in at most `width` columns, its end replaced if it is longer."""
    if measure(text) <= width:
        return text
    kept, taken = "", 0
    for character in text:
        taken += _columns(character)
        if taken > width - 1:
            break
        kept += character
    return kept + "…" if width > 0 else ""


def shorten_front(text: str, width: int) -> str:
    """The text in at most `width` columns, its beginning replaced if it is longer."""
    return shorten(text[::-1], width)[::-1]


def wrap(text: str, width: int, most_lines: int) -> list[str]:
    """The text in lines of at most `width` columns, broken at spaces if there are any; the last may be cut."""
    lines: list[str] = []
    while measure(text) > width and len(lines) < most_lines - 1:
        fitting = shorten(text, width + 1)[:-1] or text[:1]
        cut = fitting.rfind(" ") + 1 or len(fitting)
        lines.append(text[:cut].rstrip())
        text = text[cut:].lstrip()
    return [*lines, shorten(text, width)]


def measure(text: str) -> int:
    """The width of a text in columns, one or two per character."""
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def write_probability(logprob: float) -> str:
    """A log-probability as a percentage."""
    share = 100 * math.exp(min(logprob, 0.0))
    if share >= 99.95:
        return "100%"
    return f"{share:.0f}%" if share >= 9.5 else f"{share:.1f}%" if share >= 0.095 else "<0.1%"


def write_number(value: float) -> str:
    """A log-probability or score, with a minus sign as wide as a digit."""
    return "−∞" if value == -math.inf else f"{value:.2f}".replace("-", "−")
