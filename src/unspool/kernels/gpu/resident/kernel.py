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
from unspool.kernels.gpu.resident.products import (
    add_up,
    keep_blocks,
    multiply_blocks,
    multiply_normed,
    round_octets,
    store_sums,
    take_rows,
    take_tiles,
)
from unspool.kernels.gpu.resident.tables import ask_for_vectors, keep_tables, load_some, pick, read_table
from unspool.kernels.gpu.resident.tiles import (
    bring_tiles,
    count_slots,
    count_tiles,
    find_group,
    find_octet,
    leaves_early,
)
from unspool.kernels.gpu.resident.vectors import (
    count_all,
    count_each,
    count_kinds,
    find_first,
    find_thread,
    list_places,
)
from unspool.kernels.gpu.resident.words import LINE, hold_back, put_words, wait_for_states, wait_for_words

TRAVEL = gl.constexpr(600)  # cycles from a program's words until those of others are there, at the least


@gluon.jit(do_not_specialize=["num_layers"])
def run_blocks(
    H_FIRST, H_REST, F_FIRST, F_REST, VECTOR, PLACES, X, TOKEN, POSITIONS, OUT, WORDS, COUNT, BASE, TABLE, LENGTH,
    SOURCES, SOURCE_LENGTH, num_layers, eps, scale, source_scale, embedding_scale, offset, num_positions,
    H: gl.constexpr, F: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, PROGRAMS: gl.constexpr,
    OWN_SPLITS: gl.constexpr, SPLITS: gl.constexpr, KEY_TILES: gl.constexpr, ACT: gl.constexpr,
    IS_NORM_FIRST: gl.constexpr, HAS_FIRST_NORM: gl.constexpr, UNIT: gl.constexpr, ENTRIES: gl.constexpr,
    EMBEDS: gl.constexpr, HAS_POSITIONS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Bring tiles by one warp, and run all layers by the others. What the kernel before has written is read by these
    alone: tiles are brought while it runs."""
    COUNTS: gl.constexpr = count_tiles(H, F, PROGRAMS)
    SLOTS: gl.constexpr = count_slots(COUNTS)
    FIRST: gl.constexpr = find_first(H)
    program = gl.program_id(0)
    tiles = (H_FIRST, H_REST, F_FIRST, F_REST)
    slots = (gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 8, FIRST // 64, 64], H_FIRST.layout),)
    if H > FIRST:
        slots = slots + (gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 8, (H - FIRST) // 64, 64], H_REST.layout),)
    ready, used = (), ()
    for slot in gl.static_range(SLOTS):
        ready = ready + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(ready[slot], count=1)
    for group in gl.static_range(5 + COUNTS[1]):
        used = used + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(used[group], count=1)
    table_room = gl.allocate_shared_memory(gl.int32, [ENTRIES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_run_layers, (
                VECTOR, PLACES, X, TOKEN, POSITIONS, OUT, WORDS, COUNT, BASE, TABLE, LENGTH, SOURCES, SOURCE_LENGTH,
                table_room, slots, ready, used, program,
                num_layers, eps, scale, source_scale, embedding_scale, offset, num_positions,
                H, F, D, WARPS, PROGRAMS, OWN_SPLITS, SPLITS, KEY_TILES, ACT, IS_NORM_FIRST, HAS_FIRST_NORM, UNIT,
                ENTRIES, EMBEDS, HAS_POSITIONS, PDL,
            )),
            (bring_tiles, (tiles, PLACES, slots, ready, used, program, num_layers, H, F, PROGRAMS)),
        ],
        [1],  # warp that brings tiles
        [24],  # registers that it needs
    )  # fmt: skip


@gluon.jit
def _load_numbers(row, places):
    xs = ()
    for number in gl.static_range(len(places)):
        xs = xs + (gl.load(row + places[number]),)
    return xs


@gluon.jit
def _embed(row, position, places, own, is_own, scale, HAS_POSITIONS: gl.constexpr):
    """Some numbers of a token's embedding, as `tokens.embed` makes it; and a program's own."""
    found = _load_numbers(row, places) + (gl.load(row + own, mask=is_own, other=0.0),)
    added = found
    if HAS_POSITIONS:
        added = _load_numbers(position, places) + (gl.load(position + own, mask=is_own, other=0.0),)
    xs = ()
    for number in gl.static_range(len(found)):
        x = found[number].to(gl.float32) * scale
        if HAS_POSITIONS:
            x += added[number].to(gl.float32)
        xs = xs + (x.to(gl.bfloat16),)
    return xs


@gluon.jit
def _find_outputs(program, OUTPUTS: gl.constexpr, PROGRAMS: gl.constexpr, OUTS: gl.constexpr):
    """A program's outputs of a product with so many, and which of them there are."""
    COUNT: gl.constexpr = round_octets((OUTPUTS + 8 * PROGRAMS - 1) // (8 * PROGRAMS))
    place = gl.arange(0, 8 * COUNT, OUTS)
    output = find_octet(program, place // 8, PROGRAMS) * 8 + place % 8
    return output, output < OUTPUTS


@gluon.jit
def _leave_normed(
    ws, xs, pivot, weight, held, moments, room, bias, eps, has_norm,
    H: gl.constexpr, WARPS: gl.constexpr, B: gl.constexpr, SUMS: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """A matrix's products with a state behind its norm; the state's mean, and the norm's root."""
    OUTPUTS: gl.constexpr = 8 * round_octets(len(ws))
    enter_state(xs, pivot, weight, held, moments, H, WARPS)
    gl.thread_barrier()
    multiply_normed(ws, held, room, WARPS, B, SUMS)
    gl.thread_barrier()
    mean, first, root = find_moments(moments, pivot, eps, has_norm, H, WARPS)
    return leave_norm(add_up(room, OUTPUTS, RESULT), first, root) + bias.to(gl.float32), mean, root


@gluon.jit
def _add_product(
    MATRIX: gl.constexpr, ws, xs, state, bias, rows, room, layer, slots, ready, used,
    H: gl.constexpr, BLOCKS: gl.constexpr, COUNTS: gl.constexpr, WARPS: gl.constexpr,
    A: gl.constexpr, B: gl.constexpr, SUMS: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """A program's numbers of the state, and what a matrix makes of some rows; of the last matrix, whose octets have
    several tiles, those after the first octet are taken here."""
    OCTETS: gl.constexpr = COUNTS[1]
    keep_blocks(xs, rows, H, BLOCKS, WARPS)
    gl.thread_barrier()
    operands = take_rows(rows, WARPS, B)
    totals = ()
    for octet in gl.static_range(OCTETS):
        if MATRIX == 5:
            if octet > 0:
                ws = take_tiles(MATRIX, octet * BLOCKS, BLOCKS, layer, slots, ready, COUNTS, WARPS, A)
            totals = totals + (multiply_blocks(ws, operands, WARPS, SUMS),)
        else:
            totals = totals + (multiply_blocks((ws[octet],), operands, WARPS, SUMS),)
    store_sums(totals, room)
    gl.thread_barrier()
    if MATRIX == 5 and OCTETS > 1:
        mbarrier.arrive(used[find_group(MATRIX, BLOCKS, COUNTS)])
    return round_state(state + gl.sum(add_up(room, 8 * OCTETS, RESULT), 1) + bias.to(gl.float32))


@gluon.jit
def _leave_slots(MATRIX: gl.constexpr, IS_EARLY: gl.constexpr, used, COUNTS: gl.constexpr):
    """Say behind a barrier that the slots of a matrix's tiles, or of its first octet's, are free: early, as soon as
    they are in registers, or once they are multiplied."""
    if leaves_early(COUNTS) == IS_EARLY:
        mbarrier.arrive(used[find_group(MATRIX, 0, COUNTS)])


@gluon.jit
def _run_layers(
    VECTOR, PLACES, X, TOKEN, POSITIONS, OUT, WORDS, COUNT, BASE, TABLE, LENGTH, SOURCES, SOURCE_LENGTH,
    table_room, slots, ready, used, program,
    num_layers, eps, scale, source_scale, embedding_scale, offset, num_positions,
    H: gl.constexpr, F: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, PROGRAMS: gl.constexpr,
    OWN_SPLITS: gl.constexpr, SPLITS: gl.constexpr, KEY_TILES: gl.constexpr, ACT: gl.constexpr,
    IS_NORM_FIRST: gl.constexpr, HAS_FIRST_NORM: gl.constexpr, UNIT: gl.constexpr, ENTRIES: gl.constexpr,
    EMBEDS: gl.constexpr, HAS_POSITIONS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """All layers, of a program's outputs: what follows a wait has been made ready before it."""
    COUNTS: gl.constexpr = count_tiles(H, F, PROGRAMS)
    OCTETS: gl.constexpr = COUNTS[1]
    WIDE: gl.constexpr = round_octets(max(COUNTS[0], COUNTS[4]))
    UPS: gl.constexpr = F // H
    NUMBERS: gl.constexpr = count_all(H)  # of a state that a thread has
    BLOCK: gl.constexpr = WARPS * 16
    HEADS: gl.constexpr = H // D
    SHARE: gl.constexpr = PROGRAMS // HEADS  # programs that read a head's keys
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    RESULT: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 8, 4], [1, WARPS, 1], [2, 1, 0])
    OUTS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, RESULT))
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ROOM: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])

    QKV: gl.constexpr = 0  # where words of each kind begin
    OWN: gl.constexpr = QKV + 3 * H
    OWN_WEIGHTS: gl.constexpr = OWN + OWN_SPLITS * H
    READ: gl.constexpr = OWN_WEIGHTS + LINE * OWN_SPLITS * HEADS
    QUERIES: gl.constexpr = READ + H
    OTHERS: gl.constexpr = QUERIES + H
    OTHERS_WEIGHTS: gl.constexpr = OTHERS + SPLITS * H
    TOLD: gl.constexpr = OTHERS_WEIGHTS + LINE * SPLITS * HEADS
    INNER: gl.constexpr = TOLD + H
    STATE: gl.constexpr = INNER + F

    # One piece of shared memory for each use: between two uses of one there would be a barrier.
    held, rows = (), ()
    for part in gl.static_range(count_kinds(H)):
        held = held + (gl.allocate_shared_memory(gl.bfloat16, [4, WARPS, count_each(H, part) * 32], ROOM),)
        rows = rows + (gl.allocate_shared_memory(gl.bfloat16, [4, WARPS, count_each(H, part) * 32], ROOM),)
    wide_room = gl.allocate_shared_memory(gl.float32, [WARPS, 8 * WIDE, 4], ROOM)
    room = gl.allocate_shared_memory(gl.float32, [WARPS, 8 * OCTETS, 4], ROOM)
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
    thread = find_thread(WARPS)
    places = list_places(thread, H)
    own, is_own = _find_outputs(program, H, PROGRAMS, OUTS)
    qkv_out, is_qkv = _find_outputs(program, 3 * H, PROGRAMS, OUTS)
    up_out, is_up = _find_outputs(program, F, PROGRAMS, OUTS)

    weights, shifts = load_norm(VECTOR, pick(table, 0), pick(table, 1), thread, HAS_FIRST_NORM, H, WARPS, UNIT)
    own_weight = load_some(VECTOR, pick(table, 0), own, is_own & HAS_FIRST_NORM, 1.0, UNIT)
    own_shift = load_some(VECTOR, pick(table, 1), own, is_own & HAS_FIRST_NORM, 0.0, UNIT)
    wide_bias = load_some(VECTOR, pick(table, 6), qkv_out, is_qkv, 0.0, UNIT)
    let_next_start(PDL)
    wait_for_input(PDL)
    count = gl.load(COUNT)
    length = gl.load(LENGTH).to(gl.int32)
    row, position = X, POSITIONS
    if EMBEDS:
        row = X + gl.maximum(gl.load(TOKEN), 0) * H
    if HAS_POSITIONS:
        position = POSITIONS + gl.minimum(gl.maximum(length + offset, 0), num_positions - 1).to(gl.int64) * H
    begun = _embed(row, position, places, own, is_own, embedding_scale, HAS_POSITIONS)
    xs, state = begun[:NUMBERS], begun[NUMBERS].to(gl.float32)
    is_present = length >= 0
    length = gl.maximum(length, 0)
    source_length = gl.load(SOURCE_LENGTH).to(gl.int32)
    head = program // SHARE
    source_split, split = program % SHARE, SHARE - 1 - program % SHARE  # the source's keys are read by others
    chunk, parts = divide_keys(length, OWN_SPLITS, BLOCK)
    begin = split * chunk
    end = gl.minimum(begin + chunk, length)
    attends, is_last = (split < parts) & (head < HEADS), (split == parts - 1) & is_present
    source_chunk, source_parts = divide_keys(source_length, SPLITS, BLOCK)
    source_begin, attends_source = source_split * source_chunk, (source_split < source_parts) & (head < HEADS)
    source_end = gl.minimum(source_begin + source_chunk, source_length)
    end, source_end = gl.where(attends, end, 0), gl.where(attends_source, source_end, 0)
    read_begin, read_end = gl.where(attends, begin, source_begin), gl.maximum(end, source_end)
    keys = find_keys(BASE, table, attends, head, D, UNIT)
    ask_for_keys(keys, read_begin, read_end, H, BLOCK, WARPS)
    total = 0.0
    for number in gl.static_range(NUMBERS):
        total += xs[number].to(gl.float32)
    pivot = gl.sum(total, 0) / H  # the mean of the state that was normalised last; of the first, its own
    before = (count * num_layers) & 0xFFFF  # the tag before this step's
    age_words(WORDS + OWN, WORDS + OWN_WEIGHTS, before, head, split, split >= parts, thread, H, D, OWN_SPLITS)
    age_words(
        WORDS + OTHERS, WORDS + OTHERS_WEIGHTS, before, head, source_split, source_split >= source_parts, thread,
        H, D, SPLITS,
    )  # fmt: skip
    for layer in range(num_layers):
        tag = (count * num_layers + layer + 1) & 0xFFFF
        later = gl.minimum(layer + 1, num_layers - 1)
        table = read_table(table_room, layer)

        # Queries, keys and values of the state.
        has_norm = (layer > 0) | HAS_FIRST_NORM
        weight = enter_norm(weights, shifts, held, thread, H, WARPS)
        ws = take_tiles(0, 0, COUNTS[0], layer, slots, ready, COUNTS, WARPS, A)
        gl.thread_barrier()
        _leave_slots(0, True, used, COUNTS)
        if layer > 0:
            xs = wait_for_states(WORDS + STATE, (tag - 1) & 0xFFFF, thread, H, 1)
        y, mean, root = _leave_normed(
            ws, xs, pivot, weight, held, moments, wide_room, wide_bias, eps, has_norm, H, WARPS, B, SUMS, RESULT
        )  # fmt: skip
        put_words(WORDS + QKV + qkv_out, y, tag, is_qkv)
        _leave_slots(0, False, used, COUNTS)
        if not IS_NORM_FIRST:
            state = normalise(state, mean, root, own_weight, own_shift)
        pivot = mean
        bias = load_some(VECTOR, pick(table, 7), own, is_own, 0.0, UNIT)
        weights, shifts = load_norm(VECTOR, pick(table, 2), pick(table, 3), thread, True, H, WARPS, UNIT)
        own_weight = load_some(VECTOR, pick(table, 2), own, is_own, 1.0, UNIT)
        own_shift = load_some(VECTOR, pick(table, 3), own, is_own, 0.0, UNIT)
        ks, vs = load_first_keys(keys, read_begin, read_end, H, D, WARPS, KEY_TILES)
        ask_for_vectors(VECTOR, table, program, thread, H, F, PROGRAMS, UNIT)

        # The row's own keys.
        if attends:
            found = wait_for_asked(WORDS + QKV, head, thread, tag, H, D)
            asked.store(found)
            gl.thread_barrier()
            attend(
                asked, keys, begin, end, is_last, scale, WORDS + OWN, WORDS + OWN_WEIGHTS, tag, head, split,
                top_room, sum_room, read_room, H, D, WARPS, True, (ks[0],), (vs[0],),
            )  # fmt: skip
            write_new(found, thread, keys, length, is_last, H, D)
        ws = take_tiles(1, 0, OCTETS, layer, slots, ready, COUNTS, WARPS, A)
        if leaves_early(COUNTS):
            gl.thread_barrier()
        _leave_slots(1, True, used, COUNTS)
        read = wait_for_output(WORDS + OWN, WORDS + OWN_WEIGHTS, tag, parts, thread, H, D, OWN_SPLITS)
        state = _add_product(
            1, ws, read, state, bias, rows, room, layer, slots, ready, used, H, 1, COUNTS, WARPS, A, B, SUMS, RESULT
        )  # fmt: skip
        put_words(WORDS + READ + own, state, tag, is_own)
        _leave_slots(1, False, used, COUNTS)
        bias = load_some(VECTOR, pick(table, 8), own, is_own, 0.0, UNIT)

        # The source's queries of the state.
        weight = enter_norm(weights, shifts, held, thread, H, WARPS)
        ws = take_tiles(2, 0, OCTETS, layer, slots, ready, COUNTS, WARPS, A)
        gl.thread_barrier()
        _leave_slots(2, True, used, COUNTS)
        hold_back(TRAVEL)
        xs = wait_for_states(WORDS + READ, tag, thread, H, 1)
        y, mean, root = _leave_normed(
            ws, xs, pivot, weight, held, moments, room, bias, eps, True, H, WARPS, B, SUMS, RESULT
        )  # fmt: skip
        put_words(WORDS + QUERIES + own, y, tag, is_own)
        _leave_slots(2, False, used, COUNTS)
        if not IS_NORM_FIRST:
            state = normalise(state, mean, root, own_weight, own_shift)
        pivot = mean
        bias = load_some(VECTOR, pick(table, 9), own, is_own, 0.0, UNIT)
        weights, shifts = load_norm(VECTOR, pick(table, 4), pick(table, 5), thread, True, H, WARPS, UNIT)
        own_weight = load_some(VECTOR, pick(table, 4), own, is_own, 1.0, UNIT)
        own_shift = load_some(VECTOR, pick(table, 5), own, is_own, 0.0, UNIT)

        # The source's keys.
        next_table = read_table(table_room, later)
        ask_for_vectors(VECTOR, next_table, program, thread, H, F, PROGRAMS, UNIT)
        next_keys = find_keys(BASE, next_table, attends, head, D, UNIT)
        ask_for_keys(next_keys, read_begin, read_end, H, BLOCK, WARPS)
        if attends_source:
            found = wait_for_words(WORDS + QUERIES + head * D + thread % D, tag + thread * 0)
            asked.store(found)
            gl.thread_barrier()
            attend(
                asked, keys, source_begin, source_end, False, source_scale,
                WORDS + OTHERS, WORDS + OTHERS_WEIGHTS, tag, head, source_split,
                top_room, sum_room, read_room, H, D, WARPS, False, ks, vs,
            )  # fmt: skip
        ws = take_tiles(3, 0, OCTETS, layer, slots, ready, COUNTS, WARPS, A)
        if leaves_early(COUNTS):
            gl.thread_barrier()
        _leave_slots(3, True, used, COUNTS)
        read = wait_for_output(WORDS + OTHERS, WORDS + OTHERS_WEIGHTS, tag, source_parts, thread, H, D, SPLITS)
        state = _add_product(
            3, ws, read, state, bias, rows, room, layer, slots, ready, used, H, 1, COUNTS, WARPS, A, B, SUMS, RESULT
        )  # fmt: skip
        put_words(WORDS + TOLD + own, state, tag, is_own)
        _leave_slots(3, False, used, COUNTS)
        inner_bias = load_some(VECTOR, pick(table, 10), up_out, is_up, 0.0, UNIT)

        # The feed-forward.
        weight = enter_norm(weights, shifts, held, thread, H, WARPS)
        ws = take_tiles(4, 0, COUNTS[4], layer, slots, ready, COUNTS, WARPS, A)
        gl.thread_barrier()
        _leave_slots(4, True, used, COUNTS)
        xs = wait_for_states(WORDS + TOLD, tag, thread, H, 1)
        y, mean, root = _leave_normed(
            ws, xs, pivot, weight, held, moments, wide_room, inner_bias, eps, True, H, WARPS, B, SUMS, RESULT
        )  # fmt: skip
        put_words(WORDS + INNER + up_out, activate(y, ACT), tag, is_up)
        _leave_slots(4, False, used, COUNTS)
        if not IS_NORM_FIRST:
            state = normalise(state, mean, root, own_weight, own_shift)
        pivot = mean
        bias = load_some(VECTOR, pick(table, 11), own, is_own, 0.0, UNIT)
        weights, shifts = load_norm(VECTOR, pick(next_table, 0), pick(next_table, 1), thread, True, H, WARPS, UNIT)
        own_weight = load_some(VECTOR, pick(next_table, 0), own, is_own, 1.0, UNIT)
        own_shift = load_some(VECTOR, pick(next_table, 1), own, is_own, 0.0, UNIT)
        wide_bias = load_some(VECTOR, pick(next_table, 6), qkv_out, is_qkv, 0.0, UNIT)

        ws = take_tiles(5, 0, UPS, layer, slots, ready, COUNTS, WARPS, A)
        if leaves_early(COUNTS):
            gl.thread_barrier()
        _leave_slots(5, True, used, COUNTS)
        inner = wait_for_states(WORDS + INNER, tag, thread, H, UPS)
        state = _add_product(
            5, ws, inner, state, bias, rows, room, layer, slots, ready, used, H, UPS, COUNTS, WARPS, A, B, SUMS, RESULT
        )  # fmt: skip
        put_words(WORDS + STATE + own, state, tag, is_own)
        _leave_slots(5, False, used, COUNTS)
        keys = next_keys
    gl.store(OUT + own, state.to(gl.bfloat16), mask=is_own)
    if program == 0:  # which has read words of all others, and they have read the count
        gl.store(COUNT, count + 1)
