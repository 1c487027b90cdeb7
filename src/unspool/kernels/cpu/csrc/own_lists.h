/* Green lists that a token itself helps to choose: each of a row's likeliest tokens is raised if it is on its own list. */
#ifndef UNSPOOL_OWN_LISTS_H
#define UNSPOOL_OWN_LISTS_H

#include "draws.h" /* keep_highest */

#define SIDE_BY_SIDE 8 /* seeds: each waits for its own numbers alone */

typedef struct {
    uint32_t state[TWISTER + LANES];
    int64_t pair;      /* of a row and a candidate */
    int32_t token, at; /* where the shuffle has taken it */
    int32_t is_raised;
} us_followed;

/* Of LANES swaps, those that surely do not go to a place. */
#if defined(US_AVX512)
typedef __mmask16 us_far;
INLINE us_far all_far(void) { return 0xffff; }
INLINE int32_t is_one_near(us_far is_far) { return is_far != 0xffff; }
#else
typedef veci us_far;
INLINE us_far all_far(void) { return (veci){0} - 1; }
INLINE int32_t is_one_near(us_far is_far) {
    int32_t all = -1;
    for (int32_t i = 0; i < LANES; i++) all &= is_far[i];
    return !all;
}
#endif

/* Leaves in `is_far` what the swaps of LANES words are, too. A swap goes to its own place and a word's remainder, so the word
 * less what is missing to the place must be divisible. A number is divisible by another if its product with the inverse of
 * the odd part, turned by the powers of two, is within a limit. `passed`: how far the swaps are past the place. */
INLINE us_far stay_far(us_far is_far, vecu state, vecu passed, const uint32_t *inverses, int32_t count) {
    const vecu product = (temper_words(state) + passed) * load_words(inverses), turn = load_words(inverses + count);
    const uint32_t *limits = inverses + 2 * (size_t)count;
#if defined(US_AVX512)
    return _mm512_mask_cmpgt_epu32_mask(is_far, _mm512_rorv_epi32((__m512i)product, (__m512i)turn), _mm512_loadu_si512(limits));
#else
    return is_far & (veci)((product >> turn | product << (-turn & 31)) > load_words(limits));
#endif
}

INLINE vecu count_from(uint32_t first) {
    vecu counted;
    for (uint32_t lane = 0; lane < LANES; lane++) counted[lane] = first + lane;
    return counted;
}

/* Whether one of the swaps from..stop of a block, whole vectors of them, may go to a place. */
static int32_t may_go(const us_own_task *task, const uint32_t *state, int32_t first, int32_t from, int32_t stop, int32_t place) {
    vecu passed = count_from((uint32_t)(first + from - place));
    us_far is_far = all_far();
    for (int32_t i = from; i < stop; i += LANES, passed += LANES)
        is_far = stay_far(is_far, load_words(state + i), passed, task->divisors + first + i, task->num_first);
    return is_one_near(is_far);
}

/* The same of a whole block, whose words are made on the way. */
static int32_t twist_near(const us_own_task *task, uint32_t *state, int32_t first, int32_t place) {
    vecu passed = count_from((uint32_t)(first - place));
    us_far is_far = all_far();
    for (int32_t i = 0; i < TWISTER; i += LANES, passed += LANES)
        is_far = stay_far(is_far, twist_next(state, i), passed, task->divisors + first + i, task->num_first);
    return is_one_near(is_far);
}

/* The same of any swaps, and for sure. */
static int32_t goes_surely(const us_own_task *task, const uint32_t *state, int32_t first, int32_t from, int32_t stop, int32_t place) {
    for (int32_t i = from; i < stop; i++) {
        const uint32_t word = temper(state[i]), left = (uint32_t)(place - first - i);
        if (word >= left && !((word - left) % (uint32_t)(task->vocab - first - i))) return 1;
    }
    return 0;
}

