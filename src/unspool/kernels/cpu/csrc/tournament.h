/* SynthID-Text's tournament. A row is played by one thread, or by a whole team that has more threads than rows. Its tokens
 * lie in parts, whose masses are added up in one order: who plays a row changes nothing about it. */
#ifndef UNSPOOL_TOURNAMENT_H
#define UNSPOOL_TOURNAMENT_H

#include <float.h>

#include "marks.h" /* find_highest */

#define WORD_ROUNDS 30 /* whose bits share a word */
#if defined(US_AVX512)
#define ROUNDS 3 /* that one pass settles: the masses of their patterns are added up in registers */
#else
#define ROUNDS 10 /* and here in tables */
#endif
#define PATTERNS (1 << ROUNDS)
#define GROUPS (WORD_ROUNDS / ROUNDS)
#define PARTS US_PARTS
#define TABLES 4 /* so that neighbours with one pattern do not wait for each other */
#define BLOCK 1024 /* shares that are added up as floats */
#define ONE_BY_ONE __asm__ volatile("") /* in loops that look numbers up: gathers of vectors are slower on many machines */

typedef struct {
    const us_tournament_task *task;
    us_play_room *room;
    us_team *team;
    int32_t first_part, last_part; /* those of this thread */
    int32_t turn;                  /* which of the two masses of a part are made next */
    const float *scores;           /* of the row */
    float *out, *shares, *logs;    /* of classes: probabilities, and sums of the factors' logarithms; no logs for a draw */
    int32_t classes;               /* tokens that lie a table's size apart have the same bits: they are one class */
    float highest;
    double total;
} us_play;

/* What a group of rounds multiplies the probability of a pattern of their bits by, and its logarithm. */
typedef struct {
#if defined(US_AVX512)
    float factors[16], logs[16]; /* twice: a vector of sixteen is looked up by four bits */
#else
    float factors[PATTERNS], logs[PATTERNS];
#endif
} us_factors;

/* The masses of the patterns become factors: a round's is 1 - m for a zero and 2 - m for a one, m being the mass of the
 * ones. A draw needs no logarithms. */
static void settle(double *masses, int32_t rounds, int32_t has_logs, us_factors *to) {
    double product[PATTERNS] = {1}, sum[PATTERNS] = {0};
    for (int32_t round = 0; round < ROUNDS; round++) {
        const int32_t half = PATTERNS >> (round + 1), made = 1 << round, is_there = round < rounds;
        double mass = 0;
        for (int32_t i = 0; i < half; i++) mass += masses[2 * i + 1];
        const double zero = !is_there ? 1 : 1 - mass > 0 ? 1 - mass : 0, one = is_there ? 2 - mass : 1;
        for (int32_t i = 0; i < half; i++) masses[i] = zero * masses[2 * i] + one * masses[2 * i + 1];
        const double log_zero = has_logs ? log(zero) : 0, log_one = has_logs ? log(one) : 0;
        for (int32_t i = 0; i < made; i++) {
            product[made + i] = product[i] * one, product[i] *= zero;
            sum[made + i] = sum[i] + log_one, sum[i] += log_zero;
        }
    }
    for (int32_t i = 0; i < (int32_t)(sizeof to->logs / sizeof *to->logs); i++)
        to->factors[i] = (float)product[i % PATTERNS], to->logs[i] = (float)sum[i % PATTERNS];
}

/* shares[i] = e to the (scores[i] - highest), nothing where a score is -inf; added to what is there if it `adds`. */
static void spread_scores(const float *scores, int32_t count, float highest, int32_t adds, float *shares) {
    int32_t v = 0;
    for (; v + 4 * LANES <= count; v += 4 * LANES) {
        vec x[4];
        veci is_there[4];
        UNROLLED for (int i = 0; i < 4; i++) x[i] = load(scores + v + i * LANES) - highest;
        UNROLLED for (int i = 0; i < 4; i++) is_there[i] = x[i] > fill(-INFINITY);
        exponentials(x, 4);
        UNROLLED for (int i = 0; i < 4; i++) x[i] = choose(is_there[i], x[i], fill(0));
        UNROLLED for (int i = 0; i < 4; i++) store(shares + v + i * LANES, adds ? load(shares + v + i * LANES) + x[i] : x[i]);
    }
    for (; v < count; v++) shares[v] = (adds ? shares[v] : 0) + expf(scores[v] - highest);
}


static double add_up(const float *shares, int32_t count) {
    double total = 0;
    for (int32_t first = 0; first < count; first += BLOCK) {
        vec parts = fill(0);
        int32_t v = first, end = count - first < BLOCK ? count : first + BLOCK;
        for (; v + LANES <= end; v += LANES) parts += load(shares + v);
        total += sum(parts);
        for (; v < end; v++) total += shares[v];
    }
    return total;
}

