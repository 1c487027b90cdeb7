/* Draws from rows of scores: temperature, top-k, top-p and min-p, and the token at which the cumulated probability of what
 * they leave passes a number in [0, 1). */
#ifndef UNSPOOL_DRAWS_H
#define UNSPOOL_DRAWS_H

#include <float.h>

#include "marks.h" /* find_highest */

#define DRAW_BLOCKS 256 /* of tokens, looked into where their highest score or their probability asks for it */
#define UNSURE -2 /* rounding decides where a head ends */
#define NEAR 1e-6 /* of probability */
#define ALMOST_ALL 0.9999

typedef double doubles __attribute__((vector_size(LANES * 8)));

typedef struct {
    const float *scores;
    int32_t vocab, block, num_blocks; /* tokens of a block, a multiple of LANES */
    float highest, scale; /* the temperature's inverse */
    const us_draw *draw;
    us_candidate *found; /* room for the vocabulary; in the order of tokens */
    us_candidate *order; /* likewise; in the order of values */
    int32_t count;
} us_drawing;

/* e to the (scores - highest) / temperature of LANES tokens, of which `count` are there; nothing where a score is -inf. */
INLINE vec find_shares(const us_drawing *d, const float *scores, int32_t count) {
    vec given = fill(-INFINITY);
    if (count >= LANES) given = load(scores);
    else
        for (int32_t i = 0; i < count; i++) given[i] = scores[i];
    return choose(given > fill(-INFINITY), exponential((given - d->highest) * d->scale), fill(0));
}

static int32_t end_block(const us_drawing *d, int32_t block) {
    const int32_t first = block * d->block;
    return d->vocab - first < d->block ? d->vocab : first + d->block;
}

/* --- from all tokens ------------------------------------------------------------------------------------------ */

/* Added up as doubles: next to a share of 1 a float would forget those that are drawn once in a billion times. */
static double add_block(const us_drawing *d, int32_t block) {
    const int32_t end = end_block(d, block);
    doubles parts = {0};
    double total = 0;
    int32_t v = block * d->block;
    for (; v + 4 * LANES <= end; v += 4 * LANES) {
        vec x[4];
        veci is_there[4];
        UNROLLED for (int i = 0; i < 4; i++) x[i] = (load(d->scores + v + i * LANES) - d->highest) * d->scale;
        UNROLLED for (int i = 0; i < 4; i++) is_there[i] = x[i] > fill(-INFINITY);
        exponentials(x, 4);
        UNROLLED for (int i = 0; i < 4; i++) parts += __builtin_convertvector(choose(is_there[i], x[i], fill(0)), doubles);
    }
    for (; v < end; v += LANES) parts += __builtin_convertvector(find_shares(d, d->scores + v, end - v), doubles);
    for (int i = 0; i < LANES; i++) total += parts[i];
    return total;
}

static int32_t draw_from_all(const us_drawing *d) {
    double sums[DRAW_BLOCKS], total = 0, passed = 0;
    int32_t found = -1, drawn = -1;
    for (int32_t k = 0; k < d->num_blocks; k++) total += sums[k] = add_block(d, k);
    const double target = fmin(d->draw->uniform, 1 - 0x1p-52) * total;
    for (int32_t k = 0; k < d->num_blocks; k++) { /* the last that has a probability, if rounding lets none pass */
        if (!(sums[k] > 0)) continue;
        passed += found >= 0 ? sums[found] : 0;
        found = k;
        if (passed + sums[k] > target) break;
    }
    const int32_t end = end_block(d, found);
    for (int32_t v = found * d->block; v < end; v += LANES) {
        const vec shares = find_shares(d, d->scores + v, end - v);
        for (int32_t i = 0; i < LANES; i++) {
            if (!(shares[i] > 0)) continue;
            drawn = v + i;
            passed += (double)shares[i];
            if (passed > target) return drawn;
        }
    }
    return drawn;
}

/* --- from candidates ------------------------------------------------------------------------------------------ */

static float divide(const us_drawing *d, float score) {
    return d->draw->temperature == 1 ? score : (float)((double)score / d->draw->temperature);
}

