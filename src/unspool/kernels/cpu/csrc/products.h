/* Products of rows with matrices of any kind: rows as int8 if the matrix is quantised, tiles, gates. Included by kernels.c. */
#ifndef UNSPOOL_PRODUCTS_H
#define UNSPOOL_PRODUCTS_H

/* One row of `columns` numbers as int8, to its place in its panel. */
static void quantise(const float *x, int32_t columns, int32_t row, panel p, int8_t *quants, float *scales, float *sums,
                     int32_t *offsets) {
    enum { VECTORS = US_BLOCK / LANES, HALF = US_BLOCK / 2 };
    const size_t blocks = (size_t)(columns / US_BLOCK), at = (size_t)p.first * blocks + (size_t)(row - p.first);
    quants += at * US_BLOCK;
    scales += at;
    sums += at;
    offsets += 2 * at;
    for (size_t b = 0; b < blocks;
         b++, x += US_BLOCK, quants += US_BLOCK * p.count, scales += p.count, sums += p.count, offsets += 2 * p.count) {
        vec v[VECTORS], most[2] = {fill(0), fill(0)};
        UNROLLED for (int i = 0; i < VECTORS; i++) {
            v[i] = load(x + i * LANES);
            most[i % 2] = larger(most[i % 2], magnitude(v[i]));
        }
        const float size = largest(larger(most[0], most[1])), inverse = size > 0 ? 127.0f / size : 0;
        veci halves[2] = {{0}, {0}};
        UNROLLED for (int i = 0; i < VECTORS; i++) {
            const veci whole = nearest(v[i] * inverse);
            const bytes small = __builtin_convertvector(whole, bytes);
            memcpy(quants + i * LANES, &small, sizeof small);
            halves[i * LANES / HALF] += whole;
        }
        const int32_t lower = sum_whole(halves[0]), upper = sum_whole(halves[1]);
        *scales = size / 127.0f;
        *sums = *scales * (float)(lower + upper);
        offsets[0] = -32 * lower;
        offsets[1] = -32 * upper;
    }
}

typedef struct {
    const float *x; /* rows of floats, `stride` apart */
    size_t stride;
    activations quantised; /* of all panels, one after the other */
    const uint16_t *pieces; /* for narrow.h */
} input;

/* Where results go: y = result, y += result, or y += result + extra; with `gate`, y = activation(gate) * result. */
typedef struct {
    float *y;
    size_t stride;
    const float *extra;
    size_t extra_stride;
    int32_t adds;
    const int32_t *rows; /* rows of y that results go to, if not their own; */
    const float *shares; /* and by what they are multiplied before; or NULL */
} output;

/* Whether a matrix is multiplied as panels of 16 outputs: numbers of 16 bits are, and plain rows that are turned into them. */
static int is_paneled(const us_matrix *w) {
#if defined(US_AVX512)
    if (w->kind == US_F32) return !w->rest && w->columns % US_BLOCK == 0;
#endif
    return us_is_narrow(w->kind);
}

#include "narrow.h"
#include "unpacked.h"
#include "tables.h"

static void multiply_super(int32_t kind, const uint8_t *tile, int supers, activations a, int32_t num_rows, int is_pair,
                           float *out) {
#define SUPER(M)                                                                    \
    case M:                                                                         \
        if (kind == US_K4) tile_super(tile, supers, a, M, US_K4, is_pair, out);      \
        else if (kind == US_K5) tile_super(tile, supers, a, M, US_K5, is_pair, out); \
        else if (kind == US_K6) tile_super(tile, supers, a, M, US_K6, is_pair, out); \
        else tile_super(tile, supers, a, M, US_Q5, is_pair, out);                   \
        break;
    switch (num_rows) {
        SUPER(1) SUPER(2) SUPER(3) SUPER(4)
#if MOST_M == 8
        SUPER(5) SUPER(6) SUPER(7) SUPER(8)
#endif
    }
}

