/* A team of threads that spin briefly between the phases of a step and sleep when nobody calls. */
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "crowding.h"
#include "internal.h"

#define MOST_THREADS 256
#define SPINS_TO_LOOK 512        /* until the clock is read: some ten microseconds */
#define LONGEST_SPIN 3000000     /* nanoseconds, about what a thread keeps its core for */
#define SPINS_TO_YIELD 4000  /* some ten microseconds: the time between two calls */
#define YIELDS_TO_SLEEP 15000 /* some five milliseconds, in which others may have the core: the time between two steps */

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER; /* one call at a time */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards sleeping and waking */
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER; /* there is a call */
static pthread_cond_t more = PTHREAD_COND_INITIALIZER; /* there is one of more threads than the last had */
static pthread_t workers[MOST_THREADS];
static int32_t num_threads = 1; /* the workers and the caller */
static us_team team = {.size = 1}; /* those of them that the present call is for */
static us_crowding crowding;
static int64_t longest_spin; /* nanoseconds that a thread waits for others before it lets others have its core */
static us_task current; /* NULL: go home */
static const void *current_argument;
static atomic_llong call_word; /* the present call: its number times 2^16, and how many threads it is for */

static inline int32_t count_called(long long word) { return (int32_t)(word & 0xffff); }

static _Thread_local int64_t noted; /* what a thread had worked when it last noted its time (nanoseconds) */

static int64_t read_clock(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Count what the calling thread has worked since it last did. */
static void note_time(us_team *team) {
    const int64_t now = read_clock(CLOCK_THREAD_CPUTIME_ID);
    atomic_fetch_add_explicit(&team->worked, now - noted, memory_order_relaxed);
    noted = now;
}

/* What the threads of a call had no core for, of the time that has passed since it began. */
static int64_t count_missed(us_team *team, int64_t spent) {
    return team->size * spent - atomic_load_explicit(&team->worked, memory_order_relaxed);
}

#if defined(US_CHECKS)
static int32_t us_draw_luck(int32_t count) {
    static atomic_uint drawn;
    const uint32_t number = atomic_fetch_add(&drawn, 1) * 2654435761u;
    return (int32_t)((number >> 16) % (uint32_t)count);
}
#endif

static inline void rest(void) {
#if defined(__aarch64__)
    __asm__ volatile("yield");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* While threads work, floats too small for all their digits are zeros, where one costs its operation 150 cycles: GELU makes them
 * of every activation below -13. What the thread did with them before, which it does again behind the call. */
#if defined(__x86_64__) && !defined(US_KEEPS_SMALL)
static uint32_t flush_small(void) {
    const uint32_t before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 1u << 15 | 1u << 6);
    return before;
}
static void keep_small(uint32_t before) { __builtin_ia32_ldmxcsr(before); }
#else
static uint32_t flush_small(void) { return 0; }
static void keep_small(uint32_t before) { (void)before; }
#endif

/* Whether a call that began that long ago should go on with fewer threads. */
static int is_late(us_team *asked) {
#if defined(US_CHECKS) /* the checks go on often, and with any number of threads */
    (void)asked;
    return us_draw_luck(3) == 0;
#else
    const int64_t spent = read_clock(CLOCK_MONOTONIC) - asked->begun;
    return us_is_crowded_within(count_missed(asked, spent), spent);
#endif
}

static void meet(us_team *met, int looks) {
    const int32_t size = met->size; /* the next call may be another's before this one has left */
    if (size == 1) return;
    int phase = atomic_load_explicit(&met->phase, memory_order_acquire);
    if (atomic_fetch_add_explicit(&met->arrived, 1, memory_order_acq_rel) == size - 1) {
        if (looks) met->is_late = is_late(met); /* by the last: all say the same */
        atomic_store_explicit(&met->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&met->phase, phase + 1, memory_order_release);
        return;
    }
    int64_t since = 0, now = 0;
    for (int spins = 1; atomic_load_explicit(&met->phase, memory_order_acquire) == phase; spins++) {
        if (spins % SPINS_TO_LOOK == 0) {
            now = read_clock(CLOCK_MONOTONIC);
            since = since ? since : now;
        }
        if (now - since < longest_spin || spins < SPINS_TO_LOOK) rest();
        else sched_yield();
    }
}

void us_meet(us_team *met) { meet(met, 0); }

/* What a thread waits for others just before is not counted as work; so this follows another meeting closely. */
int us_meet_late(us_team *met) {
    if (met->size == 1) return 0;
    note_time(met);
    meet(met, 1);
    return met->is_late;
}

/* Wait for a call that is not the last one seen. */
static long long wait_for_call(long long seen, int32_t thread) {
    long long word = seen;
    for (int spins = 0; spins < SPINS_TO_YIELD + YIELDS_TO_SLEEP && thread < count_called(seen); spins++) {
        word = atomic_load_explicit(&call_word, memory_order_acquire);
        if (word != seen) return word;
        if (spins < SPINS_TO_YIELD) rest();
        else sched_yield();
    }
    pthread_mutex_lock(&lock);
    while ((word = atomic_load_explicit(&call_word, memory_order_acquire)) == seen || thread >= count_called(word))
        pthread_cond_wait(thread < count_called(word) ? &wake : &more, &lock);
    pthread_mutex_unlock(&lock);
    return word;
}

/* A call that is for a thread waits for it, so the thread misses none; of others it knows nothing. */
static void *work(void *number) {
    const int32_t thread = (int32_t)(intptr_t)number;
    flush_small();
    for (long long seen = 0;;) {
        seen = wait_for_call(seen, thread);
        if (thread >= count_called(seen)) continue;
        if (!current) return NULL;
        noted = read_clock(CLOCK_THREAD_CPUTIME_ID);
        current(current_argument, thread, &team);
        note_time(&team);
        us_meet(&team);
    }
}

static void call(us_task task, const void *argument) {
    const long long last = atomic_load(&call_word);
    current = task;
    current_argument = argument;
    pthread_mutex_lock(&lock);
    atomic_store_explicit(&call_word, (((last >> 16) + 1) << 16) | team.size, memory_order_release);
    pthread_cond_broadcast(&wake);
    if (team.size > count_called(last)) pthread_cond_broadcast(&more);
    pthread_mutex_unlock(&lock);
}

/* In the child of a fork there are no workers, and locks may be held by nobody. */
static void forget(void) {
    pthread_mutex_init(&gate, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    pthread_cond_init(&more, NULL);
    memset(&team, 0, sizeof team);
    team.size = num_threads = 1;
    atomic_store(&call_word, 0);
    crowding = (us_crowding){0};
}

/* From the beginning: who calls with one thread holds the gate, too. */
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget); }