/* The tokens with a score of at least `lowest`, of blocks that have one. */
static void collect(us_drawing *d, const float *tops, float lowest) {
    d->count = 0;
    for (int32_t k = 0; k < d->num_blocks; k++) {
        if (!(tops[k] >= lowest)) continue;
        const int32_t end = end_block(d, k);
        int32_t v = k * d->block;
        for (; v + LANES <= end; v += LANES) {
            if (!(largest(load(d->scores + v)) >= lowest)) continue;
            for (int32_t i = v; i < v + LANES; i++)
                if (d->scores[i] >= lowest) d->found[d->count++] = (us_candidate){d->scores[i], i};
        }
        for (; v < end; v++)
            if (d->scores[v] >= lowest) d->found[d->count++] = (us_candidate){d->scores[v], v};
    }
}

static float find_block_top(const us_drawing *d, int32_t block) {
    const int32_t end = end_block(d, block);
    vec most = fill(-INFINITY);
    int32_t v = block * d->block;
    for (; v + LANES <= end; v += LANES) most = larger(load(d->scores + v), most);
    float top = largest(most);
    for (; v < end; v++) top = d->scores[v] > top ? d->scores[v] : top;
    return top;
}

/* The k-th highest of numbers, which are put in another order; k from 1 on. */
static float find_kth(float *x, int32_t count, int32_t k) {
    int32_t low = 0, high = count - 1;
    while (low < high) {
        const float pivot = x[low + (high - low) / 2];
        int32_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                const float held = x[i];
                x[i++] = x[j], x[j--] = held;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else break;
    }
    return x[k - 1];
}

/* The k highest scores and what ties with the last, divided by the temperature, which may make more of them tie. */
static void keep_highest(us_drawing *d, const float *tops, int32_t k) {
    float held[DRAW_BLOCKS], *values = (float *)d->order;
    memcpy(held, tops, sizeof(float) * (size_t)d->num_blocks);
    collect(d, tops, k <= d->num_blocks ? find_kth(held, d->num_blocks, k) : -FLT_MAX); /* at least k of them, if there are */
    if (d->count < k) {
        collect(d, tops, -FLT_MAX);
        for (int32_t i = 0; i < d->count; i++) d->found[i].value = divide(d, d->found[i].value);
        return;
    }
    for (int32_t i = 0; i < d->count; i++) values[i] = d->found[i].value;
    const float last = find_kth(values, d->count, k), lowest = divide(d, last);
    collect(d, tops, last - 1e-6f * fabsf(last) - FLT_MIN);
    int32_t kept = 0;
    for (int32_t i = 0; i < d->count; i++) {
        const float value = divide(d, d->found[i].value);
        if (value >= lowest) d->found[kept++] = (us_candidate){value, d->found[i].token};
    }
    d->count = kept;
}

static int compare_candidates(const void *one, const void *two) { /* the highest first, of equals the earlier token */
    const us_candidate *a = one, *b = two;
    return a->value != b->value ? (a->value < b->value ? 1 : -1) : (a->token > b->token) - (a->token < b->token);
}

/* Leaves the candidates that make up top-p, where all tokens have the probability `total` together, relative to the
 * highest; whether it is sure which they are. The candidates must reach p. */
static int32_t keep_top_p(us_drawing *d, double total) {
    const double highest = (double)divide(d, d->highest), wanted = d->draw->top_p;
    double reached = 0;
    int32_t kept = 0;
    memcpy(d->order, d->found, sizeof *d->found * (size_t)d->count);
    qsort(d->order, (size_t)d->count, sizeof *d->order, compare_candidates);
    for (; kept < d->count; kept++) {
        if (kept && fabs(reached / total - wanted) < NEAR) return 0;
        if (reached / total >= wanted && kept >= d->draw->fewest) break;
        reached += exp((double)d->order[kept].value - highest);
    }
    if (kept < d->count) {
        const us_candidate last = d->order[kept - 1];
        int32_t count = 0;
        for (int32_t i = 0; i < d->count; i++)
            if (compare_candidates(&d->found[i], &last) <= 0) d->found[count++] = d->found[i];
        d->count = count;
    }
    return 1;
}

static int32_t draw_from_candidates(us_drawing *d) {
    const double highest = (double)divide(d, d->highest), lowest = highest + d->draw->below;
    double total = 0, passed = 0;
    int32_t drawn = -1;
    for (int32_t i = 0; i < d->count; i++) {
        const double value = (double)d->found[i].value;
        const double share = value >= lowest ? exp(value - highest) : 0;
        total += share;
        memcpy(&d->order[i], &share, sizeof share);
    }
    const double target = fmin(d->draw->uniform, 1 - 0x1p-52) * total;
    for (int32_t i = 0; i < d->count; i++) {
        double share;
        memcpy(&share, &d->order[i], sizeof share);
        if (!(share > 0)) continue;
        drawn = d->found[i].token;
        passed += share;
        if (passed > target) break;
    }
    return drawn;
}

