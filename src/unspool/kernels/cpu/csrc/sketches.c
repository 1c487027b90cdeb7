/* Sketches of heads, which csrc/sketch.h reads. */
#include "internal.h"
#include "vector.h"

#define LEAST_SCALE 0x1p-14f /* the least float16 that is not subnormal */
#define MOST_SCALE 65504.0f

/* A float16 that is not below a positive number in their range. */
static uint16_t round_up(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return (uint16_t)((bits - 0x38000000 + 0x1fff) >> 13);
}

/* Squares of a row's norms: of itself, of its sketch, and of what that lacks. */
typedef struct {
    double own, sketch, missing;
} squares;

/* A block of a row, as int8 in the place of its tile's row; 0 if its numbers are too large. */
static int sketch_block(const float *row, const float *inverses, uint8_t *block, int32_t place, squares *found) {
    enum { VECTORS = US_BLOCK / LANES };
    vec numbers[VECTORS], most = fill(0), own = fill(0), sketch = fill(0), missing = fill(0);
    int8_t quants[US_BLOCK];
    UNROLLED for (int i = 0; i < VECTORS; i++) {
        numbers[i] = load(row + LANES * i) * load(inverses + LANES * i);
        most = larger(most, magnitude(numbers[i]));
        own += numbers[i] * numbers[i];
    }
    const float size = sum(own), wanted = largest(most) / 127.0f;
    if (!(size < INFINITY) || wanted > MOST_SCALE) return 0;
    const uint16_t half = round_up(wanted > LEAST_SCALE ? wanted : LEAST_SCALE);
    const float scale = half_to_float(half), inverse = 1.0f / scale;
    UNROLLED for (int i = 0; i < VECTORS; i++) {
        const veci whole = nearest(numbers[i] * inverse);
        const bytes small = __builtin_convertvector(whole, bytes);
        const vec made = __builtin_convertvector(whole, vec) * scale, off = numbers[i] - made;
        memcpy(quants + LANES * i, &small, sizeof small);
        sketch += made * made;
        missing += off * off;
    }
    memcpy(block + 2 * place, &half, sizeof half);
    for (int group = 0; group < US_BLOCK / 4; group++) memcpy(block + 16 + 32 * group + 4 * place, quants + 4 * group, 4);
    *found = (squares){found->own + (double)size, found->sketch + (double)sum(sketch), found->missing + (double)sum(missing)};
    return 1;
}

int32_t us_sketch_rows(const float *rows, int32_t count, int32_t columns, const float *inverses, uint8_t *tiles, float *reaches,
                       int64_t apart) {
    const size_t bytes = us_block_bytes(US_Q8), blocks = (size_t)(columns / US_BLOCK);
    /* What summing in floats may take from a product, here and in the head's own: less than this for each unit of both norms. */
    const double rounding = 4.0 * (columns + 64) * 0x1p-24;
    memset(tiles, 0, (size_t)((count + US_TILE - 1) / US_TILE) * blocks * bytes);
    for (int32_t r = 0; r < count; r++, rows += columns) {
        squares found = {0, 0, 0};
        uint8_t *tile = tiles + (size_t)(r / US_TILE) * blocks * bytes;
        for (size_t b = 0; b < blocks; b++, tile += bytes)
            if (!sketch_block(rows + b * US_BLOCK, inverses + b * US_BLOCK, tile, r % US_TILE, &found)) return 0;
        reaches[r] = (float)(1.0001 * (sqrt(found.missing) + rounding * sqrt(found.own)));
        reaches[apart + r] = (float)(1.0001 * sqrt(found.sketch));
    }
    return 1;
}
