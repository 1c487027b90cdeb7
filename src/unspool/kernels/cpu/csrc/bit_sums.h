/* Sums over the bits of tensors: equal where nothing was written, and another after any change of a number, its sign or place.
 *
 * A number's bits and its place are mixed by the finaliser of MurmurHash3, a bijection, so that one changed number always
 * changes the sum. The Python of it is kernels/bit_sums.py. */
#define SUMMED_TOGETHER (1 << 16) /* numbers of a piece, which one thread takes */

#define SUM_NUMBERS(name, type)                                                          \
    static uint64_t name(const type *numbers, int64_t first, int64_t count) {            \
        uint64_t total = 0;                                                              \
        const uint32_t begin = (uint32_t)first;                                          \
        for (int64_t i = 0; i < count; i++) {                                            \
            uint32_t x = (uint32_t)numbers[first + i] ^ (begin + (uint32_t)i) * 0x9E3779B9u; \
            x = (x ^ x >> 16) * 0x85EBCA6Bu;                                             \
            x = (x ^ x >> 13) * 0xC2B2AE35u;                                             \
            total += x ^ x >> 16;                                                        \
        }                                                                                \
        return total;                                                                    \
    }
SUM_NUMBERS(sum_bytes, uint8_t)
SUM_NUMBERS(sum_halves, uint16_t)
SUM_NUMBERS(sum_words, uint32_t)

static void run_sums(const void *argument, int32_t thread, us_team *team) {
    const us_sums_task *task = argument;
    int64_t piece = 0;
    for (int32_t t = 0; t < task->num_tensors; t++) {
        const int64_t count = task->counts[t];
        uint64_t total = 0;
        for (int64_t first = 0; first < count; first += SUMMED_TOGETHER, piece++) {
            if (piece % team->size != thread) continue;
            const int64_t left = count - first, some = left < SUMMED_TOGETHER ? left : SUMMED_TOGETHER;
            total += task->size == 4   ? sum_words(task->at[t], first, some)
                     : task->size == 2 ? sum_halves(task->at[t], first, some)
                                       : sum_bytes(task->at[t], first, some);
        }
        if (total) atomic_fetch_add_explicit((atomic_ullong *)&task->sums[t], total, memory_order_relaxed);
    }
}
