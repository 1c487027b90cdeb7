/* The likeliest tokens without all logits. Included by kernels.c.
 *
 * The head is the largest matrix of a small model, and a greedy step asks it for one token. A sketch of it, as int8, has a
 * quarter of the bytes of floats. Logits by the sketch are off, but not by more than norms allow (Cauchy and Schwarz): of
 * w x, if w is a row of the head and v its sketch, x an activation and y its int8, no more than |w - v| |x| + |v| |x - y|.
 * The token whose logit by the sketch is the highest is multiplied by the head itself, and then all that may reach as high as
 * it does: a few. So the token is the one that all logits would give, and a tie is one of the same bits.
 */
#ifndef UNSPOOL_SKETCH_H
#define UNSPOOL_SKETCH_H

/* Multiply a row by the columns' powers of two. */
static void level(const float *x, const float *powers, int32_t columns, float *out) {
    for (int32_t i = 0; i < columns; i++) out[i] = x[i] * powers[i];
}

/* The norms of a row, and of what is missing from its int8. */
static us_extent measure(const float *x, int32_t columns, int32_t row, panel p, const activations *a) {
    const size_t blocks = (size_t)(columns / US_BLOCK), at = (size_t)p.first * blocks + (size_t)(row - p.first);
    double size = 0, error = 0;
    for (size_t b = 0; b < blocks; b++, x += US_BLOCK) {
        const int8_t *quants = a->quants + (at + b * (size_t)p.count) * US_BLOCK;
        const float scale = a->scales[at + b * (size_t)p.count];
        float whole = 0, missing = 0;
        for (int i = 0; i < US_BLOCK; i++) {
            const float off = x[i] - scale * (float)quants[i];
            whole += x[i] * x[i];
            missing += off * off;
        }
        size += (double)whole;
        error += (double)missing;
    }
    return (us_extent){1.0001f * (float)sqrt(size), 1.0001f * (float)sqrt(error)};
}

/* Prepare the rows for the sketch; whether the likeliest tokens can be found by it. */
static int prepare_sketch(run *r, const input *exact, input *rough) {
    const us_sketch *k = &r->model->sketch;
    const us_scratch *s = &r->scratch;
    const int32_t rows = r->job->num_wanted, K = k->matrix.columns;
    if (!r->job->num_close || !k->matrix.data) return 0;
    const size_t at = r->is_private ? (size_t)r->thread : 0;
    us_extent *extents = s->extents + at * (size_t)rows;
    float *levelled = s->levelled + (size_t)r->thread * (size_t)r->model->hidden;
    int64_t first = 0, last = rows;
    *rough = *exact;
    if (!r->is_private) split(rows, r->thread, r->threads, &first, &last);
    for (int64_t row = first; row < last; row++) {
        level(exact->x + (size_t)row * exact->stride, k->powers, K, levelled);
        prepare_row(&k->matrix, levelled, (int32_t)row, rows, rough);
        extents[row] = measure(levelled, K, (int32_t)row, find_panel(&k->matrix, (int32_t)row, rows), &rough->quantised);
    }
    if (!r->is_private) us_meet(r->team);
    int is_sound = 1; /* and no logit by the sketch can be infinite */
    for (int32_t row = 0; row < rows; row++) is_sound &= extents[row].size < 1e20f && extents[row].error < 1e20f;
    return is_sound;
}

/* One row times an output of the head, or times the panel of outputs that it is in. */
static void multiply_alone(const us_matrix *w, const input *in, int32_t row, int32_t num_rows, int32_t first, float *made) {
    const input alone = {.x = in->x + (size_t)row * in->stride, .stride = in->stride};
    (void)num_rows;
#if defined(US_AVX512)
    if (w->kind == US_F32 && is_paneled(w)) {
        made[0] = multiply_single((const float *)w->data + (size_t)first * (size_t)w->columns, w->columns, alone.x);
        return;
    }
#endif
    if (w->kind == US_F32) {
        multiply_plain((const float *)w->data + (size_t)first * (size_t)w->columns, w->columns, 1, alone.x, alone.stride,
                       (panel){0, 1, 0, 1}, made);
        return;
    }
    const panels p = find_panels(w, first, US_PANEL, 1);
#if defined(US_AMX)
    if (w->kind == US_BF16) { /* the matrix unit's groups of rows are ready */
        const int32_t group = row / US_PANEL * US_PANEL;
        _Alignas(64) float all[NARROW_M * MADE];
        begin_narrow(w->kind, num_rows);
        multiply_panels(p, w->columns, in, group, num_rows, all);
        end_narrow(w->kind);
        memcpy(made, all + MADE * (row - group), sizeof(float) * US_PANEL);
        return;
    }
#endif
    multiply_turn(p, w->columns, &alone, 0, 1, made);
}

