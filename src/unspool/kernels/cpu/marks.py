"""The library's calls for watermarks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from unspool.errors import ResourceError, SettingError
from unspool.forks import after_fork
from unspool.kernels.contexts import Text

LOW_BITS = (1 << 32) - 1


@dataclass(frozen=True)
class OwnLists:
    """How tokens choose their own green lists."""

    table: torch.Tensor  # (size,) int64, contiguous: the numbers of tokens
    key: int
    width: int  # tokens before
    num_first: int  # tokens of a list
    num_candidates: int  # a row's likeliest tokens
    known: torch.Tensor  # (a power of two,) int64, zeros at first: what was found out about seeds and tokens


@dataclass(frozen=True)
class KeptLists:
    """Green lists of one size, by their seeds: each seed has one place, where the last of its seeds keeps its list."""

    num_first: int  # tokens of a list
    owners: torch.Tensor  # (a power of two,) int64, zeros at first: the seed whose list is there, and 1
    bits: torch.Tensor  # (places, words of 32 tokens) int32

    @classmethod
    def new(cls, vocab: int, num_first: int, most_bytes: int) -> KeptLists:
        """No list yet, and room for as many as fit."""
        words = -(-vocab // 32)
        places = 1 << max(3, (most_bytes // (4 * words)).bit_length() - 1)
        owners, bits = torch.zeros(places, dtype=torch.int64), torch.empty(places, words, dtype=torch.int32)
        made = cls(num_first, owners, bits)
        after_fork(made, lambda kept: kept.owners.zero_())  # a list may have been half written by another thread
        return made


class Marks:
    """Contexts, permutations, the tournament and the keyed draw, each over the rows of one call."""

    def __init__(self, handle: ctypes.CDLL, threads: int) -> None:
        self.handle, self.threads = handle, threads
        number, size, at = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
        word = ctypes.c_uint32
        handle.us_list_first.argtypes = [at, number, size, size, at, size]
        handle.us_mark_listed.argtypes = [at, at, number, size, size, at, number, number, ctypes.c_float]
        handle.us_mark_listed.argtypes += [at, at, word, size]
        handle.us_are_first.argtypes = [at, at, number, size, size, at, size]
        handle.us_are_first.restype = None
        handle.us_play_tournament.argtypes = [at, at, number, size, size, at, word, at, word, at, size]
        handle.us_draw_winners.argtypes = [at, number, size, size, at, word, at, word, at, at, at, size]
        handle.us_raise_own.argtypes = [at, at, number, *(size,) * 3, at, number, size, at, number, number, at]
        handle.us_raise_own.argtypes += [ctypes.c_float, at, word, size]
        handle.us_read_contexts.argtypes = [at, at, at, number, number, *(size,) * 4, ctypes.c_uint64, size, at, at]
        handle.us_read_contexts.restype = None
        handle.us_draw_keyed.argtypes = [at, number, size, at, at, at, size]
        handle.us_draw_keyed.restype = None

    def list_first(self, seeds: list[int], count: int, num_first: int) -> torch.Tensor:
        """Which of `count` tokens are among the first so many of the permutations of seeds of 32 bits, as bits: (seeds,
        words of 32 tokens) int32."""
        if not 0 <= num_first < count < 1 << 30:
            raise SettingError(f"the first {num_first} of {count} tokens can't be listed")
        words = np.array(seeds, dtype=np.uint32)
        bits = torch.empty(len(seeds), -(-count // 32), dtype=torch.int32)
        if seeds:
            code = self.handle.us_list_first(
                words.ctypes.data, len(words), count, num_first, bits.data_ptr(), self.threads
            )
            check_code(code)
        return bits

    def are_first(self, seeds: torch.Tensor, tokens: torch.Tensor, count: int, num_first: int) -> torch.Tensor:
        """Whether each token is among the first so many of its own seed's permutation of `count`: (seeds,) bool."""
        words, ids = _check_seeds(seeds, count, num_first), tokens.to(torch.int32)
        if ids.shape != words.shape or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count):
            raise SettingError(f"{len(ids)} tokens, each below {count}, are needed for {len(words)} seeds")
        found = torch.empty(len(words), dtype=torch.bool)
        if len(words):
            words, order = words.sort()  # equal seeds are followed together
            ids, out = ids[order], torch.empty_like(found)
            self.handle.us_are_first(_at(words), _at(ids), len(words), count, num_first, _at(out), self.threads)
            found[order] = out
        return found

    def mark_listed(
        self, scores: torch.Tensor, ids: torch.Tensor, lists: KeptLists, key: int, bias: float
    ) -> torch.Tensor:
        """Scores (rows, vocab) float32, more by `bias` on the green lists that the last tokens of `ids` (rows, columns)
        choose by the key."""
        scores, ids = scores.contiguous(), ids[:, -1].to(torch.int64).contiguous()
        rows, vocab = scores.shape
        is_sound = scores.dtype == torch.float32 and len(ids) == rows and lists.bits.shape[1] == -(-vocab // 32)
        if not is_sound or not 0 <= lists.num_first < vocab < 1 << 30:
            raise SettingError(f"scores {list(scores.shape)} can't be raised after tokens {list(ids.shape)}")
        out = torch.empty_like(scores)
        if out.numel():
            about = (rows, vocab, lists.num_first, _at(ids), 1, key, bias, _at(lists.owners), _at(lists.bits))
            code = self.handle.us_mark_listed(_at(scores), _at(out), *about, len(lists.owners), self.threads)
            check_code(code)
        return out

    def raise_own(self, scores: torch.Tensor, ids: torch.Tensor, lists: OwnLists, bias: float) -> torch.Tensor:
        """Scores (rows, vocab) float32, more by `bias` for those of the likeliest tokens that are on the lists that
        they choose with the last tokens of `ids` (rows, columns)."""
        scores, ids = scores.contiguous(), ids.to(torch.int64)
        ids = ids if ids.stride(1) == 1 else ids.contiguous()
        rows, vocab = scores.shape
        is_sound = scores.dtype == torch.float32 and len(ids) == rows and lists.width <= ids.shape[1]
        if not is_sound or not 0 <= lists.num_first < vocab < 1 << 30 or lists.table.dtype != torch.int64:
            raise SettingError(f"scores {list(scores.shape)} can't be raised after tokens {list(ids.shape)}")
        out = torch.empty_like(scores)
        if out.numel():
            check_code(
                self.handle.us_raise_own(
                    _at(scores),
                    _at(out),
                    rows,
                    vocab,
                    lists.num_first,
                    min(lists.num_candidates, vocab),
                    ids.data_ptr() + ids.element_size() * (ids.shape[1] - lists.width),
                    ids.stride(0),
                    lists.width,
                    _at(lists.table),
                    len(lists.table),
                    lists.key,
                    list_divisors(vocab, lists.num_first).ctypes.data,
                    bias,
                    _at(lists.known),
                    len(lists.known),
                    self.threads,
                )
            )
        return out

    def read_contexts(self, text: Text, seed: int, *, mixes: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """`watermark.contexts.read_contexts` of a text on a CPU."""
        ids = text.ids.to(torch.int64)
        pads, firsts = (None if one is None else one.to(torch.int64).contiguous() for one in (text.pads, text.firsts))
        ids = ids if ids.stride(1) == 1 else ids.contiguous()
        rows, columns = ids.shape
        states, repeated = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        if rows:
            self.handle.us_read_contexts(
                _at(ids),
                None if pads is None else _at(pads),
                None if firsts is None else _at(firsts),
                rows,
                ids.stride(0),
                text.start,
                columns - text.start,
                text.width,
                text.first,
                seed & (2**64 - 1),
                int(mixes),
                _at(states),
                _at(repeated),
            )
        return states, repeated

    def play_tournament(
        self,
        scores: torch.Tensor,
        words: torch.Tensor,
        depth: int,
        states: torch.Tensor,
        shift: int,
        repeated: torch.Tensor,
    ) -> torch.Tensor:
        """Log-probabilities of the tournament's winner, from scores (rows, vocab) and bits (words, size) of 30 rounds
        each. Token `v` has its bits at `states + shift + v`, modulo the size; rows that are `repeated` (rows,) stay as
        they are."""
        scores, states, repeated = scores.contiguous(), states.contiguous(), repeated.to(torch.bool).contiguous()
        size = words.shape[1]
        is_sound = (
            scores.dtype == torch.float32
            and scores.dim() == 2
            and words.dtype == torch.int32
            and words.is_contiguous()
            and 0 < depth <= 30 * words.shape[0]
            and size & (size - 1) == 0
            and states.dtype == torch.int64
            and states.shape == repeated.shape == scores.shape[:1]
        )
        if not is_sound:
            raise SettingError(f"scores {list(scores.shape)} and bits {list(words.shape)} make no tournament")
        out = torch.empty_like(scores)
        if out.numel():
            check_code(
                self.handle.us_play_tournament(
                    _at(scores),
                    _at(out),
                    *scores.shape,
                    depth,
                    _at(words),
                    size,
                    _at(states),
                    shift,
                    _at(repeated),
                    self.threads,
                )
            )
        return out

    def draw_keyed(self, scores: torch.Tensor, states: torch.Tensor, repeated: torch.Tensor) -> torch.Tensor:
        """The tokens (rows,) that Gumbel's noise of these states draws from scores (rows, vocab) float32; -1 for rows
        that are repeated, and if no score is finite or one is NaN."""
        scores, states, repeated = scores.contiguous(), states.contiguous(), repeated.to(torch.bool).contiguous()
        if scores.dtype != torch.float32 or not states.shape == repeated.shape == scores.shape[:1]:
            raise SettingError(f"{len(states)} states can't draw from scores {list(scores.shape)} of {scores.dtype}")
        tokens = torch.empty(len(scores), dtype=torch.int32)
        if scores.numel():
            self.handle.us_draw_keyed(_at(scores), *scores.shape, _at(states), _at(repeated), _at(tokens), self.threads)
        return tokens


@lru_cache(maxsize=4)
def list_divisors(count: int, num_first: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    """What decides if a word is divisible by count - i: the inverse of the odd part, the powers of two, the limit."""
    divisors = count - np.arange(num_first, dtype=np.int64)
    powers = divisors & -divisors
    odd = (divisors // powers).astype(np.uint32)
    inverses = odd.copy()  # right in the lowest 3 bits; each round doubles them
    for _ in range(4):
        inverses *= np.uint32(2) - odd * inverses
    shifts = np.log2(powers).astype(np.uint32)
    return np.stack((inverses, shifts, (LOW_BITS // divisors).astype(np.uint32)))


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _check_seeds(seeds: torch.Tensor, count: int, num_first: int) -> torch.Tensor:
    if seeds.dim() != 1 or not 0 <= num_first < count < 1 << 30:
        raise SettingError(f"the first {num_first} of {count} tokens can't be found for {list(seeds.shape)} seeds")
    low = seeds & LOW_BITS
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32).contiguous()


def check_code(code: int) -> None:
    if code:
        raise ResourceError("there is no memory for a watermark's lists")
