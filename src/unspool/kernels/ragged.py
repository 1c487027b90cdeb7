"""Passes over rows of different lengths whose real tokens are concatenated, and their attention.

Everything in a decoder but attention works on one token at a time and needs no rows. Attention reads the keys in
place in the cache: on a GPU one kernel of torch's serves all rows, elsewhere rows are read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Final

import torch

from unspool.kernels.attention import attend
from unspool.kernels.sending import send

BLOCK: Final = 1024  # queries per call if they need a mask
_WIDEST_FLASH_HEAD: Final = 256


@dataclass(slots=True, frozen=True)
class QueryBlock:
    """Consecutive queries of a row that one attention call reads."""

    row: int
    own: slice  # their indices among the pass's tokens
    num_queries: int
    first: int  # the first key that any of them sees
    stop: int  # and the first that none does
    num_before: int  # keys in view before that of the first query

    def sees_all(self) -> bool:
        """Whether every query sees every key in view."""
        return self.num_queries == 1

    def is_causal(self, window: int | None) -> bool:
        """Whether each query sees its own key and all before it, and there are no others."""
        return not self.num_before and (window is None or self.num_queries <= window)


class Cut:
    """All query blocks of a pass for layers of one window, and their masks."""

    def __init__(self, blocks: list[QueryBlock], window: int | None, device: torch.device) -> None:
        self.blocks = blocks
        self._window, self._device = window, device
        masked = [block for block in blocks if not block.sees_all() and not block.is_causal(window)]
        self._before = max((block.num_before for block in masked), default=0)
        self._most = max((block.num_queries for block in masked), default=0)
        self._band: torch.Tensor | None = None

    def mask(self, block: QueryBlock, dtype: torch.dtype) -> torch.Tensor:
        """The additive mask of a block's queries over its keys: (queries, keys).

        It depends on distances alone, so all masks are slices of one band.
        """
        before, most = self._before, self._most
        if self._band is None:
            places = torch.arange(before + most, device=self._device)
            distances = places[before:, None] - places  # (queries, keys)
            is_hidden = distances < 0
            if self._window is not None:
                is_hidden |= distances >= self._window
            band = torch.zeros(is_hidden.shape, dtype=dtype, device=self._device)
            self._band = band.masked_fill_(is_hidden, -torch.inf)
        found = self._band[: block.num_queries, before - block.num_before : before + block.num_queries]
        return found if found.device.type == "cpu" else found.contiguous()  # GPU kernels want it aligned


class Ragged:
    """The real tokens of a pass over ragged rows, concatenated row by row.

    A row has `counts[row]` of them, which follow the `starts[row]` positions that it holds. The filled form is that of
    other passes: (rows, new, …), each row's tokens first and arbitrary padding after them.
    """

    def __init__(self, starts: Sequence[int], counts: Sequence[int], positions: torch.Tensor) -> None:
        """`positions` (rows, new) are those of the filled form."""
        self.starts, self.counts, self.num_new = list(starts), list(counts), positions.shape[1]
        device = positions.device
        self._ends = list(accumulate(counts))
        self.num_tokens = self._ends[-1]
        rows = len(self.counts)
        numbers = send([*counts, *(end - count for end, count in zip(self._ends, counts, strict=True))], device)
        each = torch.arange(rows, device=device)
        self.rows = each.repeat_interleave(numbers[:rows], output_size=self.num_tokens)  # (tokens,): the row of each
        self.columns = torch.arange(self.num_tokens, device=device) - numbers[rows:][self.rows]  # its index in the row
        self.positions = self.take(positions)  # (tokens,)
        self._device = device
        self._cuts: dict[tuple[int | None, bool], Cut] = {}
        self._bounds: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lasts: torch.Tensor | None = None

    def take(self, filled: torch.Tensor) -> torch.Tensor:
        """The real tokens (tokens, …) of filled rows (rows, new, …)."""
        return filled[self.rows, self.columns]

    def fill(self, flat: torch.Tensor) -> torch.Tensor:
        """Tokens (tokens, …) as filled rows (rows, new, …), with zeros after a row's end."""
        filled = flat.new_zeros((len(self.counts), self.num_new, *flat.shape[1:]))
        filled[self.rows, self.columns] = flat
        return filled

    def take_last(self, flat: torch.Tensor) -> torch.Tensor:
        """Each row's last token (rows, …) of the tokens (tokens, …); an arbitrary one for a row that has none."""
        if self._lasts is None:
            self._lasts = send([max(end - 1, 0) for end in self._ends], self._device)
        return flat.index_select(0, self._lasts)

    # --- what attention uses -------------------------------------------------------------------------
    def cut(self, window: int | None, *, in_blocks: bool) -> Cut:
        """The rows' queries in blocks, one per attention call.

        A row that holds nothing is one block, because its mask is the plain causal one. All others (and with
        `in_blocks` every row) are cut into blocks of `BLOCK`, each with the keys that it sees, so that masks stay
        small and keys outside a window cost nothing.
        """
        key = (window, in_blocks)
        if key not in self._cuts:
            blocks = [
                self._make_block(row, place, min(place + size, count), window)
                for row, (start, count) in enumerate(zip(self.starts, self.counts, strict=True))
                if count
                for size in (BLOCK if in_blocks or start or (window is not None and window < count) else count,)
                for place in range(0, count, size)
            ]
            self._cuts[key] = Cut(blocks, window, self._device)
        return self._cuts[key]

    def _make_block(self, row: int, place: int, stop: int, window: int | None) -> QueryBlock:
        start, begin = self.starts[row], self._ends[row] - self.counts[row]
        first = 0 if window is None else max(0, start + place - window + 1)
        return QueryBlock(
            row, slice(begin + place, begin + stop), stop - place, first, start + stop, start + place - first
        )

    def bounds(self, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cumulative ends of each row's queries and keys, for a kernel that reads buffers of `room` positions per row.

        Between two rows there is an empty one without queries, whose keys are the rest of the buffer.
        """
        if room not in self._bounds:
            queries, keys = [0], [0]
            for row, (start, count, end) in enumerate(zip(self.starts, self.counts, self._ends, strict=True)):
                queries += [end, end]
                keys += [row * room + start + count, (row + 1) * room]
            both = send(queries + keys, self._device, torch.int32)
            self._bounds[room] = (both[: len(queries)], both[len(queries) :])
        return self._bounds[room]


def attend_ragged(
    queries: torch.Tensor,  # (tokens, heads, width)
    keys: torch.Tensor,  # (rows, room, kv_heads, width): a key's index is its position
    values: torch.Tensor,  # (rows, room, kv_heads, width)
    ragged: Ragged,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The attention output of ragged rows: (tokens, heads, width)."""
    has_kernel = softcap is None and has_flash(queries.device, queries.dtype, queries.shape[-1])
    flash = find_flash() if has_kernel else None
    if flash is None:
        return _attend_row_by_row(queries, keys, values, ragged, scale, window, softcap)
    queries_end, keys_end = ragged.bounds(keys.shape[1])
    read: torch.Tensor = flash(
        queries,
        keys.flatten(0, 1),
        values.flatten(0, 1),
        queries_end,
        keys_end,
        max(ragged.counts),
        keys.shape[1],
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # keys before the query's own
    )
    return read


def has_flash(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether torch's kernel for ragged rows supports heads of this width and dtype."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= _WIDEST_FLASH_HEAD
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and find_flash() is not None
    )


@cache
def find_flash() -> Callable[..., Any] | None:
    """torch's attention for ragged rows, if this torch has one that takes a scale and windows.

    Its operator is called as `varlen_attn` calls it: what that puts around it costs four times as much of the host's
    time, and a second to import.
    """
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if operator is None:
        return None
    known = [argument.name for argument in operator.default._schema.arguments]
    if known[: len(_FLASH_ARGUMENTS)] != list(_FLASH_ARGUMENTS) or not {"scale", "window_size_left"} < set(known):
        return None
    return _attend_by_flash


_FLASH_ARGUMENTS: Final = (
    "query",
    "key",
    "value",
    "cum_seq_q",
    "cum_seq_k",
    "max_q",
    "max_k",
    "dropout_p",
    "is_causal",
    "return_debug_mask",
)


def _attend_by_flash(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries_end: torch.Tensor,
    keys_end: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    left, right = window_size
    found: torch.Tensor = torch.ops.aten._flash_attention_forward.default(
        queries,
        keys,
        values,
        queries_end,
        keys_end,
        most_queries,
        most_keys,
        0.0,
        window_size == (-1, 0),
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return found


def _attend_row_by_row(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ragged: Ragged,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    read = torch.empty_like(queries, memory_format=torch.contiguous_format)
    cut = ragged.cut(window, in_blocks=softcap is not None)
    for block in cut.blocks:
        is_causal = not block.sees_all() and block.is_causal(window)
        needs_mask = not block.sees_all() and not is_causal
        found, _ = attend(
            queries[block.own].transpose(0, 1)[None],
            keys[block.row, block.first : block.stop].transpose(0, 1)[None],
            values[block.row, block.first : block.stop].transpose(0, 1)[None],
            scale=scale,
            mask=cut.mask(block, queries.dtype)[None, None] if needs_mask else None,
            is_causal=is_causal,
            softcap=softcap,
        )  # (1, heads, queries, width)
        read[block.own] = found[0].transpose(0, 1)
    return read