static void resize(int32_t threads) {
    if (num_threads > 1) {
        team.size = num_threads;
        call(NULL, NULL);
        for (int32_t i = 1; i < num_threads; i++) pthread_join(workers[i], NULL);
    }
    atomic_store(&call_word, 0);
    memset(&team, 0, sizeof team);
    longest_spin = threads <= sysconf(_SC_NPROCESSORS_ONLN) ? LONGEST_SPIN : 0; /* else they wait for the cores they hold */
    crowding = (us_crowding){0};
    for (num_threads = 1; num_threads < threads; num_threads++)
        if (pthread_create(&workers[num_threads], NULL, work, (void *)(intptr_t)num_threads)) break;
}

int32_t us_gather(int32_t threads) {
    pthread_mutex_lock(&gate);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads != num_threads) resize(threads < 1 ? 1 : threads);
    team.begun = num_threads > 1 ? read_clock(CLOCK_MONOTONIC) : 0;
#if defined(US_CHECKS)
    team.size = 1 + us_draw_luck(num_threads);
#else
    team.size = us_choose_size(&crowding, num_threads, team.begun);
#endif
    atomic_store(&team.worked, 0);
    return team.size;
}

void us_leave(void) { pthread_mutex_unlock(&gate); }

void us_do(us_task task, const void *argument) {
    if (team.size > 1) {
        noted = read_clock(CLOCK_THREAD_CPUTIME_ID);
        call(task, argument);
    }
    const uint32_t before = flush_small();
    task(argument, 0, &team);
    keep_small(before);
    us_meet(&team); /* all are done: the caller may use what was computed, and call again */
    if (team.size > 1) {
        note_time(&team);
        const int64_t now = read_clock(CLOCK_MONOTONIC), spent = now - team.begun;
        us_note_call(&crowding, team.size, num_threads, count_missed(&team, spent), spent, now);
    }
    us_leave();
}
