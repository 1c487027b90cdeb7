/* Log-probabilities of rows of scores: of all tokens, or of the likeliest. */
#ifndef UNSPOOL_RANKS_H
#define UNSPOOL_RANKS_H

#include "draws.h"

/* The logarithm of what the shares of all tokens add up to, relative to the highest score: as floats in each block, whose
 * sums are added up as doubles. */
static float find_logarithm(us_drawing *d) {
    double total = 0;
    d->scale = 1;
    for (int32_t k = 0; k < d->num_blocks; k++) {
        const int32_t end = end_block(d, k);
        int32_t v = k * d->block;
        vec sums = fill(0);
        for (; v + 4 * LANES <= end; v += 4 * LANES) {
            vec x[4];
            veci is_there[4];
            UNROLLED for (int i = 0; i < 4; i++) x[i] = load(d->scores + v + i * LANES) - d->highest;
            UNROLLED for (int i = 0; i < 4; i++) is_there[i] = x[i] > fill(-INFINITY);
            exponentials(x, 4);
            UNROLLED for (int i = 0; i < 4; i++) sums += choose(is_there[i], x[i], fill(0));
        }
        for (; v < end; v += LANES) sums += find_shares(d, d->scores + v, end - v);
        for (int i = 0; i < LANES; i++) total += (double)sums[i];
    }
    return (float)log(total);
}

static void run_normalise(const void *argument, int32_t thread, us_team *team) {
    const us_normalise_task *task = argument;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    for (int64_t row = first; row < last; row++) {
        us_drawing d = {.scores = task->scores + row * task->vocab, .vocab = task->vocab};
        float *out = task->out + row * task->vocab;
        d.highest = find_highest(d.scores, d.vocab);
        if (!(d.highest > -INFINITY)) {
            atomic_store((atomic_int *)task->failed, 1);
            return;
        }
        cut_blocks(&d, NULL);
        const float less = find_logarithm(&d);
        int32_t v = 0;
        for (; v + LANES <= d.vocab; v += LANES) store(out + v, (load(d.scores + v) - d.highest) - less);
        for (; v < d.vocab; v++) out[v] = (d.scores[v] - d.highest) - less;
    }
}

/* Whether a row has so many finite scores, and none that is NaN or infinite: then its highest, falling, of equals the
 * earlier token first. */
static int32_t rank_row(us_drawing *d, int32_t count, int32_t normalises, float *values, int32_t *tokens) {
    float tops[DRAW_BLOCKS];
    d->highest = find_highest(d->scores, d->vocab);
    if (!(d->highest > -INFINITY)) return 0;
    cut_blocks(d, tops);
    keep_highest(d, tops, count);
    if (d->count < count) return 0;
    qsort(d->found, (size_t)d->count, sizeof *d->found, compare_candidates);
    if (!(d->found[count - 1].value > -INFINITY)) return 0;
    const float less = normalises ? find_logarithm(d) : 0, highest = normalises ? d->highest : 0;
    for (int32_t i = 0; i < count; i++) {
        values[i] = (d->found[i].value - highest) - less;
        tokens[i] = d->found[i].token;
    }
    return 1;
}

static void run_ranks(const void *argument, int32_t thread, us_team *team) {
    const us_rank_task *task = argument;
    const us_draw plain = {.temperature = 1};
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    if (first == last) return;
    us_candidate *room = find_room(task->vocab, task->failed);
    if (!room) return;
    for (int64_t row = first; row < last; row++) {
        us_drawing drawing = begin_drawing(task->scores, row, task->vocab, &plain, room);
        int32_t *tokens = task->tokens + row * task->count;
        if (!rank_row(&drawing, task->count, task->normalises, task->values + row * task->count, tokens)) tokens[0] = -1;
    }
    free(room);
}

#endif
