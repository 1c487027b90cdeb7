"""The kernels of `nearest.py`: weights within distances, what lies between two of them, and where a row is cut."""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.kernels.gpu.launching import let_next_start, wait_for_input
from unspool.kernels.gpu.sampling.row_sums import join_sums


@triton.jit
def _measure(scores, highest, whole, entropy, KIND: tl.constexpr):
    """The distances of scores; infinite for what is impossible."""
    distance = highest - scores
    if KIND == 1:
        distance = tl.abs((whole + distance) - entropy)
    return distance


@triton.jit
def _weigh_scores(scores, highest, is_there, KIND: tl.constexpr):
    """What scores count for: their exponential, or one."""
    weights = tl.where(is_there, 1.0, 0.0)
    if KIND < 2:
        weights = tl.where(is_there, tl.exp(scores - highest), 0.0)
    return weights


@triton.jit
def _load_row(ROWS):
    """A row's highest score, its log-sum-exp relative to that, and its entropy."""
    return tl.load(ROWS).to(tl.float32), tl.load(ROWS + 1).to(tl.float32), tl.load(ROWS + 2).to(tl.float32)


@triton.jit
def _load_bin(ROWS, LEVEL: tl.constexpr):
    """The bin that a level divides: the distance it begins after, the width of its parts, where it ends, and the weight
    before it. It begins at infinity if the weight is never reached."""
    at = ROWS + 4 + 4 * LEVEL
    return tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32), tl.load(at + 2).to(tl.float32), tl.load(at + 3)


@triton.jit
def _store_bin(ROWS, low, width, high, before, LEVEL: tl.constexpr):
    at = ROWS + 4 + 4 * LEVEL
    tl.store(at, low.to(tl.float64))
    tl.store(at + 1, width.to(tl.float64))
    tl.store(at + 2, high.to(tl.float64))
    tl.store(at + 3, before)


@triton.jit
def _find_bin(MASSES, ROWS, row, num_groups, LEVEL: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr):
    """The part of the last level's bin in which the weight is reached, as `_load_bin` returns it."""
    groups, steps = tl.arange(0, GROUPS), tl.arange(0, STEPS)
    wanted = tl.load(ROWS + 3)
    low, width, last, base = _load_bin(ROWS, LEVEL - 1)
    at = (row * num_groups + groups)[:, None] * STEPS + steps[None, :]
    masses = tl.load(MASSES + at, mask=(groups < num_groups)[:, None], other=0.0)
    reached = base + tl.sum(masses.to(tl.float64), 0)
    number = tl.min(tl.where((reached >= wanted) & (reached > 0.0), steps, STEPS), 0)  # one token is kept at least
    before = tl.where(number == 0, base, tl.sum(tl.where(steps == number - 1, reached, 0.0), 0))
    high = tl.where(number == STEPS - 1, last, low + width * (number + 1))
    low = tl.where(number < STEPS, low + width * number, float("inf"))
    return low, width / STEPS, high, before


