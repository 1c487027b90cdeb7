/* Vectors of the instruction set that a file is compiled for, through the compiler's own vector types. */
#ifndef UNSPOOL_VECTOR_H
#define UNSPOOL_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(US_AVX512)
#define LANES 16
#elif defined(US_AVX2)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t veci __attribute__((vector_size(LANES * 4)));
typedef float quad __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

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
INLINE float sum(vec v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
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
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }
INLINE vec magnitude(vec v) { return as_floats(as_bits(v) & 0x7fffffff); }
INLINE float largest(vec v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* e to the x: the power of two by its exponent, the rest by a polynomial (relative error under 2e-7). */
INLINE vec exponential(vec x) {
    x = larger(x, fill(-87.0f));
    x = choose(x < fill(88.0f), x, fill(88.0f));
    vec scaled = x * 1.44269504f;
    vec half = as_floats((as_bits(scaled) & (int32_t)0x80000000) | as_bits(fill(0.5f))); /* with the sign of x */
    veci whole = __builtin_convertvector(scaled + half, veci);
    vec n = __builtin_convertvector(whole, vec);
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = fill(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    return as_floats(as_bits(p) + (whole << 23));
}
INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

/* A float16 as a float. Scales are finite, so infinities need no care. */
INLINE float half_to_float(uint16_t half) {
#if defined(__aarch64__)
    __fp16 h;
    memcpy(&h, &half, 2);
    return (float)h;
#else
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f; /* moves the exponent, and makes subnormal numbers right too */
    memcpy(&bits, &f, 4);
    bits |= (uint32_t)(half & 0x8000) << 16;
    memcpy(&f, &bits, 4);
    return f;
#endif
}

#endif
