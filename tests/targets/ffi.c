// A second libffi, as a wheel may bring one: an `ffi_call` of its own, which its library calls through a slot. (build it with -nostdlib)
typedef unsigned long size;
typedef struct { size bytes; unsigned short alignment, kind; void **elements; } type;
typedef struct { unsigned convention, count; type **types; type *answer; unsigned bytes, flags; } interface;

void ffi_call(interface *of, void *(*function)(size), void **answer, void **values) { *answer = function(*(size *)values[0]); }

void site_second(void *(*function)(size), void **out, long n, size bytes) {
  type whole = {8, 8, 11, 0}, pointer = {8, 8, 14, 0}, *types[] = {&whole};
  interface of = {2, 1, types, &pointer, 0, 0};
  void *values[] = {&bytes};
  for (long i = 0; i < n; i++) ffi_call(&of, function, &out[i], values);
}