/* Where a part's classes begin; the end of the last is where a next one would begin. */
static int32_t begin_part(const us_play *play, int32_t part) {
    return part == PARTS ? play->classes : (int32_t)((int64_t)play->classes * part / PARTS) / LANES * LANES;
}

/* A part's words of some rounds, which go on at the table's beginning: the number of those before its end. */
static int32_t find_words(const us_play *play, int64_t row, int32_t word, int32_t first, int32_t count, const uint32_t **before,
                          const uint32_t **after) {
    const uint32_t size = play->task->size, place = ((uint32_t)play->task->states[row] + play->task->shift + (uint32_t)first) & (size - 1);
    *after = play->task->words + (size_t)word * size;
    *before = *after + place;
    return (uint32_t)count < size - place ? count : (int32_t)(size - place);
}

#include "tournament_masses.h"

/* One group of rounds, after the factors of the group before. */
static void play_group(us_play *play, int64_t row, int32_t depth, int32_t group, us_factors *factors) {
    const int32_t left = play->task->depth - depth - group * ROUNDS, turn = play->turn, shift = group * ROUNDS;
    const us_factors *by = group ? &factors[group - 1] : NULL;
    us_masses sums;
    double masses[PATTERNS];
    for (int32_t part = play->first_part; part < play->last_part; part++) {
        const int32_t first = begin_part(play, part), count = begin_part(play, part + 1) - first;
        const uint32_t *before, *after;
        const int32_t cut = find_words(play, row, depth / WORD_ROUNDS, first, count, &before, &after);
        memset(&sums, 0, sizeof sums);
        add_masses(before, shift, cut, by, play->shares + first, &sums);
        add_masses(after, shift, count - cut, by, play->shares + first + cut, &sums);
        part_masses(&sums, play->room->tallies[part].masses[turn]);
    }
    us_meet(play->team);
    for (int32_t i = 0; i < PATTERNS; i++) {
        double mass = 0;
        for (int32_t part = 0; part < PARTS; part++) mass += (double)play->room->tallies[part].masses[turn][i];
        masses[i] = mass / play->total;
    }
    settle(masses, left, play->logs != NULL, &factors[group]);
    play->turn = 1 - turn;
}

/* The rounds whose bits share a word: their factors go into the sums of logarithms, and into the shares if rounds or a draw
 * follow. */
static void play_word(us_play *play, int64_t row, int32_t depth) {
    const int32_t left = play->task->depth - depth, groups = left > WORD_ROUNDS ? GROUPS : (left + ROUNDS - 1) / ROUNDS;
    us_factors factors[GROUPS];
    memset(factors, 0, sizeof factors); /* of rounds that there are not: their bits are zeros, and so are the logarithms */
    for (int32_t group = 0; group < groups; group++) play_group(play, row, depth, group, factors);
    for (int32_t part = play->first_part; part < play->last_part; part++) {
        const int32_t first = begin_part(play, part), count = begin_part(play, part + 1) - first, shift = (groups - 1) * ROUNDS;
        const uint32_t *before, *after;
        const int32_t cut = find_words(play, row, depth / WORD_ROUNDS, first, count, &before, &after);
        if (play->logs) {
            add_logs(before, factors, cut, play->logs + first);
            add_logs(after, factors, count - cut, play->logs + first + cut);
        }
        if (play->logs && left <= WORD_ROUNDS) continue;
        scale_shares(before, shift, cut, &factors[groups - 1], play->shares + first);
        scale_shares(after, shift, count - cut, &factors[groups - 1], play->shares + first + cut);
    }
}

/* The highest score of the row; NaN if one is, or is infinite. Each thread looks at its parts of the tokens. */
static void look(us_play *play, int64_t row) {
    const int32_t vocab = play->task->vocab, side = (int32_t)(row & 1); /* the row before may still be read */
    for (int32_t part = play->first_part; part < play->last_part; part++) {
        const int32_t first = (int32_t)((int64_t)vocab * part / PARTS), last = (int32_t)((int64_t)vocab * (part + 1) / PARTS);
        play->room->tallies[part].highest[side] = find_highest(play->scores + first, last - first);
    }
    us_meet(play->team);
    play->highest = -INFINITY;
    for (int32_t part = 0; part < PARTS; part++) {
        const float found = play->room->tallies[part].highest[side];
        if (!(found <= play->highest)) play->highest = found > play->highest ? found : NAN; /* NaN stays */
    }
}

/* Adds up the shares of all parts. */
static void add_parts(us_play *play) {
    for (int32_t part = play->first_part; part < play->last_part; part++) {
        const int32_t first = begin_part(play, part);
        play->room->tallies[part].total = add_up(play->shares + first, begin_part(play, part + 1) - first);
    }
    us_meet(play->team);
    play->total = 0;
    for (int32_t part = 0; part < PARTS; part++) play->total += play->room->tallies[part].total;
}

