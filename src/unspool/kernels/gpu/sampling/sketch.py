"""The likeliest tokens without all logits, by a sketch of the head: its rows as int8.

A greedy step asks the head, the largest matrix of a small model, for one token. Logits by the sketch are off, but not
by more than norms allow (Cauchy and Schwarz): of w x, if v is the sketch of a row w, and y what a state x is rounded
to, by no more than |w - v| |x| + |v| |x - y|. Only rows whose logits may reach the highest lower bound are multiplied
by the state itself. Their number has no limit, so the token is always the one that all logits would give. A state is
rounded to two numbers of 8 bits each, so that all sums by the sketch are of whole numbers, and exact.

The reference is the head's product and `tokens.take_highest`. The CPU's form of it is csrc/sketch.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, round_up
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.norms import load_norm, norm_row
from unspool.kernels.gpu.sampling.tokens import enter_row

TILE = 512  # tokens per program that verifies
TOGETHER = 4  # rows of the head that it multiplies at a time
COLUMNS = 1024  # of them
ROWS_TOKENS, ROWS_COLUMNS = 128, 128  # of a program for several rows, and at a time
_FINE = tl.constexpr(254.0)  # units of the second number in one of the first
_SLACK = tl.constexpr(1.0001)  # for sums of squares


@dataclass(frozen=True, slots=True)
class Sketch:
    """A head's rows as int8, whose columns were divided by powers of two first."""

    numbers: torch.Tensor  # (vocab, hidden) int8
    scales: torch.Tensor  # (vocab,) float32
    reaches: torch.Tensor  # (2, vocab) float32: how far a logit can be off, per unit of a state and of what it lacks
    powers: torch.Tensor  # (hidden,) float32
    margin: float  # for the rounding of biases
    weight: torch.Tensor  # (vocab, hidden): the head itself
    bias: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens and columns."""
        return self.numbers.shape[0], self.numbers.shape[1]


@dataclass(frozen=True, slots=True)
class HeadInput:
    """What the head reads: states (rows, hidden) that may have to go through a norm, and be scaled."""

    states: torch.Tensor
    has_norm: bool = False
    norm: torch.Tensor | None = None  # its weights, as of `products.norms`, like what follows
    eps: float = 0.0
    centres: bool = False
    shift: torch.Tensor | None = None
    scale: float = 1.0
    is_rounded: bool = False  # the head's own product would read the norm as the states' dtype has it


@triton.jit
def _find_extent(most, square, other, another):
    return tl.maximum(most, other), square + another


@triton.jit
def _round_states(
    X, WEIGHT, SHIFT, POWERS, EXACT, NUMBERS, EXTENTS, HIGHEST, eps, scale, N,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, IS_LAYER: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_SHIFT: tl.constexpr, IS_ROUNDED: tl.constexpr, IS_SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_there = at < N
    powers = tl.load(POWERS + at, mask=is_there, other=0.0)
    weight, shift = load_norm(WEIGHT, SHIFT, at, is_there, HAS_NORM and HAS_WEIGHT, HAS_NORM and HAS_SHIFT)
    wait_for_input(PDL)
    x = tl.load(X + row * N + at, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORM:
        pivot = 0.0
        if IS_LAYER:
            pivot = tl.load(X + row * N).to(tl.float32)
        x = norm_row(x, pivot, weight, shift, is_there, eps, N, IS_LAYER, HAS_WEIGHT, HAS_SHIFT)
        x = tl.where(is_there, x, 0.0)
    if IS_ROUNDED:
        x = x.to(X.dtype.element_ty).to(tl.float32)
    if IS_SCALED:
        x = (x * scale).to(X.dtype.element_ty).to(tl.float32)
    tl.store(EXACT + row * N + at, x, mask=is_there)
    x *= powers
    most, square = tl.reduce((tl.abs(x), x * x), 0, _find_extent)
    let_next_start(PDL)  # whose programs ask for all of the sketch: what was loaded here before would come behind that
    unit = tl.maximum(most, 1e-30) / 127.0
    units = x / unit
    high = tl.floor(units + 0.5)
    low = tl.floor((units - high) * _FINE + 0.5)
    missing = x - (high + low / _FINE) * unit
    tl.store(NUMBERS + 2 * row * N + at, high.to(tl.int32).to(tl.int8), mask=is_there)
    tl.store(NUMBERS + (2 * row + 1) * N + at, low.to(tl.int32).to(tl.int8), mask=is_there)
    size = tl.sqrt(square) * _SLACK
    lack = tl.sqrt(tl.sum(missing * missing, 0)) * _SLACK + size * 1e-6
    is_sound = size < 1e20  # of others every token is multiplied by the head itself
    tl.store(EXTENTS + 3 * row, tl.where(is_sound, unit, 1.0))
    tl.store(EXTENTS + 3 * row + 1, tl.where(is_sound, size, float("inf")))
    tl.store(EXTENTS + 3 * row + 2, tl.where(is_sound, lack, float("inf")))
    tl.store(HIGHEST + row, float("-inf"))


@triton.jit
def _multiply_words(words, x, total):
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [words, x, total], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _load_factors(SCALES, REACHES, BIAS, rn, is_token, V, BN: tl.constexpr, HAS_BIAS: tl.constexpr):
    """What a sketch has of a program's tokens beside its numbers: no kernel writes it, so it is loaded early."""
    bias = tl.zeros((BN,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(BIAS + rn, mask=is_token, other=0.0).to(tl.float32)
    scales = tl.load(SCALES + rn, mask=is_token, other=0.0)
    reach = tl.load(REACHES + rn, mask=is_token, other=0.0)
    other = tl.load(REACHES + V + rn, mask=is_token, other=0.0)
    return scales, reach, other, bias


@triton.jit
def _load_words(at, is_token, IS_EVEN: tl.constexpr):
    if IS_EVEN:
        words = tl.load(at, eviction_policy="evict_first")
    else:
        words = tl.load(at, mask=is_token[:, None], other=0, eviction_policy="evict_first")
    return words


@triton.jit
def _bound_row(
    WORDS, SCALES, REACHES, BIAS, MASK, STATE, EXTENTS, UPPER, HIGHEST, V, margin,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    AHEAD: tl.constexpr, IS_EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of one row: a program has BN tokens, and K words of four numbers each."""
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    is_token = rn < V
    at = WORDS + rn.to(tl.int64)[:, None] * K + rk[None, :]
    ahead = ()
    for k in tl.static_range(0, AHEAD * BK, BK):
        ahead = ahead + (_load_words(at + k, is_token, IS_EVEN),)
    scales, reach, other, bias = _load_factors(SCALES, REACHES, BIAS, rn, is_token, V, BN, HAS_BIAS)
    let_next_start(PDL)
    wait_for_input(PDL)
    high = tl.zeros((BN, BK), tl.int32)
    low = tl.zeros((BN, BK), tl.int32)
    for k in tl.static_range(0, K, BK):
        if k < AHEAD * BK:
            w = ahead[k // BK]
        else:
            w = _load_words(at + k, is_token, IS_EVEN)
        high = _multiply_words(w, tl.broadcast_to(tl.load(STATE + k + rk)[None, :], (BN, BK)), high)
        low = _multiply_words(w, tl.broadcast_to(tl.load(STATE + K + k + rk)[None, :], (BN, BK)), low)
    made = tl.sum(high, 1).to(tl.float32) + tl.sum(low, 1).to(tl.float32) / _FINE
    unit, size, lack = tl.load(EXTENTS), tl.load(EXTENTS + 1), tl.load(EXTENTS + 2)
    made = made * (scales * unit) + bias
    off = reach * size + other * lack + margin
    is_allowed = is_token
    if HAS_MASK:
        is_allowed &= tl.load(MASK + rn, mask=is_token, other=1) == 0
    tl.store(UPPER + rn, tl.where(is_allowed, made + off, float("-inf")), mask=is_token)
    lower = made - off
    lower = tl.where(is_allowed & (lower == lower), lower, float("-inf"))
    tl.atomic_max(HIGHEST, tl.max(lower, 0), sem="relaxed")


@triton.jit
def _bound_rows(
    NUMBERS, SCALES, REACHES, BIAS, MASK, STATES, EXTENTS, UPPER, HIGHEST, V, rows, margin,
    K: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of several rows, on the tensor cores: R pairs of numbers, of which the first ones are there."""
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    pair = tl.arange(0, 2 * R)
    row = tl.arange(0, R)
    is_token, is_row = rn < V, row < rows
    scales, reach, other, bias = _load_factors(SCALES, REACHES, BIAS, rn, is_token, V, BN, HAS_BIAS)
    let_next_start(PDL)
    wait_for_input(PDL)
    total = tl.zeros((BN, 2 * R), tl.int32)
    tokens = tl.minimum(rn, V - 1).to(tl.int64)
    pairs = tl.minimum(pair, 2 * rows - 1)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        w = tl.load(NUMBERS + tokens[:, None] * K + k + rk[None, :], mask=(k + rk < K)[None, :], other=0)
        x = tl.load(STATES + pairs[None, :] * K + k + rk[:, None], mask=(k + rk < K)[:, None], other=0)
        total = tl.dot(w, x, total, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(total, (BN, R, 2)))
    unit = tl.load(EXTENTS + 3 * row, mask=is_row, other=0.0)
    size = tl.load(EXTENTS + 3 * row + 1, mask=is_row, other=0.0)
    lack = tl.load(EXTENTS + 3 * row + 2, mask=is_row, other=0.0)
    made = high.to(tl.float32) + low.to(tl.float32) / _FINE
    made = made * (scales[:, None] * unit[None, :]) + bias[:, None]
    off = reach[:, None] * size[None, :] + other[:, None] * lack[None, :] + margin
    is_allowed = is_token
    if HAS_MASK:
        is_allowed &= tl.load(MASK + rn, mask=is_token, other=1) == 0
    upper = tl.where(is_allowed[:, None], made + off, float("-inf"))
    tl.store(UPPER + row.to(tl.int64)[None, :] * V + rn[:, None], upper, mask=is_token[:, None] & is_row[None, :])
    lower = made - off
    lower = tl.where(is_allowed[:, None] & (lower == lower), lower, float("-inf"))
    tl.atomic_max(HIGHEST + row, tl.max(lower, 0), mask=is_row, sem="relaxed")


@triton.jit
def _cap(x, cap):
    return cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)


@triton.jit
def _verify(
    WEIGHT, EXACT, BIAS, UPPER, HIGHEST, BEST, TOKENS, COUNT, cap, V,
    K: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr, TOGETHER: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The highest of a tile's logits that may be the highest of all."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    rk = tl.arange(0, BK)
    let_next_start(PDL)
    wait_for_input(PDL)
    highest = tl.load(HIGHEST + row)
    upper = tl.load(UPPER + row * V + at, mask=at < V, other=float("-inf"))
    if HAS_CAP:
        highest, upper = _cap(highest, cap), _cap(upper, cap)
    is_close = ((upper >= highest) & (upper > float("-inf"))) | (upper != upper)
    is_close &= at < V
    place = tl.cumsum(is_close.to(tl.int32), 0) - 1
    count = tl.sum(is_close.to(tl.int32), 0)
    best = float("-inf")
    token = V
    done = 0
    while done < count:
        which = done + tl.arange(0, TOGETHER)
        is_there = which < count
        is_picked = is_close[None, :] & (place[None, :] == which[:, None])
        picked = tl.sum(tl.where(is_picked, at[None, :], 0), 1)
        total = tl.zeros((TOGETHER, BK), tl.float32)
        for k in tl.static_range(0, K, BK):
            is_column = k + rk < K
            w = tl.load(
                WEIGHT + picked.to(tl.int64)[:, None] * K + k + rk[None, :],
                mask=is_there[:, None] & is_column[None, :],
                other=0.0,
            )
            total += w.to(tl.float32) * tl.load(EXACT + row * K + k + rk, mask=is_column, other=0.0)[None, :]
        made = tl.sum(total, 1)
        if HAS_BIAS:
            made += tl.load(BIAS + picked, mask=is_there, other=0.0).to(tl.float32)
        if HAS_CAP:
            made = _cap(made, cap)
        is_number = made == made
        made = tl.where(is_there, tl.where(is_number, made, float("inf")), float("-inf"))
        top = tl.max(made, 0)
        first = tl.min(tl.where(made == top, tl.where(is_number, picked, -1), V), 0)
        token = tl.where(top > best, first, token)
        best = tl.maximum(top, best)
        done += TOGETHER
    tl.store(BEST + row * tl.num_programs(0) + tile, best)
    tl.store(TOKENS + row * tl.num_programs(0) + tile, token)
    if count > 0:
        tl.atomic_add(COUNT, count, sem="relaxed")


@triton.jit(do_not_specialize=["num_logged"])
def _take_verified(
    BEST, FOUND, TOKENS, LENGTHS, LOG, num_tiles, num_logged, TILES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    let_next_start(PDL)
    wait_for_input(PDL)
    best = tl.load(BEST + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    found = tl.load(FOUND + row * num_tiles + tiles, mask=tiles < num_tiles, other=0)
    highest = tl.max(best, 0)
    token = tl.min(tl.where(best == highest, found, 2147483647), 0)
    token = tl.where(highest > float("-inf"), token, -1)
    enter_row(row, token.to(tl.int64), TOKENS, LENGTHS, LOG, num_logged)


class SketchedChoice:
    """Finds the likeliest tokens of a captured pass's rows by a sketch of the head."""

    def __init__(self, sketch: Sketch, rows: int, count: torch.Tensor) -> None:
        (vocab, hidden), device = sketch.shape, sketch.numbers.device
        self._sketch, self._rows = sketch, rows
        self._count = count  # (1,) int64: tokens that were multiplied by the head itself, added up
        self._exact = torch.empty(rows, hidden, dtype=torch.float32, device=device)
        self._states = torch.empty(2 * rows, hidden, dtype=torch.int8, device=device)
        self._extents = torch.empty(rows, 3, dtype=torch.float32, device=device)
        self._upper = torch.empty(rows, vocab, dtype=torch.float32, device=device)
        self._highest = torch.empty(rows, dtype=torch.float32, device=device)
        num_tiles = count_parts(vocab, TILE)
        self._best = torch.empty(rows, num_tiles, dtype=torch.float32, device=device)
        self._found = torch.empty(rows, num_tiles, dtype=torch.int32, device=device)

    def choose(
        self,
        given: HeadInput,
        tokens: torch.Tensor,  # (rows,) int64: as of `take_highest`, like all that follow
        lengths: torch.Tensor,
        cap: float | None,
        log: torch.Tensor | None,
        mask: torch.Tensor | None = None,  # (vocab,) bool: tokens that are forbidden
    ) -> None:
        """Launch the choice."""
        self._round(given)
        self._bound(mask)
        sketch, rows, (vocab, hidden) = self._sketch, self._rows, self._sketch.shape
        num_tiles = self._best.shape[1]
        launch(
            _verify,
            (num_tiles, rows),
            sketch.weight,
            self._exact,
            sketch.bias if sketch.bias is not None else sketch.scales,
            self._upper,
            self._highest,
            self._best,
            self._found,
            self._count,
            cap or 1.0,
            vocab,
            K=hidden,
            BK=min(COLUMNS, round_up(hidden)),
            TILE=TILE,
            TOGETHER=TOGETHER,
            HAS_BIAS=sketch.bias is not None,
            HAS_CAP=cap is not None,
            num_warps=4,
            **launch_options(),
        )
        launch(
            _take_verified,
            (rows,),
            self._best,
            self._found,
            tokens,
            lengths,
            log if log is not None else tokens,
            num_tiles,
            len(log) if log is not None else 0,
            TILES=max(2, round_up(num_tiles)),
            num_warps=4,
            **launch_options(),
        )

    def _round(self, given: HeadInput) -> None:
        rows, hidden = given.states.shape
        block = round_up(hidden)
        launch(
            _round_states,
            (rows,),
            given.states,
            given.norm if given.norm is not None else given.states,
            given.shift if given.shift is not None else given.states,
            self._sketch.powers,
            self._exact,
            self._states,
            self._extents,
            self._highest,
            given.eps,
            given.scale,
            hidden,
            BLOCK=block,
            HAS_NORM=given.has_norm,
            IS_LAYER=given.centres,
            HAS_WEIGHT=given.norm is not None,
            HAS_SHIFT=given.shift is not None,
            IS_ROUNDED=given.is_rounded,
            IS_SCALED=given.scale != 1.0,
            num_warps=8 if block >= 2048 else 4,
            **launch_options(),
        )

    def _bound(self, mask: torch.Tensor | None) -> None:
        sketch, rows, (vocab, hidden) = self._sketch, self._rows, self._sketch.shape
        numbers, states = (sketch.numbers, self._states)
        tail = (
            sketch.scales,
            sketch.reaches,
            sketch.bias if sketch.bias is not None else sketch.scales,
            mask if mask is not None else sketch.scales,
        )
        after = (self._extents, self._upper, self._highest, vocab)
        flags = {"HAS_BIAS": sketch.bias is not None, "HAS_MASK": mask is not None}
        if rows == 1:
            tiling = choose_row_tiling(hidden)
            launch(
                _bound_row,
                (count_parts(vocab, tiling.tokens),),
                numbers.view(torch.int32),
                *tail,
                states.view(torch.int32),
                *after,
                sketch.margin,
                K=hidden // 4,
                BN=tiling.tokens,
                BK=tiling.words,
                AHEAD=tiling.ahead,
                IS_EVEN=vocab % tiling.tokens == 0,
                num_warps=tiling.warps,
                **flags,
                **launch_options(),
            )
            return
        launch(
            _bound_rows,
            (count_parts(vocab, ROWS_TOKENS),),
            numbers,
            *tail,
            states,
            *after,
            rows,
            sketch.margin,
            K=hidden,
            R=max(8, round_up(rows)),
            BN=ROWS_TOKENS,
            BK=ROWS_COLUMNS,
            STAGES=4,
            num_warps=4,
            **flags,
            **launch_options(),
        )


@dataclass(frozen=True, slots=True)
class SketchTiling:
    """How a sketch is cut for one row: tokens of a program, words of four columns at a time, and how many times so many
    are loaded before the state is there."""

    tokens: int
    words: int
    ahead: int
    warps: int


def choose_row_tiling(hidden: int) -> SketchTiling:
    """The tiling for one row, as was measured (docs/performance_history.md)."""
    words = hidden // 4
    step = min(words & -words, 128)  # the largest power of two that divides them
    return SketchTiling(tokens=32, words=step, ahead=min(words, 512) // step, warps=8 if step == 128 else 4)
