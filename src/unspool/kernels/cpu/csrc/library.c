/* The library's surface: which instruction set runs, how scratch memory is laid out, and the calls themselves. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "sets.h"
#include "vector.h"

/* --- instruction sets -------------------------------------------------------------------------------------------- */
int32_t us_abi(void) { return US_ABI; }

const char *us_instructions(void) { return kernels()->name; }

int32_t us_use_instructions(const char *set) {
    for (size_t i = 0; i < NUM_SETS; i++)
        if (!strcmp(set, sets[i].kernels->name) && sets[i].is_there()) {
            chosen = sets[i].kernels;
            return 0;
        }
    return -1;
}

const char *us_available(void) {
    static char names[128];
    names[0] = 0;
    for (size_t i = 0; i < NUM_SETS; i++)
        if (sets[i].is_there()) {
            if (names[0]) strcat(names, ",");
            strcat(names, sets[i].kernels->name);
        }
    return names;
}

/* --- scratch memory ---------------------------------------------------------------------------------------------- */
static size_t take(size_t *used, size_t bytes) {
    size_t at = *used;
    *used += (bytes + 63) & ~(size_t)63;
    return at;
}

us_scratch us_lay_out(const us_model *m, int32_t num_tokens, int32_t num_read, int32_t threads, int32_t most_keys,
                      void *memory) {
    const size_t T = (size_t)num_tokens, rows = (size_t)(num_tokens > num_read ? num_tokens : num_read), head = (size_t)m->head_dim, H = (size_t)m->num_heads, KV = (size_t)m->num_kv_heads;
    const size_t heads = H * head, hidden = (size_t)m->hidden, ffn = (size_t)m->ffn;
    size_t widest = hidden > ffn ? hidden : ffn;
    widest = widest > heads ? widest : heads;
    const size_t experts = (size_t)m->num_experts, inner = (size_t)m->expert_ffn, shared = (size_t)m->shared_ffn;
    const size_t pairs = T * (size_t)m->num_chosen, spare = m->shared_ffn ? T : 0;
    const size_t fed = pairs * inner + spare * shared, given = (pairs + spare) * hidden, most = fed > given ? fed : given;
    us_scratch s = {.quants_size = ((rows * widest > most ? rows * widest : most) + 63) & ~(size_t)63,
                    .normed_size = experts ? (rows * widest > T * hidden + most ? rows * widest : T * hidden + most) : rows * widest,
                    .scales_size = rows * (widest / US_BLOCK + 1) + most / US_BLOCK};
    s.pieces_size = us_count_pieces(s.quants_size);
    const size_t copies = us_is_private(num_tokens) ? (size_t)threads : 1;
    const size_t parts = (size_t)us_count_parts(num_tokens, m->num_kv_heads, threads, most_keys);
    size_t used = 0;
    char *base = memory;
#define PLACE(type, size) (type *)(base + take(&used, sizeof(type) * (size)))
    s.x = PLACE(float, T * hidden);
    s.qkv = PLACE(float, T * (heads + 2 * KV * head));
    s.read = PLACE(float, T * heads);
    s.side = PLACE(float, T * hidden);
    s.fed = PLACE(float, T * ffn > fed ? T * ffn : fed);
    s.logits = PLACE(float, T * experts);
    s.picked = PLACE(int32_t, pairs);
    s.choices = PLACE(float, pairs);
    s.pair_tokens = PLACE(int32_t, pairs + spare);
    s.pair_shares = PLACE(float, pairs + spare);
    s.group_firsts = PLACE(int32_t, experts + 2);
    s.parts = PLACE(float, T * parts * H * (head + 2));
    s.tallies = PLACE(float, T * H * 2);
    s.tiles = PLACE(float, (size_t)threads * 2 * US_PART * head);
    s.tops = PLACE(us_top, (size_t)threads * (size_t)num_read);
    s.nearest = PLACE(us_top, (size_t)threads * (size_t)num_read);
    s.levelled = PLACE(float, (size_t)threads * hidden);
    s.extents = PLACE(us_extent, copies * (size_t)num_read);
    s.normed = PLACE(float, copies * s.normed_size);
    s.scales = PLACE(float, copies * s.scales_size);
    s.sums = PLACE(float, copies * s.scales_size);
    s.offsets = PLACE(int32_t, 2 * copies * s.scales_size);
    s.quants = PLACE(int8_t, copies * s.quants_size);
    s.pieces = PLACE(uint16_t, copies * s.pieces_size);
    s.bytes = used;
    return s;
}

