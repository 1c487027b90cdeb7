"""SynthID-Text's tournament over a whole vocabulary, round by round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from unspool.kernels.cpu import find_marks
from unspool.kernels.presence import runs_kernels

WORD = 30  # rounds whose bits share a number: kernels settle three groups of ten with it


@dataclass(frozen=True)
class PackedBits:
    """The g-values of all tokens and rounds, as words that a token's hash is looked up in.

    A bit is `table[((hash * m + 1) + key) * m + 1 mod size]`. If the size is a power of two, a sum's remainder is
    the sum of remainders: the last product is a shift of the table for each key, made once, and a token has all its
    bits from one look.
    """

    table: torch.Tensor  # (size,), 0 or 1
    keys: torch.Tensor  # (depth,)
    multiplier: int
    increment: int
    words: torch.Tensor  # (words, size) int32; no words if the size is not a power of two

    @classmethod
    def of(cls, table: torch.Tensor, keys: torch.Tensor, multiplier: int, increment: int) -> PackedBits:
        """Pack a table for its keys."""
        size, words = len(table), []
        if size & (size - 1) == 0:
            shifts = find_shifts(keys, size, multiplier, increment)
            place = torch.arange(size, device=table.device)
            for first in range(0, len(keys), WORD):
                word = torch.zeros(size, dtype=torch.int64, device=table.device)
                for number, shift in enumerate(shifts[first : first + WORD]):
                    word |= table[(place + shift) % size] << number
                words.append(torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32))
        packed = torch.stack(words) if words else torch.zeros(0, size, dtype=torch.int32, device=table.device)
        return cls(table, keys, multiplier, increment, packed)

    @property
    def depth(self) -> int:
        """Rounds."""
        return len(self.keys)

    @cached_property
    def sorted(self) -> Any:
        """The bits as the kernels of a GPU read them."""
        from unspool.kernels.gpu.marks.tournament import SortedBits  # Triton is imported where a GPU is used

        return SortedBits.of(self.words, self.depth, self.step)

    @cached_property
    def in_order(self) -> torch.Tensor:
        """The words with the bits of neighbouring tokens side by side, as the CPU library reads them: (words, size)."""
        places = torch.arange(len(self.table), device=self.table.device) * self.step % len(self.table)
        return self.words[:, places].contiguous()

    @cached_property
    def shift(self) -> int:
        """How far from a context's hash, modulo the size, the first token's word lies in that order."""
        size = len(self.table)
        return self.multiplier * self.increment * pow(self.step, -1, size) % size

    @property
    def step(self) -> int:
        """How far apart, in the words, the bits of neighbouring tokens are."""
        return self.multiplier * self.multiplier % len(self.table)


def find_shifts(keys: torch.Tensor, size: int, multiplier: int, increment: int) -> torch.Tensor:
    """How far each key shifts a table of `size`, a power of two: (depth,)."""
    return (keys * multiplier + increment) % size


def mark_scores(scores: torch.Tensor, bits: PackedBits, contexts: torch.Tensor, repeated: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tournament's winner, from scores (rows, vocab) after contexts of these hashes (rows,).

    Rows that are repeated, and those without a finite highest score, stay as they are.
    """
    if len(bits.words) and runs_kernels(scores.device):
        from unspool.kernels.gpu.marks import tournament  # Triton is imported where a GPU is used

        return tournament.mark_scores(scores, contexts, repeated, bits.sorted)
    marks = find_marks() if scores.device.type == "cpu" and scores.dtype == torch.float32 else None
    if marks is not None and len(bits.words):
        return marks.play_tournament(scores, bits.in_order, bits.depth, contexts, bits.shift, repeated)
    return mark_plainly(scores, bits, contexts, repeated)


def mark_plainly(
    scores: torch.Tensor, bits: PackedBits, contexts: torch.Tensor, repeated: torch.Tensor
) -> torch.Tensor:
    """`mark_scores` operator by operator."""
    probs = torch.softmax(scores, dim=-1, dtype=torch.float32)
    run_plainly(probs, bits, contexts)
    highest = scores.amax(dim=-1, keepdim=True)  # NaN if one of them is
    is_kept = repeated.bool()[:, None] | ~highest.isfinite() | scores.isneginf()
    return torch.where(is_kept, scores, take_logs(probs).to(scores.dtype))


def take_logs(probs: torch.Tensor) -> torch.Tensor:
    """Logarithms, with the lowest finite number instead of minus infinity."""
    logs = probs.log()
    return torch.where(logs.isfinite(), logs, torch.finfo(logs.dtype).min)


def run_plainly(probs: torch.Tensor, bits: PackedBits, contexts: torch.Tensor) -> None:
    """Make probabilities (rows, vocab), float32, those of the winner, in place, round by round."""
    tokens = torch.arange(probs.shape[-1], device=probs.device)
    hashes = (contexts[:, None] + tokens) * bits.multiplier + bits.increment  # (rows, vocab)
    size = len(bits.table)
    if len(bits.words):
        hashes = (hashes * bits.multiplier) & (size - 1)
    for depth in range(bits.depth):
        if len(bits.words):
            if depth % WORD == 0:
                word = bits.words[depth // WORD][hashes]
            is_one = ((word >> depth % WORD) & 1).to(probs.dtype)
        else:
            keys = (hashes + bits.keys[depth]) * bits.multiplier + bits.increment
            is_one = bits.table[keys % size].to(probs.dtype)
        mass = (is_one * probs).sum(dim=-1, keepdim=True)
        probs.mul_(is_one.add_(1 - mass))
