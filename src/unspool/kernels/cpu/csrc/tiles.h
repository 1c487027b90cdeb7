/* Products of one tile: 8 output rows, times a panel of 1 to MOST_M rows of activations. What differs by instruction set
 * is here.
 *
 * A block is 32 columns. Its bytes: the scales of 8 rows, (4 bits: their minimums,) then groups of 4 columns of
 * all 8 rows, so that one instruction multiplies four columns of several rows and adds them up. With 4 bits, group
 * g and group g + 4 share bytes: low and high halves. Activations are int8 with a scale a block.
 */
#ifndef UNSPOOL_TILES_H
#define UNSPOOL_TILES_H

#include <stddef.h>

#include "unspool_cpu.h"
#include "vector.h"

#define Q8_BYTES (16 + 8 * 32)
#define Q4_BYTES (32 + 4 * 32)

#define EACH_ROW UNROLLED for (int m = 0; m < M; m++)

/* A panel of M rows of activations, block after block: 32 int8 of each row; their scales; scale times the block's sum; and
 * -32 times the sums of each half's int8, which codes that count from -32 add to their products. */
typedef struct {
    const int8_t *quants;       /* (blocks, M, 32) */
    const float *scales, *sums; /* (blocks, M) */
    const int32_t *offsets;     /* (blocks, M, 2) */
} activations;

/* Rows of a panel: unpacked weights serve them all, as long as their sums fit the registers. */
#if defined(US_NEON_DOT) || defined(US_AVX512)
#define MOST_M 8
#else
#define MOST_M 4
#endif

/* Output rows that are made together: those of one tile or, where a vector holds as many, of two. */
#if defined(US_AVX512)
#define OUTPUTS 16
#else
#define OUTPUTS 8
#endif

#if defined(US_NEON_DOT)
#include <arm_neon.h>

INLINE float32x4_t halves(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }

/* Converting integers is slow (an instruction in two cycles), subtracting is not: sums begin at the bits of 1.5 * 2^23,
 * where a float counts in ones, so that the sum's bits are that number plus the sum. Exact up to 2^22; a block's dot
 * product is at most 32 * 127 * 128. */
INLINE int32x4_t begin_dot(void) { return vdupq_n_s32(0x4b400000); }
INLINE float32x4_t end_dot(int32x4_t dot) { return vsubq_f32(vreinterpretq_f32_s32(dot), vdupq_n_f32(12582912.0f)); }

#define TOGETHER 4 /* rows whose sums are made side by side: enough to keep both pipes busy */

#if defined(US_NEON_I8MM)
/* Sums of 4 rows of weights and two of activations, 8 columns at a time. `groups` holds 8 vectors: groups of 4
 * columns for 4 rows; x0 and x1 are rows of 32 activations. */
INLINE void add_pairs(const int8x16_t *groups, const int8_t *x0, const int8_t *x1, const int begin, const int end,
                      int32x4_t *first, int32x4_t *second) {
    int32x4_t upper = begin_dot(), lower = upper;
    for (int j = 2 * begin; j < 2 * end; j++) {
        int32x4_t a = vreinterpretq_s32_s8(groups[2 * j]), b = vreinterpretq_s32_s8(groups[2 * j + 1]);
        int8x16_t x = vcombine_s8(vld1_s8(x0 + 8 * j), vld1_s8(x1 + 8 * j));
        upper = vmmlaq_s32(upper, vreinterpretq_s8_s32(vzip1q_s32(a, b)), x);
        lower = vmmlaq_s32(lower, vreinterpretq_s8_s32(vzip2q_s32(a, b)), x);
    }
    *first = vuzp1q_s32(upper, lower);
    *second = vuzp2q_s32(upper, lower);
}

/* Sums of one block's halves from `begin` to `end`: 4 rows of weights, `count` of activations. A lone last row stands in for
 * its neighbour too. */
INLINE void dot_rows(const int8x16_t *groups, const int8_t *x, const int count, const int begin, const int end, int32x4_t *dot) {
    UNROLLED for (int r = 0; r < count; r += 2) {
        const int next = r + 1 < count;
        int32x4_t unwanted;
        add_pairs(groups, x + 32 * r, x + 32 * (r + next), begin, end, &dot[r], next ? &dot[r + 1] : &unwanted);
    }
}
#else
/* The compiler must keep the order that is written here: sums that follow each other belong to different rows. What they
 * begin at is loaded, for the pipes that could copy it are the ones that multiply. */
