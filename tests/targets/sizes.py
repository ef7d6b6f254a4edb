"""Blocks from each entry of the three allocator domains, of known sizes and numbers.

    python sizes.py

    -> GO      allocate everything              <- TRUTH {"sites": {...}}
    -> FREE    free everything again            <- TRUTH (all zero)
    -> EXIT

The answers are those of accuracy.py. The allocators are called through ctypes, each from a line in a function of its own;
what such a call allocates for itself is gone when it returns.
"""
import ctypes
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

HERE = os.path.abspath(__file__)
api = ctypes.pythonapi
SIZE, BLOCK = ctypes.c_size_t, ctypes.c_void_p
PREFIX = {"raw": "PyMem_Raw", "mem": "PyMem_", "obj": "PyObject_"}


def entry(domain, name, *types):
    # An object of its own for each: PyDLL's attributes are shared.
    function = ctypes.PYFUNCTYPE(BLOCK, *types)((PREFIX[domain] + name, api))
    return function


FREE = {d: ctypes.PYFUNCTYPE(None, BLOCK)((PREFIX[d] + "Free", api)) for d in PREFIX}
KEEP = {}
SITES = {}


def hold(name, domain, size, count):
    out = (BLOCK * count)()
    KEEP[name] = (domain, out)
    SITES[name] = {size: count}
    return out


SOURCE = '''
def {name}(out, function, *args):
    for i in range(len(out)):
        out[i] = function(*args)  # SITE {name}
'''
CHAIN = '''
def {name}(out, function, sizes):
    for i in range(len(out)):
        for size in sizes:
            out[i] = function(out[i], size)  # SITE {name}
'''
DOUBLE = '''
def {name}(out, function, malloc, small, large):
    for i in range(len(out)):
        out[i] = function(malloc(large), small)  # SITE {name}
'''
LINES = {}


def site(template, name, domain, size, count, *args):
    """Compiles a function of that name, and calls it."""
    source = template.format(name=name)
    space = {}
    exec(compile(source, "/sizes/%s.py" % name, "exec"), space)
    for number, text in enumerate(source.split("\n"), 1):
        if "# SITE" in text:
            LINES[name] = number
    space[name](hold(name, domain, size, count), *args)


def allocate():
    for domain in PREFIX:
        malloc = entry(domain, "Malloc", SIZE)
        calloc = entry(domain, "Calloc", SIZE, SIZE)
        realloc = entry(domain, "Realloc", BLOCK, SIZE)
        site(SOURCE, domain + "_malloc_1", domain, 1, 200000, malloc, 1)
        site(SOURCE, domain + "_malloc_100", domain, 100, 20000, malloc, 100)
        site(SOURCE, domain + "_malloc_512", domain, 512, 4000, malloc, 512)
        site(SOURCE, domain + "_malloc_513", domain, 513, 4000, malloc, 513)
        site(SOURCE, domain + "_malloc_40000", domain, 40000, 60, malloc, 40000)
        site(SOURCE, domain + "_calloc_48", domain, 48, 20000, calloc, 3, 16)
        site(SOURCE, domain + "_calloc_4096", domain, 4096, 500, calloc, 64, 64)
        # A realloc is a free and an allocation: only the last size stays.
        site(CHAIN, domain + "_realloc_up", domain, 3000, 800, realloc, (16, 100, 600, 1200, 3000))
        site(CHAIN, domain + "_realloc_small", domain, 400, 4000, realloc, (16, 200, 400))
        # From the raw domain's allocator down to a size that pymalloc serves.
        site(DOUBLE, domain + "_realloc_down", domain, 300, 4000, realloc, malloc, 300, 2000)
    huge = 4 << 30
    raw = entry("raw", "Malloc", SIZE)
    probe = raw(huge)
    if probe:
        FREE["raw"](probe)
        site(SOURCE, "raw_malloc_huge", "raw", huge, 1, raw, huge)
    # Requests that overflow or cannot be met are no allocations.
    for domain in PREFIX:
        calloc = entry(domain, "Calloc", SIZE, SIZE)
        site(SOURCE, domain + "_overflow", domain, 1, 20000, calloc, (1 << 64) - 1, (1 << 64) - 1)
        SITES[domain + "_overflow"] = {1: 0}


def truth():
    return {"sites": {name: {"bytes": sum(s * c for s, c in sizes.items()), "count": sum(sizes.values()), "sizes": sizes,
                             "function": name, "file": "/sizes/%s.py" % name, "line": LINES[name], "big": False}
                      for name, sizes in SITES.items()}}


def main():
    commands = Commands()
    ready()
    while True:
        c = commands.next()
        if c == "EXIT":
            break
        if c == "GO":
            allocate()
            say("TRUTH", truth())
        elif c == "FREE":
            for domain, out in KEEP.values():
                for i in range(len(out)):
                    FREE[domain](out[i])
            for sizes in SITES.values():
                for size in sizes:
                    sizes[size] = 0
            say("TRUTH", truth())


if __name__ == "__main__":
    main()
