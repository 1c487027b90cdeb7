/* Products of one tile: 8 output rows, times 1, 2 or 4 rows of activations. What differs by instruction set is here.
 *
 * A block is 32 columns. Its bytes: the scales of 8 rows, (4 bits: their minimums,) then groups of 4 columns of
 * all 8 rows, so that one instruction multiplies four columns of several rows and adds them up. With 4 bits, group
 * g and group g + 4 share bytes: low and high halves. Activations are int8 with a scale a block.
 */
#ifndef UNSPOOL_TILES_H
#define UNSPOOL_TILES_H

#include "unspool_cpu.h"
#include "vector.h"

#define Q8_BYTES (16 + 8 * 32)
#define Q4_BYTES (32 + 4 * 32)

/* Loops over a few accumulators: unrolled early, or GCC keeps them in memory. */
#if defined(__GNUC__) && !defined(__clang__)
#define UNROLLED _Pragma("GCC unroll 8")
#else
#define UNROLLED
#endif
#define EACH_ROW UNROLLED for (int m = 0; m < M; m++)

/* Rows of activations: int8, their scales a block, and scale times the block's sum. */
typedef struct {
    const int8_t *quants;
    const float *scales, *sums;
    size_t stride, scale_stride;
} activations;

#if defined(US_NEON_DOT)
#include <arm_neon.h>

INLINE float32x4_t halves(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }

/* Four columns by four of one vector of activations, for all M rows of them: lanes are outside, so that sums that follow
 * each other belong to different rows. */
#define DOT_LANE(lane, w) \
    EACH_ROW dot[m] = vdotq_laneq_s32(dot[m], w, x[m], lane)
#define DOT16(w0, w1, w2, w3, columns)                                                           \
    EACH_ROW x[m] = vld1q_s8(a.quants + m * a.stride + 32 * b + (columns));   \
    DOT_LANE(0, w0);                                                                             \
    DOT_LANE(1, w1);                                                                             \
    DOT_LANE(2, w2);                                                                             \
    DOT_LANE(3, w3)

/* Converting integers is slow (an instruction in two cycles), subtracting is not: sums begin at the bits of 1.5 * 2^23,
 * where a float counts in ones, so that the sum's bits are that number plus the sum. Exact up to 2^22; a block's dot
 * product is at most 32 * 127 * 128. */
INLINE int32x4_t begin_dot(void) { return vdupq_n_s32(0x4b400000); }
INLINE float32x4_t end_dot(int32x4_t dot) { return vsubq_f32(vreinterpretq_f32_s32(dot), vdupq_n_f32(12582912.0f)); }

#if defined(US_NEON_I8MM)
/* Two rows of weights times two rows of activations, 8 columns at a time. `groups` holds 8 vectors: groups of 4
 * columns for 4 rows; x0 and x1 are rows of 32 activations. Adds up into what two rows of activations have. */
INLINE void add_pairs(const int8x16_t *groups, const int8_t *x0, const int8_t *x1, int32x4_t *first, int32x4_t *second) {
    int32x4_t upper = begin_dot(), lower = upper;
    for (int j = 0; j < 4; j++) {
        int32x4_t a = vreinterpretq_s32_s8(groups[2 * j]), b = vreinterpretq_s32_s8(groups[2 * j + 1]);
        int8x16_t x = vcombine_s8(vld1_s8(x0 + 8 * j), vld1_s8(x1 + 8 * j));
        upper = vmmlaq_s32(upper, vreinterpretq_s8_s32(vzip1q_s32(a, b)), x);
        lower = vmmlaq_s32(lower, vreinterpretq_s8_s32(vzip2q_s32(a, b)), x);
    }
    *first = vuzp1q_s32(upper, lower);
    *second = vuzp2q_s32(upper, lower);
}
#endif

