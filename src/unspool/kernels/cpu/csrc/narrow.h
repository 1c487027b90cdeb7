/* Products with floats that 16 bits hold: a matrix in half of the bytes, of bfloat16 or of float16. Included by products.h.
 *
 * A panel is 16 output rows, a tile of it 32 columns, 1 KB. A tile of bfloat16 is 16 pairs of columns of all its rows: a word
 * of 4 bytes has two columns of one row, the first in its lower half, so that a tile is what the matrix unit (AMX) multiplies
 * by. In a tile of float16 columns lie one after the other: one instruction widens a vector of them. But for AMX an activation
 * is multiplied by a column of the panel at once. Every sum of a row and an output is made in the order of the columns,
 * whatever else is multiplied: a row has the same bits alone and in a batch. With AVX-512 plain rows of floats are turned into
 * such panels while they are multiplied (turned.h).
 */
#ifndef UNSPOOL_NARROW_H
#define UNSPOOL_NARROW_H

#if defined(US_AVX512)
#define NARROW_TURN 8   /* rows that are multiplied together: 24 sums and three vectors of weights are in registers, */
#define NARROW_PANELS 3 /* and panels */
#define NARROW_M 120    /* rows for which weights are widened once, */
#define WIDE_COLUMNS 128 /* as many of them as the first-level cache holds, */
#define WIDE_FROM 64    /* where there are so many rows */
#elif defined(US_AVX2)
#define NARROW_TURN 6
#define NARROW_PANELS 2
#elif defined(__aarch64__)
#define NARROW_TURN 5 /* 20 sums, five vectors of activations and one of weights */
#define NARROW_PANELS 2
#define NARROW_M 60 /* rows for which weights are widened once, */
#define NARROW_ROWS 1 /* and all panels are multiplied by them before the next rows come: they stay in the second-level cache */
#else
#define NARROW_TURN 4
#define NARROW_PANELS 2
#endif
#define MADE (NARROW_PANELS * US_PANEL) /* output rows that have a place among results */

/* Panels that are made together lie one behind the other, and so do the groups of them. */
typedef struct {
    const uint8_t *first;
    size_t apart; /* bytes of a panel */
    int32_t count, kind;
    int32_t rows; /* output rows that are there: of plain rows no others may be read */
} panels;

/* Ask for the share of a tile that this turn of `turns` brings into the second-level cache. */
INLINE void ask_share(const uint8_t *tile, int32_t turn, int32_t turns) {
    for (int32_t line = US_PANEL * turn / turns; line < US_PANEL * (turn + 1) / turns; line++) __builtin_prefetch(tile + 64 * line, 0, 2);
}

#if defined(US_AMX)
#define UNIT_PANELS 2 /* panels that are multiplied together by the matrix unit */

#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, p) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((size_t)64) : "memory")
#define TILE_STORE(t, p) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((size_t)64) : "memory")
#define TILE_ADD(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)

/* Give the registers their shapes: sums and activations of up to 16 rows, and a tile of weights. */
static void begin_unit(int32_t num_rows) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.bytes[t] = 64;
        shapes.rows[t] = (uint8_t)(t == 7 || num_rows > US_PANEL ? US_PANEL : num_rows);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}
static void end_unit(void) { __asm__ volatile("tilerelease" ::); }

/* Write a row of floats as three numbers of bfloat16 each, whose sum it is: the upper halves of the float, of what is left,
 * and of what is left then. Rows lie in groups of 16: (groups, columns / 32, 3, rows of the group, 32). */
static void split_row(const float *x, int32_t columns, int32_t row, int32_t num_rows, uint16_t *pieces) {
    static const _Alignas(64) uint16_t odd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                  33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i halves = _mm512_load_si512(odd), upper = _mm512_set1_epi32((int32_t)0xffff0000);
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    const int32_t first = row / US_PANEL * US_PANEL, rows = num_rows - first < US_PANEL ? num_rows - first : US_PANEL;
    const size_t apart = (size_t)rows * US_BLOCK;
    pieces += 3 * (size_t)first * (size_t)columns + (size_t)(row - first) * US_BLOCK;
    for (int32_t k = 0; k < columns; k += US_BLOCK, pieces += 3 * apart) {
        __m512i piece[3][2];
        for (int half = 0; half < 2; half++) {
            const __m512 v = _mm512_loadu_ps(x + k + 16 * half);
            const __m512i bits = _mm512_castps_si512(v);
            const __mmask16 is_none = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
            const __mmask16 is_finite = _mm512_cmpneq_epi32_mask(_mm512_and_si512(bits, exponent), exponent);
            __m512i high = _mm512_and_si512(bits, upper);
            __m512 left = _mm512_maskz_sub_ps(is_finite, v, _mm512_castsi512_ps(high));
            high = _mm512_mask_or_epi32(high, is_none, high, _mm512_set1_epi32(0x00400000)); /* NaN whatever is cut off */
            piece[0][half] = high;
            piece[1][half] = _mm512_and_si512(_mm512_castps_si512(left), upper);
            piece[2][half] = _mm512_castps_si512(_mm512_sub_ps(left, _mm512_castsi512_ps(piece[1][half])));
        }
        for (int i = 0; i < 3; i++)
            _mm512_storeu_si512(pieces + (size_t)i * apart, _mm512_permutex2var_epi16(piece[i][0], halves, piece[i][1]));
    }
}