/* What a thread looks for in a row's logits by the sketch. */
typedef struct {
    run *r;
    const input *exact;
    int32_t row;
    us_extent extent;
    int64_t first, last; /* tokens that are the thread's */
    int64_t count;       /* of those that were multiplied by the head */
} search;

static const float *find_rough(const search *s) { return s->r->job->logits + (size_t)s->row * s->r->model->vocab; }

/* How far logits from token `i` on may be off. */
INLINE vec find_reach(const search *s, int64_t i, const int some) {
    const us_sketch *k = &s->r->model->sketch;
    return s->extent.size * load_some(k->reaches + i, some) + s->extent.error * load_some(k->reaches + k->matrix.rows + i, some) + k->margin;
}

/* Multiply by a token's output of the head, or by its panel of them: the likeliest one, if it is likelier than `best`. The
 * next token that is not in the panel. */
static int64_t look_close(search *s, int64_t token, us_top *best) {
    const us_matrix *head = &s->r->model->head;
    const int64_t unit = us_is_narrow(head->kind) ? US_PANEL : 1, begin = token / unit * unit, end = begin + unit;
    const float *rough = find_rough(s);
    _Alignas(64) float made[NARROW_M * MADE];
    multiply_alone(head, s->exact, s->row, s->r->job->num_wanted, (int32_t)begin, made);
    s->count += unit;
    for (int64_t i = begin < s->first ? s->first : begin; i < end && i < s->last; i++) {
        const float logit = made[i - begin] + (head->bias ? head->bias[i] : 0.0f);
        const int is_higher = logit > best->value || (logit == best->value && i < best->token);
        if (rough[i] > -INFINITY && is_higher) *best = (us_top){logit, (int32_t)i}; /* and not forbidden */
    }
    return end;
}

/* The first of a thread's tokens that the highest logit is near. */
static us_top find_nearest(search *s) {
    const float *rough = find_rough(s);
    us_top best = {-INFINITY, -1};
    const us_top near = find_top(rough, (int32_t)s->first, (int32_t)s->last);
    if (near.token >= 0) look_close(s, near.token, &best);
    return best;
}

/* The likeliest of a thread's tokens, of which `best` is one, if it reaches `low`: others may be likelier than both. */
static us_top find_likeliest(search *s, us_top best, float low) {
    const float *rough = find_rough(s);
    int64_t next = s->first;
    for (int64_t i = s->first; i < s->last; i += LANES) {
        const int some = s->last - i < LANES ? (int)(s->last - i) : LANES;
        const vec high = load_some(rough + i, some) + find_reach(s, i, some);
        if (some == LANES && largest(high) < low) continue;
        for (int n = 0; n < some; n++)
            if (high[n] >= low && i + n >= next && i + n != best.token) next = look_close(s, i + n, &best);
    }
    return best;
}

/* This thread's likeliest tokens. */
static void find_by_sketch(run *r, const input *exact, const input *rough) {
    const us_model *m = r->model;
    const us_job *job = r->job;
    const us_matrix *sketch = &m->sketch.matrix;
    const int32_t rows = job->num_wanted;
    const us_extent *extents = r->scratch.extents + (r->is_private ? (size_t)r->thread * (size_t)rows : 0);
    us_top *tops = r->scratch.tops, *nearest = r->scratch.nearest;
    search s = {.r = r, .exact = exact};
    multiply_part(sketch, rows, rough, &(output){.y = job->logits, .stride = (size_t)m->vocab}, r->thread, r->threads);
    split_outputs(sketch, m->vocab, r->thread, r->threads, &s.first, &s.last);
    for (s.row = 0; s.row < rows; s.row++) {
        forbid(job, s.first, s.last, job->logits + (size_t)s.row * m->vocab);
        nearest[r->thread * rows + s.row] = find_nearest(&s);
    }
    us_meet(r->team);
    for (s.row = 0; s.row < rows; s.row++) {
        float low = -INFINITY; /* a logit that is reached */
        for (int32_t t = 0; t < r->threads; t++) low = nearest[t * rows + s.row].value > low ? nearest[t * rows + s.row].value : low;
        s.extent = extents[s.row];
        tops[r->thread * rows + s.row] = find_likeliest(&s, nearest[r->thread * rows + s.row], low);
    }
    __atomic_fetch_add(job->num_close, s.count, __ATOMIC_RELAXED);
}

#endif
