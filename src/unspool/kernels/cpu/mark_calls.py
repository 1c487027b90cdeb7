"""Marks of step after step on the CPU, for rows whose steps are taken several at a time.

Between two steps, Python's and torch's own code and memory are cold: a mark made of twenty operators takes three times
what it takes alone. Here all that the library's calls need lies ready.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from unspool.errors import SettingError
from unspool.kernels.cpu.marks import KeptLists, Marks, OwnLists, check_code, list_divisors

NO_MARK: Final = -1  # a token that a mark does not draw


@dataclass(frozen=True, slots=True)
class Window:
    """Which tokens of a text are context: `num_tokens` from column `start` on, windows of `width`; those from `first`
    on count as earlier ones."""

    start: int
    num_tokens: int
    width: int
    first: int


@dataclass(frozen=True, slots=True)
class Bits:
    """The bits of a tournament's rounds, as `Marks.play_tournament` takes them."""

    words: torch.Tensor  # (words, size) int32, contiguous
    depth: int
    shift: int


Uniforms = np.ndarray[tuple[int], np.dtype[np.float64]]
FindWindow = Callable[[int], Window | None]
ID_BYTES: Final = 8


def prepare(function: Any, *arguments: Any) -> Callable[[], int]:
    """A call of the library with arguments that are made once: what changes is the value of those that are objects."""
    made = [
        one if isinstance(one, c_void_p) else kind(one) for kind, one in zip(function.argtypes, arguments, strict=True)
    ]

    def call() -> int:
        code: int = function(*made)
        return code

    return call


