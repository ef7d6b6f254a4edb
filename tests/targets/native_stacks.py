"""C that calls Python that calls C.

    python native_stacks.py LIBRARY

    -> GO       allocate at the end of each stack below                    <- TRUTH {"sites": {...}}
    -> EXIT

LIBRARY is native_stacks.c. Each site has its own size of block ("bytes", allocated once) and "stack", the names of all functions between the module
and the allocation, innermost first, but for those of ctypes; those of C are marked by "C ". Where the stack is that of a thread of C's, it has no more.
"""
import ctypes
import os
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

WITH, WITHOUT = ctypes.PyDLL(sys.argv[1]), ctypes.CDLL(sys.argv[1])
WITH_GIL = ctypes.PYFUNCTYPE(None)
WITHOUT_GIL = ctypes.CFUNCTYPE(None)
SITES = {}
IS_READY = []
MIB = 1 << 20
THROUGH = ["C through", "C through", "C through", "C outer"]


def site(name, number, *stack):
    size = (8 + number) * MIB if IS_READY else 64
    SITES[name] = {"bytes": size, "stack": ["C innermost", "C allocate", *stack]}
    return ctypes.c_size_t(size)


def inner(library, size):
    library.allocate(size)


def middle(library, size):
    inner(library, size)


def plain():
    middle(WITH, site("plain", 0, "inner", "middle", "plain"))


def back():
    """C, Python, C, Python with two frames of its own, C."""
    size = site("back", 1, "inner", "middle", "call", *THROUGH, "back")

    def call():
        middle(WITH, size)

    WITH.outer(WITH_GIL(call))


def back_twice():
    size = site("back_twice", 2, "inner", "middle", "last", *THROUGH, "leap", "first", *THROUGH, "back_twice")

    def last():
        middle(WITHOUT, size)

    def leap():
        WITHOUT.outer(WITHOUT_GIL(last))

    def first():
        leap()

    WITHOUT.outer(WITHOUT_GIL(first))


def generator():
    size = site("generator", 3, "inner", "middle", "call", *THROUGH, "steps", "generator")

    def call():
        middle(WITH, size)

    def steps():
        WITH.outer(WITH_GIL(call))
        yield

    for _ in steps():
        pass


class Caller:
    def __init__(self, size):
        inner(WITH, size)


def constructor():
    Caller(site("constructor", 4, "inner", "__init__", "constructor"))


class Dying:
    def __init__(self, size):
        self.size = size

    def __del__(self):
        inner(WITHOUT, self.size)


def hold(size):
    held = Dying(size)  # noqa: F841


def destructor():
    """While the frame of a function that has returned is taken apart."""
    hold(site("destructor", 5, "inner", "__del__", "destructor"))


def key(item):
    middle(WITH, item)
    return 0


def builtin():
    """Through C of the interpreter's own."""
    size = site("builtin", 6, "inner", "middle", "key", "C list_sort_impl", "builtin")
    [size].sort(key=key)


def in_thread():
    worker = threading.Thread(target=in_worker, name="a worker")
    worker.start()
    worker.join()


def in_worker():
    size = site("in_worker", 7, "inner", "middle", "call", *THROUGH, "in_worker")

    def call():
        middle(WITHOUT, size)

    WITHOUT.outer(WITHOUT_GIL(call))


def foreign():
    size = site("foreign", 8, "C on_its_own")
    WITHOUT.in_thread(size)


def edge():
    """On a stack that ends where the piece does."""
    WITHOUT.on_edge(site("edge", 9, "C on_edge", "edge"))


def is_glibc():
    try:
        return "glibc" in os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):
        return False


def main():
    commands = Commands()
    # Functions get used to being called, and specialise.
    for _ in range(20):
        for run in (plain, back, back_twice, generator, constructor, destructor, builtin):
            run()
    IS_READY.append(True)
    if not is_glibc():
        # Only other threads show where musl keeps a thread's stack.
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    ready()
    while commands.next() == "GO":
        for run in (plain, back, back_twice, generator, constructor, destructor, builtin, in_thread, foreign, edge):
            run()
        say("TRUTH", {"sites": SITES})


main()
