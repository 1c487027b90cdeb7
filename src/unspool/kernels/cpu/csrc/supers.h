/* Products of one tile of super-blocks: GGUF's Q4_K, Q5_K and Q6_K, 8 output rows of them put together; and of blocks of 5
 * bits, GGUF's Q5_0 and Q5_1, which are super-blocks of one block here.
 *
 * A super-block is 256 columns: 8 blocks of 32, whose scales are few bits times a float16 of the super-block. A tile's bytes
 * are those of its 8 rows, as many as in the file, in this order:
 *
 *   4 and 5 bits: 8 float16 (of scales), 8 float16 (of minimums), 12 x 8 bytes (the file's twelve of packed scales and
 *                 minimums, byte by byte, all rows of each), then block after block: (5 bits: 32 bytes of fifth bits,) codes
 *   6 bits:       8 float16, 16 x 8 int8 (scales of 16 columns each), then block after block: 64 bytes of top bits, codes
 *   US_Q5:        8 float16 (scales), 8 float16 (minimums, which are added), 32 bytes of fifth bits, codes
 *
 * Codes are the 128 bytes of a block of 4 bits in tiles.h: 4 columns of all rows side by side, group g in the low halves of
 * part g, group g + 4 in the high ones. Bit i of a byte of fifth bits belongs to group i. Top bits are two times 32 bytes;
 * byte by byte, part p has two bits each of the groups 2p, 2p + 1, 2p + 4 and 2p + 5. Weights are code times scale, less
 * the minimum; with 6 bits codes count from -32.
 */
#ifndef UNSPOOL_SUPERS_H
#define UNSPOOL_SUPERS_H

#include "internal.h"
#include "tiles.h"

#define HAS_FIFTHS(kind) ((kind) == US_K5 || (kind) == US_Q5)
#define K_HEADER(kind) ((kind) == US_K6 ? 16 + 128 : (kind) == US_Q5 ? 32 : 128)
#define K_EXTRA(kind) ((kind) == US_K6 ? 64 : HAS_FIFTHS(kind) ? 32 : 0) /* bytes of bits before the codes */
#define K_BLOCK(kind) (K_EXTRA(kind) + 128)
#define K_BLOCKS(kind) ((kind) == US_Q5 ? 1 : 8)
#define K_BYTES(kind) (K_HEADER(kind) + K_BLOCKS(kind) * K_BLOCK(kind))

/* The scales of a tile's super-block as floats: of 8 blocks, or of 16 halves of blocks; and its minimums. */
typedef struct {
    float scales[16][OUTPUTS], minimums[8][OUTPUTS];
} super_scales;

#if defined(US_NEON_DOT)

INLINE void put_scaled(uint16x8_t v, const float32x4_t *by, float *out) {
    vst1q_f32(out, vmulq_f32(by[0], vcvtq_f32_u32(vmovl_u16(vget_low_u16(v)))));
    vst1q_f32(out + 4, vmulq_f32(by[1], vcvtq_f32_u32(vmovl_u16(vget_high_u16(v)))));
}
INLINE void put_two_scaled(uint8x16_t v, const float32x4_t *by, float (*out)[OUTPUTS]) {
    put_scaled(vmovl_u8(vget_low_u8(v)), by, out[0]);
    put_scaled(vmovl_u8(vget_high_u8(v)), by, out[1]);
}

INLINE void read_super(const uint8_t *w, const int kind, super_scales *s) {
    const float32x4_t d[2] = {halves(w), halves(w + 8)};
    if (kind == US_K6) {
        for (int i = 0; i < 16; i++) {
            const int16x8_t v = vmovl_s8(vld1_s8((const int8_t *)w + 16 + 8 * i));
            vst1q_f32(s->scales[i], vmulq_f32(d[0], vcvtq_f32_s32(vmovl_s16(vget_low_s16(v)))));
            vst1q_f32(s->scales[i] + 4, vmulq_f32(d[1], vcvtq_f32_s32(vmovl_s16(vget_high_s16(v)))));
        }
        return;
    }
    const float32x4_t least[2] = {halves(w + 16), halves(w + 24)};
    if (kind == US_Q5) {
        UNROLLED for (int side = 0; side < 2; side++) {
            vst1q_f32(s->scales[0] + 4 * side, d[side]);
            vst1q_f32(s->minimums[0] + 4 * side, vnegq_f32(least[side]));
        }
        return;
    }
    const uint8x16_t six = vdupq_n_u8(63), low = vdupq_n_u8(15), top = vdupq_n_u8(0x30);
    for (int i = 0; i < 2; i++) { /* two blocks each of the first four and of the last four */
        const uint8x16_t first = vld1q_u8(w + 32 + 16 * i), second = vld1q_u8(w + 64 + 16 * i), third = vld1q_u8(w + 96 + 16 * i);
        put_two_scaled(vandq_u8(first, six), d, s->scales + 2 * i);
        put_two_scaled(vandq_u8(second, six), least, s->minimums + 2 * i);
        put_two_scaled(vorrq_u8(vandq_u8(third, low), vandq_u8(vshrq_n_u8(first, 2), top)), d, s->scales + 4 + 2 * i);
        put_two_scaled(vorrq_u8(vshrq_n_u8(third, 4), vandq_u8(vshrq_n_u8(second, 2), top)), least, s->minimums + 4 + 2 * i);
    }
}

