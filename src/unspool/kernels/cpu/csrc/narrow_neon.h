/* Products with numbers of 16 bits by ARM's vectors. Included by narrow.h.
 *
 * A few rows widen the weights in registers. More of them widen a span of a panel once, into the first-level cache, and take
 * turns with it, while the next span comes from memory: widening a weight of float16 by its own instruction takes as
 * long as multiplying it by four rows, one of bfloat16 half of that. Either way a sum takes its columns one after the other.
 */
#ifndef UNSPOOL_NARROW_NEON_H
#define UNSPOOL_NARROW_NEON_H

#define VECTORS (US_PANEL / LANES)
#define ASKED 1024 /* bytes that are asked for ahead of a row */
#define SPAN 512 /* columns of a panel that are widened at once: 32 KB */

/* Multiply by the column that is `lane` of four: a vector of weights, and M rows. */
#define ADD_COLUMN(v, weights, lane) EACH_ROW total[v][m] += (weights) * given[m][lane]

/* A vector of weights of the first or the second of two columns. */
INLINE float32x4_t widen_column(const uint8_t *w, const int v, const int kind, const int odd) {
    if (kind == US_F16) return (float32x4_t)widen_halves(w + 32 * odd + 2 * LANES * v);
    const uint32x4_t both = vreinterpretq_u32_u8(vld1q_u8(w + 4 * LANES * v));
    return vreinterpretq_f32_u32(odd ? vandq_u32(both, vdupq_n_u32(0xffff0000)) : vshlq_n_u32(both, 16));
}

#define SMALLER 0x1p112f /* times: see `row_of_halves` */

INLINE float32x4_t shrink_column(const uint8_t *w, const int v, const int odd) {
    const int32x4_t wide = vshll_n_s16(vreinterpret_s16_u8(vld1_u8(w + 32 * odd + 2 * LANES * v)), 13);
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_s32(wide), vdupq_n_u32(0x70000000)));
}

/* Whether floats that are too small for their exponent are zeros here (FPCR's bit FZ). */
static int flushes_small(void) {
    uint64_t settings;
    __asm__ volatile("mrs %0, fpcr" : "=r"(settings));
    return settings >> 24 & 1;
}

/* M rows times a panel whose weights are widened in registers. */
INLINE void rows_of_panel(const uint8_t *w, int32_t columns, const float *x, size_t stride, const int M, const int kind, float *out) {
    const int goes_first = kind == US_F16 || M == 2; /* two columns are widened before anything is multiplied by them */
    float32x4_t total[VECTORS][NARROW_TURN];
    UNROLLED for (int v = 0; v < VECTORS; v++) EACH_ROW total[v][m] = vdupq_n_f32(0);
    for (int32_t k = 0; k < columns; k += 4, w += 128) {
        float32x4_t given[NARROW_TURN];
        EACH_ROW given[m] = vld1q_f32(x + m * stride + k);
        UNROLLED for (int pair = 0; pair < 2; pair++) {
            const uint8_t *from = w + 64 * pair;
            float32x4_t even[VECTORS], odd[VECTORS];
            __builtin_prefetch(from + ASKED);
            UNROLLED for (int v = 0; v < VECTORS && goes_first; v++) even[v] = widen_column(from, v, kind, 0);
            UNROLLED for (int v = 0; v < VECTORS && goes_first; v++) odd[v] = widen_column(from, v, kind, 1);
            UNROLLED for (int v = 0; v < VECTORS; v++) ADD_COLUMN(v, goes_first ? even[v] : widen_column(from, v, kind, 0), 2 * pair);
            UNROLLED for (int v = 0; v < VECTORS; v++) ADD_COLUMN(v, goes_first ? odd[v] : widen_column(from, v, kind, 1), 2 * pair + 1);
        }
    }
    EACH_ROW UNROLLED for (int v = 0; v < VECTORS; v++) vst1q_f32(out + MADE * m + LANES * v, total[v][m]);
}

/* One row times a panel of bfloat16, nearly as fast as it comes from memory. Zeros are laid beside the halves of even columns,
 * for one of the pipes alone shifts. */
