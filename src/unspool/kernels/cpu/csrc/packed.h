/* Attention over keys that are packed in few bits (kernels/packing.py), and over those in full precision after them.
 *
 * Every set can unpack a part's numbers into a tile and read that. Where there are dot products of bytes, codes are read
 * as they are: what a code is multiplied by (a query times its channel's scale, a weight times its position's) is written
 * as three int8 digits to the base 256 of a fixed-point number of 24 bits. Their dot products are exact, so a sum is
 * off by no more than sums of floats are.
 */
#ifndef UNSPOOL_PACKED_H
#define UNSPOOL_PACKED_H

#include "attention.h"

/* Packed positions of one head that a part covers. */
typedef struct {
    const us_packing *packing;
    const us_packed_layer *layer;
    int64_t head; /* among all heads of all rows */
    int32_t place, count;
} packed_segment;

/* Numbers of scales or zero points as floats. */
static void read_scales(const void *from, int32_t dtype, int64_t first, int32_t count, float *out) {
    if (dtype == US_FLOAT) {
        memcpy(out, (const float *)from + first, sizeof(float) * (size_t)count);
        return;
    }
    const uint16_t *halves = (const uint16_t *)from + first;
    for (int32_t i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)halves[i] << 16;
        if (dtype == US_BFLOAT) memcpy(out + i, &bits, sizeof bits);
        else out[i] = (halves[i] & 0x7c00) == 0x7c00 ? NAN : half_to_float(halves[i]); /* nothing finite was packed */
    }
}

static const uint8_t *find_codes(const us_scheme *s, const us_packed *p, int64_t head, int64_t places, int32_t place) {
    return p->codes + (head * places + place) * s->bytes;
}

/* Scales and zero points of all channels of one place, or of its block: (width) each. */
static void read_channels(const us_scheme *s, const us_packed *p, int64_t head, int64_t places, int32_t place, int32_t D,
                          float *scales, float *zeros) {
    if (s->by_channel) {
        const int64_t first = (head * (places / s->block) + place / s->block) * D;
        read_scales(p->scales, s->dtype, first, D, scales);
        read_scales(p->zeros, s->dtype, first, D, zeros);
        return;
    }
    float groups[2][US_WIDEST_HEAD];
    const int32_t count = D / s->group;
    read_scales(p->scales, s->dtype, (head * places + place) * count, count, groups[0]);
    read_scales(p->zeros, s->dtype, (head * places + place) * count, count, groups[1]);
    for (int32_t g = 0, c = 0; g < count; g++)
        for (int32_t i = 0; i < s->group; i++, c++) scales[c] = groups[0][g], zeros[c] = groups[1][g];
}

/* The numbers of `count` places from `place` on: (count, width). */
static void unpack(const us_scheme *s, const us_packed *p, int64_t head, int64_t places, int32_t place, int32_t count,
                   int32_t D, float *out) {
    float scales[US_WIDEST_HEAD], zeros[US_WIDEST_HEAD];
    const int32_t mask = (1 << s->bits) - 1, bytes = s->bytes;
    const uint8_t *codes = find_codes(s, p, head, places, place);
    for (int32_t j = 0; j < count; j++, codes += bytes, out += D) {
        if (!j || !s->by_channel || (place + j) % s->block == 0)
            read_channels(s, p, head, places, place + j, D, scales, zeros);
        for (int32_t first = 0, shift = 0; first < D; first += bytes, shift += s->bits) {
            const int32_t last = D - first < bytes ? D - first : bytes;
            for (int32_t b = 0; b < last; b++)
                out[first + b] = (float)(codes[b] >> shift & mask) * scales[first + b] + zeros[first + b];
        }
    }
}

#if defined(US_NEON_DOT)
#define HAS_CODES 1
#define DIGITS 3
#define LARGEST_DIGITS 8323072.0f /* 127 * 256 * 256 */

/* Numbers as digits of fixed point: numbers[i] = step * (digits[0][i] + 256 digits[1][i] + 65536 digits[2][i]). Gives the
 * step. Counts are multiples of 16. */