/* Groups g and g + 4 of codes: `more` has the bits above the fourth, those of the first from bit 0 on, and those of the second,
 * which `mask` names, where they belong. */
#define JOIN(g, more, mask)                                                                                           \
    do {                                                                                                              \
        const uint8x16_t both = vld1q_u8(w + K_EXTRA(kind) + 16 * side + 32 * (g)), bits = (more);                     \
        groups[4 + (g)] = vreinterpretq_s8_u8(vbslq_u8(vdupq_n_u8(mask), bits, vshrq_n_u8(both, 4)));                  \
        groups[g] = vreinterpretq_s8_u8(vandq_u8(vsliq_n_u8(both, bits, 4), vdupq_n_u8((mask) | 15)));                 \
    } while (0)

/* The codes of one side of a block: 8 groups of 4 columns for 4 rows. Those of 6 bits count from -32 if `is_signed`. */
INLINE void split_codes(const uint8_t *w, const int kind, const int side, const int is_signed, int8x16_t *groups) {
    if (HAS_FIFTHS(kind)) {
        const uint8x16_t fifth = vld1q_u8(w + 16 * side);
        JOIN(0, fifth, 0x10);
        JOIN(1, vshrq_n_u8(fifth, 1), 0x10);
        JOIN(2, vshrq_n_u8(fifth, 2), 0x10);
        JOIN(3, vshrq_n_u8(fifth, 3), 0x10);
    } else if (kind == US_K6) {
        const uint8x16_t first = vld1q_u8(w + 16 * side), second = vld1q_u8(w + 32 + 16 * side);
        JOIN(0, first, 0x30);
        JOIN(1, vshrq_n_u8(first, 2), 0x30);
        JOIN(2, second, 0x30);
        JOIN(3, vshrq_n_u8(second, 2), 0x30);
        UNROLLED for (int g = 0; is_signed && g < 8; g++) groups[g] = vsubq_s8(groups[g], vdupq_n_s8(32));
    } else {
        UNROLLED for (int g = 0; g < 4; g++) {
            const uint8x16_t both = vld1q_u8(w + 16 * side + 32 * g);
            groups[g] = LOW(both);
            groups[4 + g] = HIGH(both);
        }
    }
}
#undef JOIN