static int32_t goes_to(const us_own_task *task, const uint32_t *state, int32_t first, int32_t from, int32_t stop, int32_t place) {
    const int32_t whole = stop > from ? from + (stop - from) / LANES * LANES : from;
    if (may_go(task, state, first, from, whole, place))
        for (int32_t i = from; i < whole; i += LANES)
            if (may_go(task, state, first, i, i + LANES, place) && goes_surely(task, state, first, i, i + LANES, place)) return 1;
    return goes_surely(task, state, first, whole, stop, place);
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

/* Where it is remembered whether a token is on a seed's list, and what is there if it is not. The table forgets what was
 * there before. Threads may write at the same time: a number is whole, and the same whoever makes it. */
static uint64_t *find_known(const us_own_task *task, uint32_t seed, int32_t token) {
    uint32_t place = seed * 0x9e3779b1u ^ (uint32_t)token * 0x85ebca6bu;
    place ^= place >> 15;
    return task->known + (place & (task->num_known - 1));
}

static inline uint64_t describe_known(uint32_t seed, int32_t token) { return (uint64_t)seed << 32 | ((uint64_t)(uint32_t)token + 1) << 1; }

/* Raises those of a row's candidates of which it is known that they are on their lists, and notes those to be followed. */
static void raise_known(const us_own_task *task, int64_t row, us_candidate *room) {
    const int32_t vocab = task->vocab, most = task->num_candidates;
    float *out = task->out + row * vocab;
    const int32_t count = list_candidates(task, task->scores + row * vocab, room, task->tokens + row * most);
    if (out != task->scores + row * vocab) memcpy(out, task->scores + row * vocab, sizeof(float) * (size_t)vocab);
    for (int32_t i = 0; i < count; i++) {
        const int64_t pair = row * most + i;
        const int32_t token = task->tokens[pair];
        const uint32_t seed = task->seeds[pair] = find_seed(task, task->ids + row * task->stride, token);
        const uint64_t held = task->num_known ? __atomic_load_n(find_known(task, seed, token), __ATOMIC_RELAXED) : 0;
        if (held >> 1 == describe_known(seed, token) >> 1) out[token] += held & 1 ? task->bias : 0;
        else task->open[atomic_fetch_add((atomic_int *)task->num_open, 1)] = pair;
    }
}

/* Follows up to SIDE_BY_SIDE candidates, raises and remembers them. */
static void follow_open(const us_own_task *task, const int64_t *open, int32_t count) {
    us_followed followed[SIDE_BY_SIDE];
    for (int32_t k = 0; k < SIDE_BY_SIDE; k++) {
        us_followed *f = followed + k;
        f->pair = open[k < count ? k : 0];
        f->token = f->at = task->tokens[f->pair];
        f->state[0] = task->seeds[f->pair];
        f->is_raised = 0;
    }
    for (uint32_t i = 1; i < TWISTER; i++)
        UNROLLED for (int32_t k = 0; k < SIDE_BY_SIDE; k++) followed[k].state[i] = seed_next(followed[k].state[i - 1], i);
    for (int32_t at = 0; at < task->num_first; at += TWISTER) /* block by block: all read the same divisors */
        for (int32_t k = 0; k < count; k++) {
            us_followed *f = followed + k;
            const int32_t end = task->num_first - at < TWISTER ? task->num_first - at : TWISTER;
            if (f->is_raised) continue;
            if (end < TWISTER || f->at < at + TWISTER) twist_state(f->state);
            else if (!twist_near(task, f->state, at, f->at)) continue;
            follow_block(task, f, at, end);
        }
    for (int32_t k = 0; k < count; k++) {
        const us_followed *f = followed + k;
        const uint32_t seed = task->seeds[f->pair];
        if (f->is_raised) task->out[f->pair / task->num_candidates * task->vocab + f->token] += task->bias;
        if (task->num_known)
            __atomic_store_n(find_known(task, seed, f->token), describe_known(seed, f->token) | (uint64_t)f->is_raised, __ATOMIC_RELAXED);
    }
}

static void run_own_lists(const void *argument, int32_t thread, us_team *team) {
    const us_own_task *task = argument;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    for (int64_t row = first; row < last; row++) raise_known(task, row, task->rooms + 2 * (size_t)thread * task->vocab);
    us_meet(team);
    split(atomic_load((atomic_int *)task->num_open), thread, team->size, &first, &last);
    for (; first < last; first += SIDE_BY_SIDE)
        follow_open(task, task->open + first, last - first < SIDE_BY_SIDE ? (int32_t)(last - first) : SIDE_BY_SIDE);
}

#endif
