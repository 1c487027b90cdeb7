/* A draw from whole rows of scores: the token at which the cumulated probability passes a number in [0, 1). */
#ifndef UNSPOOL_DRAWS_H
#define UNSPOOL_DRAWS_H

#include "marks.h" /* find_highest */

#define DRAW_BLOCKS 256 /* of tokens whose probability is added up before it is looked into */

/* e to the (scores - highest) of LANES tokens, of which `count` are there; nothing where a score is -inf. */
INLINE vec find_shares(const float *scores, int32_t count, float highest) {
    vec given = fill(-INFINITY);
    if (count >= LANES) given = load(scores);
    else
        for (int32_t i = 0; i < count; i++) given[i] = scores[i];
    return choose(given > fill(-INFINITY), exponential(given - highest), fill(0));
}

/* -1 where no score is finite, or one is NaN or infinite. */
static int32_t draw_token(const float *scores, int32_t vocab, double uniform) {
    const float highest = find_highest(scores, vocab);
    if (!(highest > -INFINITY)) return -1;
    const int32_t vectors = (vocab + LANES - 1) / LANES, block = (vectors + DRAW_BLOCKS - 1) / DRAW_BLOCKS * LANES;
    double sums[DRAW_BLOCKS], total = 0, passed = 0;
    int32_t count = 0, found = -1, drawn = -1;
    for (int32_t first = 0; first < vocab; first += block, count++) {
        const int32_t end = vocab - first < block ? vocab : first + block;
        vec parts[4] = {fill(0), fill(0), fill(0), fill(0)};
        int32_t v = first;
        for (; v + 4 * LANES <= end; v += 4 * LANES) {
            vec x[4];
            UNROLLED for (int i = 0; i < 4; i++) x[i] = load(scores + v + i * LANES) - highest;
            veci is_there[4];
            UNROLLED for (int i = 0; i < 4; i++) is_there[i] = x[i] > fill(-INFINITY);
            exponentials(x, 4);
            UNROLLED for (int i = 0; i < 4; i++) parts[i] += choose(is_there[i], x[i], fill(0));
        }
        for (; v < end; v += LANES) parts[0] += find_shares(scores + v, end - v, highest);
        total += sums[count] = (double)sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
    }
    const double target = uniform * total;
    for (int32_t k = 0; k < count; k++) { /* the last that has a probability, if rounding lets none pass */
        if (!(sums[k] > 0)) continue;
        passed += found >= 0 ? sums[found] : 0;
        found = k;
        if (passed + sums[k] > target) break;
    }
    const int32_t first = found * block, end = vocab - first < block ? vocab : first + block;
    for (int32_t v = first; v < end; v += LANES) {
        const vec shares = find_shares(scores + v, end - v, highest);
        for (int32_t i = 0; i < LANES; i++) {
            if (!(shares[i] > 0)) continue;
            drawn = v + i;
            passed += (double)shares[i];
            if (passed > target) return drawn;
        }
    }
    return drawn;
}

static void run_row_draws(const void *argument, int32_t thread, us_team *team) {
    const us_row_draw_task *task = argument;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    for (int64_t row = first; row < last; row++)
        task->tokens[row] = draw_token(task->scores + row * task->vocab, task->vocab, task->uniforms[row]);
}

#endif
