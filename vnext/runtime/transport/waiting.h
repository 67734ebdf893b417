/* Waiting for another process to change a word in shared memory: spin for a while, then sleep. For _ring.c and _exchange.c;
   Linux only. */

#ifndef VNEXT_WAITING_H
#define VNEXT_WAITING_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LOOKS_BETWEEN_YIELDS = 16 };
#define NANOSECONDS 1000000000LL

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * NANOSECONDS + now.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wake_all(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); /* fails for no address that we can have mapped */
}

/* Sleeps while the word is `seen`, until it is woken, a signal comes or time is over; 0, or errno's number. */
static int sleep_while(uint32_t *word, uint32_t seen, int64_t left) {
    struct timespec limit = {left / NANOSECONDS, left % NANOSECONDS};
    return syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0) < 0 ? errno : 0;
}

#endif
