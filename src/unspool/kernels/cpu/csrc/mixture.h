/* Feed-forwards of experts, a few of which a router chooses for every token. Included by kernels.c.
 *
 * Tokens are put together expert by expert, so that an expert's matrices are read once for all of its tokens. A thread
 * makes the same outputs of all experts, and adds them to the state in the experts' order: no thread waits for another
 * between experts, and a token has the same bits alone and in a batch.
 */
#ifndef UNSPOOL_MIXTURE_H
#define UNSPOOL_MIXTURE_H

#define TINY 1e-20f /* added to a sum of scores before dividing by it: sigmoids may all be zero */

/* One expert's tokens, or all tokens of the expert that everyone runs through. */
typedef struct {
    us_matrix up, down;
    int32_t first, count, ffn; /* pairs of a token and an expert */
    size_t given, fed;         /* where its inputs begin, and what its first product makes */
} group;

static us_matrix find_expert(const us_matrix *w, int32_t expert, int32_t experts) {
    us_matrix one = *w;
    one.rows = w->rows / experts;
    const size_t numbers = (size_t)expert * (size_t)one.rows * (size_t)w->columns;
    const size_t bytes = w->kind == US_F32 ? sizeof(float) * numbers : numbers / (US_TILE * US_BLOCK) * us_block_bytes(w->kind);
    one.data = (const uint8_t *)w->data + bytes;
    if (w->bias) one.bias = w->bias + (size_t)expert * (size_t)one.rows;
    return one;
}

/* The group of an expert; the one after the last is that of all tokens. */
static group find_group(const run *r, const us_layer *layer, int32_t number) {
    const us_model *m = r->model;
    const int32_t *firsts = r->scratch.group_firsts, pairs = r->job->num_tokens * m->num_chosen;
    if (number == m->num_experts)
        return (group){.up = layer->shared_up, .down = layer->shared_down, .first = pairs, .count = r->job->num_tokens,
                       .ffn = m->shared_ffn, .given = (size_t)pairs * (size_t)m->hidden,
                       .fed = (size_t)pairs * (size_t)m->expert_ffn};
    const int32_t first = firsts[number];
    return (group){.up = find_expert(&layer->up, number, m->num_experts),
                   .down = find_expert(&layer->down, number, m->num_experts),
                   .first = first, .count = firsts[number + 1] - first, .ffn = m->expert_ffn,
                   .given = (size_t)first * (size_t)m->hidden, .fed = (size_t)first * (size_t)m->expert_ffn};
}

static int32_t count_groups(const us_model *m) { return m->num_experts + (m->shared_ffn > 0); }

/* Turn a token's logits into scores. */
static void score_experts(const us_model *m, float *logits) {
    const int32_t E = m->num_experts;
    float most = -INFINITY, total = 0;
    for (int32_t e = 0; e < E; e++) most = logits[e] > most ? logits[e] : most;
    for (int32_t e = 0; e < E; e++) {
        logits[e] = m->is_sigmoid ? 1.0f / (1.0f + expf(-logits[e])) : expf(logits[e] - most);
        total += logits[e];
    }
    for (int32_t e = 0; e < E && !m->is_sigmoid; e++) logits[e] /= total;
}

/* The experts of the highest scores, the best first; of equal ones the first. */
static void pick(const us_model *m, const float *scores, const float *bias, int32_t *picked, float *choices) {
    int32_t count = 0;
    for (int32_t e = 0; e < m->num_experts; e++) {
        const float choice = bias ? scores[e] + bias[e] : scores[e];
        int32_t at = count;
        while (at > 0 && choice > choices[at - 1]) at--;
        if (at == m->num_chosen) continue;
        count += count < m->num_chosen;
        for (int32_t i = count - 1; i > at; i--) choices[i] = choices[i - 1], picked[i] = picked[i - 1];
        choices[at] = choice, picked[at] = e;
    }
    float total = TINY;
    for (int32_t i = 0; i < m->num_chosen; i++) total += choices[i] = scores[picked[i]];
    for (int32_t i = 0; i < m->num_chosen; i++) choices[i] *= m->is_normalised ? m->weight_scale / total : m->weight_scale;
}

/* Choose the experts of all tokens by their logits, and put tokens in the experts' order. */
static void choose_experts(run *r, const us_layer *layer, const float *normed) {
    const us_model *m = r->model;
    const us_scratch *s = &r->scratch;
    const int32_t T = r->job->num_tokens, E = m->num_experts, top = m->num_chosen, pairs = T * top;
    int32_t *firsts = s->group_firsts;
    memset(firsts, 0, sizeof(int32_t) * (size_t)(E + 2));
    for (int32_t t = 0; t < T; t++) {
        score_experts(m, s->logits + (size_t)t * E);
        pick(m, s->logits + (size_t)t * E, layer->choice_bias, s->picked + (size_t)t * top, s->choices + (size_t)t * top);
    }
    for (int32_t p = 0; p < pairs; p++) firsts[s->picked[p] + 2]++;
    for (int32_t e = 0; e < E; e++) firsts[e + 2] += firsts[e + 1];
    for (int32_t p = 0; p < pairs; p++) { /* firsts[e + 1] is where expert e goes on; at last where it ends */
        const int32_t at = firsts[s->picked[p] + 1]++;
        s->pair_tokens[at] = p / top;
        s->pair_shares[at] = s->choices[p];
    }
    for (int32_t t = 0; t < T && m->shared_ffn; t++) {
        float gate = 0;
        for (int32_t i = 0; i < m->hidden && layer->shared_gate; i++) gate += normed[(size_t)t * m->hidden + i] * layer->shared_gate[i];
        s->pair_tokens[pairs + t] = t;
        s->pair_shares[pairs + t] = layer->shared_gate ? 1.0f / (1.0f + expf(-gate)) : 1.0f;
    }
}