/* Up to 16 rows from `row` on times two panels, or one: out[row][MADE]. How many rows those are. */
INLINE int32_t multiply_group(panels p, const int has_second, int32_t columns, const uint16_t *pieces, int32_t row, int32_t num_rows,
                              float *out) {
    const int32_t rows = num_rows - row < US_PANEL ? num_rows - row : US_PANEL, turns = (num_rows + US_PANEL - 1) / US_PANEL;
    const size_t apart = (size_t)rows * US_BLOCK, step = UNIT_PANELS * p.apart;
    const uint8_t *first = p.first, *second = p.first + p.apart;
    _Alignas(64) float made[2][3][US_PANEL][US_PANEL];
    pieces += 3 * (size_t)row * (size_t)columns;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    if (has_second) {
        TILE_ZERO(3);
        TILE_ZERO(4);
        TILE_ZERO(5);
    }
    for (int32_t k = 0; k < columns; k += US_BLOCK, pieces += 3 * apart, first += 1024, second += 1024) {
        ask_share(first + step, row / US_PANEL, turns);
        TILE_LOAD(7, first);
        TILE_LOAD(6, pieces);
        TILE_ADD(0, 6, 7);
        TILE_LOAD(6, pieces + apart);
        TILE_ADD(1, 6, 7);
        TILE_LOAD(6, pieces + 2 * apart);
        TILE_ADD(2, 6, 7);
        if (!has_second) continue;
        ask_share(second + step, row / US_PANEL, turns);
        TILE_LOAD(7, second);
        TILE_ADD(5, 6, 7);
        TILE_LOAD(6, pieces + apart);
        TILE_ADD(4, 6, 7);
        TILE_LOAD(6, pieces);
        TILE_ADD(3, 6, 7);
    }
    TILE_STORE(0, made[0][0]);
    TILE_STORE(1, made[0][1]);
    TILE_STORE(2, made[0][2]);
    if (has_second) {
        TILE_STORE(3, made[1][0]);
        TILE_STORE(4, made[1][1]);
        TILE_STORE(5, made[1][2]);
    }
    for (int32_t m = 0; m < rows; m++)
        for (int i = 0; i < 1 + has_second; i++)
            store(out + MADE * m + US_PANEL * i, load(made[i][0][m]) + (load(made[i][1][m]) + load(made[i][2][m])));
    return rows;
}

#endif
#if !defined(NARROW_M)
#define NARROW_M NARROW_TURN
#endif
#if !defined(NARROW_ROWS)
#define NARROW_ROWS INT32_MAX /* a panel is multiplied by all rows before the next panel comes */
#endif

#if defined(US_AVX512)
/* Rows that are multiplied together: near-even parts of all rows. */
typedef struct {
    int32_t first, count, turn, turns;
} narrow_turn;

INLINE narrow_turn find_turn(int32_t row, int32_t num_rows) {
    const int32_t turns = (num_rows + NARROW_TURN - 1) / NARROW_TURN, turn = ((row + 1) * turns - 1) / num_rows;
    const int32_t first = num_rows * turn / turns;
    return (narrow_turn){first, num_rows * (turn + 1) / turns - first, turn, turns};
}

/* Write a row of floats beside those that are multiplied with it: (turns, columns / 32, rows of the turn, 32). So a product
 * reads one stream, at distances that it knows beforehand. A row alone lies so already. */
static void lay_row(const float *x, int32_t columns, int32_t row, int32_t num_rows, uint16_t *pieces) {
    const narrow_turn t = find_turn(row, num_rows);
    float *to = (float *)pieces + (size_t)t.first * (size_t)columns + (size_t)(row - t.first) * US_BLOCK;
    if (num_rows == 1) return;
    for (int32_t k = 0; k < columns; k += US_BLOCK, to += (size_t)t.count * US_BLOCK)
        for (int half = 0; half < US_BLOCK; half += LANES) store(to + half, load(x + k + half));
}

