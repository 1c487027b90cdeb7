/* Products of one tile with ARM's vectors. Included by tiles.h. */
#ifndef UNSPOOL_TILES_NEON_H
#define UNSPOOL_TILES_NEON_H

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

#endif
