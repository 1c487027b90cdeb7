/* Green lists that a token itself helps to choose: each of a row's likeliest tokens is raised if it is on its own list. */
#ifndef UNSPOOL_OWN_LISTS_H
#define UNSPOOL_OWN_LISTS_H

#include "draws.h" /* keep_highest */

#define SIDE_BY_SIDE 8 /* seeds: each waits for its own numbers alone */

typedef struct {
    uint32_t state[TWISTER + 1];
    int32_t token, at; /* where the shuffle has taken it */
    int32_t is_raised;
} us_followed;

/* A number is divisible by another if its product with the inverse of the odd part, turned by the powers of two, is within
 * a limit. */
#if defined(US_AVX512)
typedef __mmask16 us_hits;
INLINE us_hits are_divisible(vecu product, vecu turns, vecu limits) {
    return _mm512_cmple_epu32_mask(_mm512_rorv_epi32((__m512i)product, (__m512i)turns), (__m512i)limits);
}
static inline int32_t has_any(us_hits hits) { return hits != 0; }
#else
typedef veci us_hits;
INLINE us_hits are_divisible(vecu product, vecu turns, vecu limits) {
    return (veci)((product >> turns | product << (-turns & 31)) <= limits);
}
static inline int32_t has_any(us_hits hits) {
    int32_t any = 0;
    for (int32_t i = 0; i < LANES; i++) any |= hits[i];
    return any;
}
#endif

INLINE vecu load_words(const uint32_t *p) {
    vecu words;
    memcpy(&words, p, sizeof words);
    return words;
}

INLINE vecu temper_words(vecu y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

/* Whether one of the swaps from..stop of a block goes to a place: one goes to its own place and a word's remainder, so the
 * word less what is missing to the place must be divisible. Words below that are rare: vectors do not look for them. */
static int32_t goes_to(const us_own_task *task, const uint32_t *state, int32_t first, int32_t from, int32_t stop, int32_t place) {
    const uint32_t *inverses = task->divisors + first, *turns = inverses + task->num_first, *limits = turns + task->num_first;
    us_hits hits = {0};
    vecu missing;
    int32_t i = from;
    for (uint32_t lane = 0; lane < LANES; lane++) missing[lane] = (uint32_t)(place - first - from) - lane;
    for (; i + LANES <= stop; i += LANES, missing -= LANES) {
        const vecu product = (temper_words(load_words(state + i)) - missing) * load_words(inverses + i);
        hits |= are_divisible(product, load_words(turns + i), load_words(limits + i));
    }
    for (i = has_any(hits) ? from : i; i < stop; i++) {
        const uint32_t word = temper(state[i]), left = (uint32_t)(place - first - i);
        if (word >= left && !((word - left) % (uint32_t)(task->vocab - first - i))) return 1;
    }
    return 0;
}

/* Follows a token through a block of swaps. */
static void follow_block(const us_own_task *task, us_followed *f, int32_t first, int32_t end) {
    for (int32_t from = 0;;) {
        const int32_t turn = f->at - first; /* when the token's own place is swapped */
        if (goes_to(task, f->state, first, from, turn < end ? turn : end, f->at)) break; /* to a place that is final */
        if (turn >= end) return;
        const int32_t rest = (int32_t)(temper(f->state[turn]) % (uint32_t)(task->vocab - f->at));
        if (!rest) break;
        f->at += rest;
        from = turn + 1;
    }
    f->is_raised = 1;
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
    us_followed followed[SIDE_BY_SIDE];
    split(task->rows * most, thread, team->size, &first, &last);
    for (int64_t begin = first; begin < last; begin += SIDE_BY_SIDE) {
        const int32_t count = last - begin < SIDE_BY_SIDE ? (int32_t)(last - begin) : SIDE_BY_SIDE;
        for (int32_t k = 0; k < SIDE_BY_SIDE; k++) {
            const int64_t pair = begin + k, row = pair / most;
            us_followed *f = followed + k;
            f->token = f->at = k < count ? task->tokens[pair] : -1;
            f->state[0] = f->token >= 0 ? find_seed(task, task->ids + row * task->stride, f->token) : 0;
            f->is_raised = 0;
        }
        for (uint32_t i = 1; i < TWISTER; i++)
            UNROLLED for (int32_t k = 0; k < SIDE_BY_SIDE; k++) followed[k].state[i] = seed_next(followed[k].state[i - 1], i);
        for (int32_t at = 0; at < task->num_first; at += TWISTER) /* block by block: all read the same divisors */
            for (int32_t k = 0; k < count; k++) {
                us_followed *f = followed + k;
                if (f->token < 0 || f->is_raised) continue;
                twist_state(f->state);
                follow_block(task, f, at, task->num_first - at < TWISTER ? task->num_first - at : TWISTER);
            }
        for (int32_t k = 0; k < count; k++)
            if (followed[k].is_raised) task->out[(begin + k) / most * vocab + followed[k].token] += task->bias;
    }
}

#endif