/* Where lay_row puts what is multiplied, from a turn's first row on. */
INLINE const float *find_laid(const input *in, int32_t columns, int32_t row, int32_t num_rows) {
    return num_rows == 1 ? in->x : (const float *)in->pieces + (size_t)row * (size_t)columns;
}

/* A case of a switch for every number of rows that a turn may have. */
#define EVERY_TURN(CASE) CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6); CASE(7); CASE(8)

/* The first or the second numbers of words of two. */
INLINE __m512 widen_bfloats(__m512i both, const int odd) {
    return _mm512_castsi512_ps(odd ? _mm512_and_si512(both, _mm512_set1_epi32((int32_t)0xffff0000)) : _mm512_slli_epi32(both, 16));
}

/* M rows times P panels. */
INLINE void rows_of_panels(panels p, int32_t columns, const float *x, const int M, const int P, const int kind, int32_t turn,
                           int32_t turns, float *out) {
    __m512 total[NARROW_PANELS][NARROW_TURN];
    const uint8_t *w = p.first, *ahead = w + (size_t)P * p.apart + (size_t)P * p.apart / 64 * (size_t)turn / (size_t)turns * 64;
    int32_t due = 0;
    UNROLLED for (int i = 0; i < P; i++) EACH_ROW total[i][m] = _mm512_setzero_ps();
    for (int32_t begin = 0; begin < columns; begin += US_BLOCK, x += M * US_BLOCK - US_BLOCK) {
        for (int k = 0; k < US_BLOCK; k += 2, x += 2, w += 64) {
            __m512i both[NARROW_PANELS];
            for (due += P; due >= turns; due -= turns, ahead += 64) __builtin_prefetch(ahead, 0, 2);
            UNROLLED for (int i = 0; i < P && kind == US_BF16; i++) both[i] = _mm512_loadu_si512(w + (size_t)i * p.apart);
            UNROLLED for (int odd = 0; odd < 2; odd++) {
                __m512 weights[NARROW_PANELS];
                UNROLLED for (int i = 0; i < P; i++)
                    weights[i] = kind == US_F16 ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w + (size_t)i * p.apart) + odd))
                                                : widen_bfloats(both[i], odd);
                EACH_ROW {
                    __m512 given = _mm512_set1_ps(x[US_BLOCK * m + odd]);
                    if (P > 1) __asm__("" : "+v"(given)); /* loaded once, and not for every panel */
                    UNROLLED for (int i = 0; i < P; i++) total[i][m] = _mm512_fmadd_ps(weights[i], given, total[i][m]);
                }
            }
        }
    }
    EACH_ROW UNROLLED for (int i = 0; i < P; i++) _mm512_storeu_ps(out + MADE * m + US_PANEL * i, total[i][m]);
}

/* Up to NARROW_TURN rows from `row` on times a group of panels: out[row][MADE]. How many rows those are. */
static int32_t multiply_turn(panels p, int32_t columns, const input *in, int32_t row, int32_t num_rows, float *out) {
    const narrow_turn t = find_turn(row, num_rows);
    const float *x = find_laid(in, columns, row, num_rows);
#define ROWS_OF(M, kind)                                                                      \
    if (p.count == 3) rows_of_panels(p, columns, x, M, 3, kind, t.turn, t.turns, out);         \
    else if (p.count == 2) rows_of_panels(p, columns, x, M, 2, kind, t.turn, t.turns, out);    \
    else rows_of_panels(p, columns, x, M, 1, kind, t.turn, t.turns, out)
#if defined(US_AMX) /* it multiplies by bfloat16 itself */
#define ROWS(M)               \
    case M:                   \
        ROWS_OF(M, US_F16);   \
        break
#else
#define ROWS(M)                                   \
    case M:                                       \
        if (p.kind == US_F16) { ROWS_OF(M, US_F16); } \
        else { ROWS_OF(M, US_BF16); }                 \
        break
#endif
    switch (t.count) { EVERY_TURN(ROWS); }
#undef ROWS
#undef ROWS_OF
    return t.count;
}

#include "turned.h"

/* Some columns of panels as floats: (columns, P, 16). */
INLINE void widen_panels(panels p, const int P, int32_t begin, int32_t count, const int kind, float *wide) {
    UNROLLED for (int i = 0; i < P; i++) {
        const uint8_t *w = p.first + (size_t)i * p.apart + 2 * US_PANEL * (size_t)begin;
        for (int32_t k = 0; k < count; k += 2, w += 64) {
            float *to = wide + (k * P + i) * US_PANEL;
            UNROLLED for (int odd = 0; odd < 2; odd++)
                _mm512_store_ps(to + odd * P * US_PANEL, kind == US_F16 ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w + odd))
                                                                        : widen_bfloats(_mm512_loadu_si512(w), odd));
        }
    }
}

