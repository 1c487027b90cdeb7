"""Windows of a prompt, each without the tokens that a model could guess, read after what is left of those before it.

As in the package: token j is judged by the loss of token j + 1, the last tokens that fill no window stay, and past
the model's positions the keys of the oldest tokens are let go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from unspool.compression.llmlingua.scorer import Scorer
from unspool.compression.llmlingua.windows import Piece
from unspool.compression.losses import Losses
from unspool.errors import InputError, UnsupportedError

_NUM_FIRST = 10  # tokens whose keys stay when the oldest are let go
_SPLIT_ID = 13  # a line end in Llama's vocabulary; the package looks for it in every vocabulary
_NO_LOSS = 10_000  # what the package takes for a missing loss

Flags = npt.NDArray[np.bool_]
Watch = Callable[[int, int], None]
"""Called with how many tokens were judged, and how many there are."""


class _Side:
    """A text that is read in windows: what is left of it, and the losses that were last found."""

    def __init__(self, scorer: Scorer, ids: npt.NDArray[np.int64]) -> None:
        self.ids = ids
        self.losses: Losses | None = None
        self.ready = 0  # losses before this place are up to date
        self.gone: list[int] = []  # tokens whose keys were let go
        self._reader, self._most = scorer.start(), scorer.max_positions

    @property
    def num_held(self) -> int:
        return self._reader.num_held

    def forget(self, count: int, num_first: int) -> None:
        """Let go of the keys of `count` tokens behind the first ones; the tokens are counted from the front."""
        self._reader.forget(num_first, count)
        self.gone += self.ids[:count].tolist()
        self.ids = self.ids[count:]
        self.ready -= count

    def read(self, end: int | None, keeps: int) -> bool:
        """Read up to a place, and keep the keys of the first tokens; False if nothing was to be read."""
        held, most = self.num_held, self._most
        end = len(self.ids) if end is None else end
        reached = end if most is None else min(end, held + most)
        piece = self.ids[held:reached].tolist()
        if not piece:
            raise InputError("the prompt has no tokens to compress; give a longer text")
        found = self._reader.read(piece, keeps)
        if self.losses is None:
            self.losses = found
        elif len(found):
            self._replace(found, end - 1)
        return bool(len(found))

    def _replace(self, found: Losses, end: int) -> None:
        """Put losses at their places, from `ready` up to an end."""
        assert self.losses is not None
        if end > len(self.losses):
            self.losses = np.concatenate((self.losses, np.zeros_like(found)[: end - len(self.losses)]))
        place = self.losses[self.ready : end]
        if len(found) not in (1, len(place)):
            raise UnsupportedError(
                f"the windows do not fit the model's positions: {len(place)} losses were due and {len(found)} were "
                "found. Use a smaller iterative_size, shorter contexts, or a model with more positions"
            )
        place[:] = found


def filter_tokens(
    scorer: Scorer,
    ids: Sequence[int],
    windows: Sequence[Sequence[Piece]],
    *,
    size: int,
    start: int,
    compares: bool,
    keeps_splits: bool,
    watch: Watch | None = None,
) -> list[int]:
    """The ids that stay, after the first `start`, which are a question that is read before them."""
    return _TokenFilter(scorer, ids, size, start, compares, keeps_splits).run(windows, watch)


class _TokenFilter:
    def __init__(
        self, scorer: Scorer, ids: Sequence[int], size: int, start: int, compares: bool, keeps_splits: bool
    ) -> None:
        whole = np.asarray(ids, dtype=np.int64)
        self._size, self._start, self._most = size, start, scorer.max_positions
        self._main = _Side(scorer, whole)
        self._own = _Side(scorer, whole[start:]) if compares else None  # without the question
        self._splits = _find_splits(whole) if keeps_splits else None
        self._end = min(size + start, len(whole))

    def run(self, windows: Sequence[Sequence[Piece]], watch: Watch | None) -> list[int]:
        number, total = 0, len(self._main.ids)
        while self._end <= len(self._main.ids):
            if not self._read_window(is_first=number == 0):
                break
            if number >= len(windows):
                raise UnsupportedError(
                    "the contexts have more tokens joined than each alone, and more windows than were planned; join "
                    "short contexts into longer ones"
                )
            for length, rate in windows[number]:
                self._filter_piece(length, rate)
            number += 1
            if watch is not None:
                ahead = len(self._main.ids) - max(self._end - self._size, 0)
                watch(max(0, total - ahead), total)
        kept: list[int] = self._main.ids.tolist()
        return (self._main.gone + kept)[self._start :]

    # --- losses --------------------------------------------------------------------------------------
    def _read_window(self, *, is_first: bool) -> bool:
        main, own, start = self._main, self._own, self._start
        if self._most is not None and self._end > self._most and main.num_held:
            self._forget(self._end - self._most)
        keeps = 0 if is_first else self._end - self._size
        if not main.read(None if is_first else self._end, keeps):
            return False
        if own is not None:
            own.read(None if is_first else self._end - start, 0 if is_first else max(0, keeps - start))
            own.ready = 0 if start and is_first else self._end - start - self._size
        main.ready = 0 if start and is_first else self._end - self._size
        return True

    def _forget(self, count: int) -> None:
        """Let go of the oldest keys but for the first, so that positions suffice."""
        assert self._most is not None
        first = min(_NUM_FIRST + self._start, self._most)
        self._main.forget(count, first)
        if self._splits is not None:
            self._splits = self._splits[count:]
        self._end -= count
        if self._own is not None:
            if count > self._own.num_held:
                raise UnsupportedError(_explain_misfit(count, self._own.num_held))
            self._own.forget(count, min(first, self._own.num_held - count))

    # --- tokens --------------------------------------------------------------------------------------
    def _filter_piece(self, length: int, rate: float) -> None:
        """Drop tokens of the next piece of the window."""
        main, own, start = self._main, self._own, self._start
        assert main.losses is not None
        losses = main.losses
        judged = losses[start:]
        if own is not None:
            assert own.losses is not None
            judged = _align(own.losses[: len(judged)], judged) - judged
        else:
            judged = losses
        threshold = find_threshold(judged, rate)
        stays = judged > threshold
        if own is not None:
            stays = np.concatenate((losses[:start] > 0, stays))
        end = self._end - self._size + length
        stays = np.concatenate((stays, losses[:1] > 0))
        stays[end:] = True
        stays[: end - length] = True
        main.losses = losses[_fit(stays[:-1], len(losses))]
        if own is not None:
            assert own.losses is not None
            stays = _lengthen(stays, len(own.losses) + start + 1)
            own.losses = own.losses[_fit(stays[start:-1], len(own.losses))]
        stays = _lengthen(stays, len(main.ids))[: len(main.ids)]
        if self._splits is not None:
            self._spare_splits(stays, end, length)
        main.ids = main.ids[stays]
        if own is not None:
            own.ids = own.ids[_fit(stays[start:], len(own.ids))]
        self._end = end - int((~stays[:end]).sum()) + self._size

    def _spare_splits(self, stays: Flags, end: int, length: int) -> None:
        """Let paragraph breaks stay, and only one of two split tokens that came together by what went between."""
        splits = self._splits
        assert splits is not None
        stays[_fit(splits, len(stays))] = True
        last = -1
        for place in range(max(0, end - length), min(end, len(stays))):
            if not stays[place]:
                continue
            now = int(self._main.ids[place])
            if now == _SPLIT_ID and last == _SPLIT_ID and not splits[place]:
                stays[place] = False
            else:
                last = now
        self._splits = splits[stays]


def find_threshold(losses: Losses, rate: float) -> float:
    """The loss above which a token stays: the k-th largest, k = rate * all of them; none goes at a rate of 1."""
    if rate == 1.0:
        return float("-inf")
    known = losses[losses != _NO_LOSS]
    if not len(known):
        raise InputError("no losses are left to compare; give a longer text")
    place = max(0, min(len(known) - 1, int(len(known) * rate) - 1))
    return float(np.sort(known)[::-1][place])


def _find_splits(ids: npt.NDArray[np.int64]) -> Flags:
    """Which tokens are one of two split tokens side by side."""
    is_split = ids == _SPLIT_ID
    pairs = is_split[1:] & is_split[:-1]
    return np.concatenate((pairs, [False])) | np.concatenate(([False], pairs))


def _lengthen(stays: Flags, length: int) -> Flags:
    """Tokens that have no flag stay."""
    return np.concatenate((stays, np.ones(max(0, length - len(stays)), dtype=bool)))


def _align(first: Losses, second: Losses) -> Losses:
    if len(first) not in (1, len(second)):
        raise UnsupportedError(_explain_misfit(len(first), len(second)))
    return first


def _fit(flags: Flags, length: int) -> Flags:
    if len(flags) != length:
        raise UnsupportedError(_explain_misfit(len(flags), length))
    return flags


def _explain_misfit(flags: int, length: int) -> str:
    return (
        f"the question reaches past the model's positions: {flags} losses with it and {length} without it can't be "
        "compared. Use a shorter question, a smaller iterative_size, or a model with more positions"
    )
