"""What the attentions of captured passes have in common: an online softmax, split keys, one call interface.

The keys of a row are split among programs (flash-decoding: Dao et al., 2023), each of which serves all query heads that
share a key head; the program that ends last combines the parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options
from unspool.kernels.gpu.products.word_parts import find_place
from unspool.kernels.key_layout import PLAIN, KeyLayout

UNIT: Final = 8  # numbers: addresses are multiples of this, so that loads are known to be aligned
SMALLEST_DOT: Final = 16
COPIES: Final = 4  # of a part's highest score, if threads are to load it with its numbers
NOTES: Final = 2 * COPIES  # numbers that are kept of a part's query beside its output, at most
_BOUNDLESS: Final = (1 << 31) - 1  # keys


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The shape of a block's attention."""

    heads: int
    kv_heads: int
    width: int
    scale: float = 1.0
    softcap: float | None = None
    window: int | None = None
    eps: float = 0.0


@triton.jit
def find_numbers(number, PAIRS: tl.constexpr, HALVED: tl.constexpr):
    """Where a product left the numbers of a head whose rotary pairs are to be neighbours: there, or in two halves."""
    if HALVED:
        number = tl.where(number < 2 * PAIRS, number % 2 * PAIRS + number // 2, number)
    return number


@triton.jit
def score_keys(
    query, k, place, slopes, scale, softcap, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr
):  # fmt: skip
    """The scores of queries (queries, width) for keys (keys, width) at positions (keys,): (queries, keys)."""
    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    if HAS_CAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    if HAS_SLOPES:
        scores += slopes[:, None] * place.to(tl.float32)[None, :]
    return scores


@triton.jit
def read_values(scores, v, highest, total, read, MAY_SEE_NONE: tl.constexpr):
    """Continue an online softmax over some keys' values; masked keys have the score -inf.

    A query may have all of its keys so far masked only with `MAY_SEE_NONE`.
    """
    higher = tl.maximum(highest, tl.max(scores, 1))
    base = higher
    if MAY_SEE_NONE:
        base = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp(highest - base)
    weights = tl.exp(scores - base[:, None])
    total = total * fade + tl.sum(weights, 1)
    read = read * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, read


@triton.jit
def _find_targets(rq, rd, column, G: tl.constexpr, TOKEN: tl.constexpr, D: tl.constexpr, ORDER: tl.constexpr):
    """Where `put_together` writes the numbers of queries, from a column of their rows on."""
    if ORDER > 0:
        number = (rq % G * D)[:, None] + rd[None, :]
        targets = (rq // G * TOKEN)[:, None] + find_place(column + number, TOKEN, ORDER) - column
    else:
        targets = (rq // G * TOKEN + rq % G * D)[:, None] + rd[None, :]
    return targets


@triton.jit
def put_together(
    read, highest, total, OUT, PARTS, STATS, COUNTS, slot, split, used, num_splits,
    QUERIES: tl.constexpr, G: tl.constexpr, TOKEN: tl.constexpr, D: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, GJ: tl.constexpr, MOST_SPLITS: tl.constexpr,
    SINKS, HAS_SINKS: tl.constexpr, column=0, ORDER: tl.constexpr = 0, COPIES: tl.constexpr = 1,
):  # fmt: skip
    """Write the output of a key head's queries; if its keys are split, the program that ends last adds the parts up.

    Query `q` of `QUERIES` belongs to head `q % G` of token `q // G`; tokens have a stride of `TOKEN` numbers at `OUT`.
    A tile for the tensor cores is padded to GP queries: parts are added up over GJ, the smallest size that fits.
    A head's sink is the score of a key without a value, which takes a share of the attention.
    With an `ORDER` rows are arranged (`products.arranging`); the first head's numbers begin at `column` of one.
    With several `COPIES` a part's highest score is noted so often: a thread loads it as it loads the numbers of that
    query, where threads would otherwise exchange it part by part.
    """
    NOTES: tl.constexpr = 2 * COPIES
    rg, rd = tl.arange(0, GP), tl.arange(0, DP)
    is_head = rg < QUERIES
    is_number = is_head[:, None] & (rd < D)[None, :]
    if used == 1:
        target = OUT + _find_targets(rg, rd, column, G, TOKEN, D, ORDER)
        if HAS_SINKS:
            total += tl.exp(tl.load(SINKS + rg % G, mask=is_head, other=0.0).to(tl.float32) - highest)
        tl.store(target, (read / total[:, None]).to(OUT.dtype.element_ty), mask=is_number)
    else:
        part = (slot * num_splits + split) * GP
        tl.store(PARTS + (part + rg)[:, None] * DP + rd[None, :], read, mask=is_number)
        notes = STATS + NOTES * (part + rg)
        if COPIES > 1:
            copies = notes[:, None] + tl.arange(0, COPIES)[None, :]
            tl.store(copies, tl.broadcast_to(highest[:, None], (GP, COPIES)), mask=is_head[:, None])
        else:
            tl.store(notes, highest, mask=is_head)
        tl.store(notes + COPIES, total, mask=is_head)
        tl.debug_barrier()  # every thread's part is written before the count says so
        num_before = tl.atomic_add(COUNTS + slot, 1, sem="acq_rel")
        if num_before == used - 1:
            tl.debug_barrier()
            # The weight of each part is known first; the outputs are then added up, several loads at a time.
            rq = tl.arange(0, GJ)
            is_one = rq < QUERIES
            is_its = is_one[:, None] & (rd < D)[None, :]
            parts = tl.arange(0, MOST_SPLITS)
            place = (slot * num_splits + parts)[:, None] * GP + rq[None, :]
            is_part = (parts < used)[:, None] & is_one[None, :]
            tops = tl.load(STATS + NOTES * place, mask=is_part, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(STATS + NOTES * place + COPIES, mask=is_part, other=0.0, cache_modifier=".cg")
            peak = tl.where(is_one, tl.max(tops, 0), 0.0)
            whole = tl.sum(sums * tl.exp(tops - peak[None, :]), 0)
            if HAS_SINKS:
                whole += tl.exp(tl.load(SINKS + rq % G, mask=is_one, other=0.0).to(tl.float32) - peak)
            joined = tl.full((GJ, DP), 0.0, tl.float32)
            AHEAD: tl.constexpr = 8 if GJ * DP <= 1024 else 4  # parts whose loads are under way
            if COPIES > 1:
                peaks = tl.broadcast_to(peak[:, None], (GJ, DP))
                for start in tl.range(0, used, AHEAD):
                    # Unrolled by LLVM or ptxas: every pass of Triton's would take longer for each of its loads.
                    for i in tl.range(0, AHEAD):
                        one = ((slot * num_splits + start + i) * GP + rq)[:, None]
                        is_used = is_its & (start + i < used)
                        top_at = STATS + one * NOTES + (rd % COPIES)[None, :]
                        top = tl.load(top_at, mask=is_used, other=float("-inf"), cache_modifier=".cg")
                        its = tl.load(PARTS + one * DP + rd[None, :], mask=is_used, other=0.0, cache_modifier=".cg")
                        joined += its * tl.exp(top - peaks)
            else:
                for number in tl.range(0, used, loop_unroll_factor=AHEAD):
                    one = (slot * num_splits + number) * GP + rq
                    weight = tl.exp(tl.load(STATS + 2 * one, mask=is_one, other=0.0, cache_modifier=".cg") - peak)
                    its = tl.load(PARTS + one[:, None] * DP + rd[None, :], mask=is_its, other=0.0, cache_modifier=".cg")
                    joined += its * weight[:, None]
            whole = tl.where(is_one, whole, 1.0)
            target = OUT + _find_targets(rq, rd, column, G, TOKEN, D, ORDER)
            tl.store(target, (joined / whole[:, None]).to(OUT.dtype.element_ty), mask=is_its)
            tl.store(COUNTS + slot, 0)


@dataclass(frozen=True, slots=True)
class Launch:
    """The kernel that one kind of attention launches, and its parameters."""

    kernel: Any
    chunk: int  # the fewest keys per program
    constants: dict[str, Any]  # compile-time constants beside those that all kernels have
    views: tuple[torch.Tensor, ...] = field(default=())  # the base tensor of all addresses, viewed as other dtypes
    cluster: int = 1  # programs that share a row's keys and combine their parts in shared memory
    takes_any_window: bool = False  # whether layers without a window are those with a boundless one, to the same kernel


class SplitAttention(ABC):
    """The attention of captured passes: buffers for the parts of split keys, and the launch of a kernel."""

    takes_parts = False  # whether `qkv` may be the parts of a product: (parts, rows, …) float32
    arranges = False  # whether `out` can be written in the order in which a product reads it

    def __init__(
        self, rows: int, num_queries: int, width: int, shape: HeadShape, device: torch.device, splits: int
    ) -> None:
        self._rows, self._shape, self._width = rows, shape, width
        self._queries = max(SMALLEST_DOT, triton.next_power_of_2(num_queries))  # of one key head
        self._joined = triton.next_power_of_2(num_queries)
        self.splits = splits
        num_parts = rows * shape.kv_heads * self.splits * self._queries
        self._parts = torch.empty(num_parts, width, dtype=torch.float32, device=device)
        self._stats = torch.empty(num_parts, NOTES, dtype=torch.float32, device=device)
        self._counts = torch.zeros(rows * shape.kv_heads, dtype=torch.int32, device=device)

    @abstractmethod
    def _prepare(self, qkv: torch.Tensor, base: torch.Tensor, layout: KeyLayout) -> Launch:
        """The launch for queries of this dtype over keys of this layout."""

    def __call__(
        self,
        qkv: torch.Tensor,  # (rows * new, (heads + 2 * kv_heads) * width), as the product left it; see `takes_parts`
        out: torch.Tensor,  # (rows * new, heads * width)
        base: torch.Tensor,  # of the buffers' dtype: addresses are offsets from it
        table: torch.Tensor,  # int64: see `kernels.key_layout`
        lengths: torch.Tensor,  # (rows,) int32: positions held, -1 for an absent row
        layer: int,
        num_layers: int,
        *,
        turns: torch.Tensor | None = None,  # (rows * new, 2, pairs) float32: `turning.find_turns`
        scale: float | None = None,
        is_windowed: bool = False,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,  # (heads,) float32: ALiBi; or biases by distance (`StepAttention`)
        sinks: torch.Tensor | None = None,  # (heads,): scores of a key without a value
        is_halved: bool = False,  # rotary pairs of queries and keys are the two halves of what is rotated
        layout: KeyLayout = PLAIN,
        order: int = 0,  # in which `out` is written (`products.arranging`)
    ) -> None:
        """Rotate queries and keys, write keys and values after each row's length, and attend."""
        assert self.arranges or order == 0
        shape, unused = self._shape, self._stats
        started = self._prepare(qkv, base, layout)
        grid = self._rows, shape.kv_heads, self.splits
        window = shape.window or 0
        if not is_windowed and shape.window is not None and started.takes_any_window:
            is_windowed, window = True, _BOUNDLESS
        launch(
            started.kernel,
            (self.splits // started.cluster, *grid[1::-1]) if started.cluster > 1 else grid,
            qkv,
            out,
            base,
            *started.views,
            table,
            lengths,
            turns if turns is not None else unused,
            q_norm if q_norm is not None else qkv,
            k_norm if k_norm is not None else qkv,
            slopes if slopes is not None else unused,
            sinks if sinks is not None else unused,
            self._parts,
            self._stats,
            self._counts,
            layer,
            num_layers,
            shape.scale if scale is None else scale,
            shape.softcap or 1.0,
            shape.eps,
            window,
            self.splits,
            started.chunk,
            HEADS=shape.heads,
            KV_HEADS=shape.kv_heads,
            D=shape.width,
            G=shape.heads // shape.kv_heads,
            GP=self._queries,
            GJ=self._joined,
            PAIRS=turns.shape[2] if turns is not None else 0,
            HALVED=is_halved and turns is not None,
            UNIT=UNIT,
            MOST_SPLITS=triton.next_power_of_2(max(2, self.splits)),
            HAS_NORM=q_norm is not None,
            HAS_CAP=shape.softcap is not None,
            HAS_WINDOW=is_windowed,
            HAS_SINKS=sinks is not None,
            **{"HAS_SLOPES": slopes is not None, **started.constants},
            **({"ORDER": order} if self.arranges else {}),
            # A kernel that waits for a copy as well as for the product before it can't start early.
            **({"PDL": False} if layout.is_away else launch_options()),
            cluster=started.cluster,
        )