INLINE void part_super(const uint8_t *w, int supers, activations a, const int M, const int kind, const int begin, float *out) {
    const uint8_t *ahead = w + (M > 2 ? supers * K_BYTES(kind) : 1024);
    const int is_signed = M > 2; /* else their products take in what the activations' sums amount to */
    float32x4_t total[2][MOST_M];
    super_scales s;
    EACH_ROW total[0][m] = total[1][m] = vdupq_n_f32(0);
    for (int i = 0; i < supers; i++) {
        read_super(w, kind, &s);
        w += K_HEADER(kind);
        for (int b = 0; b < K_BLOCKS(kind); b++, w += K_BLOCK(kind), ahead += K_BYTES(kind) / K_BLOCKS(kind), a.quants += 32 * M, a.scales += M, a.sums += M, a.offsets += 2 * M) {
            UNROLLED for (int line = begin; line < 4; line += 3 - SIDES_AT_ONCE) __builtin_prefetch(ahead + 64 * line);
            UNROLLED for (int side = begin; side < begin + SIDES_AT_ONCE; side++) {
                int8x16_t groups[8];
                split_codes(w, kind, side, is_signed, groups);
                if (kind == US_K6) {
                    const float32x4_t d0 = vld1q_f32(s.scales[2 * b] + 4 * side), d1 = vld1q_f32(s.scales[2 * b + 1] + 4 * side);
                    UNROLLED for (int m = 0; m < M; m += TOGETHER) {
                        const int count = M - m < TOGETHER ? M - m : TOGETHER;
                        int32x4_t lower[TOGETHER], upper[TOGETHER];
                        dot_rows(groups, a.quants + 32 * m, count, 0, 1, lower);
                        dot_rows(groups, a.quants + 32 * m, count, 1, 2, upper);
                        UNROLLED for (int r = 0; !is_signed && r < count; r++) {
                            lower[r] = vaddq_s32(lower[r], vld1q_dup_s32(a.offsets + 2 * (m + r)));
                            upper[r] = vaddq_s32(upper[r], vld1q_dup_s32(a.offsets + 2 * (m + r) + 1));
                        }
                        UNROLLED for (int r = m; r < m + count; r++) {
                            total[side][r] = vfmaq_f32(total[side][r], end_dot(lower[r - m]), vmulq_n_f32(d0, a.scales[r]));
                            total[side][r] = vfmaq_f32(total[side][r], end_dot(upper[r - m]), vmulq_n_f32(d1, a.scales[r]));
                        }
                    }
                } else {
                    const float32x4_t d = vld1q_f32(s.scales[b] + 4 * side), least = vld1q_f32(s.minimums[b] + 4 * side);
                    UNROLLED for (int m = 0; m < M; m += TOGETHER) {
                        const int count = M - m < TOGETHER ? M - m : TOGETHER;
                        int32x4_t dot[TOGETHER];
                        dot_rows(groups, a.quants + 32 * m, count, 0, 2, dot);
                        UNROLLED for (int r = m; r < m + count; r++) {
                            total[side][r] = vfmaq_f32(total[side][r], end_dot(dot[r - m]), vmulq_n_f32(d, a.scales[r]));
                            total[side][r] = vfmsq_n_f32(total[side][r], least, a.sums[r]);
                        }
                    }
                }
            }
        }
    }
    UNROLLED for (int side = begin; side < begin + SIDES_AT_ONCE; side++)
        EACH_ROW vst1q_f32(out + 8 * m + 4 * side, total[side][m]);
}

INLINE void tile_super(const uint8_t *w, int supers, activations a, const int M, const int kind, int is_pair, float *out) {
    (void)is_pair;
    part_super(w, supers, a, M, kind, 0, out);
    if (SIDES_AT_ONCE == 1) part_super(w, supers, a, M, kind, 1, out);
}

#elif defined(US_AVX2) || defined(US_AVX512)

/* One vector of codes: with AVX-512 those of two tiles. */
#if defined(US_AVX512)
typedef __m512i codes;
typedef __m512 numbers;
typedef uint16_t words __attribute__((vector_size(64)));
#define SIMD(name) _mm512_##name
INLINE codes load_codes(const uint8_t *w, const uint8_t *second) { return both_tiles(w, second); }
INLINE numbers load_halves(const uint8_t *w, const uint8_t *second) { return both_halves(w, second); }
INLINE numbers bytes_as_numbers(const uint8_t *p, const int is_signed) {
    const __m128i v = _mm_loadu_si128((const __m128i *)p);
    return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(v) : _mm512_cvtepu8_epi32(v));
}
/* Sixteen bytes of two tiles, eight of each, side by side: what belongs to one block. */
INLINE codes in_order(codes v) { return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), v); }
#define AND _mm512_and_si512
#define OR _mm512_or_si512
#define STORE_CODES _mm512_storeu_si512
INLINE codes dot_super(codes dot, codes w, const int8_t *x) { return add_four(dot, w, x); }
#else
typedef __m256i codes;
typedef __m256 numbers;
typedef uint16_t words __attribute__((vector_size(32)));
#define SIMD(name) _mm256_##name
INLINE codes load_codes(const uint8_t *w, const uint8_t *second) {
    (void)second;
    return _mm256_loadu_si256((const __m256i *)w);
}
INLINE numbers load_halves(const uint8_t *w, const uint8_t *second) {
    (void)second;
    return halves(w);
}
INLINE numbers bytes_as_numbers(const uint8_t *p, const int is_signed) {
    const __m128i v = _mm_loadl_epi64((const __m128i *)p);
    return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(v) : _mm256_cvtepu8_epi32(v));
}
INLINE codes in_order(codes v) { return v; }
#define AND _mm256_and_si256
#define OR _mm256_or_si256
#define STORE_CODES(p, v) _mm256_storeu_si256((__m256i *)(p), v)
INLINE codes dot_super(codes dot, codes w, const int8_t *x) { return add_dots(dot, w, four(x)); }
#endif