/* Top-p without top-k: the head is looked for among the scores near the highest, and further down if they don't reach it. */
static int32_t draw_from_head(us_drawing *d, const float *tops) {
    const double highest = (double)divide(d, d->highest);
    double total = 0;
    for (int32_t k = 0; k < d->num_blocks; k++) total += add_block(d, k);
    for (float range = 5.0f;; range *= 2) {
        const float lowest = range < 200 ? d->highest - range * (float)d->draw->temperature : -FLT_MAX;
        collect(d, tops, lowest);
        double mass = 0;
        for (int32_t i = 0; i < d->count; i++) {
            d->found[i].value = divide(d, d->found[i].value);
            mass += exp((double)d->found[i].value - highest);
        }
        if (mass > (d->draw->top_p + 2 * NEAR) * total && d->count > d->draw->fewest) break;
        if (lowest == -FLT_MAX) return UNSURE;
    }
    return keep_top_p(d, total) ? draw_from_candidates(d) : UNSURE;
}

/* Cuts the vocabulary into blocks, and finds the highest score of each. */
static void cut_blocks(us_drawing *d, float *tops) {
    const int32_t vectors = (d->vocab + LANES - 1) / LANES;
    d->block = (vectors + DRAW_BLOCKS - 1) / DRAW_BLOCKS * LANES;
    d->num_blocks = (d->vocab + d->block - 1) / d->block;
    for (int32_t k = 0; tops && k < d->num_blocks; k++) tops[k] = find_block_top(d, k);
}

/* -1 where no score is finite, or one is NaN or infinite. */
static int32_t draw_token(us_drawing *d) {
    const us_draw *draw = d->draw;
    float tops[DRAW_BLOCKS];
    const int32_t is_cut = draw->top_k > 0 && draw->top_k < d->vocab;
    const int32_t takes_all = !is_cut && !(draw->top_p < 1) && !(draw->below > -INFINITY);
    d->highest = find_highest(d->scores, d->vocab);
    if (!(d->highest > -INFINITY)) return -1;
    if (draw->top_p < 1 && draw->top_p > ALMOST_ALL) return UNSURE;
    cut_blocks(d, takes_all ? NULL : tops);
    d->scale = (float)(1 / draw->temperature);
    if (takes_all) return draw_from_all(d);
    if (!is_cut && draw->top_p < 1) return draw_from_head(d, tops);
    if (is_cut) keep_highest(d, tops, draw->top_k);
    else { /* min-p alone; what lies a little lower is left out later */
        const double lowest = (double)d->highest + draw->below * draw->temperature;
        collect(d, tops, (float)fmax(lowest - 1e-5 * (1 + fabs(lowest)), -FLT_MAX));
        for (int32_t i = 0; i < d->count; i++) d->found[i].value = divide(d, d->found[i].value);
    }
    if (draw->top_p < 1) {
        const double highest = (double)divide(d, d->highest);
        double total = 0;
        for (int32_t i = 0; i < d->count; i++) total += exp((double)d->found[i].value - highest);
        if (!keep_top_p(d, total)) return UNSURE;
    }
    return draw_from_candidates(d);
}

/* Memory for a thread's drawings, one after the other; NULL, and noted in `failed`, if there is none. */
static us_candidate *find_room(int32_t vocab, void *failed) {
    us_candidate *room = malloc(2 * sizeof *room * (size_t)vocab);
    if (!room) atomic_store((atomic_int *)failed, 1);
    return room;
}

static us_drawing begin_drawing(const float *scores, int64_t row, int32_t vocab, const us_draw *draw, us_candidate *room) {
    return (us_drawing){.scores = scores + row * vocab, .vocab = vocab, .draw = draw, .found = room, .order = room + vocab};
}

static void run_row_draws(const void *argument, int32_t thread, us_team *team) {
    const us_row_draw_task *task = argument;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    if (first == last) return;
    us_candidate *room = find_room(task->vocab, task->failed);
    if (!room) return;
    for (int64_t row = first; row < last; row++) {
        us_drawing drawing = begin_drawing(task->scores, row, task->vocab, task->draws + row, room);
        task->tokens[row] = draw_token(&drawing);
    }
    free(room);
}

#endif
