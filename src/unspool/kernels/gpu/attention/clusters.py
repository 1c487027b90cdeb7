"""Programs of one cluster (Hopper): neighbours that run at the same time and write into each other's shared memory.

Parts of an attention that are combined there go through no other memory: no count, and no loads that wait for one
another. Triton has no words for it; the instructions are those of PTX's `mapa`, `st.shared::cluster` and
`barrier.cluster`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def announce(IS_FREE: tl.constexpr):
    """Arrive at the cluster's barrier; what this program wrote is visible to those who wait, unless it is `IS_FREE`."""
    if IS_FREE:
        tl.inline_asm_elementwise(
            "{ barrier.cluster.arrive.relaxed; mov.b32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.inline_asm_elementwise(
            "{ barrier.cluster.arrive.release; mov.b32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_others():
    """Wait for all programs of the cluster that have not ended to arrive at its barrier."""
    tl.inline_asm_elementwise(
        "{ barrier.cluster.wait.acquire; mov.b32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def find_there(here, rank):
    """The address in another program's shared memory that `here` is in this one's."""
    return tl.inline_asm_elementwise(
        "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [here, rank], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def push(at, value, is_there):
    """Write float32 numbers to addresses of `find_there`."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred there;
        setp.ne.s32 there, $3, 0;
        @there st.shared::cluster.f32 [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,r,f,r", [at, value, is_there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def pull(at):
    """Read float32 numbers of this program's shared memory."""
    return tl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [at], dtype=tl.float32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def push_part(
    read, highest, total, here, rank,
    QUERIES: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, GJ: tl.constexpr, CLUSTER: tl.constexpr,
):  # fmt: skip
    """Give every program of the cluster its numbers of this one's part, after `await_others`."""
    EACH: tl.constexpr = DP // CLUSTER  # numbers of a head that a program adds up
    STATS: tl.constexpr = CLUSTER * GJ * 8  # bytes before the parts
    rg, rd = tl.arange(0, GP)[:, None], tl.arange(0, DP)[None, :]
    is_head = (rg < QUERIES) & (rd >= 0)
    part = rank * GJ + rg
    push(find_there(here + STATS + (part * EACH + rd % EACH) * 4, rd // EACH + rg * 0), read, is_head)
    stats, is_other = find_there(here + part * 8 + rd * 0, rd % CLUSTER + rg * 0), is_head & (rd < CLUSTER)
    push(stats, highest[:, None] + tl.zeros_like(read), is_other)
    push(stats + 4, total[:, None] + tl.zeros_like(read), is_other)


@triton.jit
def join_parts(
    OUT, here, rank, used,
    QUERIES: tl.constexpr, G: tl.constexpr, TOKEN: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, GJ: tl.constexpr, CLUSTER: tl.constexpr, SINKS, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """`split_attention.put_together` for parts of one cluster: each program adds up some numbers of all heads."""
    EACH: tl.constexpr = DP // CLUSTER
    STATS: tl.constexpr = CLUSTER * GJ * 8
    UNROLLED: tl.constexpr = 1 if DP > 128 else CLUSTER
    rq, number = tl.arange(0, GJ)[:, None], tl.arange(0, EACH)[None, :]
    top_at = here + rq * 8 + number * 0
    peak = tl.full((GJ, EACH), float("-inf"), tl.float32)
    for part in tl.range(0, CLUSTER, loop_unroll_factor=UNROLLED):
        top = tl.where(part < used, pull(top_at + part * GJ * 8), float("-inf"))
        peak = tl.maximum(peak, top)
    joined, whole = tl.zeros((GJ, EACH), tl.float32), tl.zeros((GJ, EACH), tl.float32)
    for part in tl.range(0, CLUSTER, loop_unroll_factor=UNROLLED):
        is_part = part < used
        top = tl.where(is_part, pull(top_at + part * GJ * 8), float("-inf"))
        weight = tl.exp(top - peak)
        whole += tl.where(is_part, pull(top_at + part * GJ * 8 + 4), 0.0) * weight
        its = pull(here + STATS + ((part * GJ + rq) * EACH + number) * 4)
        joined += tl.where(is_part, its, 0.0) * weight
    rd = rank * EACH + number
    is_one = (rq < QUERIES) & (rd < D)
    if HAS_SINKS:
        whole += tl.exp(tl.load(SINKS + rq % G + rd * 0, mask=is_one, other=0.0).to(tl.float32) - peak)
    target = OUT + (rq // G * TOKEN + rq % G * D) + rd
    tl.store(target, (joined / whole).to(OUT.dtype.element_ty), mask=is_one)


@triton.jit
def find_parts(ROOM: tl.constexpr):
    """The address of the memory that `make_room` reserves."""
    return tl.inline_asm_elementwise(ROOM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def count_room(cluster: int, queries: int, width: int) -> int:
    """The bytes of shared memory that a cluster's parts take in each of its programs."""
    return queries * (2 * cluster + width) * 4


def make_room(cluster: int, queries: int, width: int) -> str:
    """The instructions that reserve this memory, and say where it is."""
    size = count_room(cluster, queries, width)
    return f"{{ .shared .align 16 .b8 parts_of_cluster[{size}]; mov.u32 $0, parts_of_cluster; }}"
