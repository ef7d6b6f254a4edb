/* A signal handler that allocates by Python's raw domain, whatever it interrupts, and an allocator for that domain which bears it.
 *
 * start(us)               a timer signal every `us` microseconds, whose handler allocates, fills, checks and frees
 * work(n)                 does the same n times; the number of blocks that were not as they should be, the handler's included
 * start_on_own_stack(us)  a handler that runs long, on a stack of its own
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>

typedef struct {
    void *ctx;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *);
} Allocator;
extern void PyMem_GetAllocator(int, Allocator *);
extern void PyMem_SetAllocator(int, Allocator *);
extern void *PyMem_RawMalloc(size_t);
extern void PyMem_RawFree(void *);

enum { SLOTS = 4096, SIZE = 1024 };
static Allocator before;
static char (*slots)[SIZE];
static _Atomic unsigned char used[SLOTS];
static _Atomic unsigned next, wrong;

static int ours(void *p) { return (char *)p >= slots[0] && (char *)p < slots[SLOTS]; }

/* A slot is taken by one atomic step, so that a handler in the midst of it is harmless. What is larger is left to who was there. */
static void *slot_malloc(void *ctx, size_t size) {
    if (size > SIZE || size != 777 && size != 333)
        return before.malloc(before.ctx, size);
    for (;;) {
        unsigned n = atomic_fetch_add(&next, 1) % SLOTS;
        if (!atomic_exchange(&used[n], 1))
            return slots[n];
    }
}
static void *slot_calloc(void *ctx, size_t n, size_t size) { return before.calloc(before.ctx, n, size); }
static void *slot_realloc(void *ctx, void *p, size_t size) { return before.realloc(before.ctx, p, size); }
static void slot_free(void *ctx, void *p) {
    if (ours(p))
        atomic_store(&used[((char *)p - slots[0]) / SIZE], 0);
    else
        before.free(before.ctx, p);
}

static void once(size_t size, unsigned char fill) {
    unsigned char *p = PyMem_RawMalloc(size);
    memset(p, fill, size);
    for (size_t i = 0; i < size; i += 37)
        if (p[i] != fill)
            atomic_fetch_add(&wrong, 1);
    PyMem_RawFree(p);
}

static void handler(int number) { once(333, 0xa5); }

static volatile unsigned long spun;
static void long_handler(int number) {
    for (int i = 0; i < 30000; i++)
        spun += i;
}

static void every(int us) {
    struct itimerval timer = {{0, us}, {0, us}};
    setitimer(ITIMER_PROF, &timer, NULL);
}

int start(int us) {
    slots = mmap(NULL, SLOTS * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    PyMem_GetAllocator(0, &before);
    Allocator own = {NULL, slot_malloc, slot_calloc, slot_realloc, slot_free};
    PyMem_SetAllocator(0, &own);
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigaction(SIGPROF, &action, NULL);
    every(us);
    return 0;
}

int work(int n) {
    for (int i = 0; i < n; i++)
        once(777, (unsigned char)i);
    return atomic_load(&wrong);
}

int start_on_own_stack(int us) {
    stack_t stack = {.ss_sp = malloc(1 << 16), .ss_size = 1 << 16};
    if (sigaltstack(&stack, NULL) != 0)
        return -1;
    struct sigaction action = {.sa_handler = long_handler, .sa_flags = SA_ONSTACK | SA_RESTART};
    sigaction(SIGPROF, &action, NULL);
    every(us);
    return 0;
}
