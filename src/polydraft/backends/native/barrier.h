/* A barrier, where threads wait for each other: they spin for a moment, then sleep.
 *
 * OpenMP's own barrier spins for milliseconds. That is fine if every thread has its own core; next to other busy processes it
 * takes the core from the very thread that it waits for, 300 times per pass. A sleeping thread leaves its core to the late one.
 */
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <sched.h>

typedef struct {
    int32_t round, arrived, asleep, threads;
    uint64_t last;  /* the last thread to arrive, and its core */
} Barrier;

#define SPINS 2000  /* 10 to 100 microseconds: longer than a thread with its own core is ever late */

/* Whether the last thread to arrive before this one was on the same core: then spinning would only get in its way. */
static int same_core(Barrier *m) {
#if defined(__linux__)
    static __thread char self;
    const uint64_t core = (uint64_t)sched_getcpu() & 0xffff, me = (uint64_t)(uintptr_t)&self << 16 | core;
    const uint64_t other = __atomic_exchange_n(&m->last, me, __ATOMIC_RELAXED);
    return other && other != me && (other & 0xffff) == core;
#else
    (void)m;
    return 0;
#endif
}

static void breathe(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

static void sleep_while(int32_t *word, int32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);  /* returns at once if the word has changed */
#else
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value) sched_yield();
#endif
}

static void wake_all(int32_t *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

/* Return once all threads have arrived. */
static void wait_for_all(Barrier *m) {
    if (m->threads == 1) return;
    const int32_t round = __atomic_load_n(&m->round, __ATOMIC_ACQUIRE);
    const int spins = same_core(m) ? 0 : SPINS;
    if (__atomic_add_fetch(&m->arrived, 1, __ATOMIC_ACQ_REL) == m->threads) {
        __atomic_store_n(&m->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&m->round, round + 1, __ATOMIC_SEQ_CST);
        /* A thread counts itself as asleep before it checks the round again: it either sees the new round or is seen here. */
        if (__atomic_load_n(&m->asleep, __ATOMIC_SEQ_CST)) wake_all(&m->round);
        return;
    }
    for (int spin = 0; spin < spins; spin++) {
        if (__atomic_load_n(&m->round, __ATOMIC_ACQUIRE) != round) return;
        breathe();
    }
    __atomic_add_fetch(&m->asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&m->round, __ATOMIC_SEQ_CST) == round) sleep_while(&m->round, round);
    __atomic_sub_fetch(&m->asleep, 1, __ATOMIC_SEQ_CST);
}