/* Up to OUTPUTS output rows from `first`, for a panel of activations: out[row][OUTPUTS]. */
static void multiply(const us_matrix *w, int32_t first, int32_t count, const input *in, panel p, float *out) {
    if (w->rest) { /* tiles of two kinds may be made together */
        const int32_t left = w->own - first;
        if (count > left) multiply(w->rest, left > 0 ? 0 : -left, left > 0 ? count - left : count, in, p, left > 0 ? out + left : out);
        if (left <= 0) return;
        count = count < left ? count : left;
    }
    const size_t blocks = (size_t)(w->columns / US_BLOCK), at = (size_t)p.first * blocks;
    if (w->kind == US_F32) {
        multiply_plain((const float *)w->data + (size_t)first * (size_t)w->columns, w->columns, count,
                       in->x + (size_t)p.first * in->stride, in->stride, p, out);
        return;
    }
    if (us_has_table(w->kind)) {
        multiply_table(w->kind, (const uint8_t *)w->data + (size_t)(first / US_TILE) * blocks * TABLE_BYTES, (int)blocks,
                       in->x + (size_t)p.first * in->stride, in->stride, p.count, count > US_TILE, out);
        return;
    }
    const int is_q8 = w->kind == US_Q8;
    const activations a = {in->quantised.quants + at * US_BLOCK, in->quantised.scales + at, in->quantised.sums + at,
                           in->quantised.offsets + 2 * at};
    const uint8_t *tile = (const uint8_t *)w->data + (size_t)(first / US_TILE) * blocks * us_block_bytes(w->kind);
    if (w->kind >= US_K4) {
        multiply_super(w->kind, tile, (int)blocks / us_count_blocks(w->kind), a, p.count, count > US_TILE, out);
        return;
    }
#define TILE(M, name)                                          \
    case M:                                                    \
        if (is_q8) name##_q8(tile, (int)blocks, a, M, out);     \
        else name##_q4(tile, (int)blocks, a, M, out);           \
        break;
#if MOST_M == 8
#define EVERY(name) TILE(1, name) TILE(2, name) TILE(3, name) TILE(4, name) TILE(5, name) TILE(6, name) TILE(7, name) TILE(8, name)
#else
#define EVERY(name) TILE(1, name) TILE(2, name) TILE(3, name) TILE(4, name)
#endif
#if OUTPUTS > US_TILE
    if (count > US_TILE) {
        switch (p.count) { EVERY(tiles) }
        return;
    }
#endif
    switch (p.count) { EVERY(tile) }
}

/* The same for some rows from `row` on: one panel, or several. How many rows those are. */
static int32_t multiply_rows(const us_matrix *w, int32_t first, int32_t count, const input *in, int32_t row, int32_t num_rows,
                             float *out) {
#if defined(US_AVX512)
    if (is_unpacked(w, num_rows)) return multiply_unpacked(w, first, count, in->quantised, row, num_rows, out);
#endif
    const panel p = find_panel(w, row, num_rows);
    multiply(w, first, count, in, p, out);
    return p.count;
}

/* Put some results of a row, from output `first` on, where they belong. */
INLINE void put_some(const us_matrix *w, int32_t first, const float *made, const int some, float *y, int32_t row, const output *to) {
    vec result = load_some(made, some);
    if (w->bias) result += load_some(w->bias + first, some);
    if (to->shares) result *= to->shares[row];
    if (to->extra) result += load_some(to->extra + row * to->extra_stride + first, some);
    if (to->adds) result += load_some(y + first, some);
    store_some(y + first, result, some);
}

/* Put the results of some rows from `row` on, `pitch` apart, where they belong. */
static void put(const us_matrix *w, int32_t first, int32_t count, const float *made, int32_t pitch, int32_t row, int32_t num_rows,
                const output *to) {
    for (int32_t last = row + num_rows; row < last; row++, made += pitch) {
        float *y = to->y + (to->rows ? to->rows[row] : row) * to->stride;
        int32_t n = 0;
        for (; n + LANES <= count; n += LANES) put_some(w, first + n, made + n, LANES, y, row, to);
        if (n < count) put_some(w, first + n, made + n, count - n, y, row, to);
        if (OUTPUTS > US_TILE) __builtin_prefetch(y + first + 2 * count - 1, 1, 2); /* where the next results go; measured on AVX-512 */
    }
}