/* M rows times some columns of P panels, added to the sums of those before; meanwhile rows are asked for, or none. */
INLINE void add_wide(const float *wide, int32_t count, const float *x, const int M, const int P, int is_first, const int asks,
                     row_asking *following, float *out) {
    row_asking ask = *following;
    __m512 total[NARROW_PANELS][NARROW_TURN];
    EACH_ROW UNROLLED for (int i = 0; i < P; i++)
        total[i][m] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + MADE * m + US_PANEL * i);
    for (int32_t begin = 0; begin < count; begin += US_BLOCK, x += M * US_BLOCK - US_BLOCK)
        for (int k = 0; k < US_BLOCK; k++, x++, wide += P * US_PANEL) {
            __m512 weights[NARROW_PANELS];
            if (asks) ask_for_rows(&ask);
            UNROLLED for (int i = 0; i < P; i++) weights[i] = _mm512_load_ps(wide + i * US_PANEL);
            EACH_ROW {
                __m512 given = _mm512_set1_ps(x[US_BLOCK * m]);
                if (P > 1) __asm__("" : "+v"(given));
                UNROLLED for (int i = 0; i < P; i++) total[i][m] = _mm512_fmadd_ps(weights[i], given, total[i][m]);
            }
        }
    EACH_ROW UNROLLED for (int i = 0; i < P; i++) _mm512_storeu_ps(out + MADE * m + US_PANEL * i, total[i][m]);
    *following = ask;
}

/* Up to NARROW_M rows from `row` on times a group of P panels: out[row][MADE]. How many rows those are. */
INLINE int32_t multiply_wide(panels p, const int P, int32_t columns, const input *in, int32_t row, int32_t num_rows, float *out) {
    _Alignas(64) float wide[WIDE_COLUMNS * NARROW_PANELS * US_PANEL];
    const float *given = find_laid(in, columns, row, num_rows);
    const int32_t left = num_rows - row, turns = ((left < NARROW_M ? left : NARROW_M) + NARROW_TURN - 1) / NARROW_TURN;
    int32_t rows = 0;
    for (int32_t begin = 0; begin < columns; begin += WIDE_COLUMNS) {
        const int32_t count = columns - begin < WIDE_COLUMNS ? columns - begin : WIDE_COLUMNS;
        row_asking following = find_following(p, columns, begin, count, count * turns);
        if (p.kind == US_F32) turn_panels(p, P, columns, begin, count, wide);
        else if (p.kind == US_F16) widen_panels(p, P, begin, count, US_F16, wide);
        else widen_panels(p, P, begin, count, US_BF16, wide);
        narrow_turn t;
        for (rows = 0; row + rows < num_rows && rows <= NARROW_M - NARROW_TURN; rows += t.count) {
            t = find_turn(row + rows, num_rows);
            const float *x = given + (size_t)rows * (size_t)columns + (size_t)(begin * t.count);
            float *to = out + MADE * (size_t)rows;
#define ROWS(M)                                                                                \
    case M:                                                                                    \
        if (p.kind == US_F32) add_wide(wide, count, x, M, P, begin == 0, 1, &following, to);    \
        else if (M >= 7) add_wide(wide, count, x, M, P, begin == 0, 0, &following, to);         \
        break /* near-even parts of WIDE_FROM rows and more are no smaller */
            switch (t.count) { EVERY_TURN(ROWS); }
#undef ROWS
        }
    }
    return rows;
}

#elif defined(__aarch64__)
#include "narrow_neon.h"

#else
#define VECTORS (US_PANEL / LANES)

INLINE void rows_of_panel(const uint8_t *w, const uint8_t *ahead, int32_t columns, const float *x, size_t stride, const int M,
                          const int kind, int32_t turn, int32_t turns, float *out) {
    vec total[VECTORS][NARROW_TURN];
    UNROLLED for (int v = 0; v < VECTORS; v++) EACH_ROW total[v][m] = fill(0);
    for (int32_t begin = 0; begin < columns; begin += US_BLOCK, ahead += 1024) {
        ask_share(ahead, turn, turns);
        for (int32_t k = begin; k < begin + US_BLOCK; k += 2, w += 64) {
            vec even[VECTORS], odd[VECTORS];
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                veci both;
                memcpy(&both, w + 4 * LANES * v, sizeof both);
                even[v] = kind == US_F16 ? widen_halves(w + 2 * LANES * v) : as_floats(both << 16);
                odd[v] = kind == US_F16 ? widen_halves(w + 32 + 2 * LANES * v) : as_floats(both & (int32_t)0xffff0000);
            }
            EACH_ROW {
                UNROLLED for (int v = 0; v < VECTORS; v++) total[v][m] += even[v] * x[m * stride + k];
            }
            EACH_ROW {
                UNROLLED for (int v = 0; v < VECTORS; v++) total[v][m] += odd[v] * x[m * stride + k + 1];
            }
        }
    }
    EACH_ROW {
        UNROLLED for (int v = 0; v < VECTORS; v++)
            store(out + MADE * m + LANES * v, total[v][m]);
    }
}

