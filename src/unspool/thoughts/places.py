"""Where rows stand in their thoughts, found from their tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from unspool.errors import SettingError
from unspool.stopping.pieces import Piece, TokenPieces
from unspool.thoughts.entry import ThoughtEntry
from unspool.thoughts.kinds import find_kind
from unspool.thoughts.parts import MOST_SPACE, Phase
from unspool.wording import about

_LOOK_BACK: Final = 2 * MOST_SPACE  # tokens of a prompt's end beside those of a mark


class Place(NamedTuple):
    """Where a row stands after some of its tokens."""

    phase: Phase  # "open": in a thought; "closed": behind it, or in a text without one; "free": it may yet begin
    num: int = 0  # tokens of thoughts so far, those of the marks behind them included
    end: int = 0  # tokens up to where the answer began
    is_said: bool = False  # the answer began without a thought before it
    tail: Piece = b""  # the text in which a mark may have begun
    seen: int = 0  # tokens


class ThoughtMarks:
    """A kind of thoughts in the tokens of one vocabulary."""

    def __init__(self, kind: ThoughtEntry, tokenizer: Any) -> None:
        self.kind = kind
        self.pieces = TokenPieces(tokenizer)
        self._begin, self._end = self.pieces.encode(kind.begin), self.pieces.encode(kind.end)
        self._direct = self.pieces.encode(kind.direct.strip())
        self._encode: Callable[[str], list[int]] = _make_encode(tokenizer)
        self._size = len(tokenizer)
        skipped: frozenset[int] = getattr(tokenizer, "skipped_ids", frozenset())
        named = {token: tokenizer.convert_ids_to_tokens(token) for token in skipped}
        self.special_ids = frozenset(
            token for token, text in named.items() if text and any(text in mark for mark in kind.marks)
        )  # special tokens that marks are made of

    @cached_property
    def header(self) -> tuple[int, ...]:
        """The tokens between a thought and the answer behind it."""
        return tuple(self._encode(self.kind.header))

    @cached_property
    def closing(self) -> tuple[int, ...]:
        """The tokens that end a thought and begin the answer."""
        return (*self._encode(self.kind.before_end + self.kind.end), *self.header)

    @property
    def longest_begin(self) -> int:
        """The most tokens up to where a thought begins."""
        return MOST_SPACE + len(self._begin)

    # --- prompts --------------------------------------------------------------------------------------
    def find_phase(self, prompt: Sequence[int]) -> Phase:
        """Where a prompt leaves the text behind it."""
        known = [self.pieces.piece(token) for token in prompt[-len(self._begin) - _LOOK_BACK :] if token >= 0]
        text: Any = self._join(known)
        text = text.rstrip()
        if text.endswith(self._begin):
            return "open"
        return "closed" if text.endswith(self._end) else "free"

    def _join(self, pieces: Sequence[Piece | None]) -> Piece:
        empty: Any = self._begin[:0]
        joined: Piece = empty.join(piece for piece in pieces if piece is not None)
        return joined

    def start(self, phase: Phase) -> Place:
        """The place before the first token of a text."""
        return Place(phase, tail=self._begin[:0])

    # --- texts ----------------------------------------------------------------------------------------
    def advance(self, place: Place, token: int) -> Place:
        """The place one token on."""
        seen = place.seen + 1
        if place.phase == "closed" and not self.kind.repeats:
            return place._replace(seen=seen)
        piece = self.pieces.piece(token)
        text: Any = place.tail if piece is None else place.tail + piece  # type: ignore[operator]  # both of one kind
        if place.phase == "open":
            return self._advance_open(place, text, place.num + 1, seen)
        if place.phase == "closed":
            return self._reopen(place, text, seen)
        return self._advance_free(place, text, seen)

    def _advance_open(self, place: Place, text: Any, count: int, seen: int) -> Place:
        found = text.find(self._end)
        if found < 0:
            return Place("open", count, place.end, tail=text[max(0, len(text) - len(self._end) + 1) :], seen=seen)
        rest = text[found + len(self._end) :]
        return Place("closed", count, seen, tail=rest if self.kind.repeats else rest[:0], seen=seen)

    def _reopen(self, place: Place, text: Any, seen: int) -> Place:
        """A place behind a thought, where another may begin."""
        found = text.find(self._begin)
        if found < 0:
            return place._replace(tail=text[max(0, len(text) - len(self._begin) + 1) :], seen=seen)
        opened = Place("open", place.num, place.end, tail=text[:0], seen=seen)
        return self._advance_open(opened, text[found + len(self._begin) :], place.num, seen)

    def _advance_free(self, place: Place, text: Any, seen: int) -> Place:
        told = text.lstrip()
        if told.startswith(self._begin):
            opened = Place("open", tail=text[:0], seen=seen)
            return self._advance_open(opened, told[len(self._begin) :], 0, seen)
        if self._direct and told.startswith(self._direct):
            return Place("closed", 0, seen, is_said=True, tail=text[:0], seen=seen)
        if len(text) - len(told) <= MOST_SPACE and self._may_begin(told):
            return place._replace(tail=text, seen=seen)
        return Place("closed", 0, 0, is_said=True, tail=text if self.kind.repeats else text[:0], seen=seen)

    def _may_begin(self, told: Any) -> bool:
        return self._begin.startswith(told) or (bool(self._direct) and self._direct.startswith(told))

    def follow(self, place: Place, tokens: Sequence[int]) -> Place:
        """The place some tokens on."""
        for done, token in enumerate(tokens):
            if place.phase == "closed" and not self.kind.repeats:
                return place._replace(seen=place.seen + len(tokens) - done)
            place = self.advance(place, token)
        return place

    # --- what may come --------------------------------------------------------------------------------
    @cached_property
    def _vocabulary(self) -> list[Piece]:
        found = [self.pieces.piece(token) for token in range(self._size)]
        return [self._begin[:0] if piece is None else piece for piece in found]

    def list_beginnings(self, place: Place, *, is_direct: bool = True) -> list[int]:
        """The tokens with which a text that has not begun comes nearer to a thought, or (`is_direct`) to what begins an
        answer without one."""
        told: Any = place.tail.lstrip()
        goals = [self._begin[len(told) :]] if self._begin.startswith(told) else []
        if is_direct and self._direct and self._direct.startswith(told):
            goals.append(self._direct[len(told) :])
        known = self._beginnings
        key = tuple(goals)
        if key not in known:
            known[key] = [
                token
                for token, piece in enumerate(self._vocabulary)
                if piece and any(goal.startswith(piece) for goal in goals)  # type: ignore[arg-type]  # both of one kind
            ]
        return known[key]

    @cached_property
    def _beginnings(self) -> dict[tuple[Piece, ...], list[int]]:
        return {}

    @cached_property
    def _overshooting(self) -> list[list[int]]:
        """For each count of characters of the end mark that are there: the tokens that end it, with more behind."""
        end: Any = self._end
        found: list[list[int]] = [[] for _ in range(len(end))]
        first = end[-1:]
        for token, one in enumerate(self._vocabulary):
            piece: Any = one
            if first not in piece:
                continue
            for count in range(len(end)):
                rest = end[count:]
                at = piece.find(rest) if count == 0 else 0 if piece.startswith(rest) else -1
                if at >= 0 and piece[at + len(rest) :].strip():
                    found[count].append(token)
        return found

    def list_overshooting(self, place: Place) -> list[int]:
        """The tokens that would end a thought and begin the answer at once."""
        tail: Any = place.tail
        counts = [count for count in range(len(self._end)) if count == 0 or tail.endswith(self._end[:count])]
        lists = [self._overshooting[count] for count in counts if self._overshooting[count]]
        return lists[0] if len(lists) == 1 else sorted({token for listed in lists for token in listed})


def _make_encode(tokenizer: Any) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)] if text else []

    return encode


_MADE: Final = WeakKeyDictionary[Any, ThoughtMarks]()


def find_marks(tokenizer: Any) -> ThoughtMarks | None:
    """The marks of the thoughts that a tokenizer's chat template writes; None if it writes none."""
    kind = find_kind(tokenizer)
    if kind is None:
        return None
    known = _MADE.get(tokenizer)
    if known is None or known.kind is not kind:
        known = _MADE[tokenizer] = ThoughtMarks(kind, tokenizer)
    return known


