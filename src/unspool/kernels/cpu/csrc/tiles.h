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
#define MOST_UNPACKED 12 /* of one whose weights are unpacked before (unpacked.h) */

/* Output rows that are made together: those of one tile or, where a vector holds as many, of two. */
#if defined(US_AVX512)
#define OUTPUTS 16
#else
#define OUTPUTS 8
#endif

#if defined(US_NEON_DOT)
#include "tiles_neon.h"

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
/* v times a number. GCC would multiply one number and then copy it, by two instructions that keep multiplications waiting. */
INLINE __m512 times(__m512 v, const float *x) {
#if defined(__clang__)
    return _mm512_mul_ps(v, _mm512_set1_ps(*x));
#else
    __m512 product;
    __asm__("vmulps %2%{1to16%}, %1, %0" : "=v"(product) : "v"(v), "m"(*x));
    return product;
#endif
}
/* A total with a block's sum in it. */
INLINE __m512 add_q8(__m512 total, __m512i dot, __m512 d, float scale, const float *sum) { /* codes were moved by 128 */
    const __m512 moved = times(_mm512_set1_ps(128.0f), sum);
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
            total[m] = add_q8(total[m], all, d, a.scales[m], a.sums + m);
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
