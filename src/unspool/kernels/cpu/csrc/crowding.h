/* How many threads a call gets while other programs want the same cores.
 *
 * A thread that has no core makes all others of its team wait, at each of the hundreds of meetings of a step, and a system
 * that shares two cores among many programs runs both threads of a team at once only now and then. So when the threads of a
 * call had no core for much of its time, the next ones are given fewer, which need nobody else; now and then one with all
 * of them shows whether the others are gone. Time in which a thread waits for another that has more to do is no such time:
 * it has a core. How many threads there are changes no bit of a result.
 */
#ifndef UNSPOOL_CROWDING_H
#define UNSPOOL_CROWDING_H

#include <stdint.h>

/* Nanoseconds. */
#define LEAST_MISSED 1000000   /* less than this means nothing: a thread was asleep, say */
#define LEAST_WITHIN 3000000   /* within a call: about what a core is lent for */
#define SHORTEST_PAUSE 20000000 /* until a call is tried with all threads */
#define LONGEST_PAUSE 1000000000

typedef struct {
    int32_t size;  /* threads that calls get until then; 0: all */
    int64_t until; /* when all are tried again */
    int64_t pause; /* how long that was from the last time on */
} us_crowding;

static inline int32_t us_choose_size(const us_crowding *c, int32_t most, int64_t now) {
    return c->size && c->size < most && now < c->until ? c->size : most;
}

/* Whether threads that had no core for `missed` nanoseconds together, of `spent` that have passed, held each other up for a
 * quarter of them. */
static inline int us_is_crowded(int64_t missed, int64_t spent) { return missed > LEAST_MISSED && missed > spent / 4; }

/* The same, so clearly that a call goes on with fewer. A pass has hundreds of meetings, each of which may wait that long. */
static inline int us_is_crowded_within(int64_t missed, int64_t spent) { return missed > LEAST_WITHIN && us_is_crowded(missed, spent); }

/* Note how a call of `size` threads went, of `most` that it could have had. */
static inline void us_note_call(us_crowding *c, int32_t size, int32_t most, int64_t missed, int64_t spent, int64_t now) {
    if (size == 1) return;
    if (us_is_crowded(missed, spent)) {
        const int32_t fewer = size - (size < 8 ? 1 : size / 4);
        if (!c->size || fewer < c->size) c->size = fewer;
        c->pause = c->pause ? 2 * c->pause : SHORTEST_PAUSE;
        if (c->pause > LONGEST_PAUSE) c->pause = LONGEST_PAUSE;
        c->until = now + c->pause;
    } else if (size == most) *c = (us_crowding){0};
}

#endif
