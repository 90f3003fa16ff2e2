/* Moves the clocks of one process, while it runs, as another process says.
 *
 * LD_PRELOAD it. REDFENCE_CLOCK_FILE names a file with a `struct moves`, in the machine's byte order. It is mapped into memory, so a
 * change holds from the next look at the clock on.
 *
 * `offset_ns` moves the wall clock alone, as an operator does who sets a machine's clock. `lags` holds the steady clocks back
 * (CLOCK_MONOTONIC and CLOCK_BOOTTIME), as a hypervisor does that stops or slows them: they lose `loss_ns` between two instants, evenly,
 * and never get it back. A writer fills the lag that is not in force and then sets `in_force`. Clocks of processes and threads stay true.
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

struct lag {
    int64_t lost_ns; /* before from_ns */
    int64_t from_ns; /* of CLOCK_BOOTTIME, as are all instants */
    int64_t until_ns;
    int64_t loss_ns; /* between the two */
};

struct moves {
    int64_t offset_ns;
    int64_t in_force; /* which lag: 0 or 1 */
    struct lag lags[2];
};

static const struct moves unmoved;
static const struct moves *moves = &unmoved;
static int64_t asleep_ns; /* by how much CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC; no machine sleeps during a test */

static void give_up(const char *what) {
    /* A test that takes an unmoved clock for a moved one proves nothing. */
    fprintf(stderr, "clock_shim: %s: %s\n", what, strerror(errno));
    _exit(121);
}

static int64_t read_ns(clockid_t clock) {
    struct timespec now;
    syscall(SYS_clock_gettime, clock, &now);
    return now.tv_sec * NS_PER_S + now.tv_nsec;
}

__attribute__((constructor)) static void map_moves(void) {
    const char *path = getenv("REDFENCE_CLOCK_FILE");
    if (path == NULL) {
        errno = ENOENT;
        give_up("REDFENCE_CLOCK_FILE is not set");
    }
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        give_up(path);
    }
    if (lseek(descriptor, 0, SEEK_END) < (off_t)sizeof *moves) {
        errno = EINVAL; /* to read beyond the end would be a bus error, later */
        give_up(path);
    }
    void *mapped = mmap(NULL, sizeof *moves, PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
        give_up(path);
    }
    close(descriptor);
    asleep_ns = read_ns(CLOCK_BOOTTIME) - read_ns(CLOCK_MONOTONIC);
    moves = mapped;
}

static int64_t lag_ns(int64_t boottime_ns) {
    const struct lag *lag = &moves->lags[__atomic_load_n(&moves->in_force, __ATOMIC_ACQUIRE)];
    if (boottime_ns <= lag->from_ns) {
        return lag->lost_ns;
    }
    if (boottime_ns >= lag->until_ns) {
        return lag->lost_ns + lag->loss_ns;
    }
    /* Rounded down: a clock that loses no more than all of the time never goes back. */
    return lag->lost_ns + (int64_t)((__int128)lag->loss_ns * (boottime_ns - lag->from_ns) / (lag->until_ns - lag->from_ns));
}

static int64_t moved_ns(clockid_t clock, int64_t true_ns) {
    switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE:
    case CLOCK_REALTIME_ALARM:
    case CLOCK_TAI:
        return true_ns + __atomic_load_n(&moves->offset_ns, __ATOMIC_RELAXED);
    case CLOCK_MONOTONIC:
    case CLOCK_MONOTONIC_COARSE:
        return true_ns - lag_ns(true_ns + asleep_ns);
    case CLOCK_BOOTTIME:
    case CLOCK_BOOTTIME_ALARM:
        return true_ns - lag_ns(true_ns);
    default:
        return true_ns;
    }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0) {
        int64_t ns = moved_ns(clock, now->tv_sec * NS_PER_S + now->tv_nsec);
        int64_t seconds = ns / NS_PER_S - (ns % NS_PER_S < 0); /* rounded down: the nanoseconds left are never negative */
        now->tv_sec = (time_t)seconds;
        now->tv_nsec = (long)(ns - seconds * NS_PER_S);
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