class MarkCall(ABC):
    """A mark of step after step, on the CPU: what the library's calls need lies ready, in memory of their own.

    The text (rows, columns) grows where it lies. A step's scores are its own: a mark may be made where they lie, and
    what it returns is valid until the next one.
    """

    def __init__(self, marks: Marks, ids: torch.Tensor, vocab: int) -> None:
        if ids.dtype != torch.int64 or not ids.is_contiguous() or ids.device.type != "cpu":
            raise SettingError(f"a text of {ids.dtype} on {ids.device} can't be read where it lies")
        self._handle, self._threads = marks.handle, marks.threads
        self._ids, self._rows, self._stride, self._vocab = ids, *ids.shape, vocab
        self._first = ids.data_ptr()
        self._scores = c_void_p()  # where the scores that were read last lie
        self._seen: torch.Tensor | None = None
        self._states, self._repeated = torch.empty(len(ids), dtype=torch.int64), torch.empty(len(ids), dtype=torch.bool)

    def _read(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores as the library reads them; it is given where they lie. Most steps have theirs in one tensor."""
        if scores is self._seen:
            return scores
        if scores.shape != (self._rows, self._vocab):
            raise SettingError(f"scores {list(scores.shape)} can't be marked as {[self._rows, self._vocab]}")
        given = scores.to(torch.float32).contiguous()
        self._scores.value = given.data_ptr()
        self._seen = given
        return given

    @abstractmethod
    def mark(self, scores: torch.Tensor, columns: int) -> torch.Tensor:
        """Scores (rows, vocab) with the mark, after so many columns of the text."""

    def draw(self, scores: torch.Tensor, columns: int, uniforms: Uniforms | None) -> list[int] | None:  # noqa: ARG002 - for those that draw
        """The rows' tokens, if the mark draws them itself; `NO_MARK` for rows that are drawn as without it.

        Numbers (rows,) in [0, 1) decide; None if more than the mark decides about a draw.
        """
        return None

    def _read_contexts(self, window: Window, seed: int, pads: torch.Tensor | None, *, mixes: bool) -> None:
        self._handle.us_read_contexts(
            self._ids.data_ptr(),
            None if pads is None else pads.data_ptr(),
            None,
            self._rows,
            self._stride,
            window.start,
            window.num_tokens,
            window.width,
            window.first,
            seed & (2**64 - 1),
            int(mixes),
            self._states.data_ptr(),
            self._repeated.data_ptr(),
        )


class TournamentCall(MarkCall):
    """SynthID-Text's, which draws the tokens itself if each has bits of its own."""

    def __init__(self, marks: Marks, ids: torch.Tensor, vocab: int, bits: Bits, find_window: FindWindow) -> None:
        super().__init__(marks, ids, vocab)
        self._bits, self._find_window = bits, find_window
        self._out = torch.empty(len(ids), vocab)
        self._tokens = np.full(len(ids), NO_MARK, dtype=np.int32)

    def draw(self, scores: torch.Tensor, columns: int, uniforms: Uniforms | None) -> list[int] | None:
        """The tokens that the numbers draw from the winner's probabilities."""
        window, bits = self._find_window(columns), self._bits
        if window is None or uniforms is None or bits.words.shape[1] < self._vocab:
            return None
        given = self._read(scores)
        self._read_contexts(window, 1, None, mixes=False)
        check_code(
            self._handle.us_draw_winners(
                given.data_ptr(),
                *self._play(),
                uniforms.ctypes.data,
                self._tokens.ctypes.data,
                self._threads,
            )
        )
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def mark(self, scores: torch.Tensor, columns: int) -> torch.Tensor:
        """The winner's log-probabilities."""
        window = self._find_window(columns)
        if window is None:
            return scores
        given = self._read(scores)
        self._read_contexts(window, 1, None, mixes=False)
        check_code(
            self._handle.us_play_tournament(given.data_ptr(), self._out.data_ptr(), *self._play(), self._threads)
        )
        return self._out

    def _play(self) -> tuple[int, ...]:
        """What both calls are given about the rounds and the rows' contexts."""
        bits = self._bits
        return (
            self._rows,
            self._vocab,
            bits.depth,
            bits.words.data_ptr(),
            bits.words.shape[1],
            self._states.data_ptr(),
            bits.shift,
            self._repeated.data_ptr(),
        )


class KeyedDrawCall(MarkCall):
    """Gumbel's, which draws the tokens itself."""

    def __init__(
        self, marks: Marks, ids: torch.Tensor, vocab: int, seed: int, pads: torch.Tensor | None, find_window: FindWindow
    ) -> None:
        super().__init__(marks, ids, vocab)
        self._seed, self._find_window = seed, find_window
        self._pads = None if pads is None else pads.to(torch.int64).contiguous()
        self._tokens = np.full(len(ids), NO_MARK, dtype=np.int32)

    def mark(self, scores: torch.Tensor, columns: int) -> torch.Tensor:  # noqa: ARG002 - rows that it does not draw
        """The scores as they are."""
        return scores

    def draw(self, scores: torch.Tensor, columns: int, uniforms: Uniforms | None) -> list[int] | None:  # noqa: ARG002 - keys decide
        """The tokens that keyed noise draws; none for repeated contexts."""
        window = self._find_window(columns)
        assert window is not None
        given = self._read(scores)
        self._read_contexts(window, self._seed, self._pads, mixes=True)
        self._handle.us_draw_keyed(
            given.data_ptr(),
            self._rows,
            self._vocab,
            self._states.data_ptr(),
            self._repeated.data_ptr(),
            self._tokens.ctypes.data,
            self._threads,
        )
        tokens: list[int] = self._tokens.tolist()
        return tokens


class OwnListsCall(MarkCall):
    """Green lists that tokens choose themselves."""

    def __init__(self, marks: Marks, ids: torch.Tensor, vocab: int, lists: OwnLists, bias: float) -> None:
        super().__init__(marks, ids, vocab)
        self._lists, self._divisors = lists, list_divisors(vocab, lists.num_first)
        self._before = c_void_p()
        self._call = prepare(
            *(self._handle.us_raise_own, self._scores, self._scores, self._rows, vocab, lists.num_first),
            *(min(lists.num_candidates, vocab), self._before, self._stride, lists.width),
            *(lists.table.data_ptr(), len(lists.table), lists.key, self._divisors.ctypes.data, bias),
            *(lists.known.data_ptr(), len(lists.known), self._threads),
        )

    def mark(self, scores: torch.Tensor, columns: int) -> torch.Tensor:
        """The scores, more for those that are on their own lists."""
        if columns <= self._lists.width:
            return scores
        given = self._read(scores)
        self._before.value = self._first + ID_BYTES * (columns - self._lists.width)
        check_code(self._call())
        return given


class ListedCall(MarkCall):
    """Green lists of the last token, after a text of at least `fewest` columns."""

    def __init__(
        self, marks: Marks, ids: torch.Tensor, vocab: int, lists: KeptLists, key: int, bias: float, fewest: int
    ) -> None:
        super().__init__(marks, ids, vocab)
        if lists.bits.shape[1] != -(-vocab // 32):
            raise SettingError(f"lists of {32 * lists.bits.shape[1]} tokens can't mark scores of {vocab}")
        self._fewest, self._lists = fewest, lists
        owners, bits = lists.owners, lists.bits
        self._last = c_void_p()
        self._call = prepare(
            *(self._handle.us_mark_listed, self._scores, self._scores, self._rows, vocab, lists.num_first, self._last),
            *(self._stride, key, bias, owners.data_ptr(), bits.data_ptr(), len(owners), self._threads),
        )

    def mark(self, scores: torch.Tensor, columns: int) -> torch.Tensor:
        """The scores, more on the lists."""
        if columns < self._fewest:
            return scores
        given = self._read(scores)
        self._last.value = self._first + ID_BYTES * (columns - 1)
        check_code(self._call())
        return given
