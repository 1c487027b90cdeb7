/* Products with plain rows of bfloat16 or float16, whose activations and results are of the same kind. Included by kernels.c.
 *
 * N rows of weights, widened as they are read, are multiplied by M of activations, which were widened before. A pair of rows
 * has one running sum, whatever N and M are: a row has the same bits alone and in a batch.
 */
#ifndef UNSPOOL_HALVES_H
#define UNSPOOL_HALVES_H

#define HALVES_N 3            /* rows of weights that are multiplied together, */
#if defined(__aarch64__) || defined(US_AVX512)
#define HALVES_M 8 /* and of activations: with these 24 sums fit 32 registers, */
#else
#define HALVES_M 4 /* and 12 sums 16 */
#endif
#define HALVES_OUTPUTS 24 /* output rows that are put where they belong together */
#define HALVES_LONE 8 /* rows of weights that are multiplied by one of activations: sums enough that none waits for another */

typedef uint16_t shorts __attribute__((vector_size(LANES * 2)));

/* A vector of numbers of 16 bits as floats. */
INLINE vec widen_some(const uint16_t *p, const int kind) {
#if defined(__aarch64__)
    if (kind == US_BF16) return (vec)vshll_n_u16(vld1_u16(p), 16);
    return widen_halves(p);
#elif defined(US_AVX512)
    if (kind == US_BF16) return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
    return widen_halves(p);
#elif defined(US_AVX2)
    if (kind == US_BF16) return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
    return widen_halves(p);
#else
    shorts given;
    memcpy(&given, p, sizeof given);
    const veci bits = __builtin_convertvector(given, veci);
    if (kind == US_BF16) return as_floats(bits << 16);
    return as_floats(as_bits(widen_halves(p)) | (((bits & 0x7c00) == 0x7c00) & 0x7f800000)); /* infinities, and none */
#endif
}

/* A vector of floats as numbers of 16 bits: the nearest, of two the even one. */
INLINE void round_some(vec v, const int kind, uint16_t *to) {
    const veci bits = as_bits(v), size = bits & 0x7fffffff, is_none = size > 0x7f800000;
    veci made;
    if (kind == US_BF16) {
        made = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        made = (made & ~is_none) | (0x7fc0 & is_none);
    } else {
#if defined(__aarch64__)
        const float16x4_t rounded = vcvt_f16_f32((float32x4_t)v);
        memcpy(to, &rounded, sizeof rounded);
        return;
#elif defined(US_AVX512)
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
        return;
#elif defined(US_AVX2)
        _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
        return;
#else
        const veci is_small = size < 0x38800000, is_large = size >= 0x477ff000; /* a subnormal float16, or more than any */
        const veci small = as_bits(as_floats(size & is_small) + 0.5f) - 0x3f000000; /* the last bit of a half is the least float16 */
        const veci usual = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
        made = (small & is_small) | (usual & ~is_small & ~is_large) | (0x7c00 & is_large & ~is_none) | (0x7e00 & is_none);
        made |= bits >> 16 & 0x8000;
#endif
    }
    const shorts rounded = __builtin_convertvector(made, shorts);
    memcpy(to, &rounded, sizeof rounded);
}

INLINE void widen_as(const uint16_t *from, int64_t count, const int kind, float *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, widen_some(from + i, kind));
    if (i == count) return;
    uint16_t last[LANES] = {0};
    float wide[LANES];
    memcpy(last, from + i, sizeof *from * (size_t)(count - i));
    store(wide, widen_some(last, kind));
    memcpy(to + i, wide, sizeof *to * (size_t)(count - i));
}

static void widen_numbers(const uint16_t *from, int64_t count, int32_t kind, float *to) {
    if (kind == US_F16) widen_as(from, count, US_F16, to);
    else widen_as(from, count, US_BF16, to);
}

/* Two vectors of a row of weights. */
INLINE void load_weights(const uint16_t *row, const int kind, vec *low, vec *high) {
#if defined(__aarch64__)
    const uint16x8_t given = vld1q_u16(row);
    if (kind == US_BF16) {
        *low = (vec)vzip1q_u16(vdupq_n_u16(0), given); /* one of the pipes alone shifts */
        *high = (vec)vzip2q_u16(vdupq_n_u16(0), given);
    } else {
        *low = (vec)vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(given)));
        *high = (vec)vcvt_high_f32_f16(vreinterpretq_f16_u16(given));
    }
#else
    *low = widen_some(row, kind);
    *high = widen_some(row + LANES, kind);
#endif
}

