/* The masses of a tournament's patterns, and what rounds leave of the shares. Included by tournament.h. */
#ifndef UNSPOOL_TOURNAMENT_MASSES_H
#define UNSPOOL_TOURNAMENT_MASSES_H

#if defined(US_AVX512)
typedef struct {
    __m512 of[PATTERNS]; /* of the shares whose pattern has all of these bits; the first, of all, is not made */
} us_masses;

/* What is there of sixteen words or shares. */
INLINE __mmask16 find_mask(int32_t count) { return (__mmask16)((1u << count) - 1); }
INLINE __m512i load_bits(const uint32_t *p, int32_t count) {
    return count == 16 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi32(find_mask(count), p);
}
INLINE __m512 load_shares(const float *p, int32_t count) {
    return count == 16 ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(find_mask(count), p);
}
INLINE void store_shares(float *p, int32_t count, __m512 x) {
    if (count == 16) _mm512_storeu_ps(p, x);
    else _mm512_mask_storeu_ps(p, find_mask(count), x);
}

/* Words before the first that sixteen are loaded from at once; the shares lie so that these are loaded as well. */
static inline int32_t count_before(const uint32_t *words, int32_t count) {
    const int32_t before = (int32_t)(-((uintptr_t)words / sizeof *words) & 15);
    return before < count ? before : count;
}

/* DO(c, n) for n numbers from c on: sixteen at a time, fewer at the beginning and the end. */
#define IN_SIXTEENS(words, count, DO) \
    do { \
        int32_t c_ = count_before(words, count); \
        if (c_) DO(0, c_); \
        for (; c_ + 16 <= (count); c_ += 16) DO(c_, 16); \
        if (c_ < (count)) DO(c_, (count) - c_); \
    } while (0)

/* The numbers that the lowest bits of `words >> shift` choose. */
INLINE __m512 look_up(__m512 table, __m512i words, __m128i shift) { return _mm512_permutexvar_ps(_mm512_srl_epi32(words, shift), table); }

/* What rounds leave of the shares. */
static void scale_shares(const uint32_t *restrict words, int32_t shift, int32_t count, const us_factors *restrict by, float *restrict shares) {
    const __m128i places = _mm_cvtsi32_si128(shift);
    const __m512 table = _mm512_loadu_ps(by->factors);
#define SCALE(c, n) store_shares(shares + (c), n, _mm512_mul_ps(load_shares(shares + (c), n), look_up(table, load_bits(words + (c), n), places)))
    IN_SIXTEENS(words, count, SCALE);
#undef SCALE
}

/* Adds sixteen shares to the masses that their bits choose. Those with the first bit are made twice: that takes fewer
 * instructions than masks for every pattern. */
INLINE void add_sixteen(__m512i word, const __m512i *bits, __m512 given, __m512 factor, __m512 share, __m512 *of) {
    const __mmask16 a = _mm512_test_epi32_mask(word, bits[0]), b = _mm512_test_epi32_mask(word, bits[1]);
    const __mmask16 d = _mm512_test_epi32_mask(word, bits[2]), both = _kand_mask16(b, d);
    const __m512 first = _mm512_maskz_mul_ps(a, given, factor);
    of[1] = _mm512_add_ps(of[1], first);
    of[2] = _mm512_mask_add_ps(of[2], b, of[2], share);
    of[3] = _mm512_mask_add_ps(of[3], b, of[3], first);
    of[4] = _mm512_mask_add_ps(of[4], d, of[4], share);
    of[5] = _mm512_mask_add_ps(of[5], d, of[5], first);
    of[6] = _mm512_mask_add_ps(of[6], both, of[6], share);
    of[7] = _mm512_mask_add_ps(of[7], both, of[7], first);
}

/* Adds the masses of the patterns of rounds to those that are there; the shares are first multiplied `by` the factors of
 * the rounds before, if there are. */
