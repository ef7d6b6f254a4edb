// What wrappers around malloc and free cost by where they lie: near the C library, near the program, elsewhere.
//
//   cc -O2 -fPIC -shared -DLIBRARY -o DIR/loops.so places.c; cc -O2 -o DIR/places places.c -ldl; DIR/places DIR/loops.so [ROUNDS]
//
// Copies the wrappers' instructions (as in tests/golden/shim-fast-path.txt) to places in several blocks of 128 GiB, puts their addresses
// into the words through which the library calls malloc and free, and measures blocks of 0.1 ms, in random order: a third of the way up the
// sorted CPU times of each. x86-64 only.
#ifdef LIBRARY
#include <stddef.h>
__attribute__((visibility("protected"))) void *(*slot_malloc)(size_t);
__attribute__((visibility("protected"))) void (*slot_free)(void *);
__asm__(".text\n.p2align 4\nplt_malloc: jmp *slot_malloc(%rip)\n.p2align 4\nplt_free: jmp *slot_free(%rip)\n");
extern void *plt_malloc(size_t) __attribute__((visibility("hidden")));
extern void plt_free(void *) __attribute__((visibility("hidden")));
void tight(long n) {
  for (long i = 0; i < n; i++) {
    void *p = plt_malloc(56);
    __asm__ volatile("" : : "r"(p) : "memory");
    plt_free(p);
  }
}
static char *live[1000];
static unsigned x = 12345;
// As in workloads.py: 1,000 live blocks of 16 B to 32 KB, one replaced in each round and written to.
void mixed(long n) {
  for (long i = 0; i < n; i++) {
    x ^= x << 13; x ^= x >> 17; x ^= x << 5;
    unsigned at = x % 1000, kind = (x >> 10) % 16, r = x >> 14;
    size_t size = kind < 10 ? 16 + r % 240 : kind < 15 ? 256 + r % 2048 : 4096 + r % 28000;
    plt_free(live[at]);
    char *p = plt_malloc(size);
    for (size_t k = 0; k < size; k += 64) p[k] = k;
    live[at] = p;
  }
}
#else
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define MALLOC \
  "mov rax, fs:0\n imul rcx, rax, 0x1E3779B1\n shr rcx, 32\n and ecx, 0x7FC0\n lea r8, [rip + d_slots]\n" \
  "cmp [r8 + rcx], rax\n jne odd\n sub [r8 + rcx + 8], rdi\n jle odd\n jmp [rip + d_malloc]\n"
#define FREE \
  "mov rax, rdi\n shr rax, 8\n movzx eax, ax\n lea rcx, [rip + d_filter]\n cmp byte ptr [rcx + rax], 0\n jne odd\n jmp [rip + d_free]\n"
__asm__(
    ".intel_syntax noprefix\n .section .copied, \"aw\", @progbits\n .p2align 12\n copied:\n"
    "bare_malloc: jmp [rip + d_malloc]\n .p2align 4\n bare_free: jmp [rip + d_free]\n"
    ".p2align 6\n line_malloc:" MALLOC ".p2align 6\n line_free:" FREE
    ".p2align 6\n .skip 32, 0x90\n off_malloc:" MALLOC ".p2align 6\n off_free:" FREE
    "odd: ud2\n"
    ".p2align 12\n d_malloc: .quad 0\n d_free: .quad 0\n"
    ".p2align 12\n d_slots: .fill 0x8000, 1, 0\n .p2align 12\n d_filter: .fill 0x10000, 1, 0\n"
    "copied_end: .quad 0\n .text\n .att_syntax\n");
extern char copied[], copied_end[], bare_malloc[], bare_free[], line_malloc[], line_free[], off_malloc[], off_free[], d_malloc[], d_free[],
    d_slots[];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1e9 + t.tv_nsec;
}
static int order(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}
enum { WAYS = 4, MOST = 20000, PLACES = 11 };
#define BLOCK (1ul << 37)

int main(int argc, char **argv) {
  void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : 0;
  if (!library) return puts("places LIBRARY [ROUNDS]"), 2;
  int rounds = argc > 2 ? atoi(argv[2]) : 300;
  void **slot_malloc = dlsym(library, "slot_malloc"), **slot_free = dlsym(library, "slot_free");
  void (*loops[])(long) = {(void (*)(long))dlsym(library, "tight"), (void (*)(long))dlsym(library, "mixed")};
  char *malloc_ = dlsym(RTLD_DEFAULT, "malloc"), *free_ = dlsym(RTLD_DEFAULT, "free");
  uint64_t libc = (uint64_t)malloc_, program = (uint64_t)main, thread;
  __asm__("mov %%fs:0, %0" : "=r"(thread));
  srand(time(0));
  printf("program %lx, library %p, malloc %lx\n", program, (void *)loops[0], libc);
  const struct { const char *name; char *m, *f; } ways[WAYS] = {{"none", 0, 0}, {"bare jumps", bare_malloc, bare_free},
      {"as they are", line_malloc, line_free}, {"across a line", off_malloc, off_free}};
  for (int loop = 0; loop < 2; loop++)
    for (int place = 0; place < PLACES; place++) {
      uint64_t at = place < 4 ? libc - (1ul << 30) * (1 + rand() % 8)
                    : place < 8 ? program / BLOCK * BLOCK + BLOCK / 4 + (rand() % (1 << 20)) * 4096ul
                                : (libc / BLOCK - 1 - rand() % 8) * BLOCK + (rand() % (1 << 20)) * 4096ul;
      at &= ~4095ul;
      size_t len = copied_end - copied + 4096;
      char *copy = mmap((void *)at, len, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
      if (copy != (char *)at) continue;
      memcpy(copy, copied, copied_end - copied);
#define AT(what) (copy + ((what) - copied))
      *(void **)AT(d_malloc) = malloc_;
      *(void **)AT(d_free) = free_;
      char *slot = AT(d_slots) + ((thread * 0x1E3779B1ul) >> 32 & 0x7FC0);
      *(uint64_t *)slot = thread;
      *(int64_t *)(slot + 8) = INT64_MAX;
      static double times[WAYS][MOST];
      int count[WAYS] = {0};
      *slot_malloc = malloc_, *slot_free = free_;
      loops[loop](100000);
      double start = now();
      loops[loop](20000);
      long n = 100000 / ((now() - start) / 20000) + 10;
      for (int round = 0; round < rounds * WAYS; round++) {
        int way = rand() % WAYS;
        if (count[way] == MOST) continue;
        *slot_malloc = ways[way].m ? AT(ways[way].m) : malloc_;
        *slot_free = ways[way].f ? AT(ways[way].f) : free_;
        loops[loop](n / 20 + 1);
        start = now();
        loops[loop](n);
        times[way][count[way]++] = (now() - start) / n;
      }
      *slot_malloc = malloc_, *slot_free = free_;
      printf("%s  %s %12lx", loop ? "mixed" : "tight",
             at / BLOCK == libc / BLOCK ? "the C library's block" : at / BLOCK == program / BLOCK ? "the program's block  " : "another block        ", at);
      double none = 0;
      for (int way = 0; way < WAYS; way++) {
        qsort(times[way], count[way], sizeof(double), order);
        double t = times[way][count[way] / 3];
        if (!way) printf("  %.2f ns", none = t);
        else printf("  %s %+.1f %%", ways[way].name, 100 * (t / none - 1));
      }
      puts("");
      fflush(stdout);
      munmap(copy, len);
    }
}
#endif
