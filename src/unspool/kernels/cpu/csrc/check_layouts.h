/* Matrices laid out from buffers of exactly their size: an order of the rows moves nothing else, whatever number of threads there
 * is, and what was quantised is off by half a step at most. Part of check.c. */
#ifndef UNSPOOL_CHECK_LAYOUTS_H
#define UNSPOOL_CHECK_LAYOUTS_H

static void expect_layout(int is_so, const char *what, int32_t form) {
    if (is_so) return;
    printf("a layout of form %d: %s\n", (int)form, what);
    num_wrong++;
}

static float *read_whole(int32_t kind, int32_t rows, int32_t columns, const us_rows *parts, const int64_t *order, size_t bytes, int32_t threads) {
    int32_t *all = keep(get(sizeof(int32_t) * (size_t)rows));
    for (int32_t i = 0; i < rows; i++) all[i] = i;
    uint8_t *tiles = keep(get(bytes));
    memset(tiles, 0xff, bytes);
    us_lay_out_rows(parts, order, rows, columns, kind, tiles, threads);
    const us_matrix matrix = {.kind = kind, .rows = rows, .columns = columns, .own = rows, .data = tiles};
    float *numbers = keep(get(sizeof(float) * (size_t)rows * (size_t)columns));
    us_read_rows(&matrix, all, rows, numbers);
    return numbers;
}

static void check_layout(void) {
    static const struct {
        int32_t kind, columns;
        size_t stored, tile; /* bytes of a block in a file, and in a tile */
        int halves[2], num;
    } forms[] = {
        [US_STORED_Q8_0] = {US_Q8, 32, 34, 272, {0}, 1},       [US_STORED_Q4_0] = {US_Q4, 32, 18, 160, {0}, 1},
        [US_STORED_Q4_1] = {US_Q4, 32, 20, 160, {0, 2}, 2},    [US_STORED_Q5_0] = {US_Q5, 32, 22, 192, {0}, 1},
        [US_STORED_Q5_1] = {US_Q5, 32, 24, 192, {0, 2}, 2},    [US_STORED_Q4_K] = {US_K4, 256, 144, 8 * 144, {0, 2}, 2},
        [US_STORED_Q5_K] = {US_K5, 256, 176, 8 * 176, {0, 2}, 2}, [US_STORED_Q6_K] = {US_K6, 256, 210, 8 * 210, {208}, 1}};
    const int32_t form = US_STORED_Q8_0 + below(8), own[] = {1 + below(20), 1 + below(20)}, rows = own[0] + own[1];
    const int32_t units = 1 + below(4), columns = units * forms[form].columns;
    us_rows parts[2];
    for (int n = 0; n < 2; n++) {
        const size_t size = forms[form].stored, count = (size_t)(own[n] * units);
        uint8_t *raw = keep(get(size * count));
        for (size_t i = 0; i < size * count; i++) raw[i] = (uint8_t)next();
        for (size_t i = 0; i < count; i++)
            for (int h = 0; h < forms[form].num; h++) {
                const uint16_t half = (uint16_t)(below(2) << 15 | below(0x3c00));
                memcpy(raw + size * i + forms[form].halves[h], &half, 2);
            }
        parts[n] = (us_rows){.form = form, .rows = own[n], .data = raw};
        expect_layout(!us_scan_rows(raw, form, (int64_t)count), "sound scales are refused", form);
    }
    int64_t *order = keep(get(sizeof(int64_t) * (size_t)rows));
    for (int32_t i = 0; i < rows; i++) order[i] = below(rows);
    const size_t bytes = (size_t)((rows + US_TILE - 1) / US_TILE * units) * forms[form].tile, row = (size_t)columns * sizeof(float);
    const float *plain = read_whole(forms[form].kind, rows, columns, parts, NULL, bytes, 1);
    const float *moved = read_whole(forms[form].kind, rows, columns, parts, order, bytes, 1 + below(3));
    for (int32_t i = 0; i < rows; i++)
        expect_layout(!memcmp(moved + (size_t)i * columns, plain + (size_t)order[i] * columns, row), "an order changes rows", form);
    let_go();
}

static void check_quantised(void) {
    const int is_large = !below(20), is_4 = below(2);
    const int32_t rows = is_large ? 200 : 1 + below(20), blocks = is_large ? 90 : 1 + below(4), columns = US_BLOCK * blocks;
    const size_t count = (size_t)(rows * blocks);
    const float *numbers = keep(floats(count * US_BLOCK, (float)(1 + below(100))));
    uint8_t *codes = keep(get(count * US_BLOCK));
    uint16_t *scales = keep(get(sizeof(uint16_t) * count)), *minimums = is_4 ? keep(get(sizeof(uint16_t) * count)) : NULL;
    const int32_t kind = is_4 ? US_Q4 : US_Q8;
    us_quantise_rows(numbers, rows, columns, kind, codes, scales, minimums, 1 + below(3));
    const us_rows part = {.form = US_CODES, .rows = rows, .data = codes, .scales = (uint8_t *)scales, .minimums = (uint8_t *)minimums};
    const size_t bytes = (size_t)((rows + US_TILE - 1) / US_TILE * blocks) * (is_4 ? 160 : 272);
    const float *back = read_whole(kind, rows, columns, &part, NULL, bytes, 1 + below(3));
    for (size_t b = 0; b < count; b++) {
        float size = 0, off = 0;
        for (size_t i = b * US_BLOCK; i < (b + 1) * US_BLOCK; i++) {
            size = fabsf(numbers[i]) > size ? fabsf(numbers[i]) : size;
            off = fabsf(numbers[i] - back[i]) > off ? fabsf(numbers[i] - back[i]) : off;
        }
        expect_layout(off <= size * (is_4 ? 2.0f / 30 : 1.0f / 254) * 1.03f + 1e-6f, "a number is off by more than half a step", US_CODES);
    }
    let_go();
}

#endif
