/* A team of threads that spin briefly between the phases of a step and sleep when nobody calls. */
#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "internal.h"

#define MOST_THREADS 256
#define SPINS_TO_MEET 4000   /* then others may have the core */
#define SPINS_TO_YIELD 4000  /* some ten microseconds: the time between two calls */
#define YIELDS_TO_SLEEP 15000 /* some five milliseconds, in which others may have the core: the time between two steps */

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER; /* one call at a time */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards sleeping and waking */
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_t workers[MOST_THREADS];
static us_team team = {.size = 1};
static us_task current; /* NULL: go home */
static const void *current_argument;
static atomic_int call_number;

static inline void rest(void) {
#if defined(__aarch64__)
    __asm__ volatile("yield");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

void us_meet(us_team *met) {
    if (met->size == 1) return;
    int phase = atomic_load_explicit(&met->phase, memory_order_acquire);
    if (atomic_fetch_add_explicit(&met->arrived, 1, memory_order_acq_rel) == met->size - 1) {
        atomic_store_explicit(&met->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&met->phase, phase + 1, memory_order_release);
        return;
    }
    int spins = 0;
    while (atomic_load_explicit(&met->phase, memory_order_acquire) == phase) {
        if (++spins < SPINS_TO_MEET) rest();
        else sched_yield();
    }
}

static void *work(void *number) {
    int32_t thread = (int32_t)((intptr_t)number & 0xffff);
    int seen = (int)((intptr_t)number >> 16);
    for (;;) {
        int spins = 0;
        while (atomic_load_explicit(&call_number, memory_order_acquire) == seen) {
            if (++spins < SPINS_TO_YIELD) {
                rest();
                continue;
            }
            if (spins < SPINS_TO_YIELD + YIELDS_TO_SLEEP) {
                sched_yield();
                continue;
            }
            pthread_mutex_lock(&lock);
            while (atomic_load_explicit(&call_number, memory_order_acquire) == seen) pthread_cond_wait(&wake, &lock);
            pthread_mutex_unlock(&lock);
        }
        seen = (seen + 1) & 0x7fff; /* every call is for every worker: the caller waits for all of them */
        if (!current) return NULL;
        current(current_argument, thread, &team);
        us_meet(&team);
    }
}

static void call(us_task task, const void *argument) {
    current = task;
    current_argument = argument;
    pthread_mutex_lock(&lock);
    atomic_store_explicit(&call_number, (atomic_load(&call_number) + 1) & 0x7fff, memory_order_release);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
}

/* In the child of a fork there are no workers, and locks may be held by nobody. */
static void forget(void) {
    pthread_mutex_init(&gate, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    memset(&team, 0, sizeof team);
    team.size = 1;
}

static void resize(int32_t threads) {
    static int is_watching;
    if (!is_watching) is_watching = !pthread_atfork(NULL, NULL, forget);
    if (team.size > 1) {
        call(NULL, NULL);
        for (int32_t i = 1; i < team.size; i++) pthread_join(workers[i], NULL);
    }
    memset(&team, 0, sizeof team);
    int32_t size = 1;
    for (; size < threads; size++) {
        intptr_t number = ((intptr_t)atomic_load(&call_number) << 16) | size;
        if (pthread_create(&workers[size], NULL, work, (void *)number)) break;
    }
    team.size = size;
}

int32_t us_gather(int32_t threads) {
    pthread_mutex_lock(&gate);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads != team.size) resize(threads < 1 ? 1 : threads);
    return team.size;
}

void us_leave(void) { pthread_mutex_unlock(&gate); }

void us_do(us_task task, const void *argument) {
    if (team.size > 1) call(task, argument);
    task(argument, 0, &team);
    us_meet(&team); /* all are done: the caller may use what was computed, and call again */
    us_leave();
}