int64_t us_scratch_bytes(const us_model *model, int32_t num_tokens, int32_t num_read, int32_t threads, int32_t most_keys) {
    int64_t most = 0; /* a smaller call may take more: it splits attention */
    for (int32_t n = 1; n <= num_tokens; n++) {
        int64_t bytes = (int64_t)us_lay_out(model, n, num_read, threads, most_keys, NULL).bytes;
        most = bytes > most ? bytes : most;
    }
    return most;
}

int64_t us_product_bytes(const us_matrix *matrix, int32_t num_rows) {
    const int64_t columns = matrix->columns, blocks = columns / US_BLOCK;
    if (us_is_float(matrix->kind)) return (int64_t)(sizeof(uint16_t) * us_count_pieces((size_t)(num_rows * columns)));
    return ((num_rows * columns + 63) & ~(int64_t)63) + num_rows * blocks * (int64_t)(2 * sizeof(float) + 2 * sizeof(int32_t));
}

/* --- calls ------------------------------------------------------------------------------------------------------- */
/* Whether another call has to follow; where it begins. */
static int goes_on(us_progress *progress) {
    const int is_whole = progress->next == WHOLE;
    *progress = (us_progress){.first = progress->next, .next = WHOLE};
    return !is_whole;
}

void us_run(const us_model *model, const us_job *job, int32_t threads) {
    us_progress progress = {.next = WHOLE};
    do {
        us_gather(threads);
        us_do(kernels()->run, &(us_run_task){model, job, &progress});
    } while (goes_on(&progress));
}

void us_run_steps(const us_model *model, const us_job *job, us_steps *steps, int32_t threads) {
    us_progress progress = {.next = WHOLE};
    steps->num_done = 0;
    do {
        us_gather(threads);
        us_do(kernels()->steps, &(us_steps_task){model, job, steps, &progress});
    } while (goes_on(&progress));
}

int64_t us_encoder_bytes(const us_model *model, int32_t num_tokens, int32_t threads, int32_t longest) {
    const size_t rooms = sizeof(float) * us_source_room(longest, model->head_dim) * (size_t)threads;
    return (int64_t)(us_lay_out(model, num_tokens, 0, threads, 0, NULL).bytes + rooms);
}

static int32_t find_longest(const int32_t *lengths, int32_t count) {
    int32_t longest = 0;
    for (int32_t i = 0; i < count; i++) longest = lengths[i] > longest ? lengths[i] : longest;
    return longest;
}

void us_encode(const us_model *model, int32_t num_sources, const int32_t *lengths, float *states, void *scratch, int32_t threads) {
    us_job job = {.states = states, .scratch = scratch};
    for (int32_t i = 0; i < num_sources; i++) job.num_tokens += lengths[i];
    const size_t room_size = us_source_room(find_longest(lengths, num_sources), model->head_dim);
    us_progress progress = {.next = WHOLE};
    do {
        const int32_t team = us_gather(threads);
        float *rooms = (float *)((char *)scratch + us_lay_out(model, job.num_tokens, 0, team, 0, NULL).bytes);
        us_do(kernels()->encoder, &(us_encoder_task){model, &job, num_sources, lengths, rooms, room_size, &progress});
    } while (goes_on(&progress));
}

void us_product(const us_matrix *matrix, const float *x, int32_t num_rows, float *y, void *scratch, int32_t threads) {
    us_gather(threads);
    us_do(kernels()->product, &(us_product_task){matrix, x, num_rows, y, scratch});
}

/* Work on rows that need nothing of each other. One row is done by the caller: the threads of a model's step, which
 * another number of them would end, stay as they are. */