@triton.jit
def weigh(
    SCORES, SUMS, WANTED, ROWS, MASSES, BEFORE, V, row_stride, wanted_stride, num_tiles, far,
    KIND: tl.constexpr, LEVEL: tl.constexpr, NUM: tl.constexpr, FACTS: tl.constexpr, STEPS: tl.constexpr,
    LANES: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The weight of a few tiles' scores within eight distances: of all, or of the bin that the level before found."""
    row, group, num_groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ROWS += row * FACTS
    SCORES += row * row_stride
    let_next_start(PDL)
    wait_for_input(PDL)
    if LEVEL == 0:
        highest, lowest, whole, entropy, _, total, _ = join_sums(SUMS, row, num_tiles, NUM, TILES)
        low, before = tl.zeros((), tl.float32) - 1.0, tl.zeros((), tl.float64)  # below every distance
        last = tl.maximum(
            _measure(highest, highest, whole, entropy, KIND),
            _measure(lowest, highest, whole, entropy, KIND),
        )
        # On a grid, so that sums of it are exact, and every program finds the same ends of bins.
        width = tl.ceil((tl.minimum(last, far) + 1.0) * (1024.0 / STEPS)) / 1024.0
        if group == 0:
            wanted = tl.load(WANTED + row * wanted_stride).to(tl.float64)
            if KIND == 2:
                wanted = tl.where(wanted > 0.0, wanted, float("inf"))
            else:
                wanted = wanted * total
            tl.store(ROWS, highest.to(tl.float64))
            tl.store(ROWS + 1, whole.to(tl.float64))
            tl.store(ROWS + 2, entropy.to(tl.float64))
            tl.store(ROWS + 3, wanted)
    else:
        highest, whole, entropy = _load_row(ROWS)
        low, width, last, before = _find_bin(BEFORE, ROWS, row, num_groups, LEVEL, STEPS, GROUPS)
    if group == 0:
        _store_bin(ROWS, low, width, last, before, LEVEL)
    # Sums of each lane first: threads meet once.
    token = group * (EACH * LANES) + tl.arange(0, LANES)
    nothing = tl.zeros((LANES,), tl.float32)
    a, b, c, d, e, f, g, h = nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing
    for _ in tl.range(EACH, num_stages=STAGES):
        scores = tl.load(SCORES + token, mask=token < V, other=float("-inf"))
        distance = _measure(scores, highest, whole, entropy, KIND)
        is_there = (scores > float("-inf")) & (distance > low)
        weights = _weigh_scores(scores, highest, is_there, KIND)
        a += tl.where(distance <= low + width, weights, 0.0)
        b += tl.where(distance <= low + width * 2, weights, 0.0)
        c += tl.where(distance <= low + width * 3, weights, 0.0)
        d += tl.where(distance <= low + width * 4, weights, 0.0)
        e += tl.where(distance <= low + width * 5, weights, 0.0)
        f += tl.where(distance <= low + width * 6, weights, 0.0)
        g += tl.where(distance <= low + width * 7, weights, 0.0)
        h += tl.where(distance <= last, weights, 0.0)
        token += LANES
    steps = tl.arange(0, STEPS)
    tl.store(MASSES + (row * num_groups + group) * STEPS + steps, tl.sum(_join_eight(a, b, c, d, e, f, g, h), 0))


@triton.jit
def _join_eight(a, b, c, d, e, f, g, h):
    """Eight tensors (lanes,) side by side: (lanes, 8)."""
    first = tl.join(tl.join(a, b), tl.join(c, d))
    second = tl.join(tl.join(e, f), tl.join(g, h))
    return tl.reshape(tl.permute(tl.join(first, second), (0, 3, 2, 1)), (a.shape[0], 8))


@triton.jit
def gather(
    SCORES, ROWS, MASSES, COUNTS, FOUND, TOKENS, V, row_stride, num_tiles, num_groups,
    KIND: tl.constexpr, LEVEL: tl.constexpr, FACTS: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
    GROUPS: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write down a tile's scores of the bin in which the weight is reached, in the order of their tokens, as far as
    there are slots for them; and how many they are."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    ROWS += row * FACTS
    let_next_start(PDL)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    highest, whole, entropy = _load_row(ROWS)
    low, width, high, before = _find_bin(MASSES, ROWS, row, num_groups, LEVEL, STEPS, GROUPS)
    if tile == 0:
        _store_bin(ROWS, low, width, high, before, LEVEL)
    distance = _measure(scores, highest, whole, entropy, KIND)
    is_in = (scores > float("-inf")) & (distance > low) & (distance <= high)
    number = tl.cumsum(is_in.to(tl.int32), 0)
    at = (row * num_tiles + tile) * SLOTS + number - 1
    has_slot = is_in & (number <= SLOTS)
    tl.store(FOUND + at, scores, mask=has_slot)
    tl.store(TOKENS + at, token, mask=has_slot)
    tl.store(COUNTS + row * num_tiles + tile, tl.sum(is_in.to(tl.int32), 0))


@triton.jit
def _weigh_chunk(
    SCORES, COUNTS, first, count, highest, whole, entropy, low,
    KIND: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Distances and weights of some of `count` scores, which are slots if there are SLOTS; infinite and nothing if they
    are not beyond `low`."""
    at = first + tl.arange(0, CHUNK)
    is_there = at < count
    if SLOTS > 0:
        is_there = is_there & (at % SLOTS < tl.load(COUNTS + at // SLOTS, mask=is_there, other=0))
    scores = tl.load(SCORES + at, mask=is_there, other=float("-inf"))
    distance = _measure(scores, highest, whole, entropy, KIND)
    is_in = (scores > float("-inf")) & (distance > low)
    weight = _weigh_scores(scores, highest, is_in, KIND).to(tl.float64)
    return tl.where(is_in, distance, float("inf")), weight


@triton.jit
def _search(
    SCORES, TOKENS, COUNTS, ROWS, CUT, LAST, count,
    KIND: tl.constexpr, LEVELS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The least distance within which scores reach a row's weight, by bisection; and the last token that is kept of
    those at that distance. If they are in slots, one chunk holds all of them."""
    highest, whole, entropy = _load_row(ROWS)
    wanted = tl.load(ROWS + 3)
    low, _width, high, before = _load_bin(ROWS, LEVELS)
    # Distances are at least 0: their bits have their order.
    least = tl.where(low < 0.0, -1, tl.maximum(low, 0.0).to(tl.int32, bitcast=True))
    most = tl.maximum(high, 0.0).to(tl.int32, bitcast=True)
    if SLOTS > 0:
        distance, weight = _weigh_chunk(SCORES, COUNTS, 0, count, highest, whole, entropy, low, KIND, SLOTS, CHUNK)
    while most - least > 1:
        middle = least + (most - least) // 2
        limit = middle.to(tl.float32, bitcast=True)
        if SLOTS > 0:
            reached = tl.sum(tl.where(distance <= limit, weight, 0.0), 0)
        else:
            parts = tl.zeros((CHUNK,), tl.float64)
            for first in range(0, count, CHUNK):
                far, each = _weigh_chunk(SCORES, COUNTS, first, count, highest, whole, entropy, low, KIND, SLOTS, CHUNK)
                parts += tl.where(far <= limit, each, 0.0)
            reached = tl.sum(parts, 0)
        reached += before
        is_enough = (reached >= wanted) & (reached > 0.0)
        most = tl.where(is_enough, middle, most)
        least = tl.where(is_enough, least, middle)
    cut = most.to(tl.float32, bitcast=True)
    tl.store(CUT, cut)
    if KIND == 0:  # of equal scores only as many are kept as are needed, the first ones
        parts = tl.zeros((CHUNK,), tl.float64)
        share = tl.zeros((), tl.float64)
        for first in range(0, count, CHUNK):
            far, each = _weigh_chunk(SCORES, COUNTS, first, count, highest, whole, entropy, low, KIND, SLOTS, CHUNK)
            parts += tl.where(far < cut, each, 0.0)
            share = tl.maximum(share, tl.max(tl.where(far == cut, each, 0.0), 0))
        missing = wanted - before - tl.sum(parts, 0)
        num_kept = tl.where(share > 0.0, tl.ceil(missing / share), 1.0)
        num_kept = tl.maximum(num_kept, 1.0).to(tl.int32)
        num_before, last = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        for first in range(0, count, CHUNK):
            far, _each = _weigh_chunk(SCORES, COUNTS, first, count, highest, whole, entropy, low, KIND, SLOTS, CHUNK)
            at = first + tl.arange(0, CHUNK)
            if SLOTS > 0:
                token = tl.load(TOKENS + at, mask=at < count, other=0)
            else:
                token = at
            is_tie = (far == cut).to(tl.int32)
            is_kept = (is_tie > 0) & (num_before + tl.cumsum(is_tie, 0) <= num_kept)
            last = tl.maximum(last, tl.max(tl.where(is_kept, token, 0), 0))
            num_before += tl.sum(is_tie, 0)
        tl.store(LAST, last)


@triton.jit
def find(
    SCORES, FOUND, TOKENS, COUNTS, ROWS, CUTS, LASTS, V, row_stride, num_tiles,
    KIND: tl.constexpr, LEVELS: tl.constexpr, FACTS: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Where a row is cut: everything farther goes, and of what is as far, tokens after the last."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    ROWS += row * FACTS
    COUNTS += row * num_tiles
    let_next_start(PDL)
    wait_for_input(PDL)
    most = tl.max(tl.load(COUNTS + tiles, mask=tiles < num_tiles, other=0), 0)
    low, _, _, _ = _load_bin(ROWS, LEVELS)
    if low == float("inf"):
        tl.store(CUTS + row, float("inf"))
        tl.store(LASTS + row, V)
    elif most <= SLOTS:
        first = row * num_tiles * SLOTS
        _search(
            FOUND + first, TOKENS + first, COUNTS, ROWS, CUTS + row, LASTS + row, num_tiles * SLOTS,
            KIND, LEVELS, SLOTS, TILES * SLOTS,
        )  # fmt: skip
    else:
        _search(SCORES + row * row_stride, TOKENS, COUNTS, ROWS, CUTS + row, LASTS + row, V, KIND, LEVELS, 0, CHUNK)


@triton.jit
def cut_far(
    SCORES, OUT, ROWS, CUTS, LASTS, V, row_stride, filler,
    KIND: tl.constexpr, FACTS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The scores, with those beyond the cut of their row at `filler`."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    is_far = is_beyond(scores, token, row, ROWS, CUTS, LASTS, KIND, FACTS)
    tl.store(OUT + row * V + token, tl.where(is_far, filler, scores), mask=token < V)


@triton.jit
def is_beyond(scores, token, row, ROWS, CUTS, LASTS, KIND: tl.constexpr, FACTS: tl.constexpr):
    """Which of a row's scores lie beyond its cut."""
    highest, whole, entropy = _load_row(ROWS + row * FACTS)
    cut = tl.load(CUTS + row)
    distance = _measure(scores, highest, whole, entropy, KIND)
    is_far = distance > cut
    if KIND == 0:
        is_far = is_far | ((distance == cut) & (token > tl.load(LASTS + row)))
    return is_far
