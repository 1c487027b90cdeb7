"""The kernel that runs all blocks: `blocks` says how, and launches it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from unspool.kernels.gpu.attention.held_attention import divide_keys
from unspool.kernels.gpu.gluon_launching import let_next_start, wait_for_input
from unspool.kernels.gpu.products.early_product import activate
from unspool.kernels.gpu.resident.attention import (
    age_words,
    ask_for_keys,
    attend,
    find_keys,
    load_first_keys,
    wait_for_asked,
    wait_for_output,
    write_new,
)
from unspool.kernels.gpu.resident.norms import (
    enter_norm,
    enter_state,
    find_moments,
    leave_norm,
    load_norm,
    normalise,
    round_state,
)
from unspool.kernels.gpu.resident.products import add_up, keep_rows, multiply_blocks, multiply_normed, take_tiles
from unspool.kernels.gpu.resident.tables import ask_for_vectors, keep_tables, load_some, pick, read_table
from unspool.kernels.gpu.resident.tiles import bring_tiles
from unspool.kernels.gpu.resident.words import LINE, hold_back, put_words, wait_for_words

TRAVEL = gl.constexpr(600)  # cycles from a program's words until those of others are there, at the least


@gluon.jit(do_not_specialize=["num_layers"])
def run_blocks(
    H_TILES, F_TILES, VECTOR, PLACES, X, TOKEN, POSITIONS, OUT, WORDS, COUNT, BASE, TABLE, LENGTH, SOURCES,
    SOURCE_LENGTH, num_layers, eps, scale, source_scale, embedding_scale, offset, num_positions,
    H: gl.constexpr, F: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    ACT: gl.constexpr, IS_NORM_FIRST: gl.constexpr, HAS_FIRST_NORM: gl.constexpr, UNIT: gl.constexpr,
    ENTRIES: gl.constexpr, EMBEDS: gl.constexpr, HAS_POSITIONS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Bring tiles by one warp, and run all layers by the others. What the kernel before has written is read by these
    alone: tiles are brought while it runs."""
    SLOTS: gl.constexpr = 4 + max(F // H - 1, 1) + F // H
    program = gl.program_id(0)
    slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 8, H // 64, 64], H_TILES.layout)
    ready, used = (), ()
    for slot in gl.static_range(SLOTS):
        ready = ready + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(ready[slot], count=1)
    for matrix in gl.static_range(6):
        used = used + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(used[matrix], count=1)
    table_room = gl.allocate_shared_memory(gl.int32, [ENTRIES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_run_layers, (
                VECTOR, PLACES, X, TOKEN, POSITIONS, OUT, WORDS, COUNT, BASE, TABLE, LENGTH, SOURCES, SOURCE_LENGTH,
                table_room, slots, ready, used, program,
                num_layers, eps, scale, source_scale, embedding_scale, offset, num_positions,
                H, F, D, WARPS, SPLITS, ACT, IS_NORM_FIRST, HAS_FIRST_NORM, UNIT, ENTRIES, EMBEDS, HAS_POSITIONS, PDL,
            )),
            (bring_tiles, (H_TILES, F_TILES, PLACES, slots, ready, used, program, num_layers, H, F // H)),
        ],
        [1],  # warp that brings tiles
        [24],  # registers that it needs
    )  # fmt: skip


@gluon.jit
def _load_state(
    X, TOKEN, POSITIONS, LENGTH, scale, offset, num_positions, number, own,
    H: gl.constexpr, EMBEDS: gl.constexpr, HAS_POSITIONS: gl.constexpr,
):  # fmt: skip
    """The state that the layers begin with, all of it and a program's own: from memory, or a token's embedding, as
    `tokens.embed` has it."""
    if EMBEDS:
        row = X + gl.maximum(gl.load(TOKEN), 0) * H
        x, some = gl.load(row + number).to(gl.float32) * scale, gl.load(row + own).to(gl.float32) * scale
        if HAS_POSITIONS:
            position = gl.minimum(gl.maximum(gl.load(LENGTH) + offset, 0), num_positions - 1)
            row = POSITIONS + position.to(gl.int64) * H
            x += gl.load(row + number).to(gl.float32)
            some += gl.load(row + own).to(gl.float32)
        x, some = x.to(gl.bfloat16), some.to(gl.bfloat16)
    else:
        x, some = gl.load(X + number), gl.load(X + own)
    return x, some.to(gl.float32)


@gluon.jit
def _run_layers(
    VECTOR, PLACES, X, TOKEN, POSITIONS, OUT, WORDS, COUNT, BASE, TABLE, LENGTH, SOURCES, SOURCE_LENGTH,
    table_room, slots, ready, used, program,
    num_layers, eps, scale, source_scale, embedding_scale, offset, num_positions,
    H: gl.constexpr, F: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
    ACT: gl.constexpr, IS_NORM_FIRST: gl.constexpr, HAS_FIRST_NORM: gl.constexpr, UNIT: gl.constexpr,
    ENTRIES: gl.constexpr, EMBEDS: gl.constexpr, HAS_POSITIONS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """All layers, of a program's outputs: what follows a wait has been made ready before it."""
    UPS: gl.constexpr = F // H
    TK: gl.constexpr = H // WARPS
    BLOCK: gl.constexpr = WARPS * 16
    HEADS: gl.constexpr = H // D
    EACH: gl.constexpr = H // (WARPS * 32)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    NUMBERS: gl.constexpr = gl.BlockedLayout([EACH], [32], [WARPS], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    RESULT: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 8, 4], [1, WARPS, 1], [2, 1, 0])
    OUTS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, RESULT))
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ROOM: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])

    QKV: gl.constexpr = 0  # where words of each kind begin
    OWN: gl.constexpr = QKV + 3 * H
    OWN_WEIGHTS: gl.constexpr = OWN + SPLITS * H
    READ: gl.constexpr = OWN_WEIGHTS + LINE * SPLITS * HEADS
    QUERIES: gl.constexpr = READ + H
    OTHERS: gl.constexpr = QUERIES + H
    OTHERS_WEIGHTS: gl.constexpr = OTHERS + SPLITS * H
    TOLD: gl.constexpr = OTHERS_WEIGHTS + LINE * SPLITS * HEADS
    INNER: gl.constexpr = TOLD + H
    STATE: gl.constexpr = INNER + F

    # One piece of shared memory for each use: between two uses of one there would be a barrier.
    held = gl.allocate_shared_memory(gl.bfloat16, [4, WARPS, TK], ROOM)
    rows = gl.allocate_shared_memory(gl.bfloat16, [4, WARPS, TK], ROOM)
    wide_room = gl.allocate_shared_memory(gl.float32, [WARPS, 32, 4], ROOM)
    room = gl.allocate_shared_memory(gl.float32, [WARPS, 8, 4], ROOM)
    moments = ()
    for _ in gl.static_range(2):
        moments = moments + (gl.allocate_shared_memory(gl.float32, [WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0])),)
    asked = gl.allocate_shared_memory(gl.bfloat16, [WARPS * 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    top_room = gl.allocate_shared_memory(gl.float32, [WARPS, 8], FLAT)
    sum_room = gl.allocate_shared_memory(gl.float32, [WARPS, 8], FLAT)
    read_room = gl.allocate_shared_memory(gl.float32, [WARPS, D, 8], ROOM)
    keep_tables(PLACES, TABLE, SOURCES, num_layers, table_room, ENTRIES, WARPS)
    gl.thread_barrier()
    table = read_table(table_room, 0)
    number = gl.arange(0, H, NUMBERS)
    pair = gl.arange(0, H // 2, gl.BlockedLayout([EACH // 2], [32], [WARPS], [0]))
    long = gl.arange(0, F, NUMBERS)
    word = gl.arange(0, WARPS * 32, ONE)
    own = program * 8 + gl.arange(0, 8, OUTS)  # of the state
    output = gl.arange(0, 32, OUTS)
    qkv_out, up_out = program * 24 + output, program * 8 * UPS + gl.arange(0, 8 * UPS, OUTS)
    is_own, is_qkv, is_up = own >= 0, output < 24, up_out >= 0

    weights, shifts = load_norm(VECTOR, pick(table, 0), pick(table, 1), pair, HAS_FIRST_NORM, UNIT)
    own_weight = load_some(VECTOR, pick(table, 0), own, is_own & HAS_FIRST_NORM, 1.0, UNIT)
    own_shift = load_some(VECTOR, pick(table, 1), own, is_own & HAS_FIRST_NORM, 0.0, UNIT)
    wide_bias = load_some(VECTOR, pick(table, 6), qkv_out, is_qkv, 0.0, UNIT)
    let_next_start(PDL)
    wait_for_input(PDL)
    count = gl.load(COUNT)
    length = gl.load(LENGTH).to(gl.int32)
    is_present = length >= 0
    length = gl.maximum(length, 0)
    source_length = gl.load(SOURCE_LENGTH).to(gl.int32)
    head = program // 8
    source_split, split = program % 8, 7 - program % 8  # the source's keys are read by others than the row's own
    chunk, parts = divide_keys(length, SPLITS, BLOCK)
    begin = split * chunk
    end = gl.minimum(begin + chunk, length)
    attends, is_last = split < parts, (split == parts - 1) & is_present
    source_chunk, source_parts = divide_keys(source_length, SPLITS, BLOCK)
    source_begin, attends_source = source_split * source_chunk, source_split < source_parts
    source_end = gl.minimum(source_begin + source_chunk, source_length)
    read_begin = gl.where(attends, begin, source_begin)
    read_end = gl.where(attends, end, gl.where(attends_source, source_end, 0))
    keys = find_keys(BASE, table, attends, head, D, UNIT)
    ask_for_keys(keys, read_begin, read_end, H, BLOCK, WARPS)
    x, state = _load_state(
        X, TOKEN, POSITIONS, LENGTH, embedding_scale, offset, num_positions, number, own, H, EMBEDS, HAS_POSITIONS
    )  # fmt: skip
    pivot = gl.sum(x.to(gl.float32), 0) / H  # the mean of the state that was normalised last; of the first, its own
    before = (count * num_layers) & 0xFFFF  # the tag before this step's
    age_words(WORDS + OWN, WORDS + OWN_WEIGHTS, before, head, split, split >= parts, word, H, D, SPLITS)
    age_words(
        WORDS + OTHERS, WORDS + OTHERS_WEIGHTS, before, head, source_split, source_split >= source_parts, word,
        H, D, SPLITS,
    )  # fmt: skip
    for layer in range(num_layers):
        tag = (count * num_layers + layer + 1) & 0xFFFF
        later = gl.minimum(layer + 1, num_layers - 1)
        table = read_table(table_room, layer)

        # Queries, keys and values of the state.
        has_norm = (layer > 0) | HAS_FIRST_NORM
        weight = enter_norm(weights, shifts, held, H, WARPS, NUMBERS)
        ws = take_tiles(0, 0, 3, layer, slots, ready, H, UPS, WARPS, A)
        gl.thread_barrier()
        if layer > 0:
            x = wait_for_words(WORDS + STATE + number, ((tag - 1) & 0xFFFF) + number * 0, EACH, EACH)
        enter_state(x, pivot, weight, held, moments, H, WARPS)
        gl.thread_barrier()
        multiply_normed(ws, held, wide_room, H, WARPS, B, SUMS)
        gl.thread_barrier()
        mean, first, root = find_moments(moments, pivot, eps, has_norm, H, WARPS)
        y = leave_norm(add_up(wide_room, 32, RESULT), first, root) + wide_bias.to(gl.float32)
        put_words(WORDS + QKV + qkv_out, y, tag, is_qkv)
        mbarrier.arrive(used[0])
        if not IS_NORM_FIRST:
            state = normalise(state, mean, root, own_weight, own_shift)
        pivot = mean
        bias = load_some(VECTOR, pick(table, 7), own, is_own, 0.0, UNIT)
        weights, shifts = load_norm(VECTOR, pick(table, 2), pick(table, 3), pair, True, UNIT)
        own_weight = load_some(VECTOR, pick(table, 2), own, is_own, 1.0, UNIT)
        own_shift = load_some(VECTOR, pick(table, 3), own, is_own, 0.0, UNIT)
        ks, vs = load_first_keys(keys, read_begin, read_end, H, D, WARPS)
        ask_for_vectors(VECTOR, table, program, word, H, UPS, UNIT)

        # The row's own keys.
        if attends:
            found = wait_for_asked(WORDS + QKV, head, word, tag, H, D)
            asked.store(found)
            gl.thread_barrier()
            attend(
                asked, keys, begin, end, is_last, scale, WORDS + OWN, WORDS + OWN_WEIGHTS, tag, head, split,
                top_room, sum_room, read_room, H, D, WARPS, True, ks, vs,
            )  # fmt: skip
            write_new(found, word, keys, length, is_last, H, D)
        ws = take_tiles(1, 0, 1, layer, slots, ready, H, UPS, WARPS, A)
        read = wait_for_output(WORDS + OWN, WORDS + OWN_WEIGHTS, number, tag, parts, H, D, SPLITS, EACH)
        keep_rows(read.to(gl.bfloat16), rows.slice(0, 1, dim=0), 1, WARPS)
        gl.thread_barrier()
        multiply_blocks(ws, rows, room, H, WARPS, B, SUMS)
        gl.thread_barrier()
        state = round_state(state + gl.sum(add_up(room, 8, RESULT), 1) + bias.to(gl.float32))
        put_words(WORDS + READ + own, state, tag, is_own)
        mbarrier.arrive(used[1])
        bias = load_some(VECTOR, pick(table, 8), own, is_own, 0.0, UNIT)

        # The source's queries of the state.
        weight = enter_norm(weights, shifts, held, H, WARPS, NUMBERS)
        ws = take_tiles(2, 0, 1, layer, slots, ready, H, UPS, WARPS, A)
        gl.thread_barrier()
        hold_back(TRAVEL)
        x = wait_for_words(WORDS + READ + number, tag + number * 0, EACH, EACH)
        enter_state(x, pivot, weight, held, moments, H, WARPS)
        gl.thread_barrier()
        multiply_normed(ws, held, room, H, WARPS, B, SUMS)
        gl.thread_barrier()
        mean, first, root = find_moments(moments, pivot, eps, True, H, WARPS)
        y = leave_norm(add_up(room, 8, RESULT), first, root) + bias.to(gl.float32)
        put_words(WORDS + QUERIES + own, y, tag, is_own)
        mbarrier.arrive(used[2])
        if not IS_NORM_FIRST:
            state = normalise(state, mean, root, own_weight, own_shift)
        pivot = mean
        bias = load_some(VECTOR, pick(table, 9), own, is_own, 0.0, UNIT)
        weights, shifts = load_norm(VECTOR, pick(table, 4), pick(table, 5), pair, True, UNIT)
        own_weight = load_some(VECTOR, pick(table, 4), own, is_own, 1.0, UNIT)
        own_shift = load_some(VECTOR, pick(table, 5), own, is_own, 0.0, UNIT)

        # The source's keys.
        next_table = read_table(table_room, later)
        ask_for_vectors(VECTOR, next_table, program, word, H, UPS, UNIT)
        next_keys = find_keys(BASE, next_table, attends, head, D, UNIT)
        ask_for_keys(next_keys, read_begin, read_end, H, BLOCK, WARPS)
        if attends_source:
            found = wait_for_words(WORDS + QUERIES + head * D + word % D, tag + word * 0, 1, 1)
            asked.store(found)
            gl.thread_barrier()
            attend(
                asked, keys, source_begin, source_end, False, source_scale,
                WORDS + OTHERS, WORDS + OTHERS_WEIGHTS, tag, head, source_split,
                top_room, sum_room, read_room, H, D, WARPS, False, ks, vs,
            )  # fmt: skip
        ws = take_tiles(3, 0, 1, layer, slots, ready, H, UPS, WARPS, A)
        read = wait_for_output(WORDS + OTHERS, WORDS + OTHERS_WEIGHTS, number, tag, source_parts, H, D, SPLITS, EACH)
        keep_rows(read.to(gl.bfloat16), rows.slice(0, 1, dim=0), 1, WARPS)
        gl.thread_barrier()
        multiply_blocks(ws, rows, room, H, WARPS, B, SUMS)
        gl.thread_barrier()
        state = round_state(state + gl.sum(add_up(room, 8, RESULT), 1) + bias.to(gl.float32))
        put_words(WORDS + TOLD + own, state, tag, is_own)
        mbarrier.arrive(used[3])
        inner_bias = load_some(VECTOR, pick(table, 10), up_out, is_up, 0.0, UNIT)

        # The feed-forward.
        weight = enter_norm(weights, shifts, held, H, WARPS, NUMBERS)
        ups = take_tiles(4, 0, UPS, layer, slots, ready, H, UPS, WARPS, A)
        gl.thread_barrier()
        x = wait_for_words(WORDS + TOLD + number, tag + number * 0, EACH, EACH)
        enter_state(x, pivot, weight, held, moments, H, WARPS)
        gl.thread_barrier()
        multiply_normed(ups, held, wide_room.slice(0, 8 * UPS, dim=1), H, WARPS, B, SUMS)
        gl.thread_barrier()
        mean, first, root = find_moments(moments, pivot, eps, True, H, WARPS)
        y = activate(leave_norm(add_up(wide_room, 8 * UPS, RESULT), first, root) + inner_bias.to(gl.float32), ACT)
        put_words(WORDS + INNER + up_out, y, tag, is_up)
        mbarrier.arrive(used[4])
        if not IS_NORM_FIRST:
            state = normalise(state, mean, root, own_weight, own_shift)
        pivot = mean
        bias = load_some(VECTOR, pick(table, 11), own, is_own, 0.0, UNIT)
        table = read_table(table_room, later)
        weights, shifts = load_norm(VECTOR, pick(table, 0), pick(table, 1), pair, True, UNIT)
        own_weight = load_some(VECTOR, pick(table, 0), own, is_own, 1.0, UNIT)
        own_shift = load_some(VECTOR, pick(table, 1), own, is_own, 0.0, UNIT)
        wide_bias = load_some(VECTOR, pick(table, 6), qkv_out, is_qkv, 0.0, UNIT)

        downs = take_tiles(5, 0, UPS, layer, slots, ready, H, UPS, WARPS, A)
        inner = wait_for_words(WORDS + INNER + long, tag + long * 0, UPS * EACH, EACH)
        keep_rows(inner, rows.slice(0, UPS, dim=0), UPS, WARPS)
        gl.thread_barrier()
        multiply_blocks(downs, rows, room, H, WARPS, B, SUMS)
        gl.thread_barrier()
        state = round_state(state + gl.sum(add_up(room, 8, RESULT), 1) + bias.to(gl.float32))
        put_words(WORDS + STATE + own, state, tag, is_own)
        mbarrier.arrive(used[5])
        keys = next_keys
    gl.store(OUT + own, state.to(gl.bfloat16))
    if program == 0:  # which has read words of all others, and they have read the count
        gl.store(COUNT, count + 1)