static void do_rows(us_task task, const void *argument, int64_t rows, int32_t threads) {
    us_team alone = {.size = 1};
    if (rows == 1) {
        task(argument, 0, &alone);
        return;
    }
    us_gather(threads);
    us_do(task, argument);
}

#define WIDENED_TOGETHER (1 << 16) /* numbers that other threads are not woken for */

void us_widen(const uint16_t *from, int64_t count, int32_t kind, float *to, int32_t threads) {
    do_rows(kernels()->widen, &(us_widen_task){from, count, kind, to}, count > WIDENED_TOGETHER ? 2 : 1, threads);
}

void us_sum_bits(const void *const *at, const int64_t *counts, int32_t num_tensors, int32_t size, uint64_t *sums, int32_t threads) {
    int64_t all = 0;
    for (int32_t i = 0; i < num_tensors; i++) all += counts[i];
    const us_sums_task task = {at, counts, num_tensors, size, sums};
    do_rows(kernels()->sums, &task, all > WIDENED_TOGETHER ? 2 : 1, threads);
}

/* The same with a team that was gathered for its memory. */
static void do_gathered(us_task task, const void *argument, int64_t rows) {
    us_team alone = {.size = 1};
    if (rows > 1) {
        us_do(task, argument);
        return;
    }
    task(argument, 0, &alone);
    us_leave();
}

/* Working memory of a call that has the team, kept for the next one: the system would hand its pages out, cleared, at every
 * step anew. NULL: there is none, and the team is given back. */
#define MOST_KEPT ((size_t)64 << 20)
static void *gather_with(size_t bytes, int32_t threads) {
    static void *kept;
    static size_t size;
    us_gather(threads);
    if (bytes > size || size > MOST_KEPT) {
        free(kept);
        kept = malloc(bytes);
        size = kept ? bytes : 0;
        if (!kept) us_leave();
    }
    return kept;
}

int32_t us_multiply_halves(const uint16_t *weights, const uint16_t *bias, int32_t kind, int32_t rows, int32_t columns,
                           const uint16_t *x, int32_t num_rows, uint16_t *y, int32_t threads) {
    float *wide = gather_with(sizeof(float) * us_pad_halves(columns) * (size_t)num_rows, threads);
    if (!wide) return -1;
    us_do(kernels()->halves, &(us_halves_task){weights, bias, kind, rows, columns, x, num_rows, y, wide});
    return 0;
}

int32_t us_attend_halves(const us_attention *attention, uint16_t *out, int32_t threads) {
    const size_t room_size = US_ASKED * (size_t)(attention->width + attention->num_keys);
    float *rooms = gather_with(sizeof(float) * room_size * (size_t)(threads > 1 ? threads : 1), threads);
    if (!rooms) return -1;
    us_do(kernels()->attend, &(us_attend_task){*attention, out, rooms, room_size});
    return 0;
}

void us_are_first(const uint32_t *seeds, const int32_t *tokens, int64_t count, int32_t vocab, int32_t num_first, uint8_t *out,
                  int32_t threads) {
    do_rows(kernels()->first, &(us_first_task){seeds, tokens, count, vocab, num_first, out}, count, threads);
}

static size_t size_list_room(int32_t vocab, int32_t num_first) {
    return (us_list_bytes(vocab, num_first) + US_LINE - 1) & ~(size_t)(US_LINE - 1);
}

int32_t us_list_first(const uint32_t *seeds, int64_t count, int32_t vocab, int32_t num_first, uint32_t *bits, int32_t threads) {
    const size_t room_size = size_list_room(vocab, num_first);
    void *rooms = gather_with(room_size * (size_t)(threads > 1 ? threads : 1), threads);
    if (!rooms) return -1;
    do_gathered(kernels()->lists, &(us_list_task){seeds, count, vocab, num_first, bits, rooms, room_size}, count);
    return 0;
}

