/* Vectors of the instruction set that a file is compiled for, through the compiler's own vector types. */
#ifndef UNSPOOL_VECTOR_H
#define UNSPOOL_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(US_AVX512) || defined(US_AVX2)
#include <immintrin.h>
#endif

#if defined(US_AVX512)
#define LANES 16
#elif defined(US_AVX2)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t veci __attribute__((vector_size(LANES * 4)));
typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef float quad __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

/* Loops over a few accumulators: unrolled early, or compilers keep them in memory. */
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define UNROLLED _Pragma("GCC unroll 12")
#else
#define UNROLLED
#endif

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE vec fill(float x) {
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = x;
    return v;
}
/* Neighbours first, then their sums: what pairwise additions do. */
INLINE float sum(vec v) {
    float part[LANES];
    memcpy(part, &v, sizeof v);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) part[i] = part[2 * i] + part[2 * i + 1];
    return part[0];
}
INLINE int32_t sum_whole(veci v) {
#if defined(__aarch64__)
    return vaddvq_s32((int32x4_t)v);
#elif defined(US_AVX512)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
}
/* The sums of four vectors. */
INLINE quad sums(const vec *v) {
#if defined(__aarch64__)
    const float32x4_t low = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    return (quad)vpaddq_f32(low, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]));
#elif defined(US_AVX512) || defined(US_AVX2)
    /* Within every 128 bits: four sums side by side; then those of all 128 bits. */
#if defined(US_AVX512)
    typedef __m512 wide;
#define WIDE_DO(name, ...) _mm512_##name(__VA_ARGS__)
#else
    typedef __m256 wide;
#define WIDE_DO(name, ...) _mm256_##name(__VA_ARGS__)
#endif
    const wide a = (wide)v[0], b = (wide)v[1], c = (wide)v[2], d = (wide)v[3];
    const wide low = WIDE_DO(add_ps, WIDE_DO(unpacklo_ps, a, b), WIDE_DO(unpackhi_ps, a, b));
    const wide high = WIDE_DO(add_ps, WIDE_DO(unpacklo_ps, c, d), WIDE_DO(unpackhi_ps, c, d));
    const wide all = WIDE_DO(add_ps, WIDE_DO(shuffle_ps, low, high, 0x44), WIDE_DO(shuffle_ps, low, high, 0xee));
#if defined(US_AVX512)
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#else
    const __m256 half = all;
#endif
    return (quad)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    return (quad){sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3])};
#endif
}
INLINE vec as_floats(veci v) {
    vec f;
    memcpy(&f, &v, sizeof f);
    return f;
}
INLINE veci as_bits(vec v) {
    veci bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}
INLINE vec choose(veci mask, vec a, vec b) { return as_floats((as_bits(a) & mask) | (as_bits(b) & ~mask)); }
INLINE vec larger(vec a, vec b) {
#if defined(__aarch64__)
    return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#elif defined(US_AVX512)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(US_AVX2)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}
INLINE vec magnitude(vec v) { return as_floats(as_bits(v) & 0x7fffffff); }
INLINE float largest(vec v) {
#if defined(__aarch64__)
    return vmaxvq_f32((float32x4_t)v);
#elif defined(US_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

/* The nearest whole numbers, halves away from zero. */
INLINE veci nearest(vec x) {
    const vec half = as_floats((as_bits(x) & (int32_t)0x80000000) | as_bits(fill(0.5f))); /* with the sign of x */
    return __builtin_convertvector(x + half, veci);
}

/* e to the x: the power of two by its exponent, the rest by a polynomial (relative error under 2e-7). N vectors side by
 * side: one alone waits for each of its steps. */
INLINE void exponentials(vec *x, const int N) {
    static const float factors[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    veci whole[4];
    vec r[4], p[4];
    UNROLLED for (int i = 0; i < N; i++) {
        x[i] = larger(x[i], fill(-87.0f));
        x[i] = choose(x[i] < fill(88.0f), x[i], fill(88.0f));
    }
    UNROLLED for (int i = 0; i < N; i++) whole[i] = nearest(x[i] * 1.44269504f);
    UNROLLED for (int i = 0; i < N; i++) {
        const vec n = __builtin_convertvector(whole[i], vec);
        r[i] = x[i] - n * 0.693359375f;
        r[i] = r[i] + n * 2.12194440e-4f;
        p[i] = fill(1.9875691500e-4f);
    }
    UNROLLED for (int k = 0; k < 5; k++)
        UNROLLED for (int i = 0; i < N; i++) p[i] = p[i] * r[i] + factors[k];
    UNROLLED for (int i = 0; i < N; i++) p[i] = p[i] * (r[i] * r[i]) + (r[i] + 1.0f);
    UNROLLED for (int i = 0; i < N; i++) x[i] = as_floats(as_bits(p[i]) + (whole[i] << 23));
}
INLINE vec exponential(vec x) {
    exponentials(&x, 1);
    return x;
}
/* Half of erfc(x / sqrt 2) for x >= 0: what lies above x of a normal distribution (Abramowitz and Stegun 7.1.26; the
 * error is below 8e-8). */
INLINE vec normal_tail(vec x) {
    static const float factors[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    const vec t = 1.0f / (1.0f + 0.23164189f * x);
    vec p = fill(factors[0]);
    UNROLLED for (int k = 1; k < 5; k++) p = p * t + factors[k];
    return 0.5f * p * t * exponential(-0.5f * x * x);
}
/* The hyperbolic tangent; NaN stays NaN. The error is below 2e-7. */
INLINE vec tangent(vec x) {
    const vec e = exponential(-2.0f * magnitude(x)), t = (1.0f - e) / (1.0f + e);
    return choose(x == x, as_floats(as_bits(t) | (as_bits(x) & (int32_t)0x80000000)), x);
}
INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

/* A float16 as a float. Scales are finite, so infinities need no care. */
INLINE float half_to_float(uint16_t half) {
#if defined(__aarch64__)
    __fp16 h;
    memcpy(&h, &half, 2);
    return (float)h;
#else
    const uint32_t size = half & 0x7fff, normal = (size << 13) + (112u << 23);
    const float subnormal = (float)(int32_t)size * 0x1p-24f; /* no small float on the way, which may count as zero here */
    uint32_t bits;
    memcpy(&bits, &subnormal, 4);
    bits = (size < 0x400 ? bits : normal) | (uint32_t)(half & 0x8000) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
#endif
}

/* A vector of float16 as floats. */
INLINE vec widen_halves(const void *p) {
#if defined(US_AVX512)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif defined(US_AVX2)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128(p));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
#else
    uint16_t halves[LANES];
    vec v;
    memcpy(halves, p, sizeof halves);
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(halves[i]);
    return v;
#endif
}

#if defined(__aarch64__)
/* Instructions that stay in the order in which they are written. On a Neoverse-N1 a pipe loses a cycle where the results of
 * widening (two cycles) and of multiplying (four) would come at once, and one instruction that loads a pair is slower than
 * two. */
#define ORDERED_LOAD(to, from) __asm__ volatile("ldr %q0, %1" : "=w"(to) : "m"(*(const uint8_t(*)[16])(from)))
#define ORDERED_TO(how, to, a) __asm__ volatile(how : "=w"(to) : "w"(a))
#define ORDERED_IN(how, a) __asm__ volatile(how : "+w"(a))
#define ORDERED(how, to, a, b) __asm__ volatile(how : "=w"(to) : "w"(a), "w"(b))
#define ORDERED_ADD(total, how, a, b) __asm__ volatile("fmla %0.4s, %1.4s, %2" how : "+w"(total) : "w"(a), "w"(b))
#endif

#endif
