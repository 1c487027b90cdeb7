"""Green lists: the tokens before a token choose a part of the vocabulary, whose scores are raised.

"A Watermark for Large Language Models" (arXiv 2301.10226) and "On the Reliability of Watermarks" (arXiv 2306.04634).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch

from unspool.config import WatermarkingConfig
from unspool.errors import InputError
from unspool.forks import make_lock
from unspool.kernels.cpu import find_marks
from unspool.kernels.cpu import marks as cpu_marks
from unspool.kernels.cpu.mark_calls import ListedCall, MarkCall, OwnListsCall
from unspool.kernels.masks import raise_listed
from unspool.kernels.presence import runs_kernels
from unspool.logits.highest import take_highest
from unspool.logits.watermark import WatermarkProcessor
from unspool.watermark.contexts import send_key
from unspool.watermark.twister import SEED_BITS, are_first, list_first, permute

NUM_CANDIDATES = 40  # of `selfhash`: the likeliest tokens, each asked for its own green list
TABLE_SIZE = 1_000_003
MOST_CACHED_BYTES = 1 << 26  # of green lists of one size
MOST_KNOWN = 1 << 18  # seeds with a token of which it is known whether it is on the list


class GreenLists:
    """The first `num_first` tokens of seeds' permutations as words of bits; those asked for last are kept."""

    def __init__(self, vocab_size: int, num_first: int) -> None:
        self._vocab_size, self._num_first = vocab_size, num_first
        self._lists: OrderedDict[int, torch.Tensor] = OrderedDict()  # by seed: (words,) int32
        self._most = max(8, MOST_CACHED_BYTES // max(1, vocab_size // 8))
        self._lock = make_lock(self, "_lock")  # the requests of several threads share them

    def __len__(self) -> int:
        return len(self._lists)

    def find(self, seeds: list[int]) -> torch.Tensor:
        """The lists of these seeds: (seeds, words) int32."""
        with self._lock:
            missing = [seed for seed in dict.fromkeys(seeds) if seed not in self._lists]
            if missing:
                self._lists.update(zip(missing, list_first(missing, self._vocab_size, self._num_first), strict=True))
            for seed in seeds:
                self._lists.move_to_end(seed)
            lists = [self._lists[seed] for seed in seeds]
            while len(self._lists) > self._most:
                self._lists.popitem(last=False)
        return lists[0][None] if len(lists) == 1 else torch.stack(lists)


@lru_cache(maxsize=4)
def _share_lists(vocab_size: int, num_first: int) -> GreenLists:
    """The lists of all processors of one vocabulary and one size."""
    return GreenLists(vocab_size, num_first)


@lru_cache(maxsize=4)
def _keep_lists(vocab_size: int, num_first: int) -> cpu_marks.KeptLists:
    """The same for the CPU library, which keeps them itself."""
    return cpu_marks.KeptLists.new(vocab_size, num_first, MOST_CACHED_BYTES)


@lru_cache(maxsize=4)
def _share_known(vocab_size: int, num_first: int) -> torch.Tensor:  # noqa: ARG001 - what is known is known for them alone
    """What all processors of one vocabulary and one size have found out about seeds and tokens: (entries,) int64.

    A candidate often comes back while the token that chose its list is still near: a third to a half of them are known.
    """
    return torch.zeros(MOST_KNOWN, dtype=torch.int64)


class WatermarkLogitsProcessor(WatermarkProcessor):
    """Adds `bias` to the scores of the tokens on the green list of the tokens before."""

    def __init__(
        self,
        vocab_size: int,
        device: Any,  # the reference's argument; green lists are the same on all devices
        greenlist_ratio: float = 0.25,
        bias: float = 2.0,
        hashing_key: int = 15485863,
        seeding_scheme: str = "lefthash",
        context_width: int = 1,
    ) -> None:
        WatermarkingConfig(greenlist_ratio, bias, hashing_key, seeding_scheme, context_width).validate()
        self.vocab_size = vocab_size
        self.greenlist_size = int(vocab_size * greenlist_ratio)
        self.bias = bias
        self.seeding_scheme = seeding_scheme
        self.context_width = context_width
        self._key = hashing_key
        self._seed_of_token = _list_seeds(hashing_key, vocab_size) if seeding_scheme == "lefthash" else None
        self._table = _permute_table(hashing_key) if seeding_scheme == "selfhash" else None
        self._lists = _share_lists(vocab_size, self.greenlist_size)

    @property
    def hash_key(self) -> int:
        """The key that green lists are seeded with."""
        return self._key

    @property
    def is_self_seeded(self) -> bool:
        """Whether a token's list depends on the token itself."""
        return self._table is not None

    @property
    def mark(self) -> Hashable:
        """The key and the settings."""
        how = (self.vocab_size, self.greenlist_size, self.bias, self.seeding_scheme, self.context_width)
        return type(self), self._key, *how

    def set_seed(self, input_seq: torch.Tensor) -> int:
        """The seed (its low 32 bits) that the last tokens of a text (length,) give the next token's green list."""
        return int(self.find_seeds(input_seq[None, -self.context_width :])[0])

    def find_seeds(self, contexts: torch.Tensor) -> torch.Tensor:
        """The seeds of contexts (…, width): 32 bits in int64. With `selfhash` a context ends with the token itself."""
        if self._seed_of_token is not None:
            self._seed_of_token = self._seed_of_token.to(contexts.device)
            return self._seed_of_token.take(contexts[..., -1])
        assert self._table is not None
        table = self._table = self._table.to(contexts.device)
        values = table[contexts % TABLE_SIZE] + 1
        product = (self._key * values * values[..., -1:]).amin(dim=-1)  # wraps around, as the reference's does
        return (product - (product < 0).long()) & SEED_BITS  # what `% (2**64 - 1)` leaves of the low 32 bits

    def are_green(self, contexts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Whether tokens (n,) are on the green lists of their contexts (n, width): (n,) bool."""
        return are_first(self.find_seeds(contexts), tokens, self.vocab_size, self.greenlist_size)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """The scores with `bias` added on the green lists; unchanged while a row's text is shorter than the context."""
        if scores.shape[-1] != self.vocab_size:
            raise InputError(
                f"the watermark is for a vocabulary of {self.vocab_size} tokens, and the scores have "
                f"{scores.shape[-1]}; make the processor with the model's `vocab_size`"
            )
        if input_ids.shape[-1] < self.context_width:
            return scores
        if pads is not None and self.context_width > 1:
            is_short = input_ids.shape[-1] - pads < self.context_width
            return torch.where(is_short[:, None], scores, self._raise(input_ids, scores))
        return self._raise(input_ids, scores)

    def _raise(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.is_self_seeded:
            return self._raise_candidates(input_ids, scores)
        marks = find_marks() if scores.device.type == "cpu" and scores.dtype == torch.float32 else None
        if marks is not None:
            lists = _keep_lists(self.vocab_size, self.greenlist_size)
            return marks.mark_listed(scores, input_ids, lists, self._key, self.bias)
        seeds = self.find_seeds(input_ids)
        if runs_kernels(scores.device):
            from unspool.kernels.gpu.marks.green_lists import raise_green  # Triton is imported where a GPU is used

            return raise_green(scores, seeds, self.greenlist_size, self.bias)
        bits = self._lists.find(seeds.tolist())
        return raise_listed(scores, bits.to(scores.device), self.bias)

    def prepare_steps(self, ids: torch.Tensor, vocab: int, pads: torch.Tensor | None) -> MarkCall | None:
        """The library's calls for every step."""
        marks = find_marks() if ids.device.type == "cpu" and vocab == self.vocab_size else None
        if marks is None or (pads is not None and self.context_width > 1):
            return None
        if self._table is not None:
            return OwnListsCall(marks, ids, vocab, self._describe_own(), self.bias)
        lists = _keep_lists(vocab, self.greenlist_size)
        return ListedCall(marks, ids, vocab, lists, self._key, self.bias, self.context_width)

    def _describe_own(self) -> cpu_marks.OwnLists:
        assert self._table is not None
        count = min(NUM_CANDIDATES, self.vocab_size)
        known = _share_known(self.vocab_size, self.greenlist_size)
        return cpu_marks.OwnLists(self._table, self._key, self.context_width - 1, self.greenlist_size, count, known)

    def _raise_candidates(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Each of the likeliest tokens is raised if it is on the list that it would itself help to choose."""
        count = min(NUM_CANDIDATES, self.vocab_size)
        if runs_kernels(scores.device):
            return self._raise_on_gpu(input_ids, scores, count)
        marks = find_marks() if scores.device.type == "cpu" and scores.dtype == torch.float32 else None
        if marks is not None and self._table is not None:
            return marks.raise_own(scores, input_ids, self._describe_own(), self.bias)
        return self.raise_plainly(input_ids, scores, count)

    def raise_plainly(self, input_ids: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
        """The same operator by operator."""
        highest, candidates = take_highest(scores, count)  # (rows, candidates)
        before = input_ids[:, None, input_ids.shape[-1] - self.context_width + 1 :]
        before = before.expand(-1, candidates.shape[1], -1)
        contexts = torch.cat((before, candidates[..., None]), dim=-1)
        is_green = self.are_green(contexts.flatten(0, 1), candidates.flatten()).view_as(candidates)
        return scores.scatter(-1, candidates, torch.where(is_green, highest + self.bias, highest))

    def _raise_on_gpu(self, input_ids: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
        from unspool.kernels.gpu.marks.own_lists import DeviceOwnLists, raise_own  # Triton: only where a GPU is used

        assert self._table is not None
        table = self._table = self._table.to(scores.device)
        key = send_key(self._key, scores.device)
        lists = DeviceOwnLists(table, key, self.context_width - 1, self.greenlist_size, count)
        return raise_own(scores, input_ids, lists, self.bias)


@lru_cache(maxsize=16)
def _list_seeds(key: int, vocab_size: int) -> torch.Tensor:
    """Every token's seed as the token before (vocab,): the key times the token, its low 32 bits."""
    return torch.tensor([_find_seed(key, token) for token in range(vocab_size)])


def _find_seed(key: int, token: int) -> int:
    return (key * token) % (2**64 - 1) & SEED_BITS


@lru_cache(maxsize=4)
def _permute_table(key: int) -> torch.Tensor:
    return permute(key, TABLE_SIZE)
