/*
 * Preloaded into the agent alone (its children do not inherit LD_PRELOAD): a machine that misbehaves beneath it.
 *
 *   SHIM_CLOCK=FILE     the wall clock is off by as many seconds as the file says, at any moment
 *   SHIM_SLOW=PREFIX    opening what begins so takes SHIM_DELAY milliseconds; with "hang" as the delay it takes until
 *                       the file SHIM_RELEASE exists. Below /proc only what waits for a process's memory map can hang:
                       cmdline, environ and maps
 *   SHIM_STORM=MICROS   a signal with a handler arrives that often, so that system calls are interrupted (EINTR)
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const char *clock_file, *slow, *delay, *release_file;

static void nothing(int number) { (void)number; }

__attribute__((constructor)) static void begin(void) {
    clock_file = getenv("SHIM_CLOCK");
    slow = getenv("SHIM_SLOW");
    delay = getenv("SHIM_DELAY");
    release_file = getenv("SHIM_RELEASE");
    const char *storm = getenv("SHIM_STORM");
    if (storm) {
        struct sigaction action = {.sa_handler = nothing}; /* no SA_RESTART: that is the point */
        sigaction(SIGALRM, &action, NULL);
        long every = atol(storm);
        struct itimerval timer = {{0, every}, {0, every}};
        setitimer(ITIMER_REAL, &timer, NULL);
    }
}

static long offset(void) {
    char text[32] = "";
    if (!clock_file) return 0;
    int file = (int)syscall(SYS_openat, AT_FDCWD, clock_file, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    if (syscall(SYS_read, file, text, sizeof text - 1) < 0) text[0] = 0;
    syscall(SYS_close, file);
    return atol(text);
}

int clock_gettime(clockid_t which, struct timespec *into) {
    int result = (int)syscall(SYS_clock_gettime, which, into);
    if (result == 0 && which == CLOCK_REALTIME) into->tv_sec += offset();
    return result;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}

static void wait_for(const char *path) {
    if (!slow || !path || strncmp(path, slow, strlen(slow)) != 0) return;
    if (delay && strcmp(delay, "hang") == 0) {
        const char *name = strrchr(path, '/');
        if (strncmp(path, "/proc/", 6) == 0 && strcmp(name, "/cmdline") != 0 && strcmp(name, "/environ") != 0 &&
            strcmp(name, "/maps") != 0)
            return;
        while (syscall(SYS_faccessat, AT_FDCWD, release_file, F_OK) != 0) {
            struct timespec pause = {0, 20000000};
            nanosleep(&pause, NULL);
        }
        return;
    }
    long left = delay ? atol(delay) : 0;
    struct timespec pause = {left / 1000, left % 1000 * 1000000};
    while (nanosleep(&pause, &pause) != 0) { }
}

#define OPENS(NAME)                                                                   \
    int NAME(const char *path, int flags, ...) {                                      \
        va_list more;                                                                 \
        va_start(more, flags);                                                        \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;             \
        va_end(more);                                                                 \
        wait_for(path);                                                               \
        return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);                 \
    }
OPENS(open)
OPENS(open64)

#define OPENS_AT(NAME)                                                                \
    int NAME(int folder, const char *path, int flags, ...) {                          \
        va_list more;                                                                 \
        va_start(more, flags);                                                        \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;             \
        va_end(more);                                                                 \
        wait_for(path);                                                               \
        return (int)syscall(SYS_openat, folder, path, flags, mode);                   \
    }
OPENS_AT(openat)
OPENS_AT(openat64)

DIR *opendir(const char *path) {
    static DIR *(*real)(const char *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "opendir");
    wait_for(path);
    return real(path);
}