static const int32_t beginning[4] __attribute__((aligned(16))) = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
#define DOT_LANE(lane)                                         \
    UNROLLED for (int r = 0; r < count; r++)                   \
        __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #lane "]" \
                         : "+w"(dot[r])                        \
                         : "w"(groups[4 * half + lane]), "w"(v[r]))

INLINE void dot_rows(const int8x16_t *groups, const int8_t *x, const int count, const int begin, const int end, int32x4_t *dot) {
    int8x16_t v[TOGETHER];
    UNROLLED for (int r = 0; r < count; r++) __asm__ volatile("ldr %q0, %1" : "=w"(dot[r]) : "m"(beginning));
    UNROLLED for (int half = begin; half < end; half++) {
        UNROLLED for (int r = 0; r < count; r++) v[r] = vld1q_s8(x + 32 * r + 16 * half);
        DOT_LANE(0);
        DOT_LANE(1);
        DOT_LANE(2);
        DOT_LANE(3);
    }
}
#endif

/* A tile has two sides: rows 0 to 3 and rows 4 to 7. The sums of more than 2 rows fit the registers for one side at a
 * time only. One row takes what memory gives, in the order in which it lies; several are bound by instructions, and bring
 * the tile after this one into the cache meanwhile. */
#define SIDES_AT_ONCE (M > 2 ? 1 : 2)
#define LOW(v) vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15)))
#define HIGH(v) vreinterpretq_s8_u8(vshrq_n_u8(v, 4))

INLINE void part_q8(const uint8_t *w, int blocks, activations a, const int M, const int begin, float *out) {
    const uint8_t *ahead = w + (M > 2 ? blocks : 4) * Q8_BYTES;
    float32x4_t total[2][MOST_M];
    EACH_ROW total[0][m] = total[1][m] = vdupq_n_f32(0);
    for (int b = 0; b < blocks; b++, w += Q8_BYTES, ahead += Q8_BYTES, a.quants += 32 * M, a.scales += M) {
        UNROLLED for (int i = begin; i < 5; i += 3 - SIDES_AT_ONCE) __builtin_prefetch(ahead + 64 * i);
        UNROLLED for (int side = begin; side < begin + SIDES_AT_ONCE; side++) {
            int8x16_t groups[8];
            UNROLLED for (int g = 0; g < 8; g++) groups[g] = vld1q_s8((const int8_t *)w + 16 + 16 * side + 32 * g);
            const float32x4_t d = halves(w + 8 * side);
            UNROLLED for (int m = 0; m < M; m += TOGETHER) {
                const int count = M - m < TOGETHER ? M - m : TOGETHER;
                int32x4_t dot[TOGETHER];
                dot_rows(groups, a.quants + 32 * m, count, 0, 2, dot);
                UNROLLED for (int r = m; r < m + count; r++)
                    total[side][r] = vfmaq_f32(total[side][r], end_dot(dot[r - m]), vmulq_n_f32(d, a.scales[r]));
            }
        }
    }
    UNROLLED for (int side = begin; side < begin + SIDES_AT_ONCE; side++)
        EACH_ROW vst1q_f32(out + 8 * m + 4 * side, total[side][m]);
}

INLINE void part_q4(const uint8_t *w, int blocks, activations a, const int M, const int begin, float *out) {
    const uint8_t *ahead = w + (M > 2 ? blocks : 6) * Q4_BYTES;
    float32x4_t total[2][MOST_M];
    EACH_ROW total[0][m] = total[1][m] = vdupq_n_f32(0);
    for (int b = 0; b < blocks; b++, w += Q4_BYTES, ahead += Q4_BYTES, a.quants += 32 * M, a.scales += M, a.sums += M) {
        UNROLLED for (int i = begin; i < 3; i += 3 - SIDES_AT_ONCE) __builtin_prefetch(ahead + 64 * i);
        UNROLLED for (int side = begin; side < begin + SIDES_AT_ONCE; side++) {
            int8x16_t groups[8];
            UNROLLED for (int g = 0; g < 4; g++) {
                const uint8x16_t both = vld1q_u8(w + 32 + 16 * side + 32 * g);
                groups[g] = LOW(both);
                groups[4 + g] = HIGH(both);
            }
            const float32x4_t d = halves(w + 8 * side), least = halves(w + 16 + 8 * side);
            UNROLLED for (int m = 0; m < M; m += TOGETHER) {
                const int count = M - m < TOGETHER ? M - m : TOGETHER;
                int32x4_t dot[TOGETHER];
                dot_rows(groups, a.quants + 32 * m, count, 0, 2, dot);
                UNROLLED for (int r = m; r < m + count; r++) {
                    total[side][r] = vfmaq_f32(total[side][r], end_dot(dot[r - m]), vmulq_n_f32(d, a.scales[r]));
                    total[side][r] = vfmaq_n_f32(total[side][r], least, a.sums[r]);
                }
            }
        }
    }
    UNROLLED for (int side = begin; side < begin + SIDES_AT_ONCE; side++)
        EACH_ROW vst1q_f32(out + 8 * m + 4 * side, total[side][m]);
}

