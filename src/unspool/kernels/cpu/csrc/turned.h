/* Plain rows of floats turned into panels of 16 outputs, which are multiplied as those of narrow.h. Included by it for AVX-512.
 *
 * A vector then holds a column of 16 outputs, and is multiplied by one activation; rows as they lie would need two loads for
 * a product. Up to FEW_TURNED rows of activations have all their sums in registers, and so is what was turned. For more,
 * some columns of a few panels are turned into the first-level cache. A sum is made in the order of the columns in either.
 */
#ifndef UNSPOOL_TURNED_H
#define UNSPOOL_TURNED_H

#define FEW_TURNED (2 * NARROW_TURN)
#define TURNED_AHEAD 512 /* columns after which weights are asked for */

/* 16 columns of 16 rows of weights, of which those from `count` on are the last one. */
INLINE void turn_columns(const float *w, size_t pitch, const int is_whole, int32_t count, __m512 (*to)[4]) {
    __m512 fours[4][4]; /* each has the same four columns of four rows, four from each other */
    UNROLLED for (int i = 0; i < 4; i++) {
        __m512 row[4];
        UNROLLED for (int j = 0; j < 4; j++)
            row[j] = _mm512_loadu_ps(w + (size_t)(is_whole || i + 4 * j < count ? i + 4 * j : count - 1) * pitch);
        const __m512 a = _mm512_shuffle_f32x4(row[0], row[1], 0x44), b = _mm512_shuffle_f32x4(row[0], row[1], 0xee);
        const __m512 c = _mm512_shuffle_f32x4(row[2], row[3], 0x44), d = _mm512_shuffle_f32x4(row[2], row[3], 0xee);
        fours[0][i] = _mm512_shuffle_f32x4(a, c, 0x88);
        fours[1][i] = _mm512_shuffle_f32x4(a, c, 0xdd);
        fours[2][i] = _mm512_shuffle_f32x4(b, d, 0x88);
        fours[3][i] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
    UNROLLED for (int i = 0; i < 4; i++) {
        const __m512 a = _mm512_unpacklo_ps(fours[i][0], fours[i][1]), b = _mm512_unpackhi_ps(fours[i][0], fours[i][1]);
        const __m512 c = _mm512_unpacklo_ps(fours[i][2], fours[i][3]), d = _mm512_unpackhi_ps(fours[i][2], fours[i][3]);
        to[i][0] = _mm512_shuffle_ps(a, c, 0x44);
        to[i][1] = _mm512_shuffle_ps(a, c, 0xee);
        to[i][2] = _mm512_shuffle_ps(b, d, 0x44);
        to[i][3] = _mm512_shuffle_ps(b, d, 0xee);
    }
}

/* M rows and N others times a panel; either lie as lay_row has them. */
INLINE void rows_of_turned(const float *w, int32_t columns, const float *x, const int M, const float *others, const int N, float *out) {
    const size_t pitch = (size_t)columns;
    __m512 total[FEW_TURNED];
    EACH_ROW total[m] = _mm512_setzero_ps();
    UNROLLED for (int n = 0; n < N; n++) total[M + n] = _mm512_setzero_ps();
    for (int32_t k = 0; k < columns; k += LANES, w += LANES) {
        const float *ahead = w + TURNED_AHEAD + (k + TURNED_AHEAD < columns ? 0 : (US_PANEL - 1) * pitch); /* or of the next panel */
        UNROLLED for (int i = 0; i < US_PANEL / 2; i++) {
            __builtin_prefetch(ahead + (size_t)i * pitch);
            __builtin_prefetch(ahead + (size_t)(i + US_PANEL / 2) * pitch);
        }
        __m512 turned[4][4];
        turn_columns(w, pitch, 1, US_PANEL, turned);
        UNROLLED for (int i = 0; i < 4; i++) UNROLLED for (int j = 0; j < 4; j++) {
            const int at = 4 * i + j;
            EACH_ROW total[m] = _mm512_fmadd_ps(turned[i][j], _mm512_set1_ps(x[US_BLOCK * m + at]), total[m]);
            UNROLLED for (int n = 0; n < N; n++)
                total[M + n] = _mm512_fmadd_ps(turned[i][j], _mm512_set1_ps(others[US_BLOCK * n + at]), total[M + n]);
        }
        x += k % US_BLOCK ? US_BLOCK * M - LANES : LANES;
        others += k % US_BLOCK ? US_BLOCK * N - LANES : LANES;
    }
    EACH_ROW _mm512_storeu_ps(out + MADE * m, total[m]);
    UNROLLED for (int n = 0; n < N; n++) _mm512_storeu_ps(out + MADE * (M + n), total[M + n]);
}

/* All of up to FEW_TURNED rows times a whole panel: out[row][MADE]. */
static int32_t multiply_few(const float *w, int32_t columns, const input *in, int32_t num_rows, float *out) {
    const float *x = find_laid(in, columns, 0, num_rows);
    const float *others = x + (size_t)find_turn(0, num_rows).count * (size_t)columns; /* the second turn's rows, as many or one more */
#define ONE(M) \
    case M: rows_of_turned(w, columns, x, M, x, 0, out); break
#define TWO(M) \
    case M: rows_of_turned(w, columns, x, (M) / 2, others, (M) - (M) / 2, out); break
    switch (num_rows) {
        EVERY_TURN(ONE);
        TWO(9);
        TWO(10);
        TWO(11);
        TWO(12);
        TWO(13);
        TWO(14);
        TWO(15);
        TWO(16);
    }
#undef ONE
#undef TWO
    return num_rows;
}

/* One output of one row, with the bits that it has among others. */
static float multiply_single(const float *w, int32_t columns, const float *x) {
    float total = 0;
    for (int32_t k = 0; k < columns; k++) total = __builtin_fmaf(w[k], x[k], total);
    return total;
}

/* Some columns of P panels, of which the last may have fewer rows: (columns, P, 16). */
INLINE void turn_panels(panels p, const int P, int32_t columns, int32_t begin, int32_t count, float *wide) {
    UNROLLED for (int i = 0; i < P; i++) {
        const float *w = (const float *)(p.first + (size_t)i * p.apart) + begin;
        const int32_t rows = p.rows - i * US_PANEL;
        for (int32_t k = 0; k < count; k += LANES) {
            __m512 turned[4][4];
            if (rows >= US_PANEL) turn_columns(w + k, (size_t)columns, 1, US_PANEL, turned);
            else turn_columns(w + k, (size_t)columns, 0, rows, turned);
            UNROLLED for (int n = 0; n < 4; n++) UNROLLED for (int m = 0; m < 4; m++)
                _mm512_store_ps(wide + ((k + 4 * n + m) * P + i) * US_PANEL, turned[n][m]);
        }
    }
}

/* Weights that are turned next. Each column that is multiplied asks for its share of them, because lines that are asked for at
 * once hold up the loads behind them. */
typedef struct {
    const float *row;
    size_t pitch;
    int32_t line, per_row;     /* lines of a row that are asked for */
    int32_t lines, turns, due; /* so many lines in so many turns */
} row_asking;

/* To be asked for in so many turns: what follows `count` columns from `begin` on, of these panels or of those behind them. */
static row_asking find_following(panels p, int32_t columns, int32_t begin, int32_t count, int32_t turns) {
    const int32_t end = begin + count, first = end < columns ? end : 0;
    const int32_t lines = (columns - first < WIDE_COLUMNS ? columns - first : WIDE_COLUMNS) / LANES;
    const float *panel = (const float *)p.first + (end < columns ? 0 : (size_t)p.rows * (size_t)columns);
    return (row_asking){panel + first, (size_t)columns, 0, lines, p.rows * lines, turns, 0};
}

INLINE void ask_for_rows(row_asking *a) {
    for (a->due += a->lines; a->due >= a->turns; a->due -= a->turns) {
        __builtin_prefetch(a->row + LANES * a->line, 0, 2);
        if (++a->line < a->per_row) continue;
        a->line = 0;
        a->row += a->pitch;
    }
}

#endif
