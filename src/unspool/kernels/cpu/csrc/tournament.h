/* SynthID-Text's tournament. A row is played by one thread, or by a whole team that has more threads than rows. Its tokens
 * lie in parts, whose masses are added up in one order: who plays a row changes nothing about it. */
#ifndef UNSPOOL_TOURNAMENT_H
#define UNSPOOL_TOURNAMENT_H

#include "marks.h" /* find_highest */

#define ROUNDS 10 /* that one pass settles */
#define WORD_ROUNDS 30 /* whose bits share a word */
#define PATTERNS US_PATTERNS
#define PARTS US_PARTS
#define HALF 32 /* patterns of five bits */
#define ONE_BY_ONE __asm__ volatile("") /* in loops that look numbers up: gathers of vectors are slower on many machines */

typedef struct {
    const us_tournament_task *task;
    us_play_room *room;
    us_team *team;
    int32_t first_part, last_part; /* those of this thread */
    int32_t turn;                  /* which of the two masses of a part are made next */
    const float *scores;           /* of the row */
    float *out, *shares, *logs;    /* of classes: probabilities, and sums of the factors' logarithms */
    int32_t classes;               /* tokens that lie a table's size apart have the same bits: they are one class */
    float highest;
    double total;
} us_play;

/* What ten rounds multiply the probability of a pattern of their bits by, and its logarithm. Both are put together from
 * those of the lower and the upper five bits, which vectors of sixteen look up without memory. */
typedef struct {
    float factors[2][HALF], logs[2][HALF];
#if !defined(US_AVX512)
    float all_factors[PATTERNS], all_logs[PATTERNS];
#endif
} us_factors;

/* The masses of the patterns become factors: a round's is 1 - m for a zero and 2 - m for a one, m being the mass of the
 * ones. */
static void settle(double *masses, int32_t rounds, us_factors *to) {
    double product[2][HALF], sum[2][HALF];
    for (int32_t i = 0; i < 2; i++) product[i][0] = 1, sum[i][0] = 0;
    for (int32_t round = 0; round < ROUNDS; round++) {
        const int32_t half = PATTERNS >> (round + 1), side = round / 5, made = 1 << round % 5, is_there = round < rounds;
        double mass = 0;
        for (int32_t i = 0; i < half; i++) mass += masses[2 * i + 1];
        const double zero = !is_there ? 1 : 1 - mass > 0 ? 1 - mass : 0, one = is_there ? 2 - mass : 1;
        for (int32_t i = 0; i < half; i++) masses[i] = zero * masses[2 * i] + one * masses[2 * i + 1];
        const double log_zero = log(zero), log_one = log(one);
        for (int32_t i = 0; i < made; i++) {
            product[side][made + i] = product[side][i] * one, product[side][i] *= zero;
            sum[side][made + i] = sum[side][i] + log_one, sum[side][i] += log_zero;
        }
    }
    for (int32_t side = 0; side < 2; side++)
        for (int32_t i = 0; i < HALF; i++)
            to->factors[side][i] = (float)product[side][i], to->logs[side][i] = (float)sum[side][i];
#if !defined(US_AVX512)
    for (int32_t i = 0; i < PATTERNS; i++) {
        to->all_factors[i] = to->factors[0][i % HALF] * to->factors[1][i / HALF];
        to->all_logs[i] = to->logs[0][i % HALF] + to->logs[1][i / HALF];
    }
#endif
}

/* shares[i] = e to the (scores[i] - highest), added to what is there if it `adds`. */
static void spread_scores(const float *scores, int32_t count, float highest, int32_t adds, float *shares) {
    int32_t v = 0;
    for (; v + 4 * LANES <= count; v += 4 * LANES) {
        vec x[4];
        UNROLLED for (int i = 0; i < 4; i++) x[i] = load(scores + v + i * LANES) - highest;
        exponentials(x, 4);
        UNROLLED for (int i = 0; i < 4; i++) store(shares + v + i * LANES, adds ? load(shares + v + i * LANES) + x[i] : x[i]);
    }
    for (; v < count; v++) shares[v] = (adds ? shares[v] : 0) + expf(scores[v] - highest);
}


