"""Contexts in tagged segments: `<llmlingua, rate=0.4>…</llmlingua>`, `<llmlingua, compress=False>…</llmlingua>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unspool.errors import InputError, SettingError, excerpt

_RATE = r"(?:,\s*rate\s*=\s*(?P<rate{n}>[\d.]+))?\s*"
_COMPRESS = r"(?:,\s*compress\s*=\s*(?P<compress{n}>True|False))?\s*"
_OPENING = r"<llmlingua\s*" + "".join(part.replace("{n}", n) for n in "12" for part in (_RATE, _COMPRESS)) + ">"
_SEGMENT = re.compile(_OPENING + r"(?P<text>[^<]+)</llmlingua>")
_CLOSING = "</llmlingua>"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a context, how much of it may stay, and whether anything of it may go."""

    length: int  # characters
    rate: float
    is_compressed: bool = True
    text: str = ""


@dataclass(frozen=True, slots=True)
class SegmentedContext:
    """A context without its tags, and its segments in order."""

    text: str
    segments: tuple[Segment, ...]

    @property
    def is_kept(self) -> bool:
        """Whether it has a segment that must stay."""
        return any(not segment.is_compressed for segment in self.segments)


def read_segments(context: str, rate: float) -> SegmentedContext:
    """The segments of a tagged context; a text without tags is one segment, and text between tags is not kept."""
    if context.count("<llmlingua") > context.count(_CLOSING):
        raise InputError(f"a <llmlingua> tag of {excerpt(context)} is not closed; end every segment with </llmlingua>")
    text = context if context.startswith("<llmlingua") else f"<llmlingua>{context}"
    text = text if text.endswith(_CLOSING) else text + _CLOSING
    segments = tuple(_read_segment(found, rate) for found in _SEGMENT.finditer(text))
    if not segments:
        raise InputError(
            f"no segment was found in {excerpt(context)}: write <llmlingua, rate=0.5>…</llmlingua>, close every tag, "
            "and put no '<' inside"
        )
    if _loses_segments(text):
        raise InputError(f"a segment of {excerpt(context)} has a '<' inside, which only tags may have; leave it out")
    return SegmentedContext("".join(segment.text for segment in segments), segments)


def _loses_segments(text: str) -> bool:
    """Whether a tag opens words that are in no segment; tags that stand in each other open none."""
    rest = _SEGMENT.sub("", text)
    opened = re.search(r"<llmlingua[^<>]*>(?P<lost>[^<]*)", rest)
    return opened is not None and bool(opened["lost"].strip())


def _read_segment(found: re.Match[str], rate: float) -> Segment:
    stays = found["compress1"] or found["compress2"] or "True"
    is_compressed = stays == "True"
    written = found["rate1"] or found["rate2"]
    try:
        own = float(written) if written else 0.0
    except ValueError as error:
        raise SettingError(f"the rate {excerpt(written)} of a segment is no number") from error
    own = own or (rate if is_compressed else 1.0)
    if not own <= 1:
        raise SettingError(f"the rate {own:g} of a segment must be a number from 0 to 1")
    return Segment(len(found["text"]), own, is_compressed, found["text"])


def divide_sentences(segments: Sequence[Segment], sentences: Sequence[str]) -> list[list[Segment]]:
    """The segments, or parts of them, that each sentence of a context consists of."""
    left, place, divided = [segment.length for segment in segments], 0, []
    for sentence in sentences:
        parts, remaining = [], len(sentence)
        while remaining:
            taken = min(left[place], remaining)
            parts.append(replace(segments[place], length=taken, text=""))
            left[place] -= taken
            remaining -= taken
            place += left[place] == 0
        divided.append(parts)
    return divided


def join_alike(segments: Sequence[Segment]) -> list[Segment]:
    """Neighbours that are treated alike become one."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if last is not None and (last.rate, last.is_compressed) == (segment.rate, segment.is_compressed):
            joined[-1] = replace(last, length=last.length + segment.length, text="")
        else:
            joined.append(segment)
    return joined