/* The token at which the cumulated shares pass the target; the last that has one, if rounding lets none pass. */
static int32_t find_passing(const us_play *play, double target) {
    double passed = 0, held = 0;
    int32_t found = 0, drawn = -1;
    for (int32_t v = 0; v < play->classes && !(passed + held > target); v += BLOCK) {
        const double block = add_up(play->shares + v, play->classes - v < BLOCK ? play->classes - v : BLOCK);
        if (block > 0) passed += held, held = block, found = v;
    }
    for (int32_t v = found; v < play->classes && v < found + BLOCK; v++) {
        if (!(play->shares[v] > 0)) continue;
        drawn = v;
        passed += (double)play->shares[v];
        if (passed > target) break;
    }
    return drawn;
}

#define OF_EACH(base) for (int32_t base = 0, count; count = (vocab - base < end ? vocab - base : end) - begin, base < vocab; base += step)

static void write_logs(const us_play *play, int32_t begin, int32_t end) {
    const int32_t vocab = play->task->vocab, step = play->classes;
    const float norm = play->highest + (float)log(play->total), lowest = play->highest - 103.9f;
    OF_EACH(base) { /* what has no probability in float32 has the lowest number, unless it is forbidden */
        const float *scores = play->scores + base + begin, *logs = play->logs + begin;
        float *out = play->out + base + begin;
        for (int32_t v = 0; v < count; v++) {
            const float made = scores[v] - norm + logs[v], found = scores[v] > lowest && made > -FLT_MAX ? made : -FLT_MAX;
            out[v] = scores[v] > -INFINITY ? found : -INFINITY;
        }
    }
}

/* The row's shares lie as far from a cache line's beginning as their words: both are loaded by whole lines then. */
static void lay_shares(us_play *play, int64_t row) {
    const uintptr_t first = ((uintptr_t)play->room->numbers + US_LINE - 1) & ~(uintptr_t)(US_LINE - 1);
    const uint32_t place = (uint32_t)play->task->states[row] + play->task->shift, line = US_LINE / sizeof(float);
    play->shares = (float *)first + place % line;
    if (!play->task->tokens) play->logs = play->shares + (play->classes + (int32_t)line - 1) / (int32_t)line * (int32_t)line;
}

/* A row that is `repeated` stays as it is, or its token is drawn from it. */
static void play_row(us_play *play, int64_t row) {
    const us_tournament_task *task = play->task;
    const int32_t vocab = task->vocab, begin = begin_part(play, play->first_part), end = begin_part(play, play->last_part);
    const int32_t step = play->classes, draws = task->tokens != NULL;
    play->scores = task->scores + row * vocab;
    play->out = draws ? NULL : task->out + row * vocab;
    lay_shares(play, row);
    look(play, row);
    if (!draws && (task->repeated[row] || !(play->highest > -INFINITY))) {
        OF_EACH(base) if (count > 0) memcpy(play->out + base + begin, play->scores + base + begin, sizeof(float) * (size_t)count);
        return;
    }
    if (!(play->highest > -INFINITY)) {
        if (!play->first_part) task->tokens[row] = -1;
        return;
    }
    for (int32_t part = play->first_part; part < play->last_part; part++) { /* one by one: their last shares are made singly */
        const int32_t first = begin_part(play, part), last = begin_part(play, part + 1);
        for (int32_t base = 0; base < vocab; base += step)
            spread_scores(play->scores + base + first, (vocab - base < last ? vocab - base : last) - first, play->highest, base > 0,
                          play->shares + first);
    }
    if (play->logs) memset(play->logs + begin, 0, sizeof(float) * (size_t)(end - begin));
    add_parts(play);
    for (int32_t depth = 0; depth < task->depth && !task->repeated[row]; depth += WORD_ROUNDS) play_word(play, row, depth);
    if (!draws) write_logs(play, begin, end);
    else {
        add_parts(play);
        if (!play->first_part) task->tokens[row] = find_passing(play, fmin(task->uniforms[row], 1 - 0x1p-52) * play->total);
    }
}
#undef OF_EACH

static void run_tournament(const void *argument, int32_t thread, us_team *team) {
    const us_tournament_task *task = argument;
    const int32_t is_shared = task->rows < team->size;
    us_team alone = {.size = 1};
    int64_t first = 0, last = task->rows, first_part = 0, last_part = PARTS;
    if (is_shared) split(PARTS, thread, team->size, &first_part, &last_part);
    else split(task->rows, thread, team->size, &first, &last);
    us_play_room *room = (us_play_room *)((char *)task->rooms + (is_shared ? 0 : (size_t)thread * task->room_size));
    us_play play = {.task = task,
                    .room = room,
                    .team = is_shared ? team : &alone,
                    .first_part = (int32_t)first_part,
                    .last_part = (int32_t)last_part,
                    .classes = task->vocab < (int64_t)task->size ? task->vocab : (int32_t)task->size};
    for (int64_t row = first; row < last; row++) play_row(&play, row);
}

#endif