int32_t us_mark_listed(const float *scores, float *out, int64_t rows, int32_t vocab, int32_t num_first, const int64_t *ids,
                       int64_t stride, int64_t key, float bias, uint64_t *kept, uint32_t *bits, uint32_t num_kept, int32_t threads) {
    const size_t room_size = size_list_room(vocab, num_first), rooms = room_size * (size_t)(threads > 1 ? threads : 1);
    const size_t made = sizeof(uint32_t) * (size_t)rows * (size_t)((vocab + 31) / 32);
    char *memory = gather_with(rooms + made + (size_t)rows, threads);
    if (!memory) return -1;
    do_gathered(kernels()->marked, &(us_marked_task){scores, out, rows, vocab, num_first, ids, stride, key, bias, kept, bits, num_kept,
                                                     (uint32_t *)(memory + rooms), (uint8_t *)memory + rooms + made, memory, room_size}, rows);
    return 0;
}

int32_t us_raise_own(const float *scores, float *out, int64_t rows, int32_t vocab, int32_t num_first, int32_t num_candidates,
                     const int64_t *ids, int64_t stride, int32_t width, const int64_t *table, int64_t table_size, int64_t key,
                     const uint32_t *divisors, float bias, uint64_t *known, uint32_t num_known, int32_t threads) {
    const size_t pairs = (size_t)(rows * num_candidates), room = 2 * sizeof(us_candidate) * (size_t)vocab * (size_t)(threads > 1 ? threads : 1);
    char *memory = gather_with(room + (sizeof(int64_t) + sizeof(int32_t) + sizeof(uint32_t)) * pairs, threads);
    if (!memory) return -1;
    int64_t *open = (int64_t *)(memory + room);
    int32_t *tokens = (int32_t *)(open + pairs);
    atomic_int num_open = 0;
    us_do(kernels()->own_lists, &(us_own_task){scores, out, rows, vocab, num_first, num_candidates, ids, stride, width, table, table_size,
                                               (uint64_t)key, divisors, bias, tokens, (uint32_t *)(tokens + pairs), open, &num_open,
                                               (us_candidate *)memory, known, num_known});
    return 0;
}

static int32_t play(us_tournament_task task, int32_t threads) {
    task.room_size = (sizeof(us_play_room) + 2 * sizeof(float) * (size_t)task.vocab + 4 * US_LINE) & ~(size_t)(US_LINE - 1);
    task.rooms = gather_with(task.room_size * (size_t)(threads > 1 ? threads : 1), threads);
    if (!task.rooms) return -1;
    us_do(kernels()->tournament, &task);
    return 0;
}

int32_t us_play_tournament(const float *scores, float *out, int64_t rows, int32_t vocab, int32_t depth, const uint32_t *words,
                           uint32_t size, const int64_t *states, uint32_t shift, const uint8_t *repeated, int32_t threads) {
    return play((us_tournament_task){scores, out, rows, vocab, depth, words, size, states, shift, repeated, NULL, NULL, NULL, 0}, threads);
}

int32_t us_draw_winners(const float *scores, int64_t rows, int32_t vocab, int32_t depth, const uint32_t *words, uint32_t size,
                        const int64_t *states, uint32_t shift, const uint8_t *repeated, const double *uniforms, int32_t *tokens,
                        int32_t threads) {
    if ((int64_t)size < vocab) return -2;
    return play((us_tournament_task){scores, NULL, rows, vocab, depth, words, size, states, shift, repeated, uniforms, tokens, NULL, 0},
                threads);
}

void us_read_contexts(const int64_t *ids, const int64_t *pads, const int64_t *firsts, int64_t rows, int64_t stride,
                      int32_t start, int32_t num_tokens, int32_t width, int32_t first, uint64_t seed, int32_t mixes,
                      int64_t *states, uint8_t *repeated) {
    const us_context_task task = {ids, pads, firsts, rows, stride, start, num_tokens, width, first, seed, mixes, states, repeated};
    us_team alone = {.size = 1};
    kernels()->contexts(&task, 0, &alone);
}

void us_draw_keyed(const float *scores, int64_t rows, int32_t vocab, const int64_t *states, const uint8_t *repeated,
                   int32_t *tokens, int32_t threads) {
    do_rows(kernels()->draws, &(us_draw_task){scores, rows, vocab, states, repeated, tokens}, rows, threads);
}