INLINE float cut_digits(const float *numbers, const int32_t count, int8_t *digits, const int32_t stride) {
    float32x4_t top = vdupq_n_f32(0);
    for (int32_t i = 0; i < count; i += 4) top = vmaxq_f32(top, vabsq_f32(vld1q_f32(numbers + i)));
    const float most = vmaxvq_f32(top), inverse = most > 0 ? LARGEST_DIGITS / most : 0;
    for (int32_t i = 0; i < count; i += 16) {
        int32x4_t v[4];
        int8x16_t made[DIGITS];
        UNROLLED for (int k = 0; k < 4; k++) v[k] = vcvtaq_s32_f32(vmulq_n_f32(vld1q_f32(numbers + i + 4 * k), inverse));
        UNROLLED for (int d = 0; d < DIGITS; d++) {
            const int16x8_t low = vcombine_s16(vmovn_s32(v[0]), vmovn_s32(v[1])), high = vcombine_s16(vmovn_s32(v[2]), vmovn_s32(v[3]));
            made[d] = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
            UNROLLED for (int k = 0; k < 4; k++) v[k] = vshrq_n_s32(vaddq_s32(v[k], vdupq_n_s32(128)), 8); /* the rest */
            vst1q_s8(digits + d * stride + i, made[d]);
        }
    }
    return most / LARGEST_DIGITS;
}

INLINE float32x4_t join_digits(const int32x4_t *sums) {
    const int32x4_t low = vaddq_s32(vshlq_n_s32(sums[1], 8), sums[0]);
    return vfmaq_n_f32(vcvtq_f32_s32(low), vcvtq_f32_s32(sums[2]), 65536.0f);
}

/* 16 codes from channel `c` on as int8; codes of 8 bits are moved by 128. */
INLINE int8x16_t read_codes(const uint8_t *codes, const int32_t bits, int32_t bytes, int32_t c) {
    if (bits == 8) return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(codes + c), vdupq_n_u8(128)));
    const uint8x16_t both = vshlq_u8(vld1q_u8(codes + c % bytes), vdupq_n_s8((int8_t)(-bits * (c / bytes))));
    return vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8((uint8_t)((1 << bits) - 1))));
}
#define MOVED(bits) ((bits) == 8 ? 128.0f : 0.0f)

static int has_codes(const us_packing *p, int32_t D) {
    const us_scheme *k = &p->keys, *v = &p->values;
    return k->by_channel && !v->by_channel && D % 16 == 0 && k->bytes % 16 == 0 && v->bytes % 16 == 0 && v->group % 16 == 0 &&
           k->bytes * 8 == k->bits * D && v->bytes * 8 == v->bits * D;
}

/* Scores of `count` keys of one block for all queries. */
INLINE void score_block(const float *q, const int32_t G, const int32_t D, const packed_segment *s, int32_t first, int32_t count,
                        float (*scores)[US_PART]) {
    const us_scheme *scheme = &s->packing->keys;
    const int32_t bits = scheme->bits, bytes = scheme->bytes;
    float scales[US_WIDEST_HEAD], zeros[US_WIDEST_HEAD], scaled[US_WIDEST_HEAD];
    int8_t codes[US_PART * US_WIDEST_HEAD], digits[DIGITS * US_WIDEST_HEAD];
    read_channels(scheme, &s->layer->keys, s->head, s->layer->places, s->place + first, D, scales, zeros);
    const uint8_t *from = find_codes(scheme, &s->layer->keys, s->head, s->layer->places, s->place + first);
#define READ(BITS) \
    for (int32_t j = 0; j < count; j++) \
        for (int32_t c = 0; c < D; c += 16) vst1q_s8(codes + j * D + c, read_codes(from + j * bytes, BITS, bytes, c))
    if (bits == 8) READ(8);
    else if (bits == 4) READ(4);
    else READ(2);
#undef READ
    for (int32_t g = 0; g < G; g++) {
        float32x4_t constant = vdupq_n_f32(0);
        for (int32_t c = 0; c < D; c += 4) {
            const float32x4_t one = vld1q_f32(q + g * D + c), t = vmulq_f32(one, vld1q_f32(scales + c));
            vst1q_f32(scaled + c, t);
            constant = vfmaq_f32(vfmaq_n_f32(constant, t, MOVED(bits)), one, vld1q_f32(zeros + c));
        }
        const float step = cut_digits(scaled, D, digits, US_WIDEST_HEAD);
        const float32x4_t base = vdupq_n_f32(vaddvq_f32(constant));
        for (int32_t j = 0; j < count; j += 4) {
            int32x4_t sums[DIGITS][4], joined[DIGITS];
            const int8_t *key[4];
            UNROLLED for (int k = 0; k < 4; k++) key[k] = codes + (j + k < count ? j + k : count - 1) * D;
            UNROLLED for (int d = 0; d < DIGITS; d++)
                UNROLLED for (int k = 0; k < 4; k++) sums[d][k] = vdupq_n_s32(0);
            for (int32_t c = 0; c < D; c += 16) {
                int8x16_t some[DIGITS];
                UNROLLED for (int d = 0; d < DIGITS; d++) some[d] = vld1q_s8(digits + d * US_WIDEST_HEAD + c);
                UNROLLED for (int k = 0; k < 4; k++) {
                    const int8x16_t code = vld1q_s8(key[k] + c);
                    UNROLLED for (int d = 0; d < DIGITS; d++) sums[d][k] = vdotq_s32(sums[d][k], code, some[d]);
                }
            }
            UNROLLED for (int d = 0; d < DIGITS; d++)
                joined[d] = vpaddq_s32(vpaddq_s32(sums[d][0], sums[d][1]), vpaddq_s32(sums[d][2], sums[d][3]));
            float made[4];
            vst1q_f32(made, vfmaq_n_f32(base, join_digits(joined), step));
            for (int32_t k = 0; k < 4 && j + k < count; k++) scores[g][first + j + k] = made[k];
        }
    }
}