static void add_masses(const uint32_t *restrict words, int32_t shift, int32_t count, const us_factors *restrict by,
                       float *restrict shares, us_masses *restrict masses) {
    const __m128i before = _mm_cvtsi32_si128(shift - ROUNDS);
    const __m512i bits[ROUNDS] = {_mm512_set1_epi32(1 << shift), _mm512_set1_epi32(2 << shift), _mm512_set1_epi32(4 << shift)};
    const __m512 table = by ? _mm512_loadu_ps(by->factors) : _mm512_setzero_ps(), one = _mm512_set1_ps(1);
    us_masses sums = *masses;
#define ADD_FIRST(c, n) do { \
        const __m512 share = load_shares(shares + (c), n); \
        add_sixteen(load_bits(words + (c), n), bits, share, one, share, sums.of); \
    } while (0)
#define ADD_NEXT(c, n) do { \
        const __m512i word = load_bits(words + (c), n); \
        const __m512 given = load_shares(shares + (c), n), factor = look_up(table, word, before), share = _mm512_mul_ps(given, factor); \
        store_shares(shares + (c), n, share); \
        add_sixteen(word, bits, given, factor, share, sums.of); \
    } while (0)
    if (by) IN_SIXTEENS(words, count, ADD_NEXT);
    else IN_SIXTEENS(words, count, ADD_FIRST);
#undef ADD_FIRST
#undef ADD_NEXT
    *masses = sums;
}

/* What has all of a pattern's bits, less what has others too. Nobody asks for what has none of them. */
static void part_masses(const us_masses *masses, float *found) {
    found[0] = 0;
    for (int32_t i = 1; i < PATTERNS; i++) found[i] = sum((vec)masses->of[i]);
    for (int32_t bit = 1; bit < PATTERNS; bit *= 2)
        for (int32_t i = 1; i < PATTERNS; i++)
            if (!(i & bit)) found[i] -= found[i | bit];
}

/* Adds the logarithms of all factors of a word's rounds. */
static void add_logs(const uint32_t *restrict words, const us_factors *restrict by, int32_t count, float *restrict sums) {
    __m512 tables[GROUPS];
    for (int32_t i = 0; i < GROUPS; i++) tables[i] = _mm512_loadu_ps(by[i].logs);
#define ADD_LOGS(c, n) do { \
        const __m512i word = load_bits(words + (c), n); \
        __m512 sum = load_shares(sums + (c), n); \
        UNROLLED for (int32_t i = 0; i < GROUPS; i++) sum = _mm512_add_ps(sum, look_up(tables[i], word, _mm_cvtsi32_si128(i * ROUNDS))); \
        store_shares(sums + (c), n, sum); \
    } while (0)
    IN_SIXTEENS(words, count, ADD_LOGS);
#undef ADD_LOGS
}
#else
typedef struct {
    float of[TABLES][PATTERNS];
} us_masses;

static void scale_shares(const uint32_t *restrict words, int32_t shift, int32_t count, const us_factors *restrict by, float *restrict shares) {
    for (int32_t c = 0; c < count; c++) {
        ONE_BY_ONE;
        shares[c] *= by->factors[words[c] >> shift & (PATTERNS - 1)];
    }
}

static void add_masses(const uint32_t *restrict words, int32_t shift, int32_t count, const us_factors *restrict by,
                       float *restrict shares, us_masses *restrict masses) {
    if (by) scale_shares(words, shift - ROUNDS, count, by, shares);
    int32_t c = 0;
    for (; c + TABLES <= count; c += TABLES)
        UNROLLED for (int32_t i = 0; i < TABLES; i++) {
            ONE_BY_ONE;
            masses->of[i][words[c + i] >> shift & (PATTERNS - 1)] += shares[c + i];
        }
    for (; c < count; c++) masses->of[0][words[c] >> shift & (PATTERNS - 1)] += shares[c];
}

static void part_masses(const us_masses *masses, float *found) {
    for (int32_t i = 0; i < PATTERNS; i++) found[i] = (masses->of[0][i] + masses->of[1][i]) + (masses->of[2][i] + masses->of[3][i]);
}

static void add_logs(const uint32_t *restrict words, const us_factors *restrict by, int32_t count, float *restrict sums) {
    for (int32_t c = 0; c < count; c++) {
        ONE_BY_ONE;
        const uint32_t word = words[c];
        sums[c] += by[0].logs[word & (PATTERNS - 1)] + by[1].logs[word >> ROUNDS & (PATTERNS - 1)] + by[2].logs[word >> 2 * ROUNDS & (PATTERNS - 1)];
    }
}
#endif

#endif