/* Up to NARROW_TURN rows from `row` on times two panels, or one: out[row][MADE]. How many rows those are. */
static int32_t multiply_turn(panels p, int32_t columns, const input *in, int32_t row, int32_t num_rows, float *out) {
    const int32_t turns = (num_rows + NARROW_TURN - 1) / NARROW_TURN, turn = ((row + 1) * turns - 1) / num_rows;
    const int32_t rows = num_rows * (turn + 1) / turns - row;
    const float *x = in->x + (size_t)row * in->stride;
#define ROWS(M)                                                                                                              \
    case M:                                                                                                                  \
        if (p.kind == US_F16) rows_of_panel(w, w + NARROW_PANELS * p.apart, columns, x, in->stride, M, US_F16, turn, turns, to); \
        else rows_of_panel(w, w + NARROW_PANELS * p.apart, columns, x, in->stride, M, US_BF16, turn, turns, to);               \
        break
    for (int32_t i = 0; i < p.count; i++) {
        const uint8_t *w = p.first + (size_t)i * p.apart;
        float *to = out + US_PANEL * i;
        switch (rows) {
            ROWS(1);
            ROWS(2);
            ROWS(3);
            ROWS(4);
#if NARROW_TURN > 4
            ROWS(5);
            ROWS(6);
#endif
        }
    }
#undef ROWS
    return rows;
}
#endif

/* Panels of a kind that are made together. */
static int32_t count_panels(int32_t kind, int32_t num_rows) {
#if defined(US_AMX)
    if (kind == US_BF16) return UNIT_PANELS;
#endif
#if defined(US_AVX512)
    if (kind == US_F32 && num_rows <= FEW_TURNED) return 1;
#endif
    (void)kind, (void)num_rows;
    return NARROW_PANELS;
}

/* Before and after products of one kind. */
static void begin_narrow(int32_t kind, int32_t num_rows) {
    (void)kind, (void)num_rows;
#if defined(US_AMX)
    if (kind == US_BF16) begin_unit(num_rows);
#endif
}
static void end_narrow(int32_t kind) {
    (void)kind;
#if defined(US_AMX)
    if (kind == US_BF16) end_unit();
#endif
}

/* Some rows from `row` on times panels that are made together: out[row][MADE]. How many rows those are. */
static int32_t multiply_panels(panels p, int32_t columns, const input *in, int32_t row, int32_t num_rows, float *out) {
#if defined(US_AMX)
    if (p.kind == US_BF16 && p.count == 2) return multiply_group(p, 1, columns, in->pieces, row, num_rows, out);
    if (p.kind == US_BF16) return multiply_group(p, 0, columns, in->pieces, row, num_rows, out);
#endif
#if defined(US_AVX512)
    if (p.kind == US_F32 && num_rows <= FEW_TURNED && p.rows == US_PANEL)
        return multiply_few((const float *)p.first, columns, in, num_rows, out);
    const int is_wide = p.kind == US_F32 || num_rows >= WIDE_FROM;
    if (is_wide && p.count == 3) return multiply_wide(p, 3, columns, in, row, num_rows, out);
    if (is_wide && p.count == 2) return multiply_wide(p, 2, columns, in, row, num_rows, out);
    if (is_wide) return multiply_wide(p, 1, columns, in, row, num_rows, out);
#endif
    return multiply_turn(p, columns, in, row, num_rows, out);
}

/* Output rows of a matrix from `begin` on, at most as many as are made together. */
static panels find_panels(const us_matrix *w, int64_t begin, int64_t count, int32_t num_rows) {
    const size_t row = (w->kind == US_F32 ? sizeof(float) : sizeof(uint16_t)) * (size_t)w->columns;
    const int32_t most = count_panels(w->kind, num_rows), rows = count < most * US_PANEL ? (int32_t)count : most * US_PANEL;
    return (panels){(const uint8_t *)w->data + (size_t)begin * row, US_PANEL * row, (rows + US_PANEL - 1) / US_PANEL, w->kind, rows};
}

#endif