/* The memory in which this thread, or all of them together, prepare inputs. */
typedef struct {
    float *normed, *given, *scales, *sums;
    int32_t *offsets;
    int8_t *quants;
    uint16_t *pieces;
} workbench;

static workbench find_bench(const run *r) {
    const us_scratch *s = &r->scratch;
    const size_t at = r->is_private ? (size_t)r->thread : 0;
    float *normed = s->normed + at * s->normed_size;
    return (workbench){normed, normed + (size_t)r->job->num_tokens * (size_t)r->model->hidden, s->scales + at * s->scales_size,
                       s->sums + at * s->scales_size, s->offsets + 2 * at * s->scales_size, s->quants + at * s->quants_size,
                       s->pieces + at * s->pieces_size};
}

/* The input of a group's product: rows of floats, or what they are multiplied as. */
static input find_input(const workbench *b, const us_matrix *w, const float *x, size_t at) {
    return (input){.stride = (size_t)w->columns, .x = x + at, .pieces = b->pieces + 3 * at,
                   .quantised = {b->quants + at, b->scales + at / US_BLOCK, b->sums + at / US_BLOCK, b->offsets + at / (US_BLOCK / 2)}};
}

/* Lay out the rows that the groups' first products (`is_first`) or second ones multiply. */
static void lay_rows(run *r, const us_layer *layer, const workbench *b, int is_first) {
    const us_model *m = r->model;
    const us_scratch *s = &r->scratch;
    const int32_t T = r->job->num_tokens, pairs = T * m->num_chosen + (m->shared_ffn ? T : 0);
    const size_t H = (size_t)m->hidden;
    int64_t begin = 0, end = pairs;
    if (!r->is_private) split(pairs, r->thread, r->threads, &begin, &end);
    for (int32_t number = 0; number < count_groups(m); number++) {
        const group g = find_group(r, layer, number);
        const us_matrix *w = is_first ? &g.up : &g.down;
        for (int32_t row = 0; row < g.count; row++) {
            if (g.first + row < begin || g.first + row >= end) continue;
            const float *x = is_first ? b->normed + (size_t)s->pair_tokens[g.first + row] * H : s->fed + g.fed + (size_t)row * (size_t)g.ffn;
            const size_t at = is_first ? g.given : g.fed;
            const input to = find_input(b, w, b->given, at);
            if (is_first && us_is_float(w->kind)) memcpy(b->given + at + (size_t)row * H, x, sizeof(float) * H);
            prepare_row(w, x, row, g.count, &to);
        }
    }
    if (!r->is_private) us_meet(r->team);
}

/* Add the outputs of every token's experts to its state. */
static void feed_mixture(run *r, const us_layer *layer) {
    const us_model *m = r->model;
    const us_scratch *s = &r->scratch;
    const input in = prepare(r, &layer->router, NORMED, layer->has_ffn_norm ? &layer->ffn_norm : &layer->attn_norm, layer);
    const workbench b = find_bench(r);
    multiply_part(&layer->router, r->job->num_tokens, &in, &(output){.y = s->logits, .stride = (size_t)m->num_experts}, r->thread,
                  r->threads);
    us_meet(r->team);
    if (!r->thread) choose_experts(r, layer, in.x);
    us_meet(r->team);
    lay_rows(r, layer, &b, 1);
    for (int32_t number = 0; number < count_groups(m); number++) {
        const group g = find_group(r, layer, number);
        const input given = find_input(&b, &g.up, b.given, g.given);
        const output to = {.y = s->fed + g.fed, .stride = (size_t)g.ffn};
        if (g.count) feed_part(m, &g.up, g.ffn, g.count, &given, &to, r->thread, r->threads);
    }
    float *into = layer->has_post_norms ? s->side : s->x;
    if (layer->has_post_norms && !r->thread) memset(into, 0, sizeof(float) * (size_t)r->job->num_tokens * (size_t)m->hidden);
    us_meet(r->team);
    lay_rows(r, layer, &b, 0);
    for (int32_t number = 0; number < count_groups(m); number++) {
        const group g = find_group(r, layer, number);
        const input given = find_input(&b, &g.down, s->fed, g.fed);
        const output to = {.y = into, .stride = (size_t)m->hidden, .adds = 1, .rows = s->pair_tokens + g.first, .shares = s->pair_shares + g.first};
        if (g.count) multiply_part(&g.down, g.count, &given, &to, r->thread, r->threads);
    }
    us_meet(r->team);
    if (layer->has_post_norms) add_normed(r, &layer->post_ffn_norm);
}

#endif
