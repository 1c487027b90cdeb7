/* Random numbers and the structs that are made of them. Included by check.c. */
#ifndef UNSPOOL_CHECK_RANDOM_H
#define UNSPOOL_CHECK_RANDOM_H

static uint64_t state = 88172645463325252ull;

static uint32_t next(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}
static int32_t below(int32_t n) { return (int32_t)(next() % (uint32_t)n); }
static float normal(void) { return ((float)below(2001) - 1000.0f) / 1000.0f; }

static void *get(size_t bytes) {
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 1)) abort();
    return p;
}
static float *floats(size_t n, float scale) {
    float *p = get(n * sizeof(float));
    for (size_t i = 0; i < n; i++) p[i] = normal() * scale;
    return p;
}

static void *kept[4096];
static int num_kept;
static void *keep(void *p) {
    if (num_kept == 4096) abort();
    return kept[num_kept++] = p;
}
static void let_go(void) {
    while (num_kept) free(kept[--num_kept]);
}

static int is_super(int32_t kind) { return kind == US_K4 || kind == US_K5 || kind == US_K6; }
static int has_table(int32_t kind) { return kind == US_NF4 || kind == US_FP4; }
static int is_float(int32_t kind) { return kind == US_F32 || kind == US_BF16 || kind == US_F16 || has_table(kind); }
static int32_t count_columns(int32_t kind) { return kind == US_F32 ? 1 : is_super(kind) ? US_SUPER : US_BLOCK; }

static us_matrix random_matrix(int32_t kind, int32_t rows, int32_t columns, int has_bias) {
    us_matrix m = {.kind = kind, .rows = rows, .columns = columns};
    const float scale = 1.0f / sqrtf((float)columns);
    if (kind == US_F32) m.data = keep(floats((size_t)rows * columns, scale));
    else if (kind == US_BF16 || kind == US_F16) {
        float *numbers = floats((size_t)rows * columns, scale);
        for (size_t i = 0; i < (size_t)rows * columns; i++) {
            if (kind == US_BF16) memset(numbers + i, 0, 2);
            else numbers[i] = rintf(numbers[i] * 0x1p12f) * 0x1p-12f;
        }
        uint16_t *p = keep(get(sizeof(uint16_t) * (size_t)(rows + US_PANEL - 1) / US_PANEL * US_PANEL * columns));
        if (!us_narrow_rows(numbers, rows, columns, kind, p)) abort();
        free(numbers);
        m.data = p;
    } else if (has_table(kind)) {
        const size_t blocks = (size_t)((rows + US_TILE - 1) / US_TILE) * (columns / US_BLOCK), bytes = 160;
        uint8_t *p = keep(get(blocks * bytes));
        m.data = p;
        for (size_t i = 0; i < blocks * bytes; i++) p[i] = (uint8_t)next();
        for (size_t i = 0; i < blocks * 8; i++) {
            const float factor = scale * normal();
            memcpy(p + i / 8 * bytes + i % 8 * 4, &factor, sizeof factor);
        }
    } else {
        static const size_t sizes[] = {0, 272, 160, 8 * 144, 8 * 176, 8 * 210, 192};
        const size_t bytes = sizes[kind], blocks = (size_t)((rows + US_TILE - 1) / US_TILE) * (columns / count_columns(kind));
        uint8_t *p = keep(get(blocks * bytes));
        m.data = p;
        for (size_t i = 0; i < blocks * bytes; i++) p[i] = (uint8_t)next();
        for (size_t b = 0; b < blocks; b++)
            for (int r = 0; r < 8; r++) { /* scales, and minimums: 1e-3, -4e-3; those that are multiplied again 3e-5, 1e-4 */
                const uint16_t scale = (uint16_t)((is_super(kind) ? 0x0200 : 0x1400) + below(512));
                const uint16_t lowest = (uint16_t)((is_super(kind) ? 0x0600 : 0x9c00) + below(1024));
                memcpy(p + b * bytes + 2 * r, &scale, 2);
                if (kind != US_Q8 && kind != US_K6) memcpy(p + b * bytes + 16 + 2 * r, &lowest, 2);
            }
        if (kind == US_Q8)
            for (size_t b = 0; b < blocks; b++)
                for (int i = 16; i < 272; i++)
                    if (p[b * bytes + i] == 128) p[b * bytes + i] = 129; /* -128 is not used */
    }
    if (has_bias) m.bias = keep(floats((size_t)rows, 0.1f));
    return m;
}

/* Let the last rows of a quantised matrix be of another kind. */
static us_matrix random_mixture(int32_t kind, int32_t rows, int32_t columns, int has_bias) {
    if (is_float(kind) || rows <= US_TILE || below(2)) return random_matrix(kind, rows, columns, has_bias);
    static const int32_t kinds[] = {US_Q8, US_Q4, US_Q5, US_K4, US_K5, US_K6};
    const int32_t own = US_TILE * (1 + below((rows - 1) / US_TILE));
    us_matrix m = random_matrix(kind, own, columns, 0), *rest = keep(get(sizeof *rest));
    *rest = random_matrix(kinds[below(columns % US_SUPER ? 3 : 6)], rows - own, columns, 0);
    m.rows = rows;
    m.own = own;
    m.rest = rest;
    if (has_bias) m.bias = keep(floats((size_t)rows, 0.1f));
    return m;
}

static us_norm random_norm(int32_t kind, int32_t n) {
    return (us_norm){.kind = kind, .eps = 1e-5f, .weight = keep(floats((size_t)n, 1.0f)), .bias = kind == US_LAYER ? keep(floats((size_t)n, 0.1f)) : NULL};
}

static us_scheme random_scheme(int32_t D, int32_t block) {
    const int32_t bits = 2 << below(3), parts = 8 / bits;
    us_scheme s = {.bits = bits, .bytes = (D + parts - 1) / parts, .by_channel = below(2), .block = block, .dtype = below(3)};
    do s.group = 1 + below(D);
    while (D % s.group);
    if (below(2)) s.group = D;
    return s;
}

static void *random_scales(size_t n, int32_t dtype, float scale) {
    float *p = floats(n, scale);
    if (dtype == US_FLOAT) return keep(p);
    uint16_t *made = keep(get(n * sizeof(uint16_t)));
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, p + i, sizeof bits);
        made[i] = dtype == US_BFLOAT ? (uint16_t)(bits >> 16) : (uint16_t)(below(2) << 15 | (scale < 0.1f ? 0x2000 : 0x3400) | below(1024));
    }
    free(p);
    return made;
}

static us_packed random_packed(const us_scheme *s, size_t heads, int32_t places, int32_t D) {
    const size_t bytes = heads * (size_t)places * (size_t)s->bytes;
    const size_t scales = heads * (s->by_channel ? (size_t)(places / s->block) * D : (size_t)places * (D / s->group));
    uint8_t *codes = keep(get(bytes));
    for (size_t i = 0; i < bytes; i++) codes[i] = (uint8_t)next();
    return (us_packed){codes, random_scales(scales, s->dtype, 0.01f), random_scales(scales, s->dtype, 1.0f)};
}

#endif