def require_marks(setting: str, tokenizer: Any) -> ThoughtMarks:
    """The marks of the model's thoughts, for a setting; raises if its chat template has none."""
    if tokenizer is None:
        raise SettingError(about(setting, "looks for thoughts by their text: pass the model's `tokenizer` too"))
    marks = find_marks(tokenizer)
    if marks is None:
        raise SettingError(
            about(
                setting,
                "is about thoughts, and this model's chat template has no marks of any; leave it out, or register a "
                "ThoughtEntry",
            )
        )
    return marks


class RowPlaces:
    """The places of the rows of a call; those seen last are remembered, and found again by their tokens."""

    def __init__(self, marks: ThoughtMarks) -> None:
        self._marks = marks
        self._ids: torch.Tensor | None = None  # (rows, columns)
        self._starts: list[int] = []
        self._phases: list[Phase] = []
        self._places: list[Place] = []

    def find(self, ids: torch.Tensor, starts: Sequence[int], phases: Sequence[Phase]) -> list[Place]:
        """The place of each row of `ids` (rows, columns), on the host, whose texts begin in the columns `starts` behind
        prompts of these phases."""
        columns, last = ids.shape[1], self._ids
        is_known = last is not None and list(starts) == self._starts and list(phases) == self._phases
        if is_known and last is not None and last.shape == ids.shape and torch.equal(last, ids):
            return self._places
        if is_known and last is not None and last.shape == (len(ids), columns - 1) and torch.equal(last, ids[:, :-1]):
            tokens = ids[:, -1].tolist()
            places = [
                self._marks.advance(place, token) if start < columns else place
                for place, token, start in zip(self._places, tokens, starts, strict=True)
            ]
        else:
            places = self._search(ids, starts, phases)
        # A copy: the table that the texts stand in may be written over.
        self._ids, self._starts, self._phases, self._places = ids.clone(), list(starts), list(phases), places
        return places

    def _search(self, ids: torch.Tensor, starts: Sequence[int], phases: Sequence[Phase]) -> list[Place]:
        """The places of rows that may be others than those seen last, in another order."""
        known: dict[tuple[Phase, bytes], Place] = {}
        if self._ids is not None:
            held = zip(self._ids, self._starts, self._phases, self._places, strict=True)
            known = {(phase, _as_bytes(row[start:])): place for row, start, phase, place in held}
        made = []
        for row, start, phase in zip(ids, starts, phases, strict=True):
            text = row[start:]
            place = known.get((phase, _as_bytes(text)))
            if place is None and len(text) > 1:
                place = known.get((phase, _as_bytes(text[:-1])))
            place = self._marks.start(phase) if place is None else place
            made.append(self._marks.follow(place, text[place.seen :].tolist()))
        return made


def _as_bytes(text: torch.Tensor) -> bytes:
    return text.numpy().tobytes()
