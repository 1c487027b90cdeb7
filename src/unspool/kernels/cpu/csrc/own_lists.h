/* Green lists that a token itself helps to choose: each of a row's likeliest tokens is raised if it is on its own list. */
#ifndef UNSPOOL_OWN_LISTS_H
#define UNSPOOL_OWN_LISTS_H

#include "draws.h" /* keep_highest */

#define SIDE_BY_SIDE 8 /* seeds: each waits for its own numbers alone */

/* Whether a place is where one of the swaps from..stop of a block goes. A swap goes to its own place and a word's remainder,
 * so the word less what is missing to the place must be divisible: a number is if its product with the divisor's inverse
 * (of the odd part, then turned by the powers of two) is within a limit. */
static int32_t goes_to(const us_own_task *task, const uint32_t *restrict state, int32_t first, int32_t from, int32_t stop, int32_t place) {
    const uint32_t *restrict inverses = task->divisors + first, *restrict turns = inverses + task->num_first;
    const uint32_t *restrict limits = turns + task->num_first;
    uint32_t is_hit = 0;
    for (int32_t i = from; i < stop; i++) {
        const uint32_t word = temper(state[i]), missing = (uint32_t)(place - first - i);
        const uint32_t product = (word - missing) * inverses[i];
        const uint32_t turned = product >> turns[i] | product << ((32 - turns[i]) & 31);
        is_hit |= (uint32_t)(turned <= limits[i]) & (uint32_t)(word >= missing);
    }
    return is_hit != 0;
}

/* Whether a token is among the first of the permutation that begins with this state. */
static int32_t is_first(const us_own_task *task, uint32_t *state, int32_t token) {
    const int32_t n = task->vocab, num_first = task->num_first;
    int32_t at = token;
    for (int32_t first = 0; first < num_first; first += TWISTER) {
        const int32_t end = num_first - first < TWISTER ? num_first - first : TWISTER;
        twist_state(state);
        for (int32_t from = 0;;) {
            const int32_t turn = at - first; /* when the token's own place is swapped */
            if (goes_to(task, state, first, from, turn < end ? turn : end, at)) return 1; /* to a place that is final */
            if (turn >= end) break;
            const int32_t rest = (int32_t)(temper(state[turn]) % (uint32_t)(n - at));
            if (!rest) return 1;
            at += rest;
            from = turn + 1;
        }
    }
    return 0;
}

/* The row's likeliest tokens, of equals the first; fewer if fewer are possible. */
static int32_t list_candidates(const us_own_task *task, const float *scores, us_candidate *room, int32_t *tokens) {
    const us_draw plain = {.temperature = 1};
    us_drawing d = {.scores = scores, .vocab = task->vocab, .draw = &plain, .found = room, .order = room + task->vocab};
    float tops[DRAW_BLOCKS], lowest = INFINITY;
    int32_t ties = task->num_candidates, count = 0;
    if (!(find_highest(scores, task->vocab) > -INFINITY)) return 0;
    cut_blocks(&d, tops);
    keep_highest(&d, tops, task->num_candidates);
    for (int32_t i = 0; i < d.count; i++) lowest = d.found[i].value < lowest ? d.found[i].value : lowest;
    for (int32_t i = 0; i < d.count; i++) ties -= d.found[i].value > lowest;
    for (int32_t i = 0; i < d.count; i++)
        if (d.found[i].value > lowest || ties-- > 0) tokens[count++] = d.found[i].token;
    return count;
}

static uint64_t find_number(const us_own_task *task, int64_t token) {
    const int64_t rest = token % task->table_size;
    return (uint64_t)task->table[rest < 0 ? rest + task->table_size : rest] + 1;
}

/* The seed of a token's list: the least of the products of the key, the token's number and each of the window's. */
static uint32_t find_seed(const us_own_task *task, const int64_t *before, int32_t token) {
    const uint64_t own = find_number(task, token), scaled = task->key * own;
    int64_t least = (int64_t)(scaled * own);
    for (int32_t i = 0; i < task->width; i++) {
        const int64_t product = (int64_t)(scaled * find_number(task, before[i]));
        least = product < least ? product : least;
    }
    return (uint32_t)((uint64_t)least - (least < 0)); /* what `% (2**64 - 1)` leaves of the low bits */
}

static void run_own_lists(const void *argument, int32_t thread, us_team *team) {
    const us_own_task *task = argument;
    const int32_t vocab = task->vocab, most = task->num_candidates;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    for (int64_t row = first; row < last; row++) {
        memcpy(task->out + row * vocab, task->scores + row * vocab, sizeof(float) * (size_t)vocab);
        int32_t *tokens = task->tokens + row * most;
        const int32_t count = list_candidates(task, task->scores + row * vocab, task->rooms + 2 * (size_t)thread * vocab, tokens);
        for (int32_t i = count; i < most; i++) tokens[i] = -1;
    }
    us_meet(team);
    uint32_t states[SIDE_BY_SIDE][TWISTER + 1];
    split(task->rows * most, thread, team->size, &first, &last);
    for (int64_t begin = first; begin < last; begin += SIDE_BY_SIDE) {
        const int32_t count = last - begin < SIDE_BY_SIDE ? (int32_t)(last - begin) : SIDE_BY_SIDE;
        for (int32_t k = 0; k < SIDE_BY_SIDE; k++) {
            const int64_t pair = begin + k, row = pair / most;
            const int32_t is_there = k < count && task->tokens[pair] >= 0;
            states[k][0] = is_there ? find_seed(task, task->ids + row * task->stride, task->tokens[pair]) : 0;
        }
        for (uint32_t i = 1; i < TWISTER; i++)
            UNROLLED for (int32_t k = 0; k < SIDE_BY_SIDE; k++) states[k][i] = seed_next(states[k][i - 1], i);
        for (int32_t k = 0; k < count; k++) {
            const int32_t token = task->tokens[begin + k];
            if (token >= 0 && is_first(task, states[k], token)) task->out[(begin + k) / most * vocab + token] += task->bias;
        }
    }
}

#endif
