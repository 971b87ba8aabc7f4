/* Preloaded into every process of a server: its wall clock is so many seconds ahead as the first eight bytes of the file
   CLOCK_JUMP say, at any moment. Deadlines on that clock mean the same moment as before. libfaketime 0.9.10 breaks
   Python's time.sleep (EINVAL from clock_nanosleep), and a time namespace has no wall clock of its own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static volatile const long *file;

__attribute__((constructor)) static void map(void) {
    const char *name = getenv("CLOCK_JUMP");
    int descriptor = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = descriptor < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapped != MAP_FAILED) file = mapped;
    if (descriptor >= 0) close(descriptor);
}

static long ahead_s(void) { return file ? *file : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static typeof(&clock_gettime) real;
    if (!real) real = REAL(clock_gettime);
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead_s();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    static typeof(&gettimeofday) real;
    if (!real) real = REAL(gettimeofday);
    int failed = real(now, zone);
    if (!failed) now->tv_sec += ahead_s();
    return failed;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}

/* A deadline in seconds since 1970 is one on the wall clock; one since the start of the machine is small. */
static struct timespec meant(const struct timespec *deadline) {
    struct timespec moment = *deadline;
    if (moment.tv_sec > 1000000000) moment.tv_sec -= ahead_s();
    return moment;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    struct timespec moment = meant(deadline);
    return REAL(pthread_cond_timedwait)(condition, mutex, &moment);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    struct timespec moment = meant(deadline);
    return REAL(sem_timedwait)(semaphore, &moment);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *deadline) {
    struct timespec moment = meant(deadline);
    return REAL(pthread_mutex_timedlock)(mutex, &moment);
}

/* Abseil, in Ray's processes, waits on futexes of its own. */
long syscall(long number, ...) {
    static typeof(&syscall) real;
    if (!real) real = REAL(syscall);
    va_list list;
    va_start(list, number);
    long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long);
    long d = va_arg(list, long), e = va_arg(list, long), f = va_arg(list, long);
    va_end(list);
    if (number == SYS_futex && (b & FUTEX_CLOCK_REALTIME) && d) {
        struct timespec moment = meant((const struct timespec *)d);
        return real(number, a, b, c, &moment, e, f);
    }
    return real(number, a, b, c, d, e, f);
}
