/* Watermarks: contexts, which tokens a seed's permutation puts first, SynthID-Text's tournament, Gumbel's draw. */
#ifndef UNSPOOL_MARKS_H
#define UNSPOOL_MARKS_H

#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define TWISTER 624 /* words of MT19937 */
#define TURN 397
#define MOST_FOLLOWED 64 /* tokens of one seed */
#define ROUNDS 10 /* of a tournament that one pass settles */
#define PATTERNS (1 << ROUNDS)
#define WORD_ROUNDS 30 /* whose bits share a word */

typedef struct {
    uint32_t state[TWISTER + 1], words[TWISTER];
    int32_t swaps[TWISTER]; /* where the shuffle's next places are swapped with */
} us_shuffle;

static void seed_shuffle(us_shuffle *s, uint32_t seed) {
    s->state[0] = seed;
    for (uint32_t i = 1; i < TWISTER; i++)
        s->state[i] = 1812433253u * (s->state[i - 1] ^ (s->state[i - 1] >> 30)) + i;
}

static inline uint32_t twist(uint32_t high, uint32_t low, uint32_t other) {
    const uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return other ^ (y >> 1) ^ (-(y & 1u) & 0x9908b0dfu);
}

/* The swaps of the next TWISTER places, from `first` on, of a shuffle of n. */
static void turn_shuffle(us_shuffle *s, int32_t first, int32_t n) {
    uint32_t *m = s->state;
    for (int32_t i = 0; i < TWISTER - TURN; i++) m[i] = twist(m[i], m[i + 1], m[i + TURN]);
    m[TWISTER] = m[0];
    for (int32_t i = TWISTER - TURN; i < TWISTER; i++) m[i] = twist(m[i], m[i + 1], m[i + TURN - TWISTER]);
    for (int32_t i = 0; i < TWISTER; i++) {
        uint32_t y = m[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        s->words[i] = y ^ (y >> 18);
    }
    const int32_t count = n - first < TWISTER ? n - first : TWISTER;
    for (int32_t i = 0; i < count; i++) { /* the remainder by a reciprocal, whose quotient is off by one at most */
        const uint32_t divisor = (uint32_t)(n - first - i);
        const uint32_t quotient = (uint32_t)(int64_t)((double)s->words[i] * (1.0 / (double)divisor));
        int64_t rest = (int64_t)s->words[i] - (int64_t)quotient * divisor;
        rest += rest < 0 ? (int64_t)divisor : 0;
        rest -= rest >= (int64_t)divisor ? (int64_t)divisor : 0;
        s->swaps[i] = first + i + (int32_t)rest;
    }
}

/* A place past the first ones holds what came there last; followed back to where it began, that is not among them. Most
 * places were never swapped: those that were are listed first, so that their chains are followed without the others. */
static void mark_first(us_shuffle *s, int32_t *came_from, const us_first_task *task, int64_t number) {
    const int32_t n = task->vocab, num_first = task->num_first;
    int32_t *swapped = came_from + n, count = 0;
    uint8_t *out = task->out + number * n;
    seed_shuffle(s, task->seeds[number]);
    memset(came_from, 0xff, sizeof(int32_t) * (size_t)n);
    memset(out, 1, (size_t)num_first);
    for (int32_t first = 0; first < num_first; first += TWISTER) {
        turn_shuffle(s, first, n);
        const int32_t end = num_first - first < TWISTER ? num_first - first : TWISTER;
        for (int32_t i = 0; i < end; i++)
            if (s->swaps[i] != first + i) came_from[s->swaps[i]] = first + i;
    }
    for (int32_t place = num_first; place < n; place++) {
        out[place] = came_from[place] >= 0;
        swapped[count] = place;
        count += came_from[place] >= 0;
    }
    for (int32_t i = 0; i < count; i++) {
        int32_t at = came_from[swapped[i]];
        while (came_from[at] >= 0) at = came_from[at];
        out[at] = 0;
    }
}

static int32_t has_swap(const us_shuffle *s, int32_t from, int32_t to, int32_t place) {
    int32_t found = 0;
    for (int32_t i = from; i < to; i++) found |= s->swaps[i] == place;
    return found;
}

/* Follow tokens[0..count) through the shuffle of one seed. */
static void follow_tokens(us_shuffle *s, uint32_t seed, const int32_t *tokens, int64_t count, int32_t n, int32_t num_first,
                          uint8_t *out) {
    int64_t num_open = count;
    int32_t at[MOST_FOLLOWED];
    seed_shuffle(s, seed);
    for (int64_t k = 0; k < count; k++) at[k] = tokens[k], out[k] = 0;
    for (int32_t first = 0; first < num_first && num_open; first += TWISTER) {
        turn_shuffle(s, first, n);
        const int32_t end = num_first - first < TWISTER ? num_first - first : TWISTER;
        for (int64_t k = 0; k < count; k++) {
            int32_t from = 0;
            while (!out[k]) {
                const int32_t turn = at[k] - first; /* when the token's own place is swapped */
                const int32_t is_here = turn >= from && turn < end;
                if (has_swap(s, from, is_here ? turn : end, at[k])) out[k] = 1; /* taken to a place that is final */
                else if (!is_here) break;
                else if (s->swaps[turn] == at[k]) out[k] = 1;
                else at[k] = s->swaps[turn], from = turn + 1;
            }
            num_open -= out[k] && at[k] >= 0;
            if (out[k]) at[k] = -1;
        }
    }
}

static void run_first(const void *argument, int32_t thread, us_team *team) {
    const us_first_task *task = argument;
    int64_t first, last;
    split(task->count, thread, team->size, &first, &last);
    us_shuffle *s = first < last ? malloc(sizeof *s) : NULL;
    int32_t *came_from = s && !task->tokens ? malloc(sizeof(int32_t) * 2 * (size_t)task->vocab) : NULL;
    if (s && (task->tokens || came_from))
        for (int64_t number = first, count; number < last; number += count) {
            count = 1;
            if (!task->tokens) {
                mark_first(s, came_from, task, number);
                continue;
            }
            while (number + count < last && count < MOST_FOLLOWED && task->seeds[number + count] == task->seeds[number]) count++;
            follow_tokens(s, task->seeds[number], task->tokens + number, count, task->vocab, task->num_first,
                          task->out + number);
        }
    else if (first < last) atomic_store((atomic_int *)task->failed, 1);
    free(came_from);
    free(s);
}

/* --- contexts ----------------------------------------------------------------------------------------------- */

static inline uint64_t mix(uint64_t x) { /* SplitMix64's finaliser */
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void run_contexts(const void *argument, int32_t thread, us_team *team) {
    const us_context_task *task = argument;
    const int32_t width = task->width, end = task->num_tokens;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const int64_t *ids = task->ids + row * task->stride + task->start;
        const int64_t pad = task->pads ? task->pads[row] - task->start : 0, begin = pad > 0 ? pad : 0;
#define TOKEN(at) ((at) < begin ? 0 : ids[at])
        uint64_t state = task->seed;
        for (int32_t i = end - width; i < end; i++)
            state = task->mixes ? mix(state + ((uint64_t)TOKEN(i) + 1) * 0x9e3779b97f4a7c15u)
                                : (state + (uint64_t)TOKEN(i)) * 6364136223846793005u + 1;
        task->states[row] = (int64_t)state;
        task->repeated[row] = 0;
        for (int32_t window = task->first; window < end && !task->repeated[row]; window++) {
            int32_t i = 1;
            while (i <= width && TOKEN(window - i) == TOKEN(end - i)) i++;
            task->repeated[row] = i > width;
        }
#undef TOKEN
    }
}

/* --- SynthID-Text ------------------------------------------------------------------------------------------- */

/* The masses of the patterns of some rounds' bits become what those rounds multiply each pattern's probability by, and
 * its logarithm: a round's factor is 1 - m for a zero and 2 - m for a one, m being the mass of the ones. */
static void settle(double *masses, int32_t rounds, float *factors, float *logs) {
    double product[PATTERNS], sum[PATTERNS];
    product[0] = 1, sum[0] = 0;
    for (int32_t round = 0; round < rounds; round++) {
        const int32_t half = PATTERNS >> (round + 1), made = 1 << round;
        double mass = 0;
        for (int32_t i = 0; i < half; i++) mass += masses[2 * i + 1];
        const double zero = 1 - mass > 0 ? 1 - mass : 0, one = 2 - mass;
        for (int32_t i = 0; i < half; i++) masses[i] = zero * masses[2 * i] + one * masses[2 * i + 1];
        for (int32_t i = 0; i < made; i++) {
            product[made + i] = product[i] * one, product[i] *= zero;
            sum[made + i] = sum[i] + log(one), sum[i] += log(zero);
        }
    }
    for (int32_t i = 0; i < 1 << rounds; i++) factors[i] = (float)product[i], logs[i] = (float)sum[i];
}

/* The highest of a row's scores; NaN if one of them is, or is infinite. */
static float find_highest(const float *scores, int32_t count) {
    vec most = fill(-INFINITY);
    veci is_sound = as_bits(most) | -1;
    int32_t v = 0;
    for (; v + LANES <= count; v += LANES) {
        const vec x = load(scores + v);
        is_sound &= x < fill(INFINITY);
        most = larger(x, most);
    }
    float highest = largest(most);
    int32_t sound = -1;
    for (int32_t i = 0; i < LANES; i++) sound &= is_sound[i];
    for (; v < count; v++) {
        sound &= -(scores[v] < INFINITY);
        highest = scores[v] > highest ? scores[v] : highest;
    }
    return sound ? highest : NAN;
}

/* One row. Tokens that lie a table's size apart have the same bits: they are one class. */
static void play(const us_tournament_task *task, int64_t row, float *shares, uint32_t *bits) {
    const float *scores = task->scores + row * task->vocab;
    float *out = task->out + row * task->vocab;
    const int32_t vocab = task->vocab, mask = (int32_t)task->size - 1;
    const int32_t classes = vocab < (int32_t)task->size ? vocab : (int32_t)task->size;
    const float highest = task->repeated[row] ? NAN : find_highest(scores, vocab);
    if (!(highest > -INFINITY)) {
        memcpy(out, scores, sizeof(float) * (size_t)vocab);
        return;
    }
    for (int32_t first = 0; first < vocab; first += classes) {
        const int32_t end = vocab - first < classes ? vocab - first : classes;
        int32_t v = 0;
        for (; v + LANES <= end; v += LANES) {
            const vec share = exponential(load(scores + first + v) - highest);
            store(shares + v, first ? load(shares + v) + share : share);
        }
        for (; v < end; v++) shares[v] = (first ? shares[v] : 0) + expf(scores[first + v] - highest);
    }
    double total = 0;
    for (int32_t first = 0; first < classes; first += PATTERNS) {
        float part = 0;
        vec parts = fill(0);
        int32_t v = first, end = classes - first < PATTERNS ? classes : first + PATTERNS;
        for (; v + LANES <= end; v += LANES) parts += load(shares + v);
        for (; v < end; v++) part += shares[v];
        total += sum(parts) + part;
    }
    const float base = highest + (float)log(total);
    float factors[PATTERNS], logs[3][PATTERNS], sums[2][PATTERNS];
    double masses[PATTERNS];
    for (int32_t depth = 0; depth < task->depth; depth += WORD_ROUNDS) {
        const uint32_t *words = task->words + (size_t)(depth / WORD_ROUNDS) * task->size;
        const uint32_t start = task->starts[row];
        for (int32_t c = 0; c < classes; c++) bits[c] = words[(start + task->step * (uint32_t)c) & (uint32_t)mask];
        for (int32_t group = 0; group < 3; group++) {
            int32_t rounds = task->depth - depth - group * ROUNDS, shift = group * ROUNDS, c = 0;
            rounds = rounds < 0 ? 0 : rounds < ROUNDS ? rounds : ROUNDS;
            memset(sums, 0, sizeof sums); /* two, so that equal neighbours do not wait for each other */
            if (rounds)
                for (; c + 2 <= classes; c += 2) {
                    sums[0][bits[c] >> shift & (PATTERNS - 1)] += shares[c];
                    sums[1][bits[c + 1] >> shift & (PATTERNS - 1)] += shares[c + 1];
                }
            if (rounds && c < classes) sums[0][bits[c] >> shift & (PATTERNS - 1)] += shares[c];
            for (int32_t i = 0; i < PATTERNS; i++) masses[i] = ((double)sums[0][i] + sums[1][i]) / total;
            settle(masses, rounds, factors, logs[group]);
            if (task->depth > depth + (group + 1) * ROUNDS)
                for (c = 0; c < classes; c++) shares[c] *= factors[bits[c] >> shift & (PATTERNS - 1)];
        }
        for (int32_t v = 0; v < vocab; v++) {
            const uint32_t word = bits[v & mask];
            const float sum = logs[0][word & (PATTERNS - 1)] + logs[1][word >> ROUNDS & (PATTERNS - 1)] +
                              logs[2][word >> 2 * ROUNDS & (PATTERNS - 1)];
            out[v] = (depth ? out[v] : scores[v] - base) + sum;
        }
    }
    for (int32_t v = 0; v < vocab; v++) { /* what has no probability in float32 has the lowest number, unless forbidden */
        const float found = scores[v] - highest > -103.9f && out[v] > -FLT_MAX ? out[v] : -FLT_MAX;
        out[v] = scores[v] > -INFINITY ? found : scores[v];
    }
}

static void run_tournament(const void *argument, int32_t thread, us_team *team) {
    const us_tournament_task *task = argument;
    const size_t room = (size_t)task->vocab;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    if (first == last) return;
    float *shares = malloc(room * (sizeof(float) + sizeof(uint32_t)));
    if (!shares) {
        atomic_store((atomic_int *)task->failed, 1);
        return;
    }
    for (int64_t row = first; row < last; row++) play(task, row, shares, (uint32_t *)(shares + room));
    free(shares);
}

/* --- Gumbel ------------------------------------------------------------------------------------------------- */

typedef uint32_t vecu __attribute__((vector_size(LANES * 4)));

INLINE vecu hash_words(vecu word) { /* MurmurHash3's finaliser */
    word = (word ^ (word >> 16)) * 0x85ebca6bu;
    word = (word ^ (word >> 13)) * 0xc2b2ae35u;
    return word ^ (word >> 16);
}

static double find_key(uint32_t word, float score) {
    return log(-log1p(-((double)word + 0.5) * 0x1p-32)) - (double)score;
}

/* Words of the noise and bounds from below of the keys, for LANES tokens from `token` on: a logarithm is no less than the
 * exponent and the mantissa less one, as a float's bits have them side by side. */
INLINE vec bound_keys(const float *scores, int32_t token, uint32_t low, uint32_t high, vecu *words) {
    vecu tokens;
    for (int i = 0; i < LANES; i++) tokens[i] = (uint32_t)(token + i);
    *words = hash_words(hash_words(tokens * 0x9e3779b1u + low) ^ high);
    const vec noise = __builtin_convertvector((veci)(*words >> 8), vec) * 0x1p-24f;
    const vec logs = __builtin_convertvector(as_bits(noise), vec) * 0x1p-23f - 127.0f;
    return logs * 0.693147f - load(scores);
}

/* The token with the least key, the first of equals; -1 where no score is finite, or one is NaN or infinite. */
static int32_t draw_keyed(const float *scores, int32_t vocab, uint64_t state) {
    const uint32_t low = (uint32_t)state, high = (uint32_t)(state >> 32);
    const int32_t whole = vocab / LANES * LANES;
    float rest[LANES];
    for (int32_t i = 0; i < LANES; i++) rest[i] = whole + i < vocab ? scores[whole + i] : -INFINITY;
    if (!(find_highest(scores, vocab) > -INFINITY)) return -1;
    vec least = fill(INFINITY);
    vecu words;
    double best = INFINITY;
    float bound = INFINITY;
    int32_t drawn = -1;
    for (int32_t pass = 0; pass < 2; pass++) { /* the first finds a bound from above, the second what is below it */
        veci at = (veci)fill(0), is_below;
        for (int32_t v = 0; v < vocab; v += LANES) {
            const float *from = v < whole ? scores + v : rest;
            const vec keys = bound_keys(from, v, low, high, &words);
            if (!pass) {
                is_below = keys < least;
                least = choose(is_below, keys, least);
                at = (is_below & v) | (~is_below & at);
                continue;
            }
            is_below = keys <= fill(bound);
            int32_t has_any = 0;
            for (int i = 0; i < LANES; i++) has_any |= is_below[i];
            if (!has_any) continue;
            for (int i = 0; i < LANES; i++) {
                const double key = is_below[i] ? find_key(words[i], from[i]) : INFINITY;
                if (key < best) best = key, drawn = v + i;
            }
        }
        if (pass) break;
        int32_t lane = 0;
        for (int i = 1; i < LANES; i++) lane = least[i] < least[lane] ? i : lane;
        const float *from = at[lane] < whole ? scores + at[lane] : rest;
        bound_keys(from, at[lane], low, high, &words);
        const double found = find_key(words[lane], from[lane]);
        bound = (float)(found + 1e-3 + 1e-5 * fabs(found)); /* of a float's rounding */
    }
    return drawn;
}

static void run_draws(const void *argument, int32_t thread, us_team *team) {
    const us_draw_task *task = argument;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    for (int64_t row = first; row < last; row++)
        task->tokens[row] = task->repeated[row] ? -1 : draw_keyed(task->scores + row * task->vocab, task->vocab, (uint64_t)task->states[row]);
}

#endif