static double add_up(const float *shares, int32_t count) {
    double total = 0;
    for (int32_t first = 0; first < count; first += PATTERNS) {
        vec parts = fill(0);
        int32_t v = first, end = count - first < PATTERNS ? count : first + PATTERNS;
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

/* The masses of rounds' patterns; in four tables, so that neighbours with one pattern do not wait for each other. */
static void add_masses(const uint32_t *restrict words, int32_t shift, int32_t count, const float *restrict shares,
                       float (*restrict sums)[PATTERNS]) {
    int32_t c = 0;
    for (; c + 4 <= count; c += 4)
        UNROLLED for (int32_t i = 0; i < 4; i++) {
            ONE_BY_ONE;
            sums[i][words[c + i] >> shift & (PATTERNS - 1)] += shares[c + i];
        }
    for (; c < count; c++) sums[0][words[c] >> shift & (PATTERNS - 1)] += shares[c];
}

#if defined(US_AVX512)
INLINE __m512 look_up(const float *table, __m512i place) { /* by its low five bits */
    return _mm512_permutex2var_ps(_mm512_loadu_ps(table), place, _mm512_loadu_ps(table + 16));
}
#endif

/* What ten rounds leave of the shares. */
static void scale_shares(const uint32_t *restrict words, int32_t shift, int32_t count, const us_factors *restrict by, float *restrict shares) {
    int32_t c = 0;
#if defined(US_AVX512)
    for (; c + 16 <= count; c += 16) {
        const __m512i word = _mm512_srl_epi32(_mm512_loadu_si512(words + c), _mm_cvtsi32_si128(shift));
        const __m512 factor = _mm512_mul_ps(look_up(by->factors[0], word), look_up(by->factors[1], _mm512_srli_epi32(word, 5)));
        _mm512_storeu_ps(shares + c, _mm512_mul_ps(_mm512_loadu_ps(shares + c), factor));
    }
    for (; c < count; c++) shares[c] *= by->factors[0][words[c] >> shift & (HALF - 1)] * by->factors[1][words[c] >> shift >> 5 & (HALF - 1)];
#else
    for (; c < count; c++) {
        ONE_BY_ONE;
        shares[c] *= by->all_factors[words[c] >> shift & (PATTERNS - 1)];
    }
#endif
}

/* Adds the logarithms of all factors of a word's rounds. */
static void add_logs(const uint32_t *restrict words, const us_factors *restrict by, int32_t count, float *restrict sums) {
    int32_t c = 0;
#if defined(US_AVX512)
    for (; c + 16 <= count; c += 16) {
        __m512i word = _mm512_loadu_si512(words + c);
        __m512 sum = _mm512_loadu_ps(sums + c);
        UNROLLED for (int32_t i = 0; i < 6; i++, word = _mm512_srli_epi32(word, 5)) sum = _mm512_add_ps(sum, look_up(by[i / 2].logs[i % 2], word));
        _mm512_storeu_ps(sums + c, sum);
    }
    for (; c < count; c++)
        for (int32_t i = 0; i < 6; i++) sums[c] += by[i / 2].logs[i % 2][words[c] >> 5 * i & (HALF - 1)];
#else
    for (; c < count; c++) {
        ONE_BY_ONE;
        const uint32_t word = words[c];
        sums[c] += by[0].all_logs[word & (PATTERNS - 1)] + by[1].all_logs[word >> ROUNDS & (PATTERNS - 1)] +
                   by[2].all_logs[word >> 2 * ROUNDS & (PATTERNS - 1)];
    }
#endif
}

/* One group of rounds, after the factors of the group before. */
static void play_group(us_play *play, int64_t row, int32_t depth, int32_t group, us_factors *factors) {
    const int32_t left = play->task->depth - depth - group * ROUNDS, turn = play->turn, shift = group * ROUNDS;
    float sums[4][PATTERNS];
    double masses[PATTERNS];
    for (int32_t part = play->first_part; part < play->last_part; part++) {
        const int32_t first = begin_part(play, part), count = begin_part(play, part + 1) - first;
        const uint32_t *before, *after;
        const int32_t cut = find_words(play, row, depth / WORD_ROUNDS, first, count, &before, &after);
        float *shares = play->shares + first, *found = play->room->tallies[part].masses[turn];
        if (group) {
            scale_shares(before, shift - ROUNDS, cut, &factors[group - 1], shares);
            scale_shares(after, shift - ROUNDS, count - cut, &factors[group - 1], shares + cut);
        }
        memset(sums, 0, sizeof sums);
        add_masses(before, shift, cut, shares, sums);
        add_masses(after, shift, count - cut, shares + cut, sums);
        for (int32_t i = 0; i < PATTERNS; i++) found[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    }
    us_meet(play->team);
    for (int32_t i = 0; i < PATTERNS; i++) {
        double mass = 0;
        for (int32_t part = 0; part < PARTS; part++) mass += (double)play->room->tallies[part].masses[turn][i];
        masses[i] = mass / play->total;
    }
    settle(masses, left, &factors[group]);
    play->turn = 1 - turn;
}

/* The rounds whose bits share a word: their factors go into the sums of logarithms, and into the shares if rounds follow. */
static void play_word(us_play *play, int64_t row, int32_t depth) {
    const int32_t is_last = play->task->depth <= depth + WORD_ROUNDS;
    us_factors factors[3];
    memset(factors, 0, sizeof factors); /* of rounds that there are not: their bits are zeros, and so are the logarithms */
    for (int32_t group = 0; group < 3 && play->task->depth > depth + group * ROUNDS; group++) play_group(play, row, depth, group, factors);
    for (int32_t part = play->first_part; part < play->last_part; part++) {
        const int32_t first = begin_part(play, part), count = begin_part(play, part + 1) - first;
        const uint32_t *before, *after;
        const int32_t cut = find_words(play, row, depth / WORD_ROUNDS, first, count, &before, &after);
        add_logs(before, factors, cut, play->logs + first);
        add_logs(after, factors, count - cut, play->logs + first + cut);
        if (is_last) continue;
        scale_shares(before, 2 * ROUNDS, cut, &factors[2], play->shares + first);
        scale_shares(after, 2 * ROUNDS, count - cut, &factors[2], play->shares + first + cut);
    }
}

/* The highest score of the row; NaN if it is not played. Each thread looks at its parts of the tokens. */
static void look(us_play *play, int64_t row) {
    const int32_t vocab = play->task->vocab, side = (int32_t)(row & 1); /* the row before may still be read */
    for (int32_t part = play->first_part; part < play->last_part; part++) {
        const int32_t first = (int32_t)((int64_t)vocab * part / PARTS), last = (int32_t)((int64_t)vocab * (part + 1) / PARTS);
        play->room->tallies[part].highest[side] = find_highest(play->scores + first, last - first);
    }
    us_meet(play->team);
    play->highest = play->task->repeated[row] ? NAN : -INFINITY;
    for (int32_t part = 0; part < PARTS; part++) {
        const float found = play->room->tallies[part].highest[side];
        if (!(found <= play->highest)) play->highest = found > play->highest ? found : NAN; /* NaN stays */
    }
}

static void play_row(us_play *play, int64_t row) {
    const us_tournament_task *task = play->task;
    const int32_t vocab = task->vocab, begin = begin_part(play, play->first_part), end = begin_part(play, play->last_part);
    const int32_t step = play->classes;
    play->scores = task->scores + row * vocab;
    play->out = task->out + row * vocab;
    look(play, row);
#define OF_EACH(base) for (int32_t base = 0, count; count = (vocab - base < end ? vocab - base : end) - begin, base < vocab; base += step)
    if (!(play->highest > -INFINITY)) {
        OF_EACH(base) if (count > 0) memcpy(play->out + base + begin, play->scores + base + begin, sizeof(float) * (size_t)count);
        return;
    }
    for (int32_t part = play->first_part; part < play->last_part; part++) {
        const int32_t first = begin_part(play, part), last = begin_part(play, part + 1);
        for (int32_t base = 0; base < vocab; base += step)
            spread_scores(play->scores + base + first, (vocab - base < last ? vocab - base : last) - first, play->highest, base > 0,
                          play->shares + first);
        play->room->tallies[part].total = add_up(play->shares + first, last - first);
    }
    memset(play->logs + begin, 0, sizeof(float) * (size_t)(end - begin));
    us_meet(play->team);
    play->total = 0;
    for (int32_t part = 0; part < PARTS; part++) play->total += play->room->tallies[part].total;
    for (int32_t depth = 0; depth < task->depth; depth += WORD_ROUNDS) play_word(play, row, depth);
    const float norm = play->highest + (float)log(play->total), lowest = play->highest - 103.9f;
    OF_EACH(base) { /* what has no probability in float32 has the lowest number, unless it is forbidden */
        const float *scores = play->scores + base + begin, *logs = play->logs + begin;
        float *out = play->out + base + begin;
        for (int32_t v = 0; v < count; v++) {
            const float made = scores[v] - norm + logs[v], found = scores[v] > lowest && made > -FLT_MAX ? made : -FLT_MAX;
            out[v] = scores[v] > -INFINITY ? found : -INFINITY;
        }
    }
#undef OF_EACH
}

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
    play.shares = room->numbers;
    play.logs = room->numbers + play.classes;
    for (int64_t row = first; row < last; row++) play_row(&play, row);
}

#endif
