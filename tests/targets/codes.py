"""Code objects that are hard to name, and threads that run at the same time.

    python codes.py short N     N functions, each compiled, called once and thrown away; what it allocated stays
    python codes.py odd         functions with names of every kind of string
    python codes.py threads N   N threads that allocate, check and free until the end

    -> GO      <- DONE {...}: short: {"rate": per second}; odd: {"names": [[FUNCTION, FILE], ...]} as a profile shows them;
                  threads: {} once all of them run
    -> STATUS  <- STATUS {"rounds": [...], "bad": ...}     (threads)
    -> EXIT

Function number i of `short` is gen_I in the file <gen-I>, and allocates SIZE bytes in line I % 1000 + 2.
"""
import os
import sys
import threading
import time
import types

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

KEPT = []
SIZE = 8192
ODD_SIZE = 400000
HDR = sys.getsizeof(b"", 33)


def short(n):
    body = "return bytes(%d)" % (SIZE - HDR)
    start = time.perf_counter()
    for i in range(n):
        name = "gen_%d" % i
        space = {}
        exec(compile("\n" * (i % 1000) + "def %s():\n %s\n" % (name, body), "<gen-%d>" % i, "exec"), space)
        KEPT.append(space[name]())
    say("DONE", {"rate": n / (time.perf_counter() - start)})


class Text(str):
    """Not compact, and not of the type str itself."""


NAMES = [
    "plain", "caf\xe9", "\u6587\u4ef6", "a\U0001f600b", "\udcff\udc80.py", "\U0001f600\ud800", "x" * 10000, "\xe9" * 10000,
    "\u6587" * 10000, "\U0001f600" * 10000, Text("subclass"), Text("caf\xe9 subclass"), Text("\U0001f600 subclass"),
]


def rename(code, name):
    names = {"co_name": name, "co_filename": name}
    if hasattr(code, "co_qualname"):
        names["co_qualname"] = name
    if hasattr(code, "replace"):
        return code.replace(**names)
    fields = "argcount kwonlyargcount nlocals stacksize flags code consts names varnames filename name firstlineno lnotab"
    fields = ["co_" + field for field in (fields + " freevars cellvars").split()]
    return types.CodeType(*[names.get(field, getattr(code, field)) for field in fields])


def shown(text):
    """As pyheap shows it: cut with a mark, a lone surrogate as U+FFFD."""
    text = text if len(text) <= 4096 else text[:4096] + "\u2026"
    return "".join("\ufffd" if 0xD800 <= ord(c) <= 0xDFFF else c for c in text)


def odd():
    def f():
        return bytes(ODD_SIZE)

    names = []
    for name in NAMES:
        g = type(f)(rename(f.__code__, name), globals())
        KEPT.append(g())
        names.append([shown(name), shown(name)])
    say("DONE", {"names": names})


STOP = threading.Event()


def work(number, rounds, bad):
    while not STOP.is_set():
        # Small, middle and large blocks, and containers that are tracked.
        blocks = [bytes([number]) * size for size in range(1, 6000, 7)]
        tree = {i: [number, str(i), {"n": number}] for i in range(300)}
        if any(block.count(number) != len(block) for block in blocks) or any(v[0] != number for v in tree.values()):
            bad.append(number)
        rounds[number] += 1


def threads(n):
    rounds, bad = [0] * n, []
    all_of_them = [threading.Thread(target=work, args=(i, rounds, bad)) for i in range(n)]
    return rounds, bad, all_of_them


def main():
    mode = sys.argv[1]
    n = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    rounds, bad, workers = threads(n if mode == "threads" else 0)
    commands = Commands()
    ready()
    while True:
        command = commands.next()
        if command == "EXIT":
            break
        if command == "STATUS":
            say("STATUS", {"rounds": rounds, "bad": bad})
        elif mode == "short":
            short(n)
        elif mode == "odd":
            odd()
        else:
            for worker in workers:
                worker.start()
            while not all(rounds):
                time.sleep(0.01)
            say("DONE", {})
    STOP.set()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
