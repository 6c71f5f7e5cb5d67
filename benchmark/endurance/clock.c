/* A wall clock that jumps, for the processes that load this by LD_PRELOAD: CLOCK_OFFSET_FILE holds the seconds that it
 * is off by, as a 64-bit integer, and is looked at anew each time.
 *
 * Only CLOCK_REALTIME is off, as when somebody sets a machine's clock. A wait until a time of day lasts as long as it
 * would have; one that is under way at the jump keeps its end, where a real jump moves it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t *shared;

__attribute__((constructor)) static void begin(void) {
  const char *name = getenv("CLOCK_OFFSET_FILE");
  int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0)
    return;
  void *at = mmap(NULL, sizeof *shared, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (at != MAP_FAILED)
    shared = at;
}

static int64_t off(void) { return shared ? __atomic_load_n(shared, __ATOMIC_RELAXED) : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = (int)syscall(SYS_clock_gettime, clock, now);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += off();
  return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec precise;
  int status = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return status;
}

time_t time(time_t *now) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now)
    *now = precise.tv_sec;
  return precise.tv_sec;
}

/* What the kernel has to be told for a deadline of the clock above. A time below 10^9 s is none of the wall clock's. */
static struct timespec kernels(const struct timespec *until) {
  struct timespec real = *until;
  if (real.tv_sec > 1000000000)
    real.tv_sec -= off();
  return real;
}

#define WAIT(name, type)                                                                       \
  int name(type *what, const struct timespec *until) {                                         \
    static int (*next)(type *, const struct timespec *);                                       \
    if (!next)                                                                                 \
      next = (int (*)(type *, const struct timespec *))dlsym(RTLD_NEXT, #name);                \
    struct timespec real = kernels(until);                                                     \
    return next(what, &real);                                                                  \
  }
WAIT(sem_timedwait, sem_t)
WAIT(pthread_mutex_timedlock, pthread_mutex_t)

int pthread_cond_timedwait(pthread_cond_t *restrict what, pthread_mutex_t *restrict lock,
                           const struct timespec *restrict until) {
  static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!next)
    next = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlsym(
        RTLD_NEXT, "pthread_cond_timedwait");
  struct timespec real = kernels(until);
  return next(what, lock, &real);
}