INLINE void score_codes(const float *q, const int32_t G, const int32_t D, const packed_segment *s, float (*scores)[US_PART]) {
    const int32_t block = s->packing->keys.block;
    for (int32_t first = 0, count; first < s->count; first += count) {
        count = block - (s->place + first) % block;
        count = count < s->count - first ? count : s->count - first;
        score_block(q, G, D, s, first, count, scores);
    }
}

/* Weighted values of all queries. Codes of four places stand side by side, so that a dot product runs down them. */
INLINE void weigh_codes(float *read, const int32_t G, const int32_t D, const packed_segment *s, float (*scores)[US_PART]) {
    const us_scheme *scheme = &s->packing->values;
    const int32_t bits = scheme->bits, bytes = scheme->bytes, groups = D / scheme->group, count = s->count;
    const int64_t at = (s->head * s->layer->places + s->place) * groups;
    float scales[US_PART], zeros[US_PART], all[US_PART * US_WIDEST_HEAD / 16], others[US_PART * US_WIDEST_HEAD / 16];
    int8_t side[US_PART * 16], digits[MOST_GROUP][DIGITS][US_PART];
    float steps[MOST_GROUP], constants[MOST_GROUP];
    const uint8_t *from = find_codes(scheme, &s->layer->values, s->head, s->layer->places, s->place);
    const int32_t fours = (count + 3) / 4, whole = (count + 15) / 16 * 16;
    read_scales(s->layer->values.scales, scheme->dtype, at, count * groups, all);
    read_scales(s->layer->values.zeros, scheme->dtype, at, count * groups, others);
    for (int32_t group = 0; group < groups; group++) {
        for (int32_t j = 0; j < US_PART; j++) {
            scales[j] = j < count ? all[j * groups + group] : 0;
            zeros[j] = j < count ? others[j * groups + group] + MOVED(bits) * scales[j] : 0;
        }
        for (int32_t g = 0; g < G; g++) {
            float scaled[US_PART];
            float32x4_t constant = vdupq_n_f32(0);
            for (int32_t j = count; j < whole; j++) scaled[j] = 0;
            int32_t j = 0;
            for (; j + 4 <= count; j += 4) {
                const float32x4_t weight = vld1q_f32(&scores[g][j]);
                vst1q_f32(scaled + j, vmulq_f32(weight, vld1q_f32(scales + j)));
                constant = vfmaq_f32(constant, weight, vld1q_f32(zeros + j));
            }
            constants[g] = vaddvq_f32(constant);
            for (; j < count; j++) {
                scaled[j] = scores[g][j] * scales[j];
                constants[g] += scores[g][j] * zeros[j];
            }
            steps[g] = cut_digits(scaled, whole, digits[g][0], US_PART);
        }
        for (int32_t c = group * scheme->group; c < (group + 1) * scheme->group; c += 16) {
#define READ(BITS) \
    for (int32_t j = 0; j < fours; j++) { \
        int8x16_t row[4]; \
        UNROLLED for (int k = 0; k < 4; k++) { \
            const int32_t place = 4 * j + k < count ? 4 * j + k : count - 1; \
            row[k] = read_codes(from + place * bytes, BITS, bytes, c); \
        } \
        const int16x8_t a = vreinterpretq_s16_s8(vzip1q_s8(row[0], row[1])), b = vreinterpretq_s16_s8(vzip1q_s8(row[2], row[3])); \
        const int16x8_t e = vreinterpretq_s16_s8(vzip2q_s8(row[0], row[1])), f = vreinterpretq_s16_s8(vzip2q_s8(row[2], row[3])); \
        vst1q_s8(side + 64 * j, vreinterpretq_s8_s16(vzip1q_s16(a, b))); \
        vst1q_s8(side + 64 * j + 16, vreinterpretq_s8_s16(vzip2q_s16(a, b))); \
        vst1q_s8(side + 64 * j + 32, vreinterpretq_s8_s16(vzip1q_s16(e, f))); \
        vst1q_s8(side + 64 * j + 48, vreinterpretq_s8_s16(vzip2q_s16(e, f))); \
    }
            if (bits == 8) READ(8)
            else if (bits == 4) READ(4)
            else READ(2)
#undef READ
            for (int32_t g = 0; g < G; g++) {
                int32x4_t sums[4][DIGITS];
                UNROLLED for (int i = 0; i < 4; i++)
                    UNROLLED for (int d = 0; d < DIGITS; d++) sums[i][d] = vdupq_n_s32(0);
                for (int32_t j = 0; j < fours; j++) {
                    int8x16_t some[DIGITS];
                    UNROLLED for (int d = 0; d < DIGITS; d++) {
                        int32_t four;
                        memcpy(&four, &digits[g][d][4 * j], sizeof four);
                        some[d] = vreinterpretq_s8_s32(vdupq_n_s32(four));
                    }
                    UNROLLED for (int i = 0; i < 4; i++) {
                        const int8x16_t code = vld1q_s8(side + 64 * j + 16 * i);
                        UNROLLED for (int d = 0; d < DIGITS; d++) sums[i][d] = vdotq_s32(sums[i][d], code, some[d]);
                    }
                }
                UNROLLED for (int i = 0; i < 4; i++) {
                    float *to = read + g * D + c + 4 * i;
                    const float32x4_t made = vfmaq_n_f32(vdupq_n_f32(constants[g]), join_digits(sums[i]), steps[g]);
                    vst1q_f32(to, vaddq_f32(vld1q_f32(to), made));
                }
            }
        }
    }
}
#else
#define HAS_CODES 0
#endif

