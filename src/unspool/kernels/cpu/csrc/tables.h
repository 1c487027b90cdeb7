/* Products of one tile of blocks of 4-bit codes that stand for the 16 numbers of a table: nf4 and fp4, as bitsandbytes has
 * them. Included by products.h.
 *
 * A block is 32 columns. Its bytes: the scales of 8 rows, as floats, then 4 words of each row, word after word, all rows of
 * each: the lowest four bits of word j are column 8 j, the next ones column 8 j + 1. An instruction that permutes a table by
 * the low bits of a vector's words makes numbers of the codes of one column. A weight is its table's number times the scale;
 * activations are not rounded.
 *
 * A row's sums are made in one order, whatever else is multiplied: a row has the same bits alone and in a batch.
 */
#ifndef UNSPOOL_TABLES_H
#define UNSPOOL_TABLES_H

#include "internal.h"
#include "supers.h"

#define TABLE_BYTES (32 + 128)
#define CODES_IN_WORD 8

#if defined(US_AVX2) || defined(US_AVX512)

typedef uint32_t table_words __attribute__((vector_size(4 * OUTPUTS)));

#if defined(US_AVX512)
typedef __m512 table_numbers;
INLINE table_numbers load_table(const float *table) { return _mm512_loadu_ps(table); }
INLINE numbers find_numbers(table_numbers table, table_words words) { return _mm512_permutexvar_ps((__m512i)words, table); }
INLINE numbers load_scales(const uint8_t *w, const uint8_t *second) { return _mm512_castsi512_ps(both_tiles(w, second)); }
#else
typedef struct {
    __m256 lower, upper;
} table_numbers;
INLINE table_numbers load_table(const float *table) { return (table_numbers){_mm256_loadu_ps(table), _mm256_loadu_ps(table + 8)}; }
INLINE numbers find_numbers(table_numbers table, table_words words) {
    const __m256i index = (__m256i)words;
    const __m256 lower = _mm256_permutevar8x32_ps(table.lower, index), upper = _mm256_permutevar8x32_ps(table.upper, index);
    return _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28))); /* by the fourth bit */
}
INLINE numbers load_scales(const uint8_t *w, const uint8_t *second) { return _mm256_castsi256_ps(load_codes(w, second)); }
#endif

/* With AVX-512 the tile and the one after it, if it `is_pair`; otherwise itself twice. */
INLINE void tile_table(const uint8_t *w, int blocks, const float *x, size_t stride, const int M, const float *numbers_of, int is_pair,
                       float *out) {
    const uint8_t *end = w + (size_t)blocks * TABLE_BYTES, *second = is_pair ? end : w;
    const table_numbers table = load_table(numbers_of);
    numbers total[MOST_M];
    EACH_ROW total[m] = SIMD(setzero_ps)();
    for (int b = 0; b < blocks; b++, w += TABLE_BYTES, second += TABLE_BYTES, x += US_BLOCK) {
        numbers even[MOST_M], odd[MOST_M];
        ask_ahead(w, second, end, TABLE_BYTES);
        EACH_ROW even[m] = odd[m] = SIMD(setzero_ps)();
        UNROLLED for (int j = 0; j < US_BLOCK / CODES_IN_WORD; j++) {
            const table_words words = (table_words)load_codes(w + 32 + 32 * j, second + 32 + 32 * j);
            UNROLLED for (int c = 0; c < CODES_IN_WORD; c += 2) {
                const float *column = x + CODES_IN_WORD * j + c;
                const numbers first = find_numbers(table, words >> (uint32_t)(4 * c)), other = find_numbers(table, words >> (uint32_t)(4 * c + 4));
                EACH_ROW even[m] = SIMD(fmadd_ps)(first, SIMD(set1_ps)(column[m * stride]), even[m]);
                EACH_ROW odd[m] = SIMD(fmadd_ps)(other, SIMD(set1_ps)(column[m * stride + 1]), odd[m]);
            }
        }
        const numbers scales = load_scales(w, second);
        EACH_ROW total[m] = SIMD(fmadd_ps)(SIMD(add_ps)(even[m], odd[m]), scales, total[m]);
    }
#if defined(US_AVX512)
    EACH_ROW if (is_pair) _mm512_storeu_ps(out + OUTPUTS * m, total[m]);
    else _mm256_storeu_ps(out + OUTPUTS * m, _mm512_castps512_ps256(total[m]));
#else
    EACH_ROW _mm256_storeu_ps(out + OUTPUTS * m, total[m]);
#endif
}

#else

INLINE void tile_table(const uint8_t *w, int blocks, const float *x, size_t stride, const int M, const float *numbers_of, int is_pair,
                       float *out) {
    (void)is_pair;
    float total[MOST_M][US_TILE];
    EACH_ROW for (int r = 0; r < US_TILE; r++) total[m][r] = 0;
    for (int b = 0; b < blocks; b++, w += TABLE_BYTES, x += US_BLOCK)
        for (int r = 0; r < US_TILE; r++) {
            float numbers[US_BLOCK], scale;
            memcpy(&scale, w + 4 * r, sizeof scale);
            for (int j = 0; j < US_BLOCK / CODES_IN_WORD; j++) {
                uint32_t word;
                memcpy(&word, w + 32 + 32 * j + 4 * r, sizeof word);
                for (int c = 0; c < CODES_IN_WORD; c++) numbers[CODES_IN_WORD * j + c] = numbers_of[word >> (4 * c) & 15];
            }
            EACH_ROW {
                float even = 0, odd = 0;
                for (int k = 0; k < US_BLOCK; k += 2) {
                    even += numbers[k] * x[m * stride + k];
                    odd += numbers[k + 1] * x[m * stride + k + 1];
                }
                total[m][r] += (even + odd) * scale;
            }
        }
    EACH_ROW for (int r = 0; r < US_TILE; r++) out[OUTPUTS * m + r] = total[m][r];
}
#endif

/* Up to OUTPUTS output rows of a tile, or of it and the one after it, for some rows of activations: out[row][OUTPUTS]. */
static void multiply_table(int32_t kind, const uint8_t *tile, int blocks, const float *x, size_t stride, int32_t num_rows, int is_pair,
                           float *out) {
    const float *table = us_find_table(kind);
#define TABLE(M) \
    case M: tile_table(tile, blocks, x, stride, M, table, is_pair, out); break
    switch (num_rows) {
        TABLE(1);
        TABLE(2);
        TABLE(3);
        TABLE(4);
#if MOST_M == 8
        TABLE(5);
        TABLE(6);
        TABLE(7);
        TABLE(8);
#endif
    }
#undef TABLE
}

#endif
