/* Watermarks: which tokens a seed's permutation puts first, and SynthID-Text's tournament. */
#ifndef UNSPOOL_MARKS_H
#define UNSPOOL_MARKS_H

#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define TWISTER 624 /* words of MT19937 */
#define TURN 397
#define SUMS 16 /* partial sums of a mass */

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

/* A place past the first ones holds what came there last; followed back to where it began, that is not among them. */
static void mark_first(us_shuffle *s, int32_t *came_from, const us_first_task *task, int64_t number) {
    const int32_t n = task->vocab, num_first = task->num_first;
    uint8_t *out = task->out + number * n;
    seed_shuffle(s, task->seeds[number]);
    memset(came_from, 0xff, sizeof(int32_t) * (size_t)n);
    memset(out, 1, (size_t)n);
    for (int32_t first = 0; first < num_first; first += TWISTER) {
        turn_shuffle(s, first, n);
        const int32_t count = num_first - first < TWISTER ? num_first - first : TWISTER;
        for (int32_t i = 0; i < count; i++)
            if (s->swaps[i] != first + i) came_from[s->swaps[i]] = first + i;
    }
    for (int32_t place = num_first; place < n; place++) {
        int32_t at = place;
        while (came_from[at] >= 0) at = came_from[at];
        out[at] = 0;
    }
}

static uint8_t is_first(us_shuffle *s, uint32_t seed, int32_t token, int32_t n, int32_t num_first) {
    int32_t at = token;
    seed_shuffle(s, seed);
    for (int32_t first = 0; first < num_first; first += TWISTER) {
        turn_shuffle(s, first, n);
        const int32_t count = num_first - first < TWISTER ? num_first - first : TWISTER;
        for (int32_t i = 0; i < count; i++) {
            if (first + i == at) at = s->swaps[i];
            else if (s->swaps[i] != at) continue;
            else return 1; /* taken to a place that is final */
            if (at == first + i) return 1;
        }
    }
    return 0;
}

static void run_first(const void *argument, int32_t thread, us_team *team) {
    const us_first_task *task = argument;
    int64_t first, last;
    split(task->count, thread, team->size, &first, &last);
    us_shuffle *s = first < last ? malloc(sizeof *s) : NULL;
    int32_t *came_from = s && !task->tokens ? malloc(sizeof(int32_t) * (size_t)task->vocab) : NULL;
    if (s && (task->tokens || came_from))
        for (int64_t number = first; number < last; number++) {
            if (!task->tokens) mark_first(s, came_from, task, number);
            else task->out[number] = is_first(s, task->seeds[number], task->tokens[number], task->vocab, task->num_first);
        }
    else if (first < last) atomic_store((atomic_int *)task->failed, 1);
    free(came_from);
    free(s);
}

/* One row: only tokens that have a probability take part. */
static void play(const us_tournament_task *task, int64_t row, float *probs, uint32_t *bits, int32_t *tokens) {
    float *all = task->probs + row * task->vocab;
    int32_t count = 0;
    for (int32_t v = 0; v < task->vocab; v++) {
        tokens[count] = v;
        probs[count] = all[v];
        count += all[v] > 0;
    }
    const int32_t whole = (count + SUMS - 1) / SUMS * SUMS;
    for (int32_t i = count; i < whole; i++) probs[i] = 0, tokens[i] = 0;
    const uint32_t mask = task->size - 1, start = task->starts[row];
    for (int32_t depth = 0; depth < task->depth; depth++) {
        if (depth % 32 == 0) {
            const uint32_t *word = task->words + (size_t)(depth / 32) * task->size;
            for (int32_t i = 0; i < whole; i++) bits[i] = word[(start + task->step * (uint32_t)tokens[i]) & mask];
        }
        float sums[SUMS] = {0};
        for (int32_t i = 0; i < whole; i += SUMS)
            for (int32_t j = 0; j < SUMS; j++)
                sums[j] += (float)(int32_t)(bits[i + j] >> (depth % 32) & 1u) * probs[i + j];
        float mass = 0;
        for (int32_t j = 0; j < SUMS; j++) mass += sums[j];
        for (int32_t i = 0; i < whole; i++)
            probs[i] *= 1.0f - mass + (float)(int32_t)(bits[i] >> (depth % 32) & 1u);
    }
    for (int32_t i = 0; i < count; i++) all[tokens[i]] = probs[i];
}

static void run_tournament(const void *argument, int32_t thread, us_team *team) {
    const us_tournament_task *task = argument;
    const size_t room = (size_t)task->vocab + SUMS;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    if (first == last) return;
    float *probs = malloc(room * (sizeof(float) + sizeof(uint32_t) + sizeof(int32_t)));
    if (!probs) {
        atomic_store((atomic_int *)task->failed, 1);
        return;
    }
    uint32_t *bits = (uint32_t *)(probs + room);
    for (int64_t row = first; row < last; row++) play(task, row, probs, bits, (int32_t *)(bits + room));
    free(probs);
}

#endif
