// Allocates through the C library in known amounts: the library of native.py. It needs no C library of its own choosing
// (build it with -nostdlib), so that it works with whichever the interpreter has.
typedef unsigned long size;
void *malloc(size), *calloc(size, size), *realloc(void *, size), *aligned_alloc(size, size), *memalign(size, size);
void *mmap(void *, size, int, int, int, long);
int posix_memalign(void **, size, size), munmap(void *, size);
void *mremap(void *, size, size, int, ...);
void free(void *);

// Data that holds the function's address from the start, as some libraries have it.
void *(*volatile by_pointer)(size) = malloc;

void site_malloc(void **out, long n, size bytes) { for (long i = 0; i < n; i++) out[i] = malloc(bytes); }
void site_pointer(void **out, long n, size bytes) { for (long i = 0; i < n; i++) out[i] = by_pointer(bytes); }
void site_calloc(void **out, long n, size bytes) { for (long i = 0; i < n; i++) out[i] = calloc(bytes / 8, 8); }
void site_realloc(void **out, long n, size bytes) {
  for (long i = 0; i < n; i++) {
    void *block = realloc(0, 1 + bytes / 3);
    block = realloc(block, 2 * bytes);
    out[i] = realloc(block, bytes);
  }
}
void site_aligned(void **out, long n, size bytes) {
  for (long i = 0; i < n; i++)
    if (i % 3 == 0) out[i] = aligned_alloc(64, bytes);
    else if (i % 3 == 1) posix_memalign(&out[i], 64, bytes);
    else out[i] = memalign(64, bytes);
}
// PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS
void site_mmap(void **out, long n, size bytes) { for (long i = 0; i < n; i++) out[i] = mmap(0, bytes, 3, 0x22, -1, 0); }
void site_mremap(void **out, long n, size bytes) {
  for (long i = 0; i < n; i++) out[i] = mremap(mmap(0, bytes / 2, 3, 0x22, -1, 0), bytes / 2, bytes, 1);
}
void give_back(void **out, long n) { for (long i = 0; i < n; i++) free(out[i]); }
// By an address that stands in no slot.
void free_by(void (*by)(void *), void **out, long n) { for (long i = 0; i < n; i += 2) by(out[i]); }
void unmap(void **out, long n, size bytes) { for (long i = 0; i < n; i++) munmap(out[i], bytes); }
void churn(long rounds, size bytes) {
  for (long i = 0; i < rounds; i++) {
    void *volatile block = malloc(bytes);
    free(block);
  }
}
// realloc to nothing frees, or gives a block: either way nothing is left.
void vanish(long rounds, size bytes) {
  for (long i = 0; i < rounds; i++) {
    void *left = realloc(malloc(bytes), 0);
    if (left) free(left);
  }
}
// A copy of malloc's address that outlives the recording.
void *(**volatile copied)(size);
void copy_address(void) {
  copied = malloc(64);
  *copied = by_pointer;
}
void use_copy(void) { free((*copied)(100)); }
