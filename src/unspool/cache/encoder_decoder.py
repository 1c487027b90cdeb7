"""The pair of caches an encoder-decoder model needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from unspool.cache.base import Cache
from unspool.cache.contract.capabilities import BRANCH, BRANCH_SOURCE, JOIN
from unspool.cache.files import list_saved
from unspool.cache.pair_surface import PairSurface
from unspool.cache.rows import RowCache
from unspool.cache.span import Span
from unspool.cache.write_log import WriteLog
from unspool.errors import SettingError, UnsupportedError


def _value(name: str) -> Any:
    """The decoder's part's value of that name."""
    return property(lambda pair: getattr(pair.self_attention_cache, name))


def _method(name: str) -> Any:
    """The decoder's part's method of that name."""

    def call(pair: EncoderDecoderCache, *args: Any, **kwargs: Any) -> Any:
        return getattr(pair.self_attention_cache, name)(*args, **kwargs)

    return call


@lru_cache(maxsize=64)
def _find_common(own: frozenset[str], cross: frozenset[str]) -> frozenset[str]:
    """What a pair can; asked at every step."""
    return own & cross - {BRANCH} | {BRANCH_SOURCE}


class EncoderDecoderCache(PairSurface):
    """Self-attention keys of the decoder, and cross-attention keys of the encoder's states (written once).

    It says what a row sees of its source: row `r` reads the first `source_lengths[s]` positions of the cross-attention
    cache's row `s = r // num_branches`. Keys (`read_sources`) and mask (`mask_source`) both follow from that.
    """

    @property  # type: ignore[misc]  # type(pair) is the class
    def __class__(self) -> type:
        """What isinstance() asks beside the type: transformers' models look for two parts in pairs of theirs alone."""
        theirs = sys.modules.get("transformers.cache_utils")
        return EncoderDecoderCache if theirs is None else getattr(theirs, "EncoderDecoderCache", EncoderDecoderCache)

    # The decoder's part moves, and answers for the pair; the encoder's is written once.
    lengths, room, is_endless = map(_value, ("lengths", "room", "is_endless"))
    takes_padding = _value("takes_padding")
    is_trying, is_in_order, num_forks = map(_value, ("is_trying", "is_in_order", "num_forks"))
    rolls_back_exactly, first_fork, can_follow = map(_value, ("rolls_back_exactly", "first_fork", "can_follow"))
    places, steady = map(_method, ("places", "steady"))
    write, write_flat, begin_trial = map(_method, ("write", "write_flat", "begin_trial"))
    mask, key_positions, order_weights = map(_method, ("mask", "key_positions", "order_weights"))
    get_seq_length, get_max_cache_shape = map(_method, ("get_seq_length", "get_max_cache_shape"))
    get_mask_sizes, get_query_offset = map(_method, ("get_mask_sizes", "get_query_offset"))
    activate_past_recording = _method("activate_past_recording")
    _reserve = _method("_reserve")

    @property
    def can(self) -> frozenset[str]:  # type: ignore[override]  # what both parts can
        return _find_common(self.self_attention_cache.can, self.cross_attention_cache.can)

    @property
    def source_lengths(self) -> list[int]:
        """Positions of the encoder's states, one for each row of the cross-attention cache."""
        return self.cross_attention_cache.lengths

    def read_sources(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the sources, one pair for each layer: (sources, heads, longest source, width)."""
        cross = self.cross_attention_cache
        if not isinstance(cross, RowCache):
            raise UnsupportedError(
                f"cross-attention keys can't be read from a {type(cross).__name__}; use a DynamicCache for them, as "
                "model.new_cache() does"
            )
        longest = max(self.source_lengths)
        return [(keys[:, :, :longest], values[:, :, :longest]) for keys, values in cross]

    def mask_source(self, device: torch.device) -> torch.Tensor | None:
        """Which of those keys belong to each source: (sources, 1, 1, longest source); None if all do."""
        lengths = self.source_lengths
        longest = max(lengths)
        if min(lengths) == longest:
            return None
        return (torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None])[:, None, None]

    @property
    def num_source_rows(self) -> int:
        """Rows of a pass that the sources are for; 0 while nothing is encoded."""
        return len(self.source_lengths) * self.num_branches * self.self_attention_cache.num_forks

    # --- a forward pass: the decoder's part moves, the encoder's stays --------------------------------
    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        if self.source_lengths and rows != self.num_source_rows:
            raise SettingError(
                f"the cache holds sources for {self.num_source_rows} rows and the forward pass has {rows}; "
                "use the cache that was made for this batch, or select_rows() first"
            )
        return self.self_attention_cache.begin(rows, num_new, counts, device)

    def end(self) -> None:
        self.self_attention_cache.end()
        if self._log is not None:
            self._log.note(self.lengths)

    def advance(self, rows: int) -> None:
        self.self_attention_cache.advance(rows)
        if self._log is not None:
            self._log.note(self.lengths)

    def fork(self, forks: range) -> EncoderDecoderCache:
        """The decoder's part forked; the forks of a row read the same states of the encoder."""
        own = self.self_attention_cache.fork(forks)
        return EncoderDecoderCache(own, self.cross_attention_cache, num_branches=self.num_branches)

    def keep_fork(self, chosen: torch.Tensor) -> None:
        self.self_attention_cache.keep_fork(chosen)
        self._log = None

    def truncate(self, lengths: Sequence[int]) -> None:
        self.self_attention_cache.truncate(lengths)
        if self._log is not None:
            self._log.truncate(lengths)

    def select_rows(self, index: Sequence[int]) -> None:
        """Keep, repeat or reorder rows; a source stays shared if all rows that read it stay together."""
        self.beams_left = self.texts_held = None
        sources = [row // self.num_branches for row in index]
        first_of_each = sources[:: self.num_branches]
        if sources == [source for source in first_of_each for _ in range(self.num_branches)]:
            sources = first_of_each
        else:
            self.num_branches = 1
        own, log = self.self_attention_cache, self._log
        if log is not None and isinstance(own, RowCache) and len(index) == len(own.lengths):
            own.copy_rows(index, log.find_parting(index))  # beams differ in their last positions only
        else:
            own.select_rows(index)
        if log is not None:
            log.select(index)
        self.cross_attention_cache.select_rows(sources)

    def follow_rows(self, index: torch.Tensor) -> None:
        """Let beams go on from others of their source, which stays where it is."""
        self._log = None  # who wrote what is on the device alone from now on
        self.self_attention_cache.follow_rows(index)

    def branch(self, num_branches: int) -> EncoderDecoderCache:
        """Continue every row in `num_branches` rows, which read one copy of its cross-attention keys."""
        rows = len(self.source_lengths) * self.num_branches
        spread = [row for row in range(rows) for _ in range(num_branches)]
        self._log = WriteLog(rows)
        self._log.note(self.lengths or [0] * rows)
        self._log.select(spread)
        self.self_attention_cache.select_rows(spread)
        self.num_branches *= num_branches
        return self

    def join(self, other: Any) -> None:
        """Take in the rows of another pair, and the sources that they read."""
        self.require(JOIN)
        if not isinstance(other, EncoderDecoderCache):
            raise SettingError(f"the rows of a {type(other).__name__} can't join those of a pair of caches")
        self._log = None
        given = other.merge()  # every row with a source of its own, as the rows that join have
        if self.num_branches > 1:
            self._unshare()
        self.self_attention_cache.join(given.self_attention_cache)
        self.cross_attention_cache.join(given.cross_attention_cache)
        self.is_updated |= other.is_updated

    def divide(self, num_parts: int, num_new: int) -> list[Cache]:
        if self.num_branches not in (1, num_parts):
            raise UnsupportedError(f"{self.num_branches} rows a source divide into as many parts, not {num_parts}")
        cross = self.cross_attention_cache
        shared = [cross] * num_parts if self.num_branches > 1 else cross.divide(num_parts, 0)
        own = self.self_attention_cache.divide(num_parts, num_new)
        return [EncoderDecoderCache(*pair) for pair in zip(own, shared, strict=True)]

    def rejoin(self, parts: Sequence[Cache]) -> None:
        self.self_attention_cache.rejoin(
            [part.self_attention_cache for part in parts if isinstance(part, EncoderDecoderCache)]
        )
        if self._log is not None:
            self._log.note(self.lengths)

    def merge(self) -> EncoderDecoderCache:
        if self.num_branches == 1:
            return self
        [cross] = self.cross_attention_cache.divide(1, 0)
        whole = EncoderDecoderCache(self.self_attention_cache, cross, num_branches=self.num_branches)
        whole._unshare()
        return whole

    def _unshare(self) -> None:
        """Give every row a copy of its source."""
        branches, self.num_branches = self.num_branches, 1
        rows = len(self.source_lengths) * branches
        self.cross_attention_cache.select_rows([row // branches for row in range(rows)])

    def _select(self, index: torch.Tensor) -> None:
        self.select_rows([int(i) for i in index])

    # --- copies and files ----------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        return self.self_attention_cache.nbytes + self.cross_attention_cache.nbytes

    def find_misfit(self, shape: Any) -> str | None:
        misfit = self.cross_attention_cache.find_misfit(shape)
        return self.self_attention_cache.find_misfit(shape) or (misfit and f"of the encoder's states, {misfit}")

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        own, own_tensors = self.self_attention_cache._pack()
        cross, cross_tensors = self.cross_attention_cache._pack()
        kinds = [type(self.self_attention_cache).__name__, type(self.cross_attention_cache).__name__]
        facts = {
            "kinds": kinds,
            "own": own,
            "cross": cross,
            "source_lengths": self.source_lengths,
            "num_branches": self.num_branches,
        }
        tensors = {f"own.{name}": tensor for name, tensor in own_tensors.items()}
        return facts, tensors | {f"cross.{name}": tensor for name, tensor in cross_tensors.items()}

    @classmethod
    def _unpack(
        cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]
    ) -> EncoderDecoderCache:
        parts = []
        for kind, name, held in zip(facts["kinds"], ("own", "cross"), (lengths, facts["source_lengths"]), strict=True):
            if kind == cls.__name__:
                raise ValueError("a pair within a pair")
            prefix = f"{name}."
            own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            parts.append(list_saved()[kind]._unpack(facts[name], own, held))
        num_branches = facts.get("num_branches", 1)
        if not isinstance(num_branches, int) or num_branches < 1:
            raise ValueError(f"{num_branches!r} rows for every source")
        own_part, cross_part = parts
        pair = cls(own_part, cross_part, num_branches=num_branches)
        if lengths and pair.source_lengths and len(lengths) != pair.num_source_rows:
            raise ValueError(f"{len(lengths)} rows for {len(pair.source_lengths)} sources of {num_branches} rows each")
        return pair

    def __len__(self) -> int:
        return len(self.self_attention_cache)