/* How many output rows are made together from a tile on, of the tiles before `last`. */
static int32_t count_outputs(int64_t tile, int64_t last, int32_t rows) {
    const int32_t begin = (int32_t)tile * US_TILE, most = last - tile < OUTPUTS / US_TILE ? US_TILE : OUTPUTS;
    return rows - begin < most ? rows - begin : most;
}

/* The output rows that a thread makes of a matrix's first `rows`. */
static void split_outputs(const us_matrix *w, int32_t rows, int32_t thread, int32_t threads, int64_t *first, int64_t *last) {
    const int32_t unit = us_tile_rows(w->kind);
    split((rows + unit - 1) / unit, thread, threads, first, last);
    *first *= unit;
    *last = *last * unit < rows ? *last * unit : rows;
}

/* One thread's part of a product with numbers of 16 bits. */
static void multiply_narrow(const us_matrix *w, int32_t num_rows, const input *in, const output *to, int32_t thread, int32_t threads) {
    int64_t first, last;
    split_outputs(w, w->rows, thread, threads, &first, &last);
    _Alignas(64) float made[NARROW_M * MADE];
    const int32_t most = count_panels(w->kind, num_rows) * US_PANEL;
    begin_narrow(w->kind, num_rows);
    for (int32_t from = 0, row = num_rows; from < num_rows; from = row)
        for (int64_t begin = first; begin < last; begin += most) {
            const panels p = find_panels(w, begin, last - begin, num_rows);
            const int32_t count = (int32_t)(last - begin < most ? last - begin : most);
            for (row = from; row < num_rows && row - from < NARROW_ROWS;) {
                const int32_t rows = multiply_panels(p, w->columns, in, row, num_rows, made);
                put(w, (int32_t)begin, count, made, MADE, row, rows, to);
                row += rows;
            }
        }
    end_narrow(w->kind);
}

/* Rows that all output rows are made of before the next rows are, or a few more: their activations and results stay in the
 * second-level cache, and a weight that comes from memory is multiplied as often. */
#define BLOCK_ROWS 120

/* One thread's part of a product for all rows. */
static void multiply_part(const us_matrix *w, int32_t num_rows, const input *in, const output *to, int32_t thread,
                          int32_t threads) {
    int64_t first, last;
    if (is_paneled(w)) {
        multiply_narrow(w, num_rows, in, to, thread, threads);
        return;
    }
    split((w->rows + US_TILE - 1) / US_TILE, thread, threads, &first, &last);
    _Alignas(64) float made[MOST_ROWS * OUTPUTS];
    for (int32_t from = 0, row = num_rows; from < num_rows; from = row)
        for (int64_t tile = first; tile < last; tile += OUTPUTS / US_TILE) {
            const int32_t begin = (int32_t)tile * US_TILE, count = count_outputs(tile, last, w->rows);
            for (row = from; row < num_rows && row - from < BLOCK_ROWS;) {
                const int32_t rows = multiply_rows(w, begin, count, in, row, num_rows, made);
                put(w, begin, count, made, OUTPUTS, row, rows, to);
                row += rows;
            }
        }
}

/* gpt-oss's gate: both sides are kept within a limit, and the value counts from -1. */
INLINE vec gate_clamped(const us_model *model, vec gate, vec value) {
    const vec most = fill(model->gate_limit);
    gate = -larger(-gate, -most);
    value = larger(-larger(-value, -most), -most);
    return gate * sigmoid(model->gate_gain * gate) * (value + 1.0f);
}

/* Put the activation of a row's gates, and of its values if it has any, where they belong. */
static void put_fed(const us_model *model, const us_matrix *w, int32_t ffn, int32_t begin, int32_t count, const float *gates,
                    const float *values, int32_t row, const output *to) {
    for (int32_t n = 0; n < count; n += LANES) {
        const int some = count - n < LANES ? count - n : LANES;
        vec gate = load_some(gates + n, some), value = fill(1);
        if (w->bias) gate += load_some(w->bias + begin + n, some);
        if (values) {
            value = load_some(values + n, some);
            if (w->bias) value += load_some(w->bias + ffn + begin + n, some);
        }
        const vec result = model->activation == US_CLAMPED ? gate_clamped(model, gate, value)
                                                            : activate(model->activation, gate) * value;
        store_some(to->y + row * to->stride + begin + n, result, some);
    }
}

