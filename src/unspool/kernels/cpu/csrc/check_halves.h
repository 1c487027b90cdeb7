/* Products and attention in half precision: every instruction set against plain C. Part of check.c. */
#ifndef UNSPOOL_CHECK_HALVES_H
#define UNSPOOL_CHECK_HALVES_H

typedef struct {
    const uint16_t *weights, *bias, *x;
    int32_t kind, rows, columns, num_rows, threads;
} half_product;

static uint16_t *random_halves(size_t n, int32_t kind) { return random_scales(n, kind == US_BF16 ? US_BFLOAT : US_HALF, 1.0f); }

static void multiply_halves(void *argument, const char *set, float *y) {
    const half_product *p = argument;
    const size_t n = (size_t)p->num_rows * p->rows;
    uint16_t *made = get(n * sizeof *made);
    (void)set;
    if (us_multiply_halves(p->weights, p->bias, p->kind, p->rows, p->columns, p->x, p->num_rows, made, p->threads)) abort();
    us_widen(made, (int64_t)n, p->kind, y, p->threads);
    free(made);
}

static void attend_halves(void *argument, const char *set, float *y) {
    const us_attention *a = argument;
    const size_t n = (size_t)a->rows * a->heads * a->asked * a->width;
    uint16_t *made = get(n * sizeof *made);
    (void)set;
    if (us_attend_halves(a, made, 1 + below(3))) abort();
    us_widen(made, (int64_t)n, a->kind, y, 1);
    free(made);
}

/* Keys lie with room between places, heads or rows, or with none; a row sees one key at least. */
static void check_half_attention(int32_t kind) {
    const int32_t rows = 1 + below(3), heads = 1 + below(3), num_keys = 1 + below(70), width = US_BLOCK * (1 + below(4)), gap = 8 * below(2);
    us_attention a = {.kind = kind, .rows = rows, .heads = heads, .asked = 1 + below(6), .num_keys = num_keys, .width = width, .scale = 0.1f};
    a.key_place = a.value_place = width + gap;
    a.key_head = a.value_head = a.key_place * num_keys;
    a.key_row = a.value_row = a.key_head * heads;
    const size_t held = (size_t)(a.key_row * rows - gap);
    a.queries = random_halves((size_t)rows * heads * a.asked * width, kind);
    a.keys = random_halves(held, kind);
    a.values = random_halves(held, kind);
    if (below(2)) {
        const int32_t masks = below(2) ? rows : 1;
        uint8_t *mask = keep(get((size_t)masks * num_keys));
        for (int32_t i = 0; i < masks * num_keys; i++) mask[i] = i % num_keys == num_keys - 1 || below(2);
        a.mask = mask;
        a.mask_row = masks == 1 ? 0 : num_keys;
    }
    for_each_set(attend_halves, &a, "attention in half precision", (size_t)rows * heads * a.asked * width, 1e-2f);
}

static void check_halves(void) {
    const int32_t kind = below(2) ? US_BF16 : US_F16;
    half_product p = {.kind = kind, .rows = 1 + below(60), .columns = 1 + below(200), .num_rows = 1 + below(20), .threads = 1 + below(3)};
    p.weights = random_halves((size_t)p.rows * p.columns, kind);
    p.x = random_halves((size_t)p.num_rows * p.columns, kind);
    p.bias = below(2) ? random_halves((size_t)p.rows, kind) : NULL;
    for_each_set(multiply_halves, &p, "a product in half precision", (size_t)p.num_rows * p.rows, 1e-2f);
    check_half_attention(kind);
    let_go();
}

#endif
