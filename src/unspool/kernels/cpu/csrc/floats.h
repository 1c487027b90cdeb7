/* Products with plain rows of floats; with AVX-512 only those that turned.h does not take. Included by kernels.c.
 *
 * N rows of weights are multiplied by M of activations, so that a number that was loaded serves several products. A pair of
 * rows is added up in the same order whatever N and M are: a row has the same bits alone and in a batch.
 */
#ifndef UNSPOOL_FLOATS_H
#define UNSPOOL_FLOATS_H

#define FLOAT_M 4 /* rows of activations that are multiplied together */

/* Rows that take their turn with a tile of weights: near-even parts of all rows, of at most MOST_M. */
typedef struct {
    int32_t first, count;
    int32_t part, parts; /* of those that rows of floats take their turns in: the panel's first one, and all */
} panel;

/* Whether a pair of tiles is unpacked for all rows (unpacked.h): not for a panel's, and where all of a matrix lies in tiles. */
INLINE int is_unpacked(const us_matrix *w, int32_t num_rows) {
#if defined(US_AVX512)
    if (num_rows <= MOST_M) return 0;
    while (w && !us_is_float(w->kind)) w = w->rest;
    return !w;
#else
    (void)w, (void)num_rows;
    return 0;
#endif
}

static panel find_panel(const us_matrix *w, int32_t row, int32_t num_rows) {
    const int32_t most = w->kind == US_F32 ? FLOAT_M : is_unpacked(w, num_rows) ? MOST_UNPACKED : MOST_M;
    if (num_rows <= MOST_M) return (panel){0, num_rows, 0, (num_rows + most - 1) / most};
    const int32_t parts = (num_rows + most - 1) / most, joined = most < MOST_M ? MOST_M / most : 1;
    const int32_t begin = ((row + 1) * parts - 1) / num_rows / joined * joined;
    const int32_t end = begin + joined < parts ? begin + joined : parts, first = num_rows * begin / parts;
    return (panel){first, num_rows * end / parts - first, begin, parts};
}

/* The last numbers of a row, fewer than two vectors of them; not inlined, so that they are added up alike everywhere. */
static __attribute__((noinline)) float add_rest(float result, const float *w, const float *x, int32_t count) {
    for (int32_t i = 0; i < count; i++) result += w[i] * x[i];
    return result;
}

#if defined(US_AVX512) || defined(US_AVX2)
#if defined(US_AVX512)
#define FLOAT_N 4
#else
#define FLOAT_N 3 /* 12 sums, 3 rows of weights and one of activations are 16 registers */
#endif
#define FLOAT_SPAN 768 /* columns of a panel of activations that stay in the first-level cache beside weights */

/* A part of one product: what the sums so far are, and where weights that come next lie. */
typedef struct {
    const float *w, *x;
    size_t pitch, stride; /* between rows of weights, and of activations */
    int32_t count;        /* columns */
    int32_t is_first, is_last;
    vec *kept;          /* sums between spans: (N, FLOAT_M) */
    const float *ahead; /* weights to ask for, of `asked` rows */
    int32_t asked;
} span;

INLINE void rows_plain(const span *s, const int N, const int M, float *out) {
    vec total[FLOAT_N][FLOAT_M];
    UNROLLED for (int n = 0; n < N; n++)
        EACH_ROW total[n][m] = s->is_first ? fill(0) : s->kept[n * FLOAT_M + m];
    int32_t k = 0;
    for (; k + LANES <= s->count; k += LANES) {
        vec weights[FLOAT_N];
        UNROLLED for (int n = 0; n < N; n++) weights[n] = load(s->w + (size_t)n * s->pitch + k);
        for (int32_t i = 0; i < s->asked; i++) __builtin_prefetch(s->ahead + (size_t)i * s->pitch + k, 0, 2);
        EACH_ROW {
            const vec given = load(s->x + m * s->stride + k);
            UNROLLED for (int n = 0; n < N; n++) total[n][m] += weights[n] * given;
        }
    }
    if (!s->is_last) {
        UNROLLED for (int n = 0; n < N; n++) EACH_ROW s->kept[n * FLOAT_M + m] = total[n][m];
        return;
    }
    UNROLLED for (int n = 0; n < N; n++) {
        vec all[FLOAT_M];
        UNROLLED for (int m = 0; m < FLOAT_M; m++) all[m] = m < M ? total[n][m] : fill(0);
        const quad results = sums(all);
        EACH_ROW {
            out[OUTPUTS * m + n] = results[m];
            if (k < s->count)
                out[OUTPUTS * m + n] = add_rest(results[m], s->w + (size_t)n * s->pitch + k, s->x + m * s->stride + k, s->count - k);
        }
    }
}

static void rows_of_span(const span *s, int32_t N, int32_t M, float *out) {
#define ROWS(N, M) \
    case 8 * N + M: rows_plain(s, N, M, out); break
#define ROWS_OF(N) ROWS(N, 1); ROWS(N, 2); ROWS(N, 3); ROWS(N, 4)
    switch (8 * N + M) {
        ROWS_OF(1);
        ROWS_OF(2);
        ROWS_OF(3);
#if FLOAT_N == 4
        ROWS_OF(4);
#endif
    }
}

/* Up to OUTPUTS rows of floats times the rows of a panel: out[row][n]. While the rows of a panel are multiplied, each of its
 * turns asks for its share of the weights that are read after all panels have had these. */
