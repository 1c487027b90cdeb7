/* Products of more rows than a panel has: a pair of tiles is unpacked once, for a group of panels. Included by products.h.
 *
 * The sums of a block are whole numbers, as those of tiles.h are, and go into the floats by the same operations in the same
 * order: a row has the same bits alone and in a batch. A span of blocks at a time, so that its weights stay in the
 * first-level cache beside a panel's activations.
 */
#ifndef UNSPOOL_UNPACKED_H
#define UNSPOOL_UNPACKED_H

#if defined(US_AVX512)

#define UNPACKED_SPAN 32 /* blocks */
#define GROUP_PANELS 8
#define MOST_ROWS (GROUP_PANELS * MOST_M) /* that are multiplied at once */

/* For each block 8 groups of 4 columns, of all 16 rows side by side; what they are multiplied by, and what is added. */
typedef struct {
    _Alignas(64) uint8_t codes[UNPACKED_SPAN][8][64];
    float scales[UNPACKED_SPAN][OUTPUTS], minimums[UNPACKED_SPAN][OUTPUTS];
} unpacked;

/* Blocks from `first` on of a tile and the one after it; of the last tile alone, twice. */
INLINE void unpack_pair(const uint8_t *w, int blocks, int first, int count, int is_q8, int is_pair, unpacked *to) {
    const size_t bytes = is_q8 ? Q8_BYTES : Q4_BYTES;
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t *end = w + (size_t)blocks * bytes, *second = is_pair ? end : w;
    w += (size_t)first * bytes, second += (size_t)first * bytes;
    for (int b = 0; b < count; b++, w += bytes, second += bytes) {
        ask_ahead(w, second, end, (int)bytes);
        _mm512_storeu_ps(to->scales[b], both_halves(w, second));
        UNROLLED for (int g = 0; is_q8 && g < 8; g++) { /* moved by 128 to lose the sign, as in tiles.h */
            const __m512i v = both_tiles(w + 16 + 32 * g, second + 16 + 32 * g);
            _mm512_store_si512(to->codes[b][g], _mm512_xor_si512(v, _mm512_set1_epi8((char)0x80)));
        }
        if (is_q8) continue;
        _mm512_storeu_ps(to->minimums[b], both_halves(w + 16, second + 16));
        UNROLLED for (int g = 0; g < 4; g++) {
            const __m512i v = both_tiles(w + 32 + 32 * g, second + 32 + 32 * g);
            _mm512_store_si512(to->codes[b][g], _mm512_and_si512(v, low));
            _mm512_store_si512(to->codes[b][4 + g], _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
        }
    }
}

/* Add a span's products to the totals of a panel's rows. */
INLINE void add_span(const unpacked *u, int blocks, activations a, const int M, const int is_q8, float (*made)[OUTPUTS]) {
    __m512 total[MOST_M];
    EACH_ROW total[m] = _mm512_loadu_ps(made[m]);
    for (int b = 0; b < blocks; b++, a.quants += 32 * M, a.scales += M, a.sums += M) {
        const __m512 d = _mm512_loadu_ps(u->scales[b]), least = is_q8 ? d : _mm512_loadu_ps(u->minimums[b]);
        __m512i dot[MOST_M];
        EACH_ROW dot[m] = _mm512_setzero_si512();
        UNROLLED for (int g = 0; g < 8; g++) {
            const __m512i v = _mm512_load_si512(u->codes[b][g]);
            EACH_ROW dot[m] = add_four(dot[m], v, a.quants + 32 * m + 4 * g);
        }
        EACH_ROW total[m] = is_q8 ? add_q8(total[m], dot[m], d, a.scales[m], a.sums[m]) : add_q4(total[m], dot[m], d, least, a.scales[m], a.sums[m]);
    }
    EACH_ROW _mm512_storeu_ps(made[m], total[m]);
}

static void add_panel(const unpacked *u, int blocks, activations a, int M, int is_q8, float (*made)[OUTPUTS]) {
#define SPAN(M)                                            \
    case M:                                                \
        if (is_q8) add_span(u, blocks, a, M, 1, made);      \
        else add_span(u, blocks, a, M, 0, made);            \
        break;
    switch (M) { SPAN(1) SPAN(2) SPAN(3) SPAN(4) SPAN(5) SPAN(6) SPAN(7) SPAN(8) }
#undef SPAN
}

/* Up to OUTPUTS output rows from `first`, for as many panels from `row` on as a group has: out[row][OUTPUTS]. How many rows
 * those have. */
static int32_t multiply_unpacked(const us_matrix *w, int32_t first, int32_t count, activations all, int32_t row, int32_t num_rows,
                                 float *out) {
    int32_t num_panels = 0, last = row;
    panel panels[GROUP_PANELS];
    for (; num_panels < GROUP_PANELS && last < num_rows; last += panels[num_panels++].count)
        panels[num_panels] = find_panel(w, last, num_rows);
    if (w->rest) { /* tiles of two kinds may be made together */
        const int32_t left = w->own - first;
        if (count > left)
            multiply_unpacked(w->rest, left > 0 ? 0 : -left, left > 0 ? count - left : count, all, row, num_rows, left > 0 ? out + left : out);
        if (left <= 0) return last - row;
        count = count < left ? count : left;
    }
    const int is_q8 = w->kind == US_Q8, blocks = w->columns / US_BLOCK, is_pair = count > US_TILE;
    const uint8_t *tile = (const uint8_t *)w->data + (size_t)(first / US_TILE) * (size_t)blocks * us_block_bytes(w->kind);
    float made[MOST_ROWS][OUTPUTS];
    unpacked u;
    memset(made, 0, sizeof made[0] * (size_t)(last - row));
    for (int from = 0; from < blocks; from += UNPACKED_SPAN) {
        const int span = blocks - from < UNPACKED_SPAN ? blocks - from : UNPACKED_SPAN;
        if (is_q8) unpack_pair(tile, blocks, from, span, 1, is_pair, &u);
        else unpack_pair(tile, blocks, from, span, 0, is_pair, &u);
        for (int32_t i = 0; i < num_panels; i++) {
            const panel p = panels[i];
            const size_t at = (size_t)p.first * (size_t)blocks + (size_t)from * (size_t)p.count;
            const activations a = {all.quants + at * US_BLOCK, all.scales + at, all.sums + at, NULL};
            add_panel(&u, span, a, p.count, is_q8, made + (p.first - row));
        }
    }
    for (int32_t m = 0; m < last - row; m++) memcpy(out + (size_t)OUTPUTS * (size_t)m, made[m], sizeof(float) * (is_pair ? OUTPUTS : US_TILE));
    return last - row;
}

/* Whether a matrix lies in tiles that can be unpacked so. */
static int is_tiled(const us_matrix *w) {
    for (; w; w = w->rest)
        if (w->kind != US_Q4 && w->kind != US_Q8) return 0;
    return 1;
}

#else
#define MOST_ROWS MOST_M
#endif

#endif