#define ADD_TWO(v, first, second)                                            \
    do {                                                                     \
        const uint8_t *from = w + 32 * (first) + 4 * LANES * (v);             \
        uint8x16_t a, b;                                                     \
        float32x4_t even_a, even_b, odd_a, odd_b;                            \
        ORDERED_LOAD(a, from);                                               \
        ORDERED_LOAD(b, from + 4 * LANES);                                   \
        ORDERED("trn1 %0.8h, %1.8h, %2.8h", even_a, zeros, a);               \
        ORDERED("trn1 %0.8h, %1.8h, %2.8h", even_b, zeros, b);               \
        ORDERED("and %0.16b, %1.16b, %2.16b", odd_a, upper, a);              \
        ORDERED("and %0.16b, %1.16b, %2.16b", odd_b, upper, b);              \
        ORDERED_ADD(total[v], ".s[" #first "]", even_a, given);              \
        ORDERED_ADD(total[v + 1], ".s[" #first "]", even_b, given);          \
        ORDERED_ADD(total[v], ".s[" #second "]", odd_a, given);              \
        ORDERED_ADD(total[v + 1], ".s[" #second "]", odd_b, given);          \
    } while (0)

static void row_of_bfloats(const uint8_t *w, int32_t columns, const float *x, float *out) {
    const uint32x4_t upper = vdupq_n_u32(0xffff0000), zeros = vdupq_n_u32(0);
    float32x4_t total[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++) total[v] = vdupq_n_f32(0);
    for (int32_t k = 0; k < columns; k += 4, w += 128) {
        const float32x4_t given = vld1q_f32(x + k);
        __builtin_prefetch(w + ASKED);
        __builtin_prefetch(w + ASKED + 64);
        ADD_TWO(0, 0, 1);
        ADD_TWO(2, 0, 1);
        ADD_TWO(0, 2, 3);
        ADD_TWO(2, 2, 3);
    }
    UNROLLED for (int v = 0; v < VECTORS; v++) vst1q_f32(out + LANES * v, total[v]);
}
#undef ADD_TWO

/* One row times a panel of float16. The instruction that widens them takes two cycles of one pipe, so half of them are read by
 * others: as floats that are 2^112 times smaller, their bits at the lower end of a float's exponent, without the copies of the
 * sign that shifting leaves there. What those are multiplied by is as much larger. */
static void row_of_halves(const uint8_t *w, int32_t columns, const float *x, float *out) {
    float32x4_t total[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++) total[v] = vdupq_n_f32(0);
    for (int32_t k = 0; k < columns; k += 4, w += 128) {
        const float32x4_t given = vld1q_f32(x + k), larger = given * SMALLER;
        float32x4_t wide[4][VECTORS];
        __builtin_prefetch(w + ASKED);
        __builtin_prefetch(w + ASKED + 64);
        UNROLLED for (int c = 0; c < 4; c++) {
            uint8x16_t first, second;
            ORDERED_LOAD(first, w + 32 * c);
            ORDERED_LOAD(second, w + 32 * c + 16);
            ORDERED_TO("sshll %0.4s, %1.4h, #13", wide[c][2], second);
            ORDERED_TO("fcvtl %0.4s, %1.4h", wide[c][0], first);
            ORDERED_TO("sshll2 %0.4s, %1.8h, #13", wide[c][3], second);
            ORDERED_IN("bic %0.4s, #0x70, lsl #24", wide[c][2]);
            ORDERED_TO("fcvtl2 %0.4s, %1.8h", wide[c][1], first);
            ORDERED_IN("bic %0.4s, #0x70, lsl #24", wide[c][3]);
        }
#define ADD_HALVES(c)                                        \
    ORDERED_ADD(total[0], ".s[" #c "]", wide[c][0], given);   \
    ORDERED_ADD(total[1], ".s[" #c "]", wide[c][1], given);   \
    ORDERED_ADD(total[2], ".s[" #c "]", wide[c][2], larger);  \
    ORDERED_ADD(total[3], ".s[" #c "]", wide[c][3], larger)
        ADD_HALVES(0);
        ADD_HALVES(1);
        ADD_HALVES(2);
        ADD_HALVES(3);
#undef ADD_HALVES
    }
    UNROLLED for (int v = 0; v < VECTORS; v++) vst1q_f32(out + LANES * v, total[v]);
}

/* Whether `row_of_halves` has read all weights, and no activation became infinite. */
static int are_halves_sound(const float *made) {
    uint32x4_t is_finite = vdupq_n_u32(UINT32_MAX);
    UNROLLED for (int v = 0; v < VECTORS; v++)
        is_finite = vandq_u32(is_finite, vcltq_f32(vabsq_f32(vld1q_f32(made + LANES * v)), vdupq_n_f32(INFINITY)));
    return !flushes_small() && vminvq_u32(is_finite);
}

/* A few rows times panels. */
static void multiply_few(panels p, int32_t columns, const float *x, size_t stride, int32_t num_rows, float *out) {
    for (int32_t i = 0; i < p.count; i++, p.first += p.apart, out += US_PANEL) {
#define ROWS(M, kind) \
    case 2 * M + (kind == US_F16): rows_of_panel(p.first, columns, x, stride, M, kind, out); break
        switch (2 * num_rows + (p.kind == US_F16)) {
            case 2:
                row_of_bfloats(p.first, columns, x, out);
                break;
            case 3:
                row_of_halves(p.first, columns, x, out);
                if (!are_halves_sound(out)) rows_of_panel(p.first, columns, x, stride, 1, US_F16, out);
                break;
            ROWS(2, US_F16);
            ROWS(3, US_F16);
            ROWS(4, US_F16);
            ROWS(5, US_F16);
            ROWS(2, US_BF16);
            ROWS(3, US_BF16);
            ROWS(4, US_BF16);
            ROWS(5, US_BF16);
        }
#undef ROWS
    }
}

/* Columns of a panel as floats, one after the other. Half of those of float16 go by way of smaller floats, as in `row_of_halves`,
 * unless those are zeros here. */
static void widen_span(const uint8_t *w, int32_t columns, int32_t kind, float *wide) {
    const int is_mixed = kind == US_F16 && !flushes_small();
    for (int32_t k = 0; k < columns; k += 2, w += 64, wide += 2 * US_PANEL)
        UNROLLED for (int odd = 0; odd < 2; odd++) {
            float *to = wide + US_PANEL * odd;
            if (is_mixed) {
                UNROLLED for (int v = 0; v < 2; v++) vst1q_f32(to + LANES * v, widen_column(w, v, US_F16, odd));
                UNROLLED for (int v = 2; v < VECTORS; v++) vst1q_f32(to + LANES * v, shrink_column(w, v, odd) * SMALLER);
                continue;
            }
            UNROLLED for (int v = 0; v < VECTORS; v++)
                vst1q_f32(to + LANES * v, kind == US_F16 ? widen_column(w, v, US_F16, odd) : widen_column(w, v, US_BF16, odd));
        }
}

/* M rows times a span that was widened; sums go on from those before it, if there are any. `ahead` is where this turn's share of
 * the span that comes next lies, of which it asks for `asked` bytes with every four columns. */
INLINE void rows_of_span(const float *wide, int32_t columns, const float *x, size_t stride, const int M, const int goes_on,
                         const uint8_t *ahead, size_t asked, float *out) {
    float32x4_t total[VECTORS][NARROW_TURN];
    UNROLLED for (int v = 0; v < VECTORS; v++)
        EACH_ROW total[v][m] = goes_on ? vld1q_f32(out + MADE * m + LANES * v) : vdupq_n_f32(0);
    for (int32_t k = 0; k < columns; k += 4, wide += 4 * US_PANEL, ahead += asked) {
        float32x4_t given[NARROW_TURN];
        __builtin_prefetch(ahead, 0, 2);
        EACH_ROW given[m] = vld1q_f32(x + m * stride + k);
        UNROLLED for (int v = 0; v < VECTORS; v++) ADD_COLUMN(v, vld1q_f32(wide + LANES * v), 0);
        UNROLLED for (int v = 0; v < VECTORS; v++) ADD_COLUMN(v, vld1q_f32(wide + US_PANEL + LANES * v), 1);
        UNROLLED for (int v = 0; v < VECTORS; v++) ADD_COLUMN(v, vld1q_f32(wide + 2 * US_PANEL + LANES * v), 2);
        UNROLLED for (int v = 0; v < VECTORS; v++) ADD_COLUMN(v, vld1q_f32(wide + 3 * US_PANEL + LANES * v), 3);
    }
    EACH_ROW UNROLLED for (int v = 0; v < VECTORS; v++) vst1q_f32(out + MADE * m + LANES * v, total[v][m]);
}

/* Several rows times panels: all of them take turns with a span. */
static void multiply_many(panels p, int32_t columns, const float *x, size_t stride, int32_t num_rows, float *out) {
    const int32_t turns = (num_rows + NARROW_TURN - 1) / NARROW_TURN;
    _Alignas(64) float wide[SPAN * US_PANEL];
    for (int32_t i = 0; i < p.count; i++, p.first += p.apart, out += US_PANEL)
        for (int32_t begin = 0; begin < columns; begin += SPAN) {
            const int32_t count = columns - begin < SPAN ? columns - begin : SPAN;
            const uint8_t *next = p.first + sizeof(uint16_t) * US_PANEL * (size_t)(begin + count);
            const size_t asked = 4 * sizeof(uint16_t) * US_PANEL / (size_t)turns;
            widen_span(p.first + sizeof(uint16_t) * US_PANEL * (size_t)begin, count, p.kind, wide);
            for (int32_t turn = 0; turn < turns; turn++) {
                const int32_t row = num_rows * turn / turns;
                const uint8_t *ahead = next + asked * (size_t)(count / 4) * (size_t)turn;
                const float *from = x + (size_t)row * stride + begin;
                float *to = out + MADE * row;
#define ROWS(M)                                                            \
    case M:                                                                \
        if (begin) rows_of_span(wide, count, from, stride, M, 1, ahead, asked, to);  \
        else rows_of_span(wide, count, from, stride, M, 0, ahead, asked, to);        \
        break
                switch (num_rows * (turn + 1) / turns - row) {
                    ROWS(1);
                    ROWS(2);
                    ROWS(3);
                    ROWS(4);
                    ROWS(5);
                }
#undef ROWS
            }
        }
}
#undef ADD_COLUMN

/* A near-even part of all rows, of at most NARROW_M from `row` on, times panels: out[row][MADE]. How many rows those are. */
static int32_t multiply_turn(panels p, int32_t columns, const input *in, int32_t row, int32_t num_rows, float *out) {
    const int32_t parts = (num_rows + NARROW_M - 1) / NARROW_M, part = ((row + 1) * parts - 1) / num_rows;
    const int32_t rows = num_rows * (part + 1) / parts - row;
    const float *x = in->x + (size_t)row * in->stride;
    if (rows <= NARROW_TURN) multiply_few(p, columns, x, in->stride, rows, out);
    else multiply_many(p, columns, x, in->stride, rows, out);
    return rows;
}

#endif