INLINE void tile_q8(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    part_q8(w, blocks, a, M, 0, out);
    if (SIDES_AT_ONCE == 1) part_q8(w, blocks, a, M, 1, out);
}

INLINE void tile_q4(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    part_q4(w, blocks, a, M, 0, out);
    if (SIDES_AT_ONCE == 1) part_q4(w, blocks, a, M, 1, out);
}

#elif defined(US_AVX2) || defined(US_AVX512)
#include <immintrin.h>

INLINE __m256 halves(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE __m256i four(const int8_t *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

#if defined(US_AVX512)
/* Unsigned weights times signed activations, two groups of columns in one vector. */
INLINE __m512i add_dots(__m512i dot, __m512i w, const int8_t *x) {
    __m512i pair = _mm512_inserti64x4(_mm512_castsi256_si512(four(x)), four(x + 4), 1);
    return _mm512_dpbusd_epi32(dot, w, pair);
}
INLINE __m256 as_eight(__m512i dot) {
    __m256i both = _mm256_add_epi32(_mm512_castsi512_si256(dot), _mm512_extracti64x4_epi64(dot, 1));
    return _mm256_cvtepi32_ps(both);
}
#else
INLINE __m256i add_dots(__m256i dot, __m256i w, __m256i x) { /* w without sign */
    return _mm256_add_epi32(dot, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
#endif

#define AHEAD 4096 /* bytes: a page further than the one that is read, whose end the processor's own foresight stops at */

/* Ask for a block of `bytes` further on in a tile and in the `second` one that is read beside it, or in those after them. */
INLINE void ask_ahead(const uint8_t *w, const uint8_t *second, const uint8_t *end, const int bytes) {
    const ptrdiff_t further = AHEAD + (w + AHEAD < end ? 0 : second - w);
    UNROLLED for (int line = 0; line < (bytes + 63) / 64; line++) {
        __builtin_prefetch(w + further + 64 * line, 0, 2);
        if (OUTPUTS > US_TILE) __builtin_prefetch(second + further + 64 * line, 0, 2);
    }
}

INLINE void tile_q8(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    __m256 total[MOST_M];
    for (int m = 0; m < M; m++) total[m] = _mm256_setzero_ps();
    for (int b = 0; b < blocks; b++, w += Q8_BYTES) {
        __m256 d = halves(w);
        ask_ahead(w, w, w, Q8_BYTES);
#if defined(US_AVX512)
        __m512i dot[MOST_M];
        for (int m = 0; m < M; m++) dot[m] = _mm512_setzero_si512();
        for (int g = 0; g < 4; g++) { /* moved by 128 to lose the sign: taken back below */
            __m512i v = _mm512_xor_si512(_mm512_loadu_si512(w + 16 + 64 * g), _mm512_set1_epi8((char)0x80));
            for (int m = 0; m < M; m++) dot[m] = add_dots(dot[m], v, a.quants + 32 * (b * M + m) + 8 * g);
        }
        for (int m = 0; m < M; m++) {
            __m256 s = _mm256_set1_ps(a.scales[b * M + m]);
            __m256 moved = _mm256_set1_ps(128.0f * a.sums[b * M + m]);
            total[m] = _mm256_fmadd_ps(d, _mm256_fmsub_ps(as_eight(dot[m]), s, moved), total[m]);
        }
#else
        __m256i dot[MOST_M];
        for (int m = 0; m < M; m++) dot[m] = _mm256_setzero_si256();
        for (int g = 0; g < 8; g++) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(w + 16 + 32 * g)), size = _mm256_abs_epi8(v);
            for (int m = 0; m < M; m++)
                dot[m] = add_dots(dot[m], size, _mm256_sign_epi8(four(a.quants + 32 * (b * M + m) + 4 * g), v));
        }
        for (int m = 0; m < M; m++) {
            __m256 s = _mm256_mul_ps(d, _mm256_set1_ps(a.scales[b * M + m]));
            total[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[m]), s, total[m]);
        }
#endif
    }
    for (int m = 0; m < M; m++) _mm256_storeu_ps(out + OUTPUTS * m, total[m]);
}

INLINE void tile_q4(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    __m256 total[MOST_M];
    for (int m = 0; m < M; m++) total[m] = _mm256_setzero_ps();
    for (int b = 0; b < blocks; b++, w += Q4_BYTES) {
        __m256 d = halves(w), least = halves(w + 16);
        ask_ahead(w, w, w, Q4_BYTES);
#if defined(US_AVX512)
        const __m512i low = _mm512_set1_epi8(15);
        __m512i dot[MOST_M];
        for (int m = 0; m < M; m++) dot[m] = _mm512_setzero_si512();
        for (int g = 0; g < 2; g++) {
            __m512i v = _mm512_loadu_si512(w + 32 + 64 * g);
            __m512i l = _mm512_and_si512(v, low), h = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
            for (int m = 0; m < M; m++) {
                const int8_t *x = a.quants + 32 * (b * M + m) + 8 * g;
                dot[m] = add_dots(add_dots(dot[m], l, x), h, x + 16);
            }
        }
#define EIGHT(m) as_eight(dot[m])
#else
        const __m256i low = _mm256_set1_epi8(15);
        __m256i dot[MOST_M];
        for (int m = 0; m < M; m++) dot[m] = _mm256_setzero_si256();
        for (int g = 0; g < 4; g++) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(w + 32 + 32 * g));
            __m256i l = _mm256_and_si256(v, low), h = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
            for (int m = 0; m < M; m++) {
                const int8_t *x = a.quants + 32 * (b * M + m) + 4 * g;
                dot[m] = add_dots(add_dots(dot[m], l, four(x)), h, four(x + 16));
            }
        }
#define EIGHT(m) _mm256_cvtepi32_ps(dot[m])
#endif
        for (int m = 0; m < M; m++) {
            __m256 s = _mm256_mul_ps(d, _mm256_set1_ps(a.scales[b * M + m]));
            total[m] = _mm256_fmadd_ps(EIGHT(m), s, total[m]);
            total[m] = _mm256_fmadd_ps(least, _mm256_set1_ps(a.sums[b * M + m]), total[m]);
        }
    }
    for (int m = 0; m < M; m++) _mm256_storeu_ps(out + OUTPUTS * m, total[m]);
}

