"""Contrastive search at the end of a captured pass over candidates; `strategies/candidates.py` does the same in torch.

Five kernels: each candidate's similarity to the past, the best candidate, moving its keys and its logits to the row's
end, and the most likely next tokens. A turn of the search is then one graph.
"""

from __future__ import annotations

import weakref
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.contests import Contest, Won
from unspool.kernels.gpu.arguments import round_up
from unspool.kernels.gpu.attention.forks import keep_keys
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.sampling.ends import PassEnd
from unspool.kernels.gpu.sampling.readings import join_parts
from unspool.kernels.gpu.sampling.tokens import TILE, count_tiles
from unspool.kernels.key_layout import PLAIN, KeyLayout
from unspool.kernels.sending import send

POSITIONS: Final = 16  # of the past that a program compares at a time
SPLITS: Final = 64  # programs that share a row's past
_NUMBERS: Final = 8192  # products that a program holds
_UNIT: Final = 4  # numbers: the past's address is a multiple of this


@triton.jit
def _compare(
    STATES, BASE, TABLE, LENGTHS, PARTS, splits,
    HIDDEN: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BP: tl.constexpr, BH: tl.constexpr,
    UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The highest cosine similarity of each candidate's state to its row's past, in a part of the past."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rk, rh = tl.arange(0, KP), tl.arange(0, BH)
    let_next_start(PDL)
    wait_for_input(PDL)
    length = tl.load(LENGTHS + row)
    past = BASE + tl.load(TABLE) * UNIT + row * tl.load(TABLE + 1) * HIDDEN
    best = tl.full((KP,), float("-inf"), tl.float32)
    for start in tl.range(split * BP, length, splits * BP):
        place = start + tl.arange(0, BP)
        products = tl.full((BP, KP), 0.0, tl.float32)
        squares = tl.full((KP,), 0.0, tl.float32)
        for first in tl.range(0, HIDDEN, BH):
            at = first + rh
            is_state = (rk < K)[:, None] & (at < HIDDEN)[None, :]
            states = tl.load(STATES + (row * K + rk)[:, None] * HIDDEN + at[None, :], mask=is_state, other=0.0)
            states = states.to(tl.float32)
            is_past = (place < length)[:, None] & (at < HIDDEN)[None, :]
            held = tl.load(past + place.to(tl.int64)[:, None] * HIDDEN + at[None, :], mask=is_past, other=0.0)
            products += tl.sum(held[:, None, :] * states[None, :, :], 2)
            squares += tl.sum(states * states, 1)
        cosines = products / tl.maximum(tl.sqrt(squares), 1e-12)[None, :]
        best = tl.maximum(best, tl.max(tl.where((place < length)[:, None], cosines, float("-inf")), 0))
    tl.store(PARTS + (row * splits + split) * K + rk, best, mask=rk < K)


@triton.jit
def _judge(
    STATES, BASE, TABLE, LENGTHS, PARTS, WEIGHTS, CANDIDATES, CHOSEN, NEXT, ALPHA,
    HIDDEN: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the candidate to keep, note its token, and append the direction of its state to the past."""
    row = tl.program_id(0).to(tl.int64)
    rk, splits, at = tl.arange(0, KP), tl.arange(0, SPLITS), tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    length, alpha = tl.load(LENGTHS + row), tl.load(ALPHA)
    is_there = (rk < K) & (length >= 0)
    parts = tl.load(
        PARTS + (row * SPLITS + splits)[:, None] * K + rk[None, :], mask=is_there[None, :], other=float("-inf")
    )
    likeness = tl.max(parts, 0)
    weights = tl.load(WEIGHTS + row * K + rk, mask=is_there, other=float("-inf"))
    values = tl.where(weights == float("-inf"), float("-inf"), (1.0 - alpha) * weights - alpha * likeness)
    chosen = tl.argmax(values, 0)
    tl.store(CHOSEN + row, chosen.to(tl.int64))
    taken = tl.load(CANDIDATES + row * K + chosen)
    first = tl.sum(tl.where(rk == 0, weights, 0.0), 0)  # the highest
    tl.store(NEXT + row * (K + 1), tl.where(first > float("-inf"), taken, -1))
    is_state = (at < HIDDEN) & (length >= 0)
    state = tl.load(STATES + (row * K + chosen) * HIDDEN + at, mask=is_state, other=0.0).to(tl.float32)
    unit = state / tl.maximum(tl.sqrt(tl.sum(state * state, 0)), 1e-12)
    past = BASE + tl.load(TABLE) * UNIT + (row * tl.load(TABLE + 1) + length) * HIDDEN
    tl.store(past + at, unit, mask=is_state)


@triton.jit
def _keep_logits(
    LOGITS, CHOSEN, KEPT, PARTS, TOPS, TOKENS, V,
    K: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy the kept candidate's logits, tile by tile, with their sum of exponentials and their maximum."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    chosen = tl.load(CHOSEN + row)
    logits = tl.load(LOGITS + (row * K + chosen) * V + at, mask=at < V, other=float("-inf"))
    tl.store(KEPT + row * V + at, logits, mask=at < V)
    highest = tl.max(logits, 0)
    base = tl.where(highest > float("-inf"), highest, 0.0)
    place = row * tl.num_programs(1) + tile
    tl.store(PARTS + place * 2, highest)
    tl.store(PARTS + place * 2 + 1, tl.sum(tl.exp(logits - base), 0))
    for rank in range(K):
        token = tl.argmax(logits, 0)
        tl.store(TOPS + place * K + rank, tl.max(logits, 0))
        tl.store(TOKENS + place * K + rank, tile * TILE + token)
        logits = tl.where(tl.arange(0, TILE) == token, float("-inf"), logits)


@triton.jit
def _rank(
    PARTS, TOPS, TOKENS, LENGTHS, NEXT, WEIGHTS, num_tiles,
    K: tl.constexpr, FOUND: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The most likely tokens of a row, in descending order, and their probabilities; the row's length grows by one."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, FOUND)
    let_next_start(PDL)
    wait_for_input(PDL)
    _, total = join_parts(PARTS, row, num_tiles, TILES)
    first = row * num_tiles * K
    tops = tl.load(TOPS + first + at, mask=at < num_tiles * K, other=float("-inf"))
    for rank in range(K):
        place = tl.argmax(tops, 0)
        top = tl.max(tops, 0)
        tl.store(NEXT + row * (K + 1) + 1 + rank, tl.load(TOKENS + first + place).to(tl.int64))
        tl.store(WEIGHTS + row * K + rank, tl.where(top == float("-inf"), top, tl.exp(top - total)))
        tops = tl.where(at == place, float("-inf"), tops)
    length = tl.load(LENGTHS + row)
    tl.store(LENGTHS + row, tl.where(length >= 0, length + 1, length))


class CapturedContest:
    """Decides a contest of `num` candidates per row in a captured pass, for a fixed number of rows."""

    def __init__(self, rows: int, num: int, hidden: int, vocab: int, position: int, device: torch.device) -> None:
        self._rows, self._num, self._hidden, self._position = rows, num, hidden, position
        tiles = count_tiles(vocab)

        def make(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self._alpha, self._weights, self._kept = make(1), make(rows, num), make(rows, vocab)
        self._table = make(2, dtype=torch.int64)  # the past's address and capacity
        self._likeness, self._parts = make(rows, SPLITS, num), make(rows, tiles, 2)
        self._tops, self._tokens = make(rows, tiles, num), make(rows, tiles, num, dtype=torch.int32)
        self._chosen = make(rows, dtype=torch.int64)
        self._next = make(rows, 1 + num, dtype=torch.int64)  # the token that was kept, and the next candidates
        self._next_weights = make(rows, num)
        self._past: weakref.ref[torch.Tensor] | None = None  # the past whose address is in the table
        self._sent_alpha = 0.0

    def holds(self, contest: Contest) -> bool:  # noqa: ARG002 - the protocol's
        """Whether the inputs of the next pass are there: never, as its tokens are chosen elsewhere."""
        return False

    def set_inputs(self, contest: Contest) -> None:
        """Set the inputs of the next pass."""
        self._weights[: len(contest.weights)].copy_(contest.weights)
        if contest.alpha != self._sent_alpha:
            self._alpha.copy_(send([contest.alpha], self._alpha.device, torch.float32))
            self._sent_alpha = contest.alpha
        if self._past is None or self._past() is not contest.past:
            unit = _UNIT * contest.past.element_size()
            address = (contest.past.data_ptr() - self._weights.data_ptr()) // unit
            self._table.copy_(send([address, contest.past.shape[1]], self._table.device))
            self._past = weakref.ref(contest.past)

    def finish(self, end: PassEnd) -> None:
        """Launch the contest after a pass over candidates."""
        self.run(
            end.states,
            end.logits,
            end.tokens,
            end.base,
            end.table,
            end.lengths,
            num_layers=end.num_layers,
            unit=end.unit,
            layout=end.layout,
        )

    def run(
        self,
        states: torch.Tensor,  # (rows * candidates, hidden): the head's input
        logits: torch.Tensor,  # (rows * candidates, vocab)
        tokens: torch.Tensor,  # (rows * candidates,) int64: the candidates
        base: torch.Tensor,
        table: torch.Tensor,  # int64: see `kernels.key_layout`
        lengths: torch.Tensor,  # (rows,) int32: incremented
        *,
        num_layers: int,
        unit: int,
        layout: KeyLayout = PLAIN,
    ) -> None:
        """Launch the contest of a pass."""
        self._choose(states, tokens, lengths)
        keep_keys(
            base,
            table,
            lengths,
            self._chosen,
            num_layers=num_layers,
            position=self._position,
            unit=unit,
            layout=layout,
            **launch_options(),
        )
        self._find_next(logits, lengths)

    def _choose(self, states: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Which candidate of each row wins."""
        rows, num, hidden = self._rows, self._num, self._hidden
        padded, options = max(2, round_up(num)), launch_options()
        launch(
            _compare,
            (rows, SPLITS),
            states,
            self._weights,
            self._table,
            lengths,
            self._likeness,
            SPLITS,
            HIDDEN=hidden,
            K=num,
            KP=padded,
            BP=POSITIONS,
            BH=min(round_up(hidden), max(16, _NUMBERS // (POSITIONS * padded))),
            UNIT=_UNIT,
            **options,
        )
        launch(
            _judge,
            (rows,),
            states,
            self._weights,
            self._table,
            lengths,
            self._likeness,
            self._weights,
            tokens,
            self._chosen,
            self._next,
            self._alpha,
            HIDDEN=hidden,
            K=num,
            KP=padded,
            SPLITS=SPLITS,
            BLOCK=round_up(hidden),
            UNIT=_UNIT,
            num_warps=8,
            **options,
        )

    def _find_next(self, logits: torch.Tensor, lengths: torch.Tensor) -> None:
        """Keep the winners' logits, and find the candidates that follow them."""
        rows, num, options = self._rows, self._num, launch_options()
        vocab, tiles = self._kept.shape[1], self._tops.shape[1]
        launch(
            _keep_logits,
            (rows, tiles),
            logits,
            self._chosen,
            self._kept,
            self._parts,
            self._tops,
            self._tokens,
            vocab,
            K=num,
            TILE=TILE,
            num_warps=8,
            **options,
        )
        launch(
            _rank,
            (rows,),
            self._parts,
            self._tops,
            self._tokens,
            lengths,
            self._next,
            self._next_weights,
            tiles,
            K=num,
            FOUND=round_up(tiles * num),
            TILES=max(2, round_up(tiles)),
            **options,
        )

    def take(self, rows: int) -> tuple[torch.Tensor, Won]:
        """The kept candidates' logits (rows, vocab), and the contest's result."""
        found = self._next[:rows].clone()
        won = Won(found[:, :1], found[:, 1:], self._next_weights[:rows].clone())
        return self._kept[:rows].clone(), won
