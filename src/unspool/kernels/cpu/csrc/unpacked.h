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
#define MOST_ROWS (GROUP_PANELS * MOST_UNPACKED) /* that are multiplied at once */

/* For each block 8 groups of 4 columns, of all 16 rows side by side; what they are multiplied by, and what is added: with 8
 * bits nothing, with 6 what the second half of the block is multiplied by. */
typedef struct {
    _Alignas(64) uint8_t codes[UNPACKED_SPAN][8][64];
    float scales[UNPACKED_SPAN][OUTPUTS], others[UNPACKED_SPAN][OUTPUTS];
} unpacked;

/* What is read next of a tile and of the one after it. Each block that is multiplied asks for its share, because lines that
 * are asked for at once hold up the loads behind them. */
typedef struct {
    const uint8_t *first, *second;
    int32_t lines, turns, due; /* so many lines of both are asked for in so many turns */
} asking;

INLINE void ask_in_turn(asking *a) {
    for (a->due += a->lines; a->due >= a->turns; a->due -= a->turns, a->first += 64, a->second += 64) {
        __builtin_prefetch(a->first, 0, 2);
        __builtin_prefetch(a->second, 0, 2);
    }
}

/* Blocks from `first` on of a tile and the one after it; of the last tile alone, twice. */
INLINE void unpack_pair(const uint8_t *w, int blocks, int first, int count, int is_q8, int is_pair, unpacked *to) {
    const size_t bytes = is_q8 ? Q8_BYTES : Q4_BYTES;
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t *second = is_pair ? w + (size_t)blocks * bytes : w;
    w += (size_t)first * bytes, second += (size_t)first * bytes;
    for (int b = 0; b < count; b++, w += bytes, second += bytes) {
        _mm512_storeu_ps(to->scales[b], both_halves(w, second));
        UNROLLED for (int g = 0; is_q8 && g < 8; g++) { /* moved by 128 to lose the sign, as in tiles.h */
            const __m512i v = both_tiles(w + 16 + 32 * g, second + 16 + 32 * g);
            _mm512_store_si512(to->codes[b][g], _mm512_xor_si512(v, _mm512_set1_epi8((char)0x80)));
        }
        if (is_q8) continue;
        _mm512_storeu_ps(to->others[b], both_halves(w + 16, second + 16));
        UNROLLED for (int g = 0; g < 4; g++) {
            const __m512i v = both_tiles(w + 32 + 32 * g, second + 32 + 32 * g);
            _mm512_store_si512(to->codes[b][g], _mm512_and_si512(v, low));
            _mm512_store_si512(to->codes[b][4 + g], _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
        }
    }
}

/* The same of super-blocks, of which a span has whole ones. */
INLINE void unpack_supers(const uint8_t *w, int supers, int first, int count, const int kind, int is_pair, unpacked *to) {
    const uint8_t *second = is_pair ? w + (size_t)supers * K_BYTES(kind) : w;
    const size_t before = (size_t)(first / K_BLOCKS(kind)) * K_BYTES(kind);
    super_scales s;
    w += before, second += before;
    for (int at = 0; at < count;) {
        read_super(w, second, kind, &s);
        w += K_HEADER(kind), second += K_HEADER(kind);
        for (int b = 0; b < K_BLOCKS(kind); b++, at++, w += K_BLOCK(kind), second += K_BLOCK(kind)) {
            codes extra[2];
            load_extra(w, second, kind, extra);
            UNROLLED for (int g = 0; g < 4; g++) {
                codes l, h;
                part_codes(w, second, extra, kind, g, &l, &h);
                _mm512_store_si512(to->codes[at][g], l);
                _mm512_store_si512(to->codes[at][4 + g], h);
            }
            const __m512 d = _mm512_loadu_ps(s.scales[kind == US_K6 ? 2 * b : b]);
            const __m512 other = kind == US_K6 ? _mm512_loadu_ps(s.scales[2 * b + 1]) : -_mm512_loadu_ps(s.minimums[b]);
            _mm512_storeu_ps(to->scales[at], d);
            _mm512_storeu_ps(to->others[at], other);
        }
    }
}

/* Add a span's products to the totals of a panel's rows. */
INLINE void add_span(const unpacked *u, int blocks, activations a, const int M, const int kind, asking *next, float (*made)[OUTPUTS]) {
    __m512 total[MOST_UNPACKED];
    asking ask = *next;
    EACH_ROW total[m] = _mm512_loadu_ps(made[m]);
    for (int b = 0; b < blocks; b++, a.quants += 32 * M, a.scales += M, a.sums += M, a.offsets += 2 * M) {
        const __m512 d = _mm512_loadu_ps(u->scales[b]), other = kind == US_Q8 ? d : _mm512_loadu_ps(u->others[b]);
        ask_in_turn(&ask);
        UNROLLED for (int half = 0; half < 2; half++) { /* with 6 bits they have scales of their own; else the first is all */
            if (half && kind != US_K6) break;
            __m512i dot[MOST_UNPACKED];
            EACH_ROW dot[m] = kind == US_K6 ? _mm512_set1_epi32(a.offsets[2 * m + half]) : _mm512_setzero_si512();
            UNROLLED for (int g = 0; g < 8; g++) {
                if (kind == US_K6 && g / 4 != half) continue;
                const __m512i v = _mm512_load_si512(u->codes[b][g]);
                EACH_ROW dot[m] = add_four(dot[m], v, a.quants + 32 * m + 4 * g);
            }
            EACH_ROW {
                if (kind == US_Q8) total[m] = add_q8(total[m], dot[m], d, a.scales[m], a.sums + m);
                else if (kind == US_K6)
                    total[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[m]), _mm512_mul_ps(half ? other : d, _mm512_set1_ps(a.scales[m])), total[m]);
                else total[m] = add_q4(total[m], dot[m], d, other, a.scales[m], a.sums[m]);
            }
        }
    }
    EACH_ROW _mm512_storeu_ps(made[m], total[m]);
    *next = ask;
}

