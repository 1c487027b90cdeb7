"""Green lists that a token itself helps to choose, on the device that marks.

The likeliest tokens of a row are found without a sort, as a sampling tail finds them: the k-th highest score is no
lower than the k-th highest maximum of groups of scores, so few groups are read. Each is then followed through the
shuffle of its own seed (`following`). The references are `WatermarkLogitsProcessor.raise_plainly` and
`watermark.twister.are_first`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import lay_in_rows
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.marks.following import CHUNKS, RESERVE, SLOTS, STATE, WORDS, is_first, list_divisors
from unspool.kernels.gpu.sampling.tail import choose_group, count_chosen, find_bound

TILE: Final = 1_024  # scores per program that copies them
SPARE: Final = 40  # places for candidates: groups may hold more than one
SLOW_CHUNK: Final = 4_096  # scores that are read at once if too many tie


@triton.jit
def _copy_scores(
    SCORES, OUT, TOPS, V, G, row_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Copy scores, and find the highest of every group; infinity if one of them is NaN."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    let_next_start(PDL)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    tl.store(OUT + row * V + token, scores, mask=token < V)
    scores = scores.to(tl.float32)
    tops = tl.max(tl.where(scores == scores, scores, float("inf")), 1)
    tl.store(TOPS + row * G + group, tops, mask=group < G)


@triton.jit
def _list_candidates(
    SCORES, TOPS, GROUPS, VALUES, TOKENS, CANDIDATES, V, G, k,
    GROUP: tl.constexpr, ALL: tl.constexpr, MOST: tl.constexpr, ROOM: tl.constexpr, SLOW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A row's likeliest tokens, of equals the first; -1 where fewer are possible, or a score is NaN or infinite."""
    row = tl.program_id(0).to(tl.int64)
    SCORES += row * V
    GROUPS += row * MOST
    VALUES += row * ROOM
    TOKENS += row * ROOM
    CANDIDATES += row * k
    group, at = tl.arange(0, ALL), tl.arange(0, ROOM)
    let_next_start(PDL)
    wait_for_input(PDL)
    tops = tl.load(TOPS + row * G + group, mask=group < G, other=float("-inf"))
    highest = tl.max(tops, 0)
    tl.store(CANDIDATES + at, tl.full((ROOM,), -1, tl.int32), mask=at < k)
    tl.debug_barrier()
    if (highest > float("-inf")) & (highest < float("inf")):
        bound = find_bound(tops, highest, k)
        is_chosen = (tops >= bound) & (tops > float("-inf"))
        number = tl.cumsum(is_chosen.to(tl.int32), 0)
        num_chosen = tl.max(number, 0)
        tl.store(GROUPS + number - 1, group, mask=is_chosen & (number <= MOST))
        tl.debug_barrier()
        column = tl.arange(0, MOST * GROUP)
        is_there = column // GROUP < num_chosen
        token = tl.load(GROUPS + column // GROUP, mask=is_there, other=0) * GROUP + column % GROUP
        value = tl.load(SCORES + token, mask=is_there & (token < V), other=float("-inf")).to(tl.float32)
        is_found = (value >= bound) & (value > float("-inf"))
        place = tl.cumsum(is_found.to(tl.int32), 0)
        num_found = tl.max(place, 0)
        if (num_chosen <= MOST) & (num_found <= ROOM):
            tl.store(VALUES + place - 1, value, mask=is_found)
            tl.store(TOKENS + place - 1, token, mask=is_found)
            tl.debug_barrier()
            its = tl.load(VALUES + at, mask=at < num_found, other=float("-inf"))
            is_tie = its[None, :] == its[:, None]
            is_before = (its[None, :] > its[:, None]) | (is_tie & (at[None, :] < at[:, None]))
            rank = tl.sum(is_before.to(tl.int32), 1)
            found = tl.load(TOKENS + at, mask=at < num_found, other=-1)
            tl.store(CANDIDATES + rank, found, mask=(rank < k) & (at < num_found))
        else:
            _list_slowly(SCORES, CANDIDATES, V, k, SLOW)


@triton.jit
def _list_slowly(SCORES, CANDIDATES, V, k, SLOW: tl.constexpr):
    """The same by one pass for each of them."""
    last = tl.full((), -1, tl.int32)
    lowest = tl.full((), float("inf"), tl.float32)
    for number in range(k):
        found = tl.full((), -1, tl.int32)
        best = tl.full((), float("-inf"), tl.float32)
        for first in range(0, V, SLOW):
            token = first + tl.arange(0, SLOW)
            value = tl.load(SCORES + token, mask=token < V, other=float("-inf")).to(tl.float32)
            value = tl.where((value < lowest) | ((value == lowest) & (token > last)), value, float("-inf"))
            top = tl.max(value, 0)
            its = tl.min(tl.where(value == top, token, V), 0)
            found = tl.where(top > best, its, found)
            best = tl.maximum(best, top)
        tl.store(CANDIDATES + number, found)
        last, lowest = found, best


@triton.jit
def _are_first(
    SEEDS, TOKENS, ROOM, DIVISORS, FOUND, V, num_first,
    STATE: tl.constexpr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr, RESERVE: tl.constexpr,
    IS_SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    let_next_start(PDL)
    wait_for_input(PDL)
    token, seed = tl.load(TOKENS + number).to(tl.int32), tl.load(SEEDS + number)
    found = is_first(
        ROOM + number * WORDS, DIVISORS, seed, token, V, num_first, STATE, SLOTS, CHUNKS, RESERVE, IS_SHARED
    )
    tl.store(FOUND + number, found.to(tl.int8))


@triton.jit(do_not_specialize=["columns", "num_before"])
def _raise_own(
    IDS, CANDIDATES, TABLE, KEY, ROOM, DIVISORS, OUT, bias, V, num_first, ids_stride, columns, num_before,
    num_candidates, table_size,
    STATE: tl.constexpr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr, RESERVE: tl.constexpr,
    IS_SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Raise one candidate if it is on the list that it helps to choose."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * num_candidates + number
    let_next_start(PDL)
    key = tl.load(KEY)
    wait_for_input(PDL)
    token = tl.load(CANDIDATES + place)
    if token >= 0:
        own = tl.load(TABLE + token % table_size) + 1
        least = key * own * own  # wraps around, as the reference's does
        for before in range(num_before):
            held = tl.load(IDS + row * ids_stride + columns - num_before + before)
            least = tl.minimum(least, key * (tl.load(TABLE + held % table_size) + 1) * own)
        seed = tl.where(least < 0, least - 1, least)  # the low half is what `% (2**64 - 1)` leaves of it
        if is_first(
            ROOM + place * WORDS, DIVISORS, seed, token, V, num_first, STATE, SLOTS, CHUNKS, RESERVE, IS_SHARED
        ):
            score = tl.load(OUT + row * V + token)
            tl.store(OUT + row * V + token, (score.to(tl.float32) + bias).to(score.dtype))


def are_first(seeds: torch.Tensor, tokens: torch.Tensor, count: int, num_first: int) -> torch.Tensor:
    """Whether each token is among the first so many of its own seed's permutation of `count`: (seeds,) bool."""
    found = torch.empty(len(seeds), dtype=torch.int8, device=seeds.device)
    launch(
        _are_first,
        (len(seeds),),
        seeds,
        tokens,
        *_describe_lists(len(seeds), count, num_first, seeds.device),
        found,
        count,
        num_first,
        **_list_options(seeds.device),
    )
    return found.view(torch.bool)


def list_candidates(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of scores (rows, vocab), and each row's `k` likeliest tokens (rows, k) int32, of equals the first.

    They are -1 where fewer are possible, or a score is NaN or infinite.
    """
    scores = lay_in_rows(scores)
    (rows, vocab), device, options = scores.shape, scores.device, launch_options()
    group = choose_group(vocab, k)
    num_groups, block = triton.cdiv(vocab, group), TILE // group
    most = triton.next_power_of_2(min(count_chosen(k), num_groups))
    room = triton.next_power_of_2(count_chosen(k) + SPARE)
    out = torch.empty(rows, vocab, dtype=scores.dtype, device=device)
    tops = torch.empty(rows, num_groups, dtype=torch.float32, device=device)
    groups = torch.empty(rows, most, dtype=torch.int32, device=device)
    values = torch.empty(rows, room, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, room, dtype=torch.int32, device=device)
    candidates = torch.empty(rows, k, dtype=torch.int32, device=device)
    launch(
        _copy_scores,
        (rows, triton.cdiv(num_groups, block)),
        scores,
        out,
        tops,
        vocab,
        num_groups,
        scores.stride(0),
        GROUP=group,
        BLOCK=block,
        num_warps=4,
        **options,
    )
    launch(
        _list_candidates,
        (rows,),
        out,
        tops,
        groups,
        values,
        tokens,
        candidates,
        vocab,
        num_groups,
        k,
        GROUP=group,
        ALL=triton.next_power_of_2(num_groups),
        MOST=most,
        ROOM=room,
        SLOW=SLOW_CHUNK,
        num_warps=8,
        **options,
    )
    return out, candidates


@dataclass(frozen=True, slots=True)
class DeviceOwnLists:
    """What chooses the list of a candidate: its own entry in a table and those of the tokens before it."""

    table: torch.Tensor  # (size,) int64
    key: torch.Tensor  # (1,) int64
    num_before: int  # tokens
    num_first: int  # of the permutation: the list's length
    num_candidates: int  # the likeliest tokens


def raise_own(scores: torch.Tensor, ids: torch.Tensor, lists: DeviceOwnLists, bias: float) -> torch.Tensor:
    """Scores (rows, vocab) with `bias` added for those of the likeliest tokens that are on their own lists after the
    tokens `ids` (rows, columns)."""
    rows, vocab = scores.shape
    ids, count = lay_in_rows(ids), lists.num_candidates
    out, candidates = list_candidates(scores, count)
    launch(
        _raise_own,
        (rows, count),
        ids,
        candidates,
        lists.table,
        lists.key,
        *_describe_lists(rows * count, vocab, lists.num_first, scores.device),
        out,
        float(bias),
        vocab,
        lists.num_first,
        ids.stride(0),
        ids.shape[1],
        lists.num_before,
        count,
        len(lists.table),
        **_list_options(scores.device),
    )
    return out


def _describe_lists(count: int, vocab: int, num_first: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the words of so many seeds, where they do not lie in shared memory, and the divisors."""
    room = torch.empty(1 if _is_shared(device) else count * WORDS, dtype=torch.int32, device=device)
    return room, list_divisors(vocab, num_first, device)


def _list_options(device: torch.device) -> dict[str, Any]:
    return {
        "STATE": STATE,
        "SLOTS": SLOTS,
        "CHUNKS": CHUNKS,
        "WORDS": WORDS,
        "RESERVE": RESERVE,
        "IS_SHARED": _is_shared(device),
        "num_warps": 1,
        "num_stages": 1,
        **launch_options(),
    }


def _is_shared(device: torch.device) -> bool:
    """Whether words lie in shared memory, which Triton's interpreter has not."""
    return device.type == "cuda" and os.environ.get("TRITON_INTERPRET") != "1"
