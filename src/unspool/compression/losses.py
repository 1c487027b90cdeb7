"""How surprising a text's tokens are to a causal model: the loss of each after those before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from unspool.cache import ROLL_BACK, Cache, DynamicCache
from unspool.decoding.reader import Reader, between_passes
from unspool.errors import InputError, UnsupportedError
from unspool.protocols import Model, Want

Losses = npt.NDArray[np.float32]

# Positions whose logits are held at a time: a pass of so many is as fast as a longer one.
_BLOCK_ON_CPU, _BLOCK_ON_DEVICE = 128, 512
_ALL = Want(logits="all", finds_likeliest=False)


def check_scorer(model: Model) -> None:
    """Raise for a model that gives no probabilities to a prompt's own tokens."""
    info = model.info
    if info.is_encoder_decoder:
        raise UnsupportedError(
            f"{info.family} is an encoder-decoder, whose prompt is not predicted token by token; compress with a "
            "decoder-only model"
        )
    if "whole_prompts" in info.can or info.why_single:
        raise UnsupportedError(
            f"this {info.family} model predicts after whole prompts alone, so it has no losses of their tokens; "
            "compress with another model"
        )


def find_block(model: Model, rows: int = 1) -> int:
    """How many positions of so many rows a pass reads."""
    most = _BLOCK_ON_CPU if model.device.type == "cpu" else _BLOCK_ON_DEVICE
    return max(1, most // rows)


class PieceLosses(Protocol):
    """A text that is read piece by piece."""

    @property
    def num_held(self) -> int:
        """Tokens that are held."""
        ...

    def read(self, ids: Sequence[int], keeps: int) -> Losses:
        """The losses of the next tokens but the first; afterwards only the first `keeps` of all are held."""
        ...


class LossSource(Protocol):
    """What finds the losses of texts: a model, or an engine that runs one."""

    @property
    def longest(self) -> int | None:
        """Tokens of the longest text; None if there is no end."""
        ...

    def start(self) -> PieceLosses:
        """A text to be read piece by piece."""
        ...

    def measure(self, rows: Sequence[Sequence[int]]) -> list[Losses]:
        """The losses of texts but of their first tokens."""
        ...


class ModelLosses:
    """Losses by a model's own passes."""

    def __init__(self, model: Model) -> None:
        check_scorer(model)
        self._model = model

    @property
    def longest(self) -> int | None:
        """Tokens of the longest text; None if there is no end."""
        info = self._model.info
        return info.max_context if info.ends_at_context else None

    def start(self) -> TextLosses:
        """A text to be read piece by piece."""
        return TextLosses(self._model)

    def measure(self, rows: Sequence[Sequence[int]]) -> list[Losses]:
        """The losses of texts but of their first tokens."""
        return measure_texts(self._model, rows)


class TextLosses:
    """A text that a model reads piece by piece: what was read stays read, and can be cut back.

    A piece's losses are those of its second token and those after it, given everything that is held.
    """

    def __init__(self, model: Model) -> None:
        check_scorer(model)
        self._model = model
        self._cache: Cache | None = None

    @property
    def num_held(self) -> int:
        """Tokens whose keys are held."""
        return self._cache.lengths[0] if self._cache is not None and self._cache.lengths else 0

    def read(self, ids: Sequence[int], keeps: int) -> Losses:
        """Read the next tokens; afterwards only the first `keeps` of all are held."""
        if self._cache is None:
            self._cache = self._model.new_cache(rows=1)
        kept, before = self._cache, max(0, keeps - self.num_held)
        if ROLL_BACK in kept.can or keeps >= self.num_held + len(ids):
            losses = read_losses(self._model, kept, [ids])[0]
            if keeps < self.num_held:
                self.keep(keeps)
            return losses
        # What can't be taken back is read from a copy.
        first = read_losses(self._model, kept, [ids[: before + 1]], ends_before=1)[0] if before else np.zeros(0, "f4")
        ahead = kept.clone() if keeps else kept
        rest = read_losses(self._model, ahead, [ids[before:]])[0]
        self._cache = kept if keeps else None
        return np.concatenate((first, rest))

    def keep(self, count: int) -> None:
        """Go back to the first `count` tokens."""
        if count == 0 or self._cache is None:
            self._cache = None
        elif count < self.num_held:
            self._cache.truncate([count])

    def forget(self, first: int, count: int) -> None:
        """Let go of the keys of `count` tokens from the `first` on: those behind them move up as they are."""
        held = self.num_held
        if not isinstance(self._cache, DynamicCache):
            raise UnsupportedError(f"a {type(self._cache).__name__} can't let go of keys in the middle of a text")
        stays = [place for place in range(held) if not first <= place < first + count]
        self._cache.keep_positions(stays)


def read_losses(model: Model, cache: Cache, rows: Sequence[Sequence[int]], *, ends_before: int = 0) -> list[Losses]:
    """Read rows after what a cache holds; the losses of every row but of its first token.

    The last `ends_before` tokens are predicted and not read.
    """
    counts = [len(row) - ends_before for row in rows]
    if min(map(len, rows)) == 0:
        raise InputError("a text without tokens has no losses; give at least one token")
    reader = Reader(model, cache, want=_ALL)
    longest = max(map(len, rows))
    filled = [[*row, *[0] * (longest - len(row))] for row in rows]
    tokens = torch.tensor(filled, device=model.device)  # (rows, columns), right-filled
    size = min(find_block(model, len(rows)), cache.longest_pass or tokens.shape[1])
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    for first in range(0, max(counts), size):
        real = [min(max(count - first, 0), size) for count in counts]
        if not max(real):
            break
        forward = reader.ask(tokens[:, first : first + max(real)], real, _ALL)
        with between_passes(model, sum(real)):
            for row, count in enumerate(real):
                following = tokens[row, first + 1 : first + 1 + min(count, len(rows[row]) - 1 - first)]
                if len(following):
                    found[row].append(measure_losses(forward.logits[row, : len(following)], following))
    return [torch.cat(each).cpu().numpy() if each else np.zeros(0, np.float32) for each in found]


def measure_losses(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The negative log-probabilities (positions,) of tokens by logits (positions, vocab)."""
    logits = logits.float()
    chosen = logits.gather(1, following[:, None])[:, 0]
    return logits.logsumexp(-1) - chosen


def measure_texts(model: Model, rows: Sequence[Sequence[int]]) -> list[Losses]:
    """The losses of texts, each alone; short ones are read together."""
    check_scorer(model)
    found: list[Losses | None] = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    most = find_block(model)
    while order:
        # Texts of about one length share passes: as many as fill a block.
        longest = len(rows[order[-1]])
        together = [order.pop()]
        while order and len(together) * longest < most and 2 * len(rows[order[-1]]) > longest:
            together.append(order.pop())
        cache = model.new_cache(rows=len(together))
        measured = read_losses(model, cache, [rows[row] for row in together])
        for row, losses in zip(together, measured, strict=True):
            found[row] = losses
    return [losses for losses in found if losses is not None]
