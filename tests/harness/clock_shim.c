/* Moves the wall clock of one process, while it runs, by an offset that another process changes.
 *
 * LD_PRELOAD it. REDFENCE_CLOCK_FILE names a file of 8 bytes: the offset in nanoseconds, a signed integer in the machine's byte order.
 * It is mapped into memory, so a change holds from the next look at the clock on. Only the wall clock moves: CLOCK_MONOTONIC,
 * CLOCK_BOOTTIME and the clocks of processes and threads stay true, as they do when an operator sets a machine's clock.
 *
 * The kernel is asked directly. To look up the functions that these replace is what keeps libfaketime from starting a redis-server: dlsym
 * allocates memory, and the allocator of the server asks for the time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000LL

static const int64_t unmoved = 0;
static const int64_t *offset_ns = &unmoved;

static void give_up(const char *what) {
    /* A test that takes an unmoved clock for a moved one proves nothing. */
    fprintf(stderr, "clock_shim: %s: %s\n", what, strerror(errno));
    _exit(121);
}

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("REDFENCE_CLOCK_FILE");
    if (path == NULL) {
        errno = ENOENT;
        give_up("REDFENCE_CLOCK_FILE is not set");
    }
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        give_up(path);
    }
    if (lseek(descriptor, 0, SEEK_END) < (off_t)sizeof *offset_ns) {
        errno = EINVAL; /* to read beyond the end would be a bus error, later */
        give_up(path);
    }
    void *mapped = mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
        give_up(path);
    }
    close(descriptor);
    offset_ns = mapped;
}

static int is_wall_clock(clockid_t clock) {
    switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE:
    case CLOCK_REALTIME_ALARM:
    case CLOCK_TAI:
        return 1;
    default:
        return 0;
    }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && is_wall_clock(clock)) {
        int64_t ns = now->tv_nsec + __atomic_load_n(offset_ns, __ATOMIC_RELAXED);
        int64_t carry = ns / NS_PER_S - (ns % NS_PER_S < 0); /* rounded down: the nanoseconds left are never negative */
        now->tv_sec += (time_t)carry;
        now->tv_nsec = (long)(ns - carry * NS_PER_S);
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    if (zone != NULL) {
        memset(zone, 0, sizeof(struct timezone));
    }
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0) {
        return -1;
    }
    now->tv_sec = precise.tv_sec;
    now->tv_usec = (suseconds_t)(precise.tv_nsec / 1000);
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0) {
        return (time_t)-1;
    }
    if (now != NULL) {
        *now = precise.tv_sec;
    }
    return precise.tv_sec;
}
