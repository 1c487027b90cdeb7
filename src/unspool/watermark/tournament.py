"""SynthID-Text's tournament over a whole vocabulary, round by round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.kernels.cpu import find_library

WORD = 32  # rounds whose bits share a number


@dataclass(frozen=True)
class PackedBits:
    """The g-values of all tokens and rounds, as words that a token's hash is looked up in.

    A bit is `table[((hash * m + 1) + key) * m + 1 mod size]`. Where the size is a power of two, a sum's remainder is
    the sum of remainders: the last product is a shift of the table for each key, made once, and a token has all its
    bits from one look.
    """

    table: torch.Tensor  # (size,), 0 or 1
    keys: torch.Tensor  # (depth,)
    multiplier: int
    increment: int
    words: torch.Tensor  # (words, size) int32; no words where the size is no power of two

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


def find_shifts(keys: torch.Tensor, size: int, multiplier: int, increment: int) -> torch.Tensor:
    """How far each key shifts a table of `size`, a power of two: (depth,)."""
    return (keys * multiplier + increment) % size


def run_tournament(probs: torch.Tensor, bits: PackedBits, contexts: torch.Tensor) -> None:
    """Make probabilities (rows, vocab), float32, those of the winner, in place; `contexts` are the rows' hashes."""
    library = find_library() if probs.device.type == "cpu" and len(bits.words) else None
    if library is None or not library.has_marks or not probs.is_contiguous():
        run_plainly(probs, bits, contexts)
        return
    # A token's hash, times the multiplier, as a start and a step; only what is left of them modulo the size counts.
    factor = bits.multiplier * bits.multiplier
    starts = (contexts * bits.multiplier + bits.increment) * bits.multiplier & (len(bits.table) - 1)
    library.run_tournament(probs, bits.words, bits.depth, starts, factor % len(bits.table))


def run_plainly(probs: torch.Tensor, bits: PackedBits, contexts: torch.Tensor) -> None:
    """`run_tournament` operator by operator."""
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
