/* Products with plain rows of bfloat16 or float16, whose activations and results are of the same kind. Included by kernels.c.
 *
 * N rows of weights are multiplied by M of activations, which were widened to floats. A pair of rows has one running sum,
 * whatever N and M are: a row has the same bits alone and in a batch. Weights are widened as they are read; for many rows of
 * activations before that, to a buffer that stays in a cache.
 */
#ifndef UNSPOOL_HALVES_H
#define UNSPOOL_HALVES_H

#define HALVES_M 4       /* rows of activations that are multiplied together */
#define HALVES_DIRECT 8  /* rows of activations up to which weights are widened as they are read */
#define HALVES_ROOM (1 << 17) /* floats of activations that stay in the second-level cache, */
#define HALVES_WIDE (1 << 14) /* and of weights that stay in the first, or a little more */
#if defined(US_AVX2) && !defined(US_AVX512)
#define HALVES_N 3 /* 12 sums, 3 rows of weights and one of activations are 16 registers */
#else
#define HALVES_N 4
#endif

typedef uint16_t shorts __attribute__((vector_size(LANES * 2)));

/* A vector of numbers of 16 bits as floats. */
INLINE vec widen_some(const uint16_t *p, const int kind) {
#if defined(__aarch64__)
    if (kind == US_BF16) return (vec)vshll_n_u16(vld1_u16(p), 16);
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
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

/* Rows of `columns` numbers, widened and filled up with zeros to rows of `pitch`. */
static void widen_rows(const uint16_t *from, int64_t count, int32_t columns, size_t pitch, int32_t kind, float *to) {
    for (int64_t row = 0; row < count; row++, from += columns, to += pitch) {
        widen_numbers(from, columns, kind, to);
        for (size_t i = (size_t)columns; i < pitch; i++) to[i] = 0;
    }
}

/* The numbers of a row from k on, of which `some` are left. */
INLINE vec load_weights(const void *row, int32_t k, int32_t some, const int kind) {
    if (kind == US_F32) return load((const float *)row + k);
    if (some >= LANES) return widen_some((const uint16_t *)row + k, kind);
    uint16_t last[LANES] = {0};
    memcpy(last, (const uint16_t *)row + k, sizeof *last * (size_t)some);
    return widen_some(last, kind);
}

/* N rows of weights, `apart` bytes from each other, times M of activations: out[m][n]. */
INLINE void rows_of_halves(const uint8_t *w, size_t apart, int32_t columns, const float *x, size_t pitch, const int N, const int M,
                           const int kind, float *out) {
    vec total[2 * HALVES_N][HALVES_M];
    UNROLLED for (int n = 0; n < N; n++) EACH_ROW total[n][m] = fill(0);
    int32_t k = 0;
    for (; k + LANES <= columns; k += LANES) {
        vec weights[2 * HALVES_N];
        if (kind != US_F32) __builtin_prefetch(w + (size_t)N * (apart + sizeof(uint16_t) * (size_t)k)); /* the next rows */
        UNROLLED for (int n = 0; n < N; n++) weights[n] = load_weights(w + (size_t)n * apart, k, LANES, kind);
        EACH_ROW {
            const vec given = load(x + m * pitch + k);
            UNROLLED for (int n = 0; n < N; n++) total[n][m] += weights[n] * given;
        }
    }
    if (k < columns)
        UNROLLED for (int n = 0; n < N; n++) {
            const vec weights = load_weights(w + (size_t)n * apart, k, columns - k, kind);
            EACH_ROW total[n][m] += weights * load(x + m * pitch + k);
        }
    UNROLLED for (int n = 0; n < N; n++) {
        vec all[HALVES_M];
        UNROLLED for (int m = 0; m < HALVES_M; m++) all[m] = m < M ? total[n][m] : fill(0);
        const quad results = sums(all);
        EACH_ROW out[US_MOST_OUTPUTS * m + n] = results[m];
    }
}

/* Some rows of weights times up to HALVES_M of activations: out[m][n]. */
INLINE void multiply_some(const uint8_t *w, size_t apart, int32_t count, int32_t columns, const float *x, size_t pitch, int32_t M,
                          const int kind, float *out) {
#define ROWS(N, M) rows_of_halves(w + (size_t)n * apart, apart, columns, x, pitch, N, M, kind, out + n)
#define ROWS_OF(M)                                            \
    case M:                                                   \
        for (; n + HALVES_N <= count; n += HALVES_N) ROWS(HALVES_N, M); \
        for (; n < count; n++) ROWS(1, M);                    \
        break
    int32_t n = 0;
    if (M == 1) /* sums enough that none waits for another */
        for (; n + 2 * HALVES_N <= count; n += 2 * HALVES_N) ROWS(2 * HALVES_N, 1);
    switch (M) {
        ROWS_OF(1);
        ROWS_OF(2);
        ROWS_OF(3);
        ROWS_OF(4);
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
    const int32_t K = task->columns, num_rows = task->num_rows, kind = task->kind, is_direct = num_rows <= HALVES_DIRECT;
    const size_t pitch = us_pad_halves(K), apart = (is_direct ? sizeof(uint16_t) * (size_t)K : sizeof(float) * pitch);
    float *x = task->scratch, *wide = x + ((size_t)num_rows + (size_t)thread * US_MOST_OUTPUTS) * pitch;
    const int32_t room = HALVES_ROOM / (int32_t)pitch, most = room < HALVES_M ? HALVES_M : room < BLOCK_ROWS ? room : BLOCK_ROWS;
    const int32_t few = HALVES_WIDE / (int32_t)pitch / HALVES_N * HALVES_N, fewest = few < HALVES_N ? HALVES_N : few;
    const int32_t outputs = is_direct || fewest > US_MOST_OUTPUTS ? US_MOST_OUTPUTS : fewest;
    int64_t first, last;
    split(num_rows, thread, team->size, &first, &last);
    widen_rows(task->x + first * K, last - first, K, pitch, kind, x + (size_t)first * pitch);
    us_meet(team);
    split((task->rows + US_TILE - 1) / US_TILE, thread, team->size, &first, &last);
    first *= US_TILE;
    last = last * US_TILE < task->rows ? last * US_TILE : task->rows;
    for (int32_t from = 0; from < num_rows; from += most)
        for (int64_t begin = first; begin < last; begin += outputs) {
            const int32_t count = (int32_t)(last - begin < outputs ? last - begin : outputs);
            const int32_t stop = num_rows - from < most ? num_rows : from + most;
            const uint16_t *given = task->weights + (size_t)begin * (size_t)K, *bias = task->bias ? task->bias + begin : NULL;
            if (!is_direct) widen_rows(given, count, K, pitch, kind, wide);
            for (int32_t row = from, M; row < stop; row += M) {
                float made[HALVES_M * US_MOST_OUTPUTS];
                const float *rows = x + (size_t)row * pitch;
                M = stop - row < HALVES_M ? stop - row : HALVES_M;
                if (!is_direct) multiply_some((const uint8_t *)wide, apart, count, (K + LANES - 1) / LANES * LANES, rows, pitch, M, US_F32, made);
                else if (kind == US_F16) multiply_some((const uint8_t *)given, apart, count, K, rows, pitch, M, US_F16, made);
                else multiply_some((const uint8_t *)given, apart, count, K, rows, pitch, M, US_BF16, made);
                for (int32_t m = 0; m < M; m++) {
                    uint16_t *to = task->y + (size_t)(row + m) * (size_t)task->rows + begin;
                    if (kind == US_F16) round_as(made + US_MOST_OUTPUTS * m, bias, count, US_F16, to);
                    else round_as(made + US_MOST_OUTPUTS * m, bias, count, US_BF16, to);
                }
            }
        }
}

#endif