/* Bits of every byte, moved by some places; those that come from a neighbour must be masked. */
INLINE codes moved_left(codes v, const int places) { return (codes)((words)v << (uint16_t)places); }
INLINE codes moved_right(codes v, const int places) { return (codes)((words)v >> (uint16_t)places); }
INLINE codes moved(codes v, const int from, const int to) { return from > to ? moved_right(v, from - to) : moved_left(v, to - from); }

INLINE void read_super(const uint8_t *w, const uint8_t *second, const int kind, super_scales *s) {
    enum { WIDTH = OUTPUTS };
    uint8_t bytes[4][4 * WIDTH];
    const numbers d = load_halves(w, second);
    if (kind == US_K6) {
        for (int i = 0; i < 4; i++) STORE_CODES(bytes[i], in_order(load_codes(w + 16 + 32 * i, second + 16 + 32 * i)));
        for (int i = 0; i < 16; i++) SIMD(storeu_ps)(s->scales[i], SIMD(mul_ps)(d, bytes_as_numbers(bytes[i / 4] + WIDTH * (i % 4), 1)));
        return;
    }
    const numbers least = load_halves(w + 16, second + 16);
    if (kind == US_Q5) {
        SIMD(storeu_ps)(s->scales[0], d);
        SIMD(storeu_ps)(s->minimums[0], SIMD(sub_ps)(SIMD(setzero_ps)(), least));
        return;
    }
    const codes first = in_order(load_codes(w + 32, second + 32)), middle = in_order(load_codes(w + 64, second + 64));
    const codes last = in_order(load_codes(w + 96, second + 96));
    const codes six = SIMD(set1_epi8)(63), low = SIMD(set1_epi8)(15), top = SIMD(set1_epi8)(0x30);
    STORE_CODES(bytes[0], AND(first, six));
    STORE_CODES(bytes[1], OR(AND(last, low), AND(moved_right(first, 2), top)));
    STORE_CODES(bytes[2], AND(middle, six));
    STORE_CODES(bytes[3], OR(AND(moved_right(last, 4), low), AND(moved_right(middle, 2), top)));
    for (int i = 0; i < 8; i++) {
        SIMD(storeu_ps)(s->scales[i], SIMD(mul_ps)(d, bytes_as_numbers(bytes[i / 4] + WIDTH * (i % 4), 0)));
        SIMD(storeu_ps)(s->minimums[i], SIMD(mul_ps)(least, bytes_as_numbers(bytes[2 + i / 4] + WIDTH * (i % 4), 0)));
    }
}

/* The bits that a block's codes have besides four. */
INLINE void load_extra(const uint8_t *w, const uint8_t *second, const int kind, codes *extra) {
    if (K_EXTRA(kind)) extra[0] = load_codes(w, second);
    if (K_EXTRA(kind) > 32) extra[1] = load_codes(w + 32, second + 32);
}

/* The codes of a block's groups g and g + 4. */
INLINE void part_codes(const uint8_t *w, const uint8_t *second, const codes *extra, const int kind, const int g, codes *l, codes *h) {
    const codes low = SIMD(set1_epi8)(15), v = load_codes(w + K_EXTRA(kind) + 32 * g, second + K_EXTRA(kind) + 32 * g);
    *l = AND(v, low), *h = AND(moved_right(v, 4), low);
    if (HAS_FIFTHS(kind)) {
        *l = OR(*l, AND(moved(extra[0], g, 4), SIMD(set1_epi8)(16)));
        *h = OR(*h, AND(moved(extra[0], 4 + g, 4), SIMD(set1_epi8)(16)));
    }
    if (kind == US_K6) {
        *l = OR(*l, AND(moved(extra[g / 2], 2 * (g % 2), 4), SIMD(set1_epi8)(0x30)));
        *h = OR(*h, AND(moved(extra[g / 2], 4 + 2 * (g % 2), 4), SIMD(set1_epi8)(0x30)));
    }
}

