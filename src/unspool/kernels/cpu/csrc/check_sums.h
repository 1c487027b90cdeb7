/* Sums over the bits of tensors of random sizes: every instruction set and number of threads against plain lines. Part of check.c. */
#ifndef UNSPOOL_CHECK_SUMS_H
#define UNSPOOL_CHECK_SUMS_H

static uint64_t sum_plainly(const uint8_t *bytes, int64_t count, int32_t size) {
    uint64_t total = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t x = 0;
        for (int32_t b = 0; b < size; b++) x |= (uint32_t)bytes[i * size + b] << 8 * b;
        x ^= (uint32_t)i * 0x9E3779B9u;
        x = (x ^ x >> 16) * 0x85EBCA6Bu;
        x = (x ^ x >> 13) * 0xC2B2AE35u;
        total += x ^ x >> 16;
    }
    return total;
}

static void check_sums_of(const char *set) {
    enum { MOST = 4 };
    const int32_t num_tensors = 1 + below(MOST), size = 1 << below(3), threads = 1 + below(3);
    const void *at[MOST];
    int64_t counts[MOST];
    uint64_t sums[MOST] = {0}, again[MOST] = {0};
    for (int32_t t = 0; t < num_tensors; t++) {
        counts[t] = below(8) ? below(500) : below(3 << 16); /* some of several pieces, some of none */
        uint8_t *bytes = keep(get((size_t)counts[t] * size + 1));
        for (int64_t i = 0; i < counts[t] * size; i++) bytes[i] = (uint8_t)next();
        at[t] = bytes;
    }
    us_sum_bits(at, counts, num_tensors, size, sums, threads);
    for (int32_t t = 0; t < num_tensors; t++) expect(sums[t] == sum_plainly(at[t], counts[t], size), "a sum of bits", set);
    const int32_t some = below(num_tensors);
    if (!counts[some]) return;
    ((uint8_t *)at[some])[next() % ((uint64_t)counts[some] * size)] ^= (uint8_t)(1 << below(8));
    us_sum_bits(at, counts, num_tensors, size, again, threads);
    for (int32_t t = 0; t < num_tensors; t++) expect((again[t] == sums[t]) == (t != some), "a bit that was written", set);
}

static void check_sums(void) { with_each_set(check_sums_of); }

#endif
