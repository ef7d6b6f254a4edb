// C that calls Python that calls C, and so on: the library of native_stacks.py. It has no C library of its own choosing (build it with
// -nostdlib). Each function does something after its call, so that none of them is a jump.
typedef unsigned long size;
void *malloc(size);
typedef void (*callback)(void);

static volatile long calls;
void *volatile kept[64];
volatile long next;

__attribute__((noinline)) static void *innermost(size bytes) {
  void *block = malloc(bytes);
  calls++;
  return block;
}
__attribute__((noinline)) void allocate(size bytes) {
  kept[next++ & 63] = innermost(bytes);
  calls++;
}
// With a frame whose size is not known beforehand, and registers that must be saved.
__attribute__((noinline)) void through(callback function, long depth) {
  volatile char room[16 + (depth & 7) * 16];
  room[0] = (char)depth;
  if (depth > 0) through(function, depth - 1);
  else function();
  calls += room[0];
}
__attribute__((noinline)) void outer(callback function) {
  through(function, 2);
  calls++;
}
// A thread that Python knows nothing of.
typedef unsigned long thread;
int pthread_create(thread *, const void *, void *(*)(void *), void *);
int pthread_join(thread, void **);
__attribute__((noinline)) static void *on_its_own(void *bytes) {
  allocate((size)bytes);
  calls++;
  return 0;
}
void in_thread(size bytes) {
  thread made;
  if (pthread_create(&made, 0, on_its_own, (void *)bytes) == 0) pthread_join(made, 0);
}

// On a stack of its own that ends with its page, above which there is nothing.
void *mmap(void *, size, int, int, int, long);
int mprotect(void *, size, int);
__attribute__((noinline)) void on_edge(size bytes) {
  const size page = 4096, pages = 16;
  char *stack = mmap(0, (pages + 1) * page, 3, 0x22, -1, 0);
  char *top = stack + pages * page;
  mprotect(top, page, 0);
  __asm__ volatile("mov %%rsp, %%rbx\n\tmov %1, %%rsp\n\tcall *%2\n\tmov %%rbx, %%rsp"
                   : "+D"(bytes)
                   : "r"(top), "r"(allocate)
                   : "rbx", "rax", "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "memory", "cc");
  calls++;
}