#if defined(US_AVX512)
/* Two tiles at once: a vector holds one group of columns of 16 rows, so that four activations serve all of it, straight
 * from memory. Sums of few rows are kept twice, or each would wait for the one before. */
#define COPIES (M > 4 ? 1 : 2)
INLINE __m512i both_tiles(const uint8_t *first, const uint8_t *second) {
    const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first));
    return _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i *)second), 1);
}
INLINE __m512 both_halves(const uint8_t *first, const uint8_t *second) {
    const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)first));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i *)second), 1));
}
INLINE __m512i four_of_all(const int8_t *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

/* dot + v times four activations. GCC would load those by an instruction of their own. */
INLINE __m512i add_four(__m512i dot, __m512i v, const int8_t *x) {
#if defined(__clang__)
    return _mm512_dpbusd_epi32(dot, v, four_of_all(x));
#else
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(dot) : "v"(v), "m"(*(const int8_t(*)[4])x));
    return dot;
#endif
}
/* A total with a block's sum in it. */
INLINE __m512 add_q8(__m512 total, __m512i dot, __m512 d, float scale, float sum) { /* codes were moved by 128 */
    const __m512 moved = _mm512_set1_ps(128.0f * sum);
    return _mm512_fmadd_ps(d, _mm512_fmsub_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(scale), moved), total);
}
INLINE __m512 add_q4(__m512 total, __m512i dot, __m512 d, __m512 least, float scale, float sum) {
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(d, _mm512_set1_ps(scale)), total);
    return _mm512_fmadd_ps(least, _mm512_set1_ps(sum), total);
}