/* N rows of weights times M of activations, `pitch` apart and filled up with zeros: out[m][n]. */
INLINE void rows_of_halves(const uint16_t *w, int32_t columns, const float *x, size_t pitch, const int N, const int M, const int kind,
                           float *out) {
    const size_t apart = (size_t)columns;
    vec total[HALVES_LONE][HALVES_M], low[HALVES_LONE], high[HALVES_LONE];
    int32_t k = 0;
    UNROLLED for (int n = 0; n < N; n++) EACH_ROW total[n][m] = fill(0);
#define ADD_PRODUCTS                                                                                    \
    EACH_ROW {                                                                                          \
        const vec left = load(x + m * pitch + k), right = load(x + m * pitch + k + LANES);              \
        UNROLLED for (int n = 0; n < N; n++) total[n][m] += low[n] * left;                              \
        UNROLLED for (int n = 0; n < N; n++) total[n][m] += high[n] * right;                            \
    }
    for (; k + 2 * LANES <= columns; k += 2 * LANES) {
        const uint16_t *next = w + (size_t)N * (apart + (size_t)k); /* in the rows after these */
        UNROLLED for (int i = 0; i < N * 2 * LANES; i += 32) __builtin_prefetch(next + i);
        UNROLLED for (int n = 0; n < N; n++) load_weights(w + (size_t)n * apart + k, kind, low + n, high + n);
        ADD_PRODUCTS
    }
    if (k < columns) {
        UNROLLED for (int n = 0; n < N; n++) {
            uint16_t last[2 * LANES] = {0};
            memcpy(last, w + (size_t)n * apart + k, sizeof *last * (size_t)(columns - k));
            load_weights(last, kind, low + n, high + n);
        }
        ADD_PRODUCTS
    }
#undef ADD_PRODUCTS
    UNROLLED for (int n = 0; n < N; n++)
        UNROLLED for (int four = 0; four < M; four += 4) {
            vec all[4];
            UNROLLED for (int m = 0; m < 4; m++) all[m] = four + m < M ? total[n][four + m] : fill(0);
            const quad results = sums(all);
            UNROLLED for (int m = 0; m < 4 && four + m < M; m++) out[HALVES_OUTPUTS * (four + m) + n] = results[m];
        }
}

#if defined(__aarch64__)
/* Add the products of eight columns of two rows of bfloat16. */
INLINE void add_eight(const uint16_t *w, size_t apart, const float *x, const uint16x8_t zeros, vec *total) {
    uint16x8_t a, b;
    vec left, right, low_a, low_b, high_a, high_b;
    ORDERED_LOAD(left, x);
    ORDERED_LOAD(right, x + LANES);
    ORDERED_LOAD(a, w);
    ORDERED_LOAD(b, w + apart);
    ORDERED("zip1 %0.8h, %1.8h, %2.8h", low_a, zeros, a);
    ORDERED("zip2 %0.8h, %1.8h, %2.8h", high_a, zeros, a);
    ORDERED("zip1 %0.8h, %1.8h, %2.8h", low_b, zeros, b);
    ORDERED("zip2 %0.8h, %1.8h, %2.8h", high_b, zeros, b);
    ORDERED_ADD(total[0], ".4s", low_a, left);
    ORDERED_ADD(total[1], ".4s", low_b, left);
    ORDERED_ADD(total[0], ".4s", high_a, right);
    ORDERED_ADD(total[1], ".4s", high_b, right);
}

/* Two rows of bfloat16 times one of activations, nearly as fast as they come from memory. */
static void pair_of_halves(const uint16_t *w, int32_t columns, const float *x, float *out) {
    const size_t apart = (size_t)columns;
    const uint16x8_t zeros = vdupq_n_u16(0);
    vec total[4] = {fill(0), fill(0), fill(0), fill(0)};
    int32_t k = 0;
    for (; k + 32 <= columns; k += 32) {
        const uint16_t *next = w + 2 * (apart + (size_t)k); /* in the rows after these */
        __builtin_prefetch(next);
        __builtin_prefetch(next + 32);
        UNROLLED for (int i = 0; i < 32; i += 2 * LANES) add_eight(w + k + i, apart, x + k + i, zeros, total);
    }
    for (; k + 2 * LANES <= columns; k += 2 * LANES) add_eight(w + k, apart, x + k, zeros, total);
    if (k < columns) {
        uint16_t last[2][2 * LANES] = {{0}};
        UNROLLED for (int n = 0; n < 2; n++) memcpy(last[n], w + n * apart + k, sizeof **last * (size_t)(columns - k));
        add_eight(last[0], 2 * LANES, x + k, zeros, total);
    }
    const quad results = sums(total);
    out[0] = results[0], out[1] = results[1];
}
#endif