/* The same as feed_part, with numbers of 16 bits. */
static void feed_narrow(const us_model *model, const us_matrix *w, int32_t ffn, int32_t num_rows, const input *in,
                        const output *to, int32_t thread, int32_t threads) {
    int64_t first, last;
    split_outputs(w, ffn, thread, threads, &first, &last);
    _Alignas(64) float gates[NARROW_M * MADE], values[NARROW_M * MADE];
    const int32_t most = count_panels(w->kind, num_rows) * US_PANEL;
    begin_narrow(w->kind, num_rows);
    for (int32_t from = 0, row = num_rows; from < num_rows; from = row)
        for (int64_t begin = first; begin < last; begin += most) {
            const panels gate_panels = find_panels(w, begin, last - begin, num_rows), value_panels = find_panels(w, ffn + begin, last - begin, num_rows);
            const int32_t count = (int32_t)(last - begin < most ? last - begin : most);
            for (row = from; row < num_rows && row - from < NARROW_ROWS;) {
                const int32_t rows = multiply_panels(gate_panels, w->columns, in, row, num_rows, gates);
                if (model->is_gated) multiply_panels(value_panels, w->columns, in, row, num_rows, values);
                for (int m = 0; m < rows; m++)
                    put_fed(model, w, ffn, (int32_t)begin, count, gates + MADE * m, model->is_gated ? values + MADE * m : NULL, row + m, to);
                row += rows;
            }
        }
    end_narrow(w->kind);
}

/* One thread's part of a feed-forward's first product, with its activation: gate rows come before the others. */
static void feed_part(const us_model *model, const us_matrix *w, int32_t ffn, int32_t num_rows, const input *in,
                      const output *to, int32_t thread, int32_t threads) {
    int64_t first, last;
    if (is_paneled(w)) {
        feed_narrow(model, w, ffn, num_rows, in, to, thread, threads);
        return;
    }
    split((ffn + US_TILE - 1) / US_TILE, thread, threads, &first, &last);
    _Alignas(64) float gates[MOST_ROWS * OUTPUTS], values[MOST_ROWS * OUTPUTS];
    for (int32_t from = 0, row = num_rows; from < num_rows; from = row)
        for (int64_t tile = first; tile < last; tile += OUTPUTS / US_TILE) {
            const int32_t begin = (int32_t)tile * US_TILE, count = count_outputs(tile, last, ffn);
            for (row = from; row < num_rows && row - from < BLOCK_ROWS;) {
                const int32_t rows = multiply_rows(w, begin, count, in, row, num_rows, gates);
                if (model->is_gated) multiply_rows(w, ffn + begin, count, in, row, num_rows, values);
                for (int m = 0; m < rows; m++)
                    put_fed(model, w, ffn, begin, count, gates + OUTPUTS * m, model->is_gated ? values + OUTPUTS * m : NULL, row + m, to);
                row += rows;
            }
        }
}

/* Turn a row of floats into what a matrix of some kind is multiplied by; floats themselves stay as they are. */
static void prepare_row(const us_matrix *w, const float *x, int32_t row, int32_t num_rows, const input *to) {
    const activations *a = &to->quantised;
    if (!us_is_float(w->kind))
        quantise(x, w->columns, row, find_panel(w, row, num_rows), (int8_t *)a->quants, (float *)a->scales, (float *)a->sums,
                 (int32_t *)a->offsets);
#if defined(US_AMX)
    if (w->kind == US_BF16) split_row(x, w->columns, row, num_rows, (uint16_t *)to->pieces);
    else if (is_paneled(w)) lay_row(x, w->columns, row, num_rows, (uint16_t *)to->pieces);
#elif defined(US_AVX512)
    if (is_paneled(w)) lay_row(x, w->columns, row, num_rows, (uint16_t *)to->pieces);
#endif
}

#endif