INLINE void tiles_q8(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    const uint8_t *second = w + (size_t)blocks * Q8_BYTES, *end = second;
    __m512 total[MOST_M];
    EACH_ROW total[m] = _mm512_setzero_ps();
    for (int b = 0; b < blocks; b++, w += Q8_BYTES, second += Q8_BYTES, a.quants += 32 * M, a.scales += M, a.sums += M) {
        const __m512 d = both_halves(w, second);
        __m512i dot[2][MOST_M];
        ask_ahead(w, second, end, Q8_BYTES);
        EACH_ROW dot[0][m] = dot[1][m] = _mm512_setzero_si512();
        UNROLLED for (int g = 0; g < 8; g++) { /* moved by 128 to lose the sign: taken back below */
            const __m512i v = _mm512_xor_si512(both_tiles(w + 16 + 32 * g, second + 16 + 32 * g), _mm512_set1_epi8((char)0x80));
            EACH_ROW dot[g % COPIES][m] = add_four(dot[g % COPIES][m], v, a.quants + 32 * m + 4 * g);
        }
        EACH_ROW {
            const __m512i all = COPIES == 2 ? _mm512_add_epi32(dot[0][m], dot[1][m]) : dot[0][m];
            total[m] = add_q8(total[m], all, d, a.scales[m], a.sums[m]);
        }
    }
    EACH_ROW _mm512_storeu_ps(out + OUTPUTS * m, total[m]);
}

INLINE void tiles_q4(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    const uint8_t *second = w + (size_t)blocks * Q4_BYTES, *end = second;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 total[MOST_M];
    EACH_ROW total[m] = _mm512_setzero_ps();
    for (int b = 0; b < blocks; b++, w += Q4_BYTES, second += Q4_BYTES, a.quants += 32 * M, a.scales += M, a.sums += M) {
        const __m512 d = both_halves(w, second), least = both_halves(w + 16, second + 16);
        __m512i dot[2][MOST_M];
        ask_ahead(w, second, end, Q4_BYTES);
        EACH_ROW dot[0][m] = dot[1][m] = _mm512_setzero_si512();
        UNROLLED for (int g = 0; g < 4; g++) {
            const __m512i v = both_tiles(w + 32 + 32 * g, second + 32 + 32 * g);
            const __m512i l = _mm512_and_si512(v, low), h = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
            EACH_ROW dot[0][m] = add_four(dot[0][m], l, a.quants + 32 * m + 4 * g);
            EACH_ROW dot[COPIES - 1][m] = add_four(dot[COPIES - 1][m], h, a.quants + 32 * m + 16 + 4 * g);
        }
        EACH_ROW {
            const __m512i all = COPIES == 2 ? _mm512_add_epi32(dot[0][m], dot[1][m]) : dot[0][m];
            total[m] = add_q4(total[m], all, d, least, a.scales[m], a.sums[m]);
        }
    }
    EACH_ROW _mm512_storeu_ps(out + OUTPUTS * m, total[m]);
}
#endif

#else /* plain C */

INLINE float half_at(const uint8_t *p, int i) {
    uint16_t half;
    memcpy(&half, p + 2 * i, 2);
    return half_to_float(half);
}

INLINE void tile_q8(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    memset(out, 0, sizeof(float) * 8 * (size_t)M);
    for (int b = 0; b < blocks; b++, w += Q8_BYTES)
        for (int m = 0; m < M; m++) {
            const int8_t *x = a.quants + 32 * (b * M + m), *p = (const int8_t *)w + 16;
            int32_t dot[8] = {0};
            for (int g = 0; g < 8; g++)
                for (int r = 0; r < 8; r++)
                    for (int k = 0; k < 4; k++) dot[r] += p[32 * g + 4 * r + k] * x[4 * g + k];
            float s = a.scales[b * M + m];
            for (int r = 0; r < 8; r++) out[8 * m + r] += (float)dot[r] * (half_at(w, r) * s);
        }
}

INLINE void tile_q4(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    memset(out, 0, sizeof(float) * 8 * (size_t)M);
    for (int b = 0; b < blocks; b++, w += Q4_BYTES)
        for (int m = 0; m < M; m++) {
            const int8_t *x = a.quants + 32 * (b * M + m);
            const uint8_t *p = w + 32;
            int32_t dot[8] = {0};
            for (int g = 0; g < 4; g++)
                for (int r = 0; r < 8; r++)
                    for (int k = 0; k < 4; k++) {
                        int32_t both = p[32 * g + 4 * r + k];
                        dot[r] += (both & 15) * x[4 * g + k] + (both >> 4) * x[16 + 4 * g + k];
                    }
            float s = a.scales[b * M + m], t = a.sums[b * M + m];
            for (int r = 0; r < 8; r++)
                out[8 * m + r] += (float)dot[r] * (half_at(w, r) * s) + half_at(w + 16, r) * t;
        }
}
#endif

#endif