/* Rows 0 to 3 of a tile are summed up before rows 4 to 7, so that all numbers at hand fit the registers. */
INLINE void tile_q8(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    float32x4_t total[4][2];
    EACH_ROW total[m][0] = total[m][1] = vdupq_n_f32(0);
    for (int b = 0; b < blocks; b++, w += Q8_BYTES) {
        for (int i = 0; i < 5; i++) __builtin_prefetch(w + 4 * Q8_BYTES + 64 * i);
        UNROLLED for (int side = 0; side < 2; side++) {
            const int8_t *p = (const int8_t *)w + 16 + 16 * side;
            int32x4_t dot[4];
            EACH_ROW dot[m] = begin_dot();
#if defined(US_NEON_I8MM)
            if (M > 1) {
                int8x16_t groups[8];
                for (int g = 0; g < 8; g++) groups[g] = vld1q_s8(p + 32 * g);
                for (int m = 0; m < M; m += 2) {
                    const int8_t *x = a.quants + m * a.stride + 32 * b;
                    add_pairs(groups, x, x + a.stride, &dot[m], &dot[m + 1]);
                }
            } else
#endif
            UNROLLED for (int half = 0; half < 2; half++, p += 128) {
                int8x16_t w0 = vld1q_s8(p), w1 = vld1q_s8(p + 32), w2 = vld1q_s8(p + 64), w3 = vld1q_s8(p + 96), x[4];
                DOT16(w0, w1, w2, w3, 16 * half);
            }
            const float32x4_t d = halves(w + 8 * side);
            EACH_ROW {
                const float s = a.scales[m * a.scale_stride + b];
                total[m][side] = vfmaq_f32(total[m][side], end_dot(dot[m]), vmulq_n_f32(d, s));
            }
        }
    }
    EACH_ROW {
        vst1q_f32(out + 8 * m, total[m][0]);
        vst1q_f32(out + 8 * m + 4, total[m][1]);
    }
}

INLINE void tile_q4(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    const uint8x16_t low = vdupq_n_u8(15);
    float32x4_t total[4][2];
    EACH_ROW total[m][0] = total[m][1] = vdupq_n_f32(0);
    for (int b = 0; b < blocks; b++, w += Q4_BYTES) {
        for (int i = 0; i < 3; i++) __builtin_prefetch(w + 6 * Q4_BYTES + 64 * i);
        UNROLLED for (int side = 0; side < 2; side++) {
            const uint8_t *p = w + 32 + 16 * side;
            const uint8x16_t v0 = vld1q_u8(p), v1 = vld1q_u8(p + 32), v2 = vld1q_u8(p + 64), v3 = vld1q_u8(p + 96);
            int32x4_t dot[4];
            EACH_ROW dot[m] = begin_dot();
#define LOW(v) vreinterpretq_s8_u8(vandq_u8(v, low))
#define HIGH(v) vreinterpretq_s8_u8(vshrq_n_u8(v, 4))
#if defined(US_NEON_I8MM)
            if (M > 1) {
                int8x16_t groups[8] = {LOW(v0), LOW(v1), LOW(v2), LOW(v3), HIGH(v0), HIGH(v1), HIGH(v2), HIGH(v3)};
                for (int m = 0; m < M; m += 2) {
                    const int8_t *x = a.quants + m * a.stride + 32 * b;
                    add_pairs(groups, x, x + a.stride, &dot[m], &dot[m + 1]);
                }
            } else
#endif
            {
                int8x16_t x[4];
                DOT16(LOW(v0), LOW(v1), LOW(v2), LOW(v3), 0);
                DOT16(HIGH(v0), HIGH(v1), HIGH(v2), HIGH(v3), 16);
            }
            const float32x4_t d = halves(w + 8 * side), least = halves(w + 16 + 8 * side);
            EACH_ROW {
                const float s = a.scales[m * a.scale_stride + b], t = a.sums[m * a.scale_stride + b];
                total[m][side] = vfmaq_f32(total[m][side], end_dot(dot[m]), vmulq_n_f32(d, s));
                total[m][side] = vfmaq_n_f32(total[m][side], least, t);
            }
        }
    }
    EACH_ROW {
        vst1q_f32(out + 8 * m, total[m][0]);
        vst1q_f32(out + 8 * m + 4, total[m][1]);
    }
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

INLINE void tile_q8(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    __m256 total[4];
    for (int m = 0; m < M; m++) total[m] = _mm256_setzero_ps();
    for (int b = 0; b < blocks; b++, w += Q8_BYTES) {
        __m256 d = halves(w);
#if defined(US_AVX512)
        __m512i dot[4];
        for (int m = 0; m < M; m++) dot[m] = _mm512_setzero_si512();
        for (int g = 0; g < 4; g++) { /* moved by 128 to lose the sign: taken back below */
            __m512i v = _mm512_xor_si512(_mm512_loadu_si512(w + 16 + 64 * g), _mm512_set1_epi8((char)0x80));
            for (int m = 0; m < M; m++) dot[m] = add_dots(dot[m], v, a.quants + m * a.stride + 32 * b + 8 * g);
        }
        for (int m = 0; m < M; m++) {
            __m256 s = _mm256_set1_ps(a.scales[m * a.scale_stride + b]);
            __m256 moved = _mm256_set1_ps(128.0f * a.sums[m * a.scale_stride + b]);
            total[m] = _mm256_fmadd_ps(d, _mm256_fmsub_ps(as_eight(dot[m]), s, moved), total[m]);
        }
#else
        __m256i dot[4];
        for (int m = 0; m < M; m++) dot[m] = _mm256_setzero_si256();
        for (int g = 0; g < 8; g++) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(w + 16 + 32 * g)), size = _mm256_abs_epi8(v);
            for (int m = 0; m < M; m++)
                dot[m] = add_dots(dot[m], size, _mm256_sign_epi8(four(a.quants + m * a.stride + 32 * b + 4 * g), v));
        }
        for (int m = 0; m < M; m++) {
            __m256 s = _mm256_mul_ps(d, _mm256_set1_ps(a.scales[m * a.scale_stride + b]));
            total[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[m]), s, total[m]);
        }