static void multiply_plain(const float *w, int32_t columns, int32_t count, const float *x, size_t stride, panel p, float *out) {
    const int32_t turns = (p.count + FLOAT_M - 1) / FLOAT_M, spans = turns > 1 ? (columns + FLOAT_SPAN - 1) / FLOAT_SPAN : 1;
    const int32_t width = ((columns + spans - 1) / spans + LANES - 1) / LANES * LANES;
    const size_t pitch = (size_t)columns;
    vec kept[OUTPUTS * MOST_M];
    for (int32_t begin = 0; begin < columns; begin += width) {
        const int32_t is_last = begin + width >= columns;
        for (int32_t n = 0, N; n < count; n += N) {
            N = count - n < FLOAT_N ? count - n : FLOAT_N;
            for (int32_t turn = 0; turn < turns; turn++) {
                const int32_t row = p.count * turn / turns, M = p.count * (turn + 1) / turns - row, place = p.part + turn;
                const int32_t asked = N * place / p.parts;
                const float *from = w + (size_t)n * pitch + begin;
                const float *next = is_last ? from + OUTPUTS * pitch - begin : from + width;
                if (p.parts == 1) next = from + (size_t)N * pitch; /* nobody else reads these before */
                const span s = {.w = from, .x = x + (size_t)row * stride + begin, .pitch = pitch, .stride = stride,
                                .count = is_last ? columns - begin : width, .is_first = !begin, .is_last = is_last,
                                .kept = kept + (size_t)n * MOST_M + (size_t)turn * FLOAT_M * (size_t)N,
                                .ahead = next + (size_t)asked * pitch, .asked = N * (place + 1) / p.parts - asked};
                rows_of_span(&s, N, M, out + OUTPUTS * row + n);
            }
        }
    }
}

#else
#if defined(__aarch64__)
#define FLOAT_N 3 /* rows of weights that are multiplied together: with 4 of activations their sums fit 32 registers */
#else
#define FLOAT_N 1
#endif

/* N rows of weights times M of activations. Every pair has two running sums, whatever N and M are, so that a row has the
 * same bits alone and in a batch. One row of activations reads weights as fast as memory gives them, in one stream.
 * Several are bound by instructions, and each of `turns` groups of them brings its share of the weights that come next
 * into the second-level cache meanwhile: the first level is full of activations. */
INLINE void rows_plain(const float *w, int32_t columns, const float *x, size_t stride, const int N, const int M, int32_t turn,
                       int32_t turns, float *out) {
    vec even[FLOAT_N][FLOAT_M], odd[FLOAT_N][FLOAT_M];
    const size_t pitch = (size_t)columns, share = (size_t)N * 2 * LANES / (size_t)turns;
    const float *ahead = w + (size_t)FLOAT_N * pitch + 1024 + (size_t)turn * share * (pitch / (2 * LANES));
    UNROLLED for (int n = 0; n < N; n++) EACH_ROW even[n][m] = odd[n][m] = fill(0);
    int32_t k = 0;
    for (; k + 2 * LANES <= columns; k += 2 * LANES) {
        vec first[FLOAT_N], second[FLOAT_N];
        if (M == 1) __builtin_prefetch(w + k + 256);
        else __builtin_prefetch(ahead, 0, 2);
        ahead += share;
        UNROLLED for (int n = 0; n < N; n++) {
            first[n] = load(w + (size_t)n * pitch + k);
            second[n] = load(w + (size_t)n * pitch + k + LANES);
        }
        EACH_ROW {
            const vec left = load(x + m * stride + k), right = load(x + m * stride + k + LANES);
            UNROLLED for (int n = 0; n < N; n++) even[n][m] += first[n] * left;
            UNROLLED for (int n = 0; n < N; n++) odd[n][m] += second[n] * right;
        }
    }
    UNROLLED for (int n = 0; n < N; n++) {
        vec both[FLOAT_M];
        UNROLLED for (int m = 0; m < FLOAT_M; m++) both[m] = m < M ? even[n][m] + odd[n][m] : fill(0);
        const quad results = sums(both);
        EACH_ROW {
            out[OUTPUTS * m + n] = results[m];
            if (k < columns) out[OUTPUTS * m + n] = add_rest(results[m], w + (size_t)n * pitch + k, x + m * stride + k, columns - k);
        }
    }
}

/* Up to OUTPUTS rows of floats times the rows of a panel: out[row][n]. */
static void multiply_plain(const float *w, int32_t columns, int32_t count, const float *x, size_t stride, panel p, float *out) {
    const int32_t num_rows = p.count, turns = (num_rows + FLOAT_M - 1) / FLOAT_M;
    for (int32_t n = 0, N; n < count; n += N, w += (size_t)N * (size_t)columns) {
        N = num_rows == 1 ? 1 : count - n < FLOAT_N ? count - n : FLOAT_N;
        for (int32_t turn = 0; turn < turns; turn++) {
            const int32_t row = num_rows * turn / turns, M = num_rows * (turn + 1) / turns - row;
            const float *from = x + (size_t)row * stride;
            float *to = out + OUTPUTS * row + n;
#define ROWS(N, M) \
    case 8 * N + M: rows_plain(w, columns, from, stride, N, M, turn, turns, to); break
#define ROWS_OF(N) ROWS(N, 1); ROWS(N, 2); ROWS(N, 3); ROWS(N, 4)
            switch (8 * N + M) {
                ROWS_OF(1);
#if FLOAT_N == 3
                ROWS_OF(2);
                ROWS_OF(3);
#endif
            }
        }
    }
}
#endif

#undef ROWS
#undef ROWS_OF

#endif