int32_t us_draw_rows(const float *scores, int64_t rows, int32_t vocab, const us_draw *draws, int32_t *tokens, int32_t threads) {
    atomic_int failed = 0;
    do_rows(kernels()->row_draws, &(us_row_draw_task){scores, rows, vocab, draws, tokens, &failed}, rows, threads);
    return -atomic_load(&failed);
}

int32_t us_rank_rows(const float *scores, int64_t rows, int32_t vocab, int32_t count, int32_t normalises, float *values,
                     int32_t *tokens, int32_t threads) {
    atomic_int failed = 0;
    do_rows(kernels()->ranks, &(us_rank_task){scores, rows, vocab, count, normalises, values, tokens, &failed}, rows, threads);
    return -atomic_load(&failed);
}

int32_t us_normalise_rows(const float *scores, int64_t rows, int32_t vocab, float *out, int32_t threads) {
    atomic_int failed = 0;
    do_rows(kernels()->normalise, &(us_normalise_task){scores, rows, vocab, out, &failed}, rows, threads);
    return -atomic_load(&failed);
}

#define FOUR_BITS(n) 1u << (n), 1u << ((n) + 1), 1u << ((n) + 2), 1u << ((n) + 3)
static const uint32_t bit_of[32] = {FOUR_BITS(0),  FOUR_BITS(4),  FOUR_BITS(8),  FOUR_BITS(12),
                                    FOUR_BITS(16), FOUR_BITS(20), FOUR_BITS(24), FOUR_BITS(28)};

/* A word's 32 scores, -inf without its bit; on the numbers' bits, which compilers make vectors of. */
static void keep_word(const float *restrict scores, uint32_t word, float *restrict out) {
    const uint32_t minus_infinity = 0xff800000u;
    for (int i = 0; i < 32; i++) {
        uint32_t score;
        memcpy(&score, scores + i, sizeof score);
        score = (word & bit_of[i]) == bit_of[i] ? score : minus_infinity;
        memcpy(out + i, &score, sizeof score);
    }
}

void us_keep_allowed(const float *scores, int64_t rows, int32_t vocab, const uint32_t *bits, int64_t words, float *out) {
    const int32_t whole = vocab / 32;
    for (int64_t row = 0; row < rows; row++, scores += vocab, out += vocab, bits += words) {
        for (int32_t w = 0; w < whole; w++) keep_word(scores + 32 * w, bits[w], out + 32 * w);
        for (int32_t v = 32 * whole; v < vocab; v++) out[v] = bits[whole] >> (v % 32) & 1u ? scores[v] : -INFINITY;
    }
}

void us_raise_listed(const float *scores, int64_t rows, int32_t vocab, const uint32_t *bits, int64_t words, float bias,
                     float *out, int32_t threads) {
    do_rows(kernels()->listed, &(us_listed_task){scores, out, rows, vocab, bits, words, bias}, rows, threads);
}

static float half_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return half_to_float(half);
}

void us_read_super(const uint8_t *tile, int32_t kind, int32_t row, us_super_row *out) {
    const uint8_t *packed = tile + (kind == US_K6 ? 16 : 32) + row; /* of scales: this row's are 8 bytes apart */
    const float scale = half_at(tile + 2 * row), least = half_at(tile + 16 + 2 * row);
    for (int i = 0; i < 16 && kind == US_K6; i++) out->scales[i] = scale * (float)(int8_t)packed[8 * i];
    out->minimums[0] = -least; /* of US_Q5, like its scale */
    if (kind == US_Q5) out->scales[0] = scale;
    for (int i = 0; i < 4 && kind != US_K6 && kind != US_Q5; i++) {
        const uint8_t first = packed[8 * i], second = packed[8 * (4 + i)], third = packed[8 * (8 + i)];
        out->scales[i] = scale * (float)(first & 63);
        out->minimums[i] = least * (float)(second & 63);
        out->scales[4 + i] = scale * (float)((third & 15) | (first >> 6) << 4);
        out->minimums[4 + i] = least * (float)(third >> 4 | (second >> 6) << 4);
    }
    const uint8_t *block = tile + (kind == US_K6 ? 16 + 128 : kind == US_Q5 ? 32 : 128);
    const int32_t extra = kind == US_K6 ? 64 : kind == US_K4 ? 0 : 32; /* bytes before the codes */
    for (int b = 0; b < us_count_blocks(kind); b++, block += extra + 128)
        for (int k = 0; k < US_BLOCK; k++) {
            const int group = k / 4, at = 4 * row + k % 4;
            int code = block[extra + 32 * (group % 4) + at] >> (group < 4 ? 0 : 4) & 15;
            if (kind == US_K5 || kind == US_Q5) code |= (block[at] >> group & 1) << 4;
            if (kind == US_K6) code = (code | (block[32 * (group % 4 / 2) + at] >> (2 * (group % 2) + group / 4 * 4) & 3) << 4) - 32;
            out->codes[US_BLOCK * b + k] = (int8_t)code;
        }
}