/* With AVX-512 the tile and the one after it, if it `is_pair`; otherwise itself twice. */
INLINE void tile_super(const uint8_t *w, int supers, activations a, const int M, const int kind, int is_pair, float *out) {
    const uint8_t *end = w + (size_t)supers * K_BYTES(kind), *second = is_pair ? end : w;
    numbers total[MOST_M];
    super_scales s;
    EACH_ROW total[m] = SIMD(setzero_ps)();
    for (int i = 0; i < supers; i++) {
        read_super(w, second, kind, &s);
        w += K_HEADER(kind);
        second += K_HEADER(kind);
        for (int b = 0; b < K_BLOCKS(kind); b++, w += K_BLOCK(kind), second += K_BLOCK(kind), a.quants += 32 * M, a.scales += M, a.sums += M, a.offsets += 2 * M) {
            codes extra[2], dot[2][MOST_M];
            ask_ahead(w, second, end, K_BYTES(kind) / K_BLOCKS(kind));
            load_extra(w, second, kind, extra);
            if (kind == US_K6) EACH_ROW {
                dot[0][m] = SIMD(set1_epi32)(a.offsets[2 * m]);
                dot[1][m] = SIMD(set1_epi32)(a.offsets[2 * m + 1]);
            }
            else EACH_ROW dot[0][m] = dot[1][m] = (codes){0};
            UNROLLED for (int g = 0; g < 4; g++) {
                codes l, h;
                part_codes(w, second, extra, kind, g, &l, &h);
                EACH_ROW dot[0][m] = dot_super(dot[0][m], l, a.quants + 32 * m + 4 * g);
                EACH_ROW {
                    const int which = kind == US_K6 || M <= 4; /* few rows have two sums, or each would wait for the one before */
                    dot[which][m] = dot_super(dot[which][m], h, a.quants + 32 * m + 16 + 4 * g);
                }
            }
            if (kind == US_K6) {
                const numbers d0 = SIMD(loadu_ps)(s.scales[2 * b]), d1 = SIMD(loadu_ps)(s.scales[2 * b + 1]);
                EACH_ROW {
                    const numbers by = SIMD(set1_ps)(a.scales[m]);
                    total[m] = SIMD(fmadd_ps)(SIMD(cvtepi32_ps)(dot[0][m]), SIMD(mul_ps)(d0, by), total[m]);
                    total[m] = SIMD(fmadd_ps)(SIMD(cvtepi32_ps)(dot[1][m]), SIMD(mul_ps)(d1, by), total[m]);
                }
            } else {
                const numbers d = SIMD(loadu_ps)(s.scales[b]), least = SIMD(loadu_ps)(s.minimums[b]);
                EACH_ROW {
                    const codes all = M <= 4 ? SIMD(add_epi32)(dot[0][m], dot[1][m]) : dot[0][m];
                    total[m] = SIMD(fmadd_ps)(SIMD(cvtepi32_ps)(all), SIMD(mul_ps)(d, SIMD(set1_ps)(a.scales[m])), total[m]);
                    total[m] = SIMD(fnmadd_ps)(least, SIMD(set1_ps)(a.sums[m]), total[m]);
                }
            }
        }
    }
#if defined(US_AVX512)
    EACH_ROW if (is_pair) _mm512_storeu_ps(out + OUTPUTS * m, total[m]);
    else _mm256_storeu_ps(out + OUTPUTS * m, _mm512_castps512_ps256(total[m]));
#else
    EACH_ROW _mm256_storeu_ps(out + OUTPUTS * m, total[m]);
#endif
}

#else /* plain C */

INLINE void tile_super(const uint8_t *w, int supers, activations a, const int M, const int kind, int is_pair, float *out) {
    (void)is_pair;
    memset(out, 0, sizeof(float) * 8 * (size_t)M);
    const int blocks = K_BLOCKS(kind);
    for (int i = 0; i < supers; i++, w += K_BYTES(kind), a.quants += 32 * blocks * M, a.scales += blocks * M, a.sums += blocks * M)
        for (int r = 0; r < 8; r++) {
            us_super_row row;
            us_read_super(w, kind, r, &row);
            for (int b = 0; b < blocks; b++)
                for (int m = 0; m < M; m++) {
                    const int8_t *x = a.quants + 32 * (b * M + m), *q = row.codes + 32 * b;
                    const float by = a.scales[b * M + m];
                    int32_t lower = 0, upper = 0;
                    for (int k = 0; k < 16; k++) lower += q[k] * x[k], upper += q[16 + k] * x[16 + k];
                    if (kind == US_K6)
                        out[8 * m + r] += (float)lower * (row.scales[2 * b] * by) + (float)upper * (row.scales[2 * b + 1] * by);
                    else
                        out[8 * m + r] += (float)(lower + upper) * (row.scales[b] * by) - row.minimums[b] * a.sums[b * M + m];
                }
        }
}
#endif

#endif