/* Some rows of weights times up to HALVES_M of activations: out[m][n]. */
INLINE void multiply_some(const uint16_t *w, int32_t count, int32_t columns, const float *x, size_t pitch, int32_t M, const int kind,
                          float *out) {
    int32_t n = 0;
#define ROWS(N, M) rows_of_halves(w + (size_t)n * (size_t)columns, columns, x, pitch, N, M, kind, out + n)
#define ROWS_OF(M)                                                      \
    case M:                                                             \
        for (; n + HALVES_N <= count; n += HALVES_N) ROWS(HALVES_N, M); \
        for (; n < count; n++) ROWS(1, M);                              \
        break
#if defined(__aarch64__)
    if (M == 1 && kind == US_BF16)
        for (; n + 2 <= count; n += 2) pair_of_halves(w + (size_t)n * (size_t)columns, columns, x, out + n);
#endif
    if (M == 1)
        for (; n + HALVES_LONE <= count; n += HALVES_LONE) ROWS(HALVES_LONE, 1);
    switch (M) {
        ROWS_OF(1);
        ROWS_OF(2);
        ROWS_OF(3);
        ROWS_OF(4);
#if HALVES_M == 8
        ROWS_OF(5);
        ROWS_OF(6);
        ROWS_OF(7);
        ROWS_OF(8);
#endif
    }
#undef ROWS_OF
#undef ROWS
}

/* Add a bias to some results and put them where they belong. */
INLINE void round_as(const float *made, const uint16_t *bias, int32_t count, const int kind, uint16_t *to) {
    for (int32_t n = 0; n < count; n += LANES) {
        const int32_t some = count - n < LANES ? count - n : LANES;
        uint16_t last[LANES] = {0};
        vec result = load_some(made + n, some);
        if (bias) {
            memcpy(last, bias + n, sizeof *last * (size_t)some);
            result += widen_some(last, kind);
        }
        round_some(result, kind, last);
        memcpy(to + n, last, sizeof *last * (size_t)some);
    }
}

static void run_widen(const void *argument, int32_t thread, us_team *team) {
    const us_widen_task *task = argument;
    int64_t first, last;
    split((task->count + US_BLOCK - 1) / US_BLOCK, thread, team->size, &first, &last);
    first *= US_BLOCK;
    last = last * US_BLOCK < task->count ? last * US_BLOCK : task->count;
    widen_numbers(task->from + first, last - first, task->kind, task->to + first);
}

static void run_halves(const void *argument, int32_t thread, us_team *team) {
    const us_halves_task *task = argument;
    const int32_t K = task->columns, num_rows = task->num_rows, kind = task->kind;
    const size_t pitch = us_pad_halves(K);
    float *x = task->wide;
    int64_t first, last;
    split(num_rows, thread, team->size, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float *wide = x + (size_t)row * pitch;
        widen_numbers(task->x + row * K, K, kind, wide);
        memset(wide + K, 0, sizeof *wide * (pitch - (size_t)K));
    }
    us_meet(team);
    split((task->rows + US_TILE - 1) / US_TILE, thread, team->size, &first, &last);
    first *= US_TILE;
    last = last * US_TILE < task->rows ? last * US_TILE : task->rows;
    for (int64_t begin = first; begin < last; begin += HALVES_OUTPUTS) {
        const int32_t count = (int32_t)(last - begin < HALVES_OUTPUTS ? last - begin : HALVES_OUTPUTS);
        const uint16_t *weights = task->weights + (size_t)begin * (size_t)K, *bias = task->bias ? task->bias + begin : NULL;
        for (int32_t row = 0, M; row < num_rows; row += M) {
            float made[HALVES_M * HALVES_OUTPUTS];
            const float *rows = x + (size_t)row * pitch;
            M = num_rows - row < HALVES_M ? num_rows - row : HALVES_M;
            if (kind == US_F16) multiply_some(weights, count, K, rows, pitch, M, US_F16, made);
            else multiply_some(weights, count, K, rows, pitch, M, US_BF16, made);
            for (int32_t m = 0; m < M; m++) {
                uint16_t *to = task->y + (size_t)(row + m) * (size_t)task->rows + begin;
                if (kind == US_F16) round_as(made + HALVES_OUTPUTS * m, bias, count, US_F16, to);
                else round_as(made + HALVES_OUTPUTS * m, bias, count, US_BF16, to);
            }
        }
    }
}

#endif