/* One row of a tile of super-blocks as numbers. Products of codes and scales are exact but with 6 bits, whose one rounding
 * nothing follows: so these are the numbers that the file stands for, to the bit. */
static void read_super_row(const us_matrix *matrix, int32_t row, float *out) {
    const int32_t width = US_BLOCK * us_count_blocks(matrix->kind), supers = matrix->columns / width;
    const size_t bytes = (size_t)us_count_blocks(matrix->kind) * us_block_bytes(matrix->kind);
    const uint8_t *tile = (const uint8_t *)matrix->data + (size_t)(row / US_TILE) * (size_t)supers * bytes;
    for (int32_t s = 0; s < supers; s++, tile += bytes, out += width) {
        us_super_row found;
        us_read_super(tile, matrix->kind, row % US_TILE, &found);
        for (int k = 0; k < width; k++)
            out[k] = matrix->kind == US_K6 ? (float)found.codes[k] * found.scales[k / 16]
                                           : (float)found.codes[k] * found.scales[k / 32] - found.minimums[k / 32];
    }
}

const float *us_find_table(int32_t kind) {
    static const float nf4[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};
    static const float fp4[16] = {0.0f, 1.0f / 192, 2.0f / 3, 1.0f,  1.0f / 3,  0.5f,  1.0f / 6,  0.25f,
                                  0.0f, -1.0f / 192, -2.0f / 3, -1.0f, -1.0f / 3, -0.5f, -1.0f / 6, -0.25f};
    return kind == US_NF4 ? nf4 : fp4;
}

/* One row of a tile of codes of a table as numbers. */
static void read_table_row(const us_matrix *matrix, int32_t row, float *out) {
    const int32_t blocks = matrix->columns / US_BLOCK, r = row % US_TILE;
    const size_t bytes = us_block_bytes(matrix->kind);
    const uint8_t *block = (const uint8_t *)matrix->data + (size_t)(row / US_TILE) * (size_t)blocks * bytes;
    const float *table = us_find_table(matrix->kind);
    for (int32_t b = 0; b < blocks; b++, block += bytes, out += US_BLOCK)
        for (int32_t k = 0; k < US_BLOCK; k++) {
            float scale;
            uint32_t word;
            memcpy(&scale, block + 4 * r, sizeof scale);
            memcpy(&word, block + 32 + 32 * (k / 8) + 4 * r, sizeof word);
            out[k] = table[word >> (4 * (k % 8)) & 15] * scale;
        }
}

/* Where a number lies in tiles of a kind of 16 bits. */
static size_t find_narrow(int32_t kind, int32_t row, int32_t column, int32_t columns) {
    const size_t panel = (size_t)(row / US_PANEL) * (size_t)columns, place = (size_t)(row % US_PANEL);
    if (kind == US_F16) return US_PANEL * (panel + (size_t)column) + place;
    return US_PANEL * (panel + (size_t)(column & ~1)) + 2 * place + (size_t)(column & 1);
}

