// The process that holds a pod's namespaces while its containers start and stop. It waits, reaps orphans if the
// containers of a pod share a process namespace, and ends on a signal. Freestanding: with a C library it would be a
// hundred times the size, in every pod.

#define SYS_RT_SIGPROCMASK 14
#define SYS_WAIT4 61
#define SYS_EXIT 60
#define SYS_RT_SIGTIMEDWAIT 128

#define SIGINT 2
#define SIGTERM 15
#define SIGCHLD 17
#define BIT(signal) (1UL << ((signal)-1))
#define SIG_BLOCK 0
#define WNOHANG 1

static long call(long number, long a, long b, long c, long d) {
  register long r10 __asm__("r10") = d;
  long result;
  __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
  return result;
}

// Blocked signals are queued even for process 1, for which the default action would ignore them.
void _start(void) {
  unsigned long waited = BIT(SIGINT) | BIT(SIGTERM) | BIT(SIGCHLD);
  call(SYS_RT_SIGPROCMASK, SIG_BLOCK, (long)&waited, 0, sizeof waited);
  for (;;) {
    long signal = call(SYS_RT_SIGTIMEDWAIT, (long)&waited, 0, 0, sizeof waited);
    if (signal == SIGINT || signal == SIGTERM) call(SYS_EXIT, 0, 0, 0, 0);
    while (call(SYS_WAIT4, -1, 0, WNOHANG, 0) > 0) {
    }
  }
}