#endif
    }
    for (int m = 0; m < M; m++) _mm256_storeu_ps(out + 8 * m, total[m]);
}

INLINE void tile_q4(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    __m256 total[4];
    for (int m = 0; m < M; m++) total[m] = _mm256_setzero_ps();
    for (int b = 0; b < blocks; b++, w += Q4_BYTES) {
        __m256 d = halves(w), least = halves(w + 16);
#if defined(US_AVX512)
        const __m512i low = _mm512_set1_epi8(15);
        __m512i dot[4];
        for (int m = 0; m < M; m++) dot[m] = _mm512_setzero_si512();
        for (int g = 0; g < 2; g++) {
            __m512i v = _mm512_loadu_si512(w + 32 + 64 * g);
            __m512i l = _mm512_and_si512(v, low), h = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
            for (int m = 0; m < M; m++) {
                const int8_t *x = a.quants + m * a.stride + 32 * b + 8 * g;
                dot[m] = add_dots(add_dots(dot[m], l, x), h, x + 16);
            }
        }
#define EIGHT(m) as_eight(dot[m])
#else
        const __m256i low = _mm256_set1_epi8(15);
        __m256i dot[4];
        for (int m = 0; m < M; m++) dot[m] = _mm256_setzero_si256();
        for (int g = 0; g < 4; g++) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(w + 32 + 32 * g));
            __m256i l = _mm256_and_si256(v, low), h = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
            for (int m = 0; m < M; m++) {
                const int8_t *x = a.quants + m * a.stride + 32 * b + 4 * g;
                dot[m] = add_dots(add_dots(dot[m], l, four(x)), h, four(x + 16));
            }
        }
#define EIGHT(m) _mm256_cvtepi32_ps(dot[m])
#endif
        for (int m = 0; m < M; m++) {
            __m256 s = _mm256_mul_ps(d, _mm256_set1_ps(a.scales[m * a.scale_stride + b]));
            total[m] = _mm256_fmadd_ps(EIGHT(m), s, total[m]);
            total[m] = _mm256_fmadd_ps(least, _mm256_set1_ps(a.sums[m * a.scale_stride + b]), total[m]);
        }
    }
    for (int m = 0; m < M; m++) _mm256_storeu_ps(out + 8 * m, total[m]);
}

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
            const int8_t *x = a.quants + m * a.stride + 32 * b, *p = (const int8_t *)w + 16;
            int32_t dot[8] = {0};
            for (int g = 0; g < 8; g++)
                for (int r = 0; r < 8; r++)
                    for (int k = 0; k < 4; k++) dot[r] += p[32 * g + 4 * r + k] * x[4 * g + k];
            float s = a.scales[m * a.scale_stride + b];
            for (int r = 0; r < 8; r++) out[8 * m + r] += (float)dot[r] * (half_at(w, r) * s);
        }
}

INLINE void tile_q4(const uint8_t *w, int blocks, activations a, const int M, float *out) {
    memset(out, 0, sizeof(float) * 8 * (size_t)M);
    for (int b = 0; b < blocks; b++, w += Q4_BYTES)
        for (int m = 0; m < M; m++) {
            const int8_t *x = a.quants + m * a.stride + 32 * b;
            const uint8_t *p = w + 32;
            int32_t dot[8] = {0};
            for (int g = 0; g < 4; g++)
                for (int r = 0; r < 8; r++)
                    for (int k = 0; k < 4; k++) {
                        int32_t both = p[32 * g + 4 * r + k];
                        dot[r] += (both & 15) * x[4 * g + k] + (both >> 4) * x[16 + 4 * g + k];
                    }
            float s = a.scales[m * a.scale_stride + b], t = a.sums[m * a.scale_stride + b];
            for (int r = 0; r < 8; r++)
                out[8 * m + r] += (float)dot[r] * (half_at(w, r) * s) + half_at(w + 16, r) * t;
        }
}
#endif

#endif