/* A tile's columns of one row as numbers of 16 bits; whether one was rounded. Without branches: compilers make vectors of it. */
static uint32_t narrow_tile_row(const float *row, int32_t kind, uint16_t *out) {
    uint32_t bits[US_BLOCK], is_rounded = 0;
    memcpy(bits, row, sizeof bits);
    if (kind == US_BF16) {
        for (int i = 0; i < US_BLOCK; i++) {
            is_rounded |= (bits[i] & 0xffff) | ((bits[i] & 0x7f800000) == 0x7f800000);
            out[i] = (uint16_t)(bits[i] >> 16);
        }
        return is_rounded;
    }
    for (int i = 0; i < US_BLOCK; i++) {
        const uint32_t size = bits[i] & 0x7fffffff, is_small = size < 0x38800000; /* a subnormal float16, or none */
        const uint32_t small = is_small ? size : 0;
        float steps;
        memcpy(&steps, &small, sizeof steps);
        steps *= 0x1p24f; /* the least float16 */
        const int32_t whole = (int32_t)steps;
        is_rounded |= is_small ? (float)whole != steps : (size & 0x1fff) | (size >= 0x47800000);
        out[i] = (uint16_t)((bits[i] >> 16 & 0x8000) | (is_small ? (uint32_t)whole : (size - 0x38000000) >> 13));
    }
    return is_rounded;
}

int32_t us_narrow_rows(const float *rows, int32_t count, int32_t columns, int32_t kind, uint16_t *out) {
    static const float zeros[US_BLOCK];
    uint32_t is_rounded = 0;
    for (int32_t panel = 0; panel < count; panel += US_PANEL)
        for (int32_t k = 0; k < columns; k += US_BLOCK, out += US_PANEL * US_BLOCK)
            for (int32_t row = 0; row < US_PANEL; row++) {
                uint16_t made[US_BLOCK];
                const float *from = panel + row < count ? rows + (size_t)(panel + row) * (size_t)columns + k : zeros;
                is_rounded |= narrow_tile_row(from, kind, made);
                uint16_t *to = out + (kind == US_F16 ? row : 2 * row); /* as find_narrow says */
                for (int32_t i = 0; i < US_BLOCK && kind == US_F16; i++) to[US_PANEL * i] = made[i];
                for (int32_t i = 0; i < US_BLOCK && kind == US_BF16; i += 2) memcpy(to + US_PANEL * i, made + i, 2 * sizeof *made);
            }
    return !is_rounded;
}

void us_read_rows(const us_matrix *matrix, const int32_t *rows, int32_t count, float *out) {
    const int32_t columns = matrix->columns, blocks = columns / US_BLOCK;
    for (int32_t i = 0; i < count; i++, out += columns) {
        const int32_t row = rows[i], tile = row / US_TILE, r = row % US_TILE;
        if (matrix->kind == US_F32) {
            memcpy(out, (const float *)matrix->data + (size_t)row * columns, sizeof(float) * (size_t)columns);
            continue;
        }
        if (us_is_narrow(matrix->kind)) {
            for (int32_t k = 0; k < columns; k++) {
                const uint16_t number = ((const uint16_t *)matrix->data)[find_narrow(matrix->kind, row, k, columns)];
                const uint32_t bits = (uint32_t)number << 16;
                if (matrix->kind == US_F16) out[k] = half_to_float(number);
                else memcpy(out + k, &bits, 4);
            }
            continue;
        }
        if (us_has_table(matrix->kind)) {
            read_table_row(matrix, row, out);
            continue;
        }
        if (matrix->kind >= US_K4) {
            read_super_row(matrix, row, out);
            continue;
        }
        const int is_q8 = matrix->kind == US_Q8;
        const size_t bytes = us_block_bytes(matrix->kind);
        const uint8_t *block = (const uint8_t *)matrix->data + (size_t)tile * blocks * bytes;
        for (int32_t b = 0; b < blocks; b++, block += bytes) {
            const float scale = half_at(block + 2 * r);
            for (int32_t k = 0; k < US_BLOCK; k++) {
                float *to = out + b * US_BLOCK + k;
                if (is_q8) *to = scale * (float)((const int8_t *)block)[16 + 32 * (k / 4) + 4 * r + k % 4];
                else {
                    const uint8_t both = block[32 + 32 * (k % 16 / 4) + 4 * r + k % 4];
                    *to = scale * (float)(k < 16 ? both & 15 : both >> 4) + half_at(block + 16 + 2 * r);
                }
            }
        }
    }
}
