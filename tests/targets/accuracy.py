"""Sites of known size and number: what the profiler must find.

    python accuracy.py [SCALE]

    -> GO      allocate everything              <- TRUTH {"sites": {...}}
    -> FREE    drop everything again            <- TRUTH (all zero)
    -> EXIT

TRUTH's sites: {NAME: {"bytes", "count", "sizes": {SIZE: COUNT}, "function", "file", "line", "big"}}.
Sizes are what is asked of the allocator: bytes(n) asks for n + HDR, its header and a zero. Each site is one line in a function of its own, named
like the site, and the line allocates nothing else that lives (the lists are made before, by hold()).
At SCALE 1 the five big ones hold 20 MiB each, 100 MiB in all, in objects of 64 B to 1 MiB; the others are harder for a
profiler and smaller, so that the five are on top of every report.
"""
import os
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say, site_lines  # noqa: E402

HDR = sys.getsizeof(b"", 33)
HERE = os.path.abspath(__file__)
KEEP = {}
SIZES = {}
BIG = ("site_64", "site_1k", "site_16k", "site_64k", "site_1m")


def hold(name, count):
    KEEP[name] = out = [None] * count
    SIZES[name] = {}
    return out


def site_64(out, n):
    for i in range(len(out)):
        out[i] = bytes(n)  # SITE site_64


def site_1k(out, n):
    for i in range(len(out)):
        out[i] = bytes(n)  # SITE site_1k


def site_16k(out, n):
    for i in range(len(out)):
        out[i] = bytes(n)  # SITE site_16k


def site_64k(out, n):
    for i in range(len(out)):
        out[i] = bytes(n)  # SITE site_64k


def site_1m(out, n):
    for i in range(len(out)):
        out[i] = bytes(n)  # SITE site_1m


def site_mixed(out, sizes):
    for i in range(len(out)):
        out[i] = bytes(sizes[i])  # SITE site_mixed


def site_deep(out, n, depth=60):
    if depth:
        return site_deep(out, n, depth - 1)
    for i in range(len(out)):
        out[i] = bytes(n)  # SITE site_deep


def site_thread(out, n, a, b):
    for i in range(a, b):
        out[i] = bytes(n)  # SITE site_thread


def site_freed(out, n, rounds):
    for _ in range(rounds):
        for i in range(len(out)):
            out[i] = bytes(n)  # SITE site_freed


def allocate(scale):
    def fixed(f, size, count):
        count = max(1, int(count * scale))
        f(hold(f.__name__, count), size - HDR)
        SIZES[f.__name__][size] = count

    mib = 1 << 20
    fixed(site_64, 64, 20 * mib // 64)
    fixed(site_1k, 1024, 20 * mib // 1024)
    fixed(site_16k, 16384, 20 * mib // 16384)
    fixed(site_64k, 65536, 20 * mib // 65536)
    fixed(site_1m, mib, 20)
    # 2 MiB of each: catches estimates that scale by the mean size of a site.
    small, large = max(1, int(2 * mib // 64 * scale)), max(1, int(32 * scale))
    sizes = [64 - HDR] * (small + large)
    for k in range(large):
        sizes[k * (small + large) // large] = 65536 - HDR
    site_mixed(hold("site_mixed", small + large), sizes)
    SIZES["site_mixed"] = {64: small, 65536: large}
    fixed(site_deep, 1024, 4096)
    n = max(4, int(4096 * scale)) // 4 * 4
    out = hold("site_thread", n)
    threads = [threading.Thread(target=site_thread, args=(out, 1024 - HDR, k * n // 4, (k + 1) * n // 4)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    SIZES["site_thread"] = {1024: n}
    out = hold("site_freed", 1000)
    site_freed(out, 2048 - HDR, max(1, int(50 * scale)))
    for i in range(len(out)):
        out[i] = None
    SIZES["site_freed"] = {2048: 0}


def truth():
    lines = site_lines(HERE)
    sites = {}
    for name, sizes in SIZES.items():
        sites[name] = {"bytes": sum(s * c for s, c in sizes.items()), "count": sum(sizes.values()), "sizes": sizes,
                       "function": name, "file": HERE, "line": lines[name], "big": name in BIG}
    return {"sites": sites}


def warm_up():
    """Lets pymalloc's own tables grow, which stay: its array of arenas, and from 3.10 on the nodes of 128 and 256 KiB
    of its map of addresses. They are allocated under whatever line needs a new arena, and would count as that line's."""
    [bytes(64 - HDR) for _ in range(600000)]


def main():
    scale = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    commands = Commands()
    warm_up()
    ready()
    while True:
        c = commands.next()
        if c == "EXIT":
            break
        if c == "GO":
            allocate(scale)
            say("TRUTH", truth())
        elif c == "FREE":
            KEEP.clear()
            for sizes in SIZES.values():
                for size in sizes:
                    sizes[size] = 0
            say("TRUTH", truth())


if __name__ == "__main__":
    main()