/* Tiles that a thread unpacks into, and what they hold: the tokens of one row read them one after the other. */
typedef struct {
    float *numbers[2];      /* keys, values: (US_PART, width) each */
    packed_segment held[2]; /* no layer: nothing */
} tiles;

/* A part's packed keys (which: 0) or values (1) as floats. */
static segment show(const packed_segment *s, int which, int32_t D, tiles *t) {
    const us_scheme *scheme = which ? &s->packing->values : &s->packing->keys;
    packed_segment *held = &t->held[which];
    if (held->layer != s->layer || held->head != s->head || held->place != s->place || held->count != s->count) {
        unpack(scheme, which ? &s->layer->values : &s->layer->keys, s->head, s->layer->places, s->place, s->count, D,
               t->numbers[which]);
        *held = *s;
    }
    return (segment){.keys = t->numbers[which], .stride = D, .count = s->count};
}

/* Read one part: packed keys, then those that lie in `num` segments. The first of them has position `position`. */
static void read_part(const us_model *model, const float *q, const score_terms *terms, int32_t G, const packed_segment *packed,
                      const segment *segments, int32_t num, int32_t position, tiles *t, reading *r) {
    const int32_t D = model->head_dim;
    float scores[MOST_GROUP][US_PART];
    int32_t count = packed->count;
    int reads_codes = 0;
    for (int32_t i = 0; i < num; i++) count += segments[i].count;
#define FROM(at) ((float(*)[US_PART])(&scores[0][at]))
#define SCORE_CODES(G, D) score_codes(q, G, D, packed, scores)
#define WEIGH_CODES(G, D) weigh_codes(r->read, G, D, packed, scores)
#define SCORE(G, D)                            \
    if (shown.count) score(q, G, D, shown, scores); \
    for (int32_t i = 0, at = packed->count; i < num; at += segments[i++].count) score(q, G, D, segments[i], FROM(at))
#define WEIGH(G, D)                                  \
    if (shown.count) weigh(r->read, G, D, shown, scores); \
    for (int32_t i = 0, at = packed->count; i < num; at += segments[i++].count) weigh(r->read, G, D, segments[i], FROM(at))
#if HAS_CODES
    reads_codes = packed->count && has_codes(packed->packing, D);
    if (reads_codes) FOR_SHAPE(SCORE_CODES)
#endif
    const int is_shown = packed->count && !reads_codes;
    segment shown = {0};
    if (is_shown) shown = show(packed, 0, D, t);
    FOR_SHAPE(SCORE)
    weight_scores(model, terms, G, count, position, scores, r);
    memset(r->read, 0, sizeof(float) * (size_t)G * (size_t)D);
#if HAS_CODES
    if (reads_codes) FOR_SHAPE(WEIGH_CODES)
#endif
    if (is_shown) shown = show(packed, 1, D, t);
    FOR_SHAPE(WEIGH)
}

#endif