/* Near-even parts of more rows than MOST_M have six at least. */
static void add_panel(const unpacked *u, int blocks, activations a, int M, int32_t kind, asking *next, float (*made)[OUTPUTS]) {
#define SPAN(M)                                                              \
    case M:                                                                  \
        if (kind == US_Q8) add_span(u, blocks, a, M, US_Q8, next, made);      \
        else if (kind == US_K6) add_span(u, blocks, a, M, US_K6, next, made); \
        else add_span(u, blocks, a, M, US_Q4, next, made);                    \
        break;
    switch (M) { SPAN(6) SPAN(7) SPAN(8) SPAN(9) SPAN(10) SPAN(11) SPAN(12) }
#undef SPAN
}

static void unpack_span(const us_matrix *w, const uint8_t *tile, int first, int count, int is_pair, unpacked *to) {
    const int blocks = w->columns / US_BLOCK, supers = blocks / 8;
    switch (w->kind) {
    case US_Q8: unpack_pair(tile, blocks, first, count, 1, is_pair, to); break;
    case US_Q4: unpack_pair(tile, blocks, first, count, 0, is_pair, to); break;
    case US_K4: unpack_supers(tile, supers, first, count, US_K4, is_pair, to); break;
    case US_K5: unpack_supers(tile, supers, first, count, US_K5, is_pair, to); break;
    case US_K6: unpack_supers(tile, supers, first, count, US_K6, is_pair, to); break;
    default: unpack_supers(tile, blocks, first, count, US_Q5, is_pair, to);
    }
}

/* Up to OUTPUTS output rows from `first`, for as many panels from `row` on as a group has: out[row][OUTPUTS]. How many rows
 * those have. */
static int32_t multiply_unpacked(const us_matrix *w, int32_t first, int32_t count, activations all, int32_t row, int32_t num_rows,
                                 float *out) {
    const int32_t parts = (num_rows + MOST_UNPACKED - 1) / MOST_UNPACKED; /* as find_panel has them */
    int32_t num_panels = 0, part = row ? find_panel(w, row, num_rows).part : 0, firsts[GROUP_PANELS + 1] = {row};
    while (num_panels < GROUP_PANELS && part < parts) firsts[++num_panels] = num_rows * ++part / parts;
    const int32_t last = firsts[num_panels];
    if (w->rest) { /* tiles of two kinds may be made together */
        const int32_t left = w->own - first;
        if (count > left)
            multiply_unpacked(w->rest, left > 0 ? 0 : -left, left > 0 ? count - left : count, all, row, num_rows, left > 0 ? out + left : out);
        if (left <= 0) return last - row;
        count = count < left ? count : left;
    }
    const int blocks = w->columns / US_BLOCK, is_pair = count > US_TILE;
    const size_t bytes = us_block_bytes(w->kind), apart = (size_t)blocks * bytes;
    const uint8_t *tile = (const uint8_t *)w->data + (size_t)(first / US_TILE) * apart;
    _Alignas(64) float some[MOST_ROWS][OUTPUTS];
    float(*made)[OUTPUTS] = is_pair ? (float(*)[OUTPUTS])out : some;
    unpacked u;
    memset(made, 0, sizeof *made * (size_t)(last - row));
    for (int from = 0; from < blocks; from += UNPACKED_SPAN) {
        const int span = blocks - from < UNPACKED_SPAN ? blocks - from : UNPACKED_SPAN;
        const int after = from + span < blocks ? from + span : 0, left = blocks - after;
        const uint8_t *next = tile + (size_t)after * bytes + (after ? 0 : 2 * apart);
        const int32_t lines = (int32_t)((size_t)(left < UNPACKED_SPAN ? left : UNPACKED_SPAN) * bytes / 64) + 1;
        asking ask = {next, next + apart, lines, num_panels * span, 0};
        unpack_span(w, tile, from, span, is_pair, &u);
        for (int32_t i = 0; i < num_panels; i++) {
            const int32_t begins = firsts[i], rows = firsts[i + 1] - begins;
            const size_t at = (size_t)begins * (size_t)blocks + (size_t)from * (size_t)rows;
            const activations a = {all.quants + at * US_BLOCK, all.scales + at, all.sums + at, all.offsets + 2 * at};
            add_panel(&u, span, a, rows, w->kind, &ask, made + (begins - row));
        }
    }
    for (int32_t m = 0; m < last - row && !is_pair; m++) memcpy(out + (size_t)OUTPUTS * (size_t)m, made[m], sizeof(float) * US_TILE);
    return last - row;
}

#else
#define MOST_ROWS MOST_M
#endif

#endif
