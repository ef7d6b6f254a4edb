#!/usr/bin/env python3
"""leak_rates: do the intervals of `pyheap leaks` hold the true rates?

    python3 benches/leak_rates.py [--pyheap FILE] [--python PYTHON] [--runs N] [--jobs N] [--seconds N]

Each run is a program of its own (this file, with --workload) that leaks at five lines, each at a rate that it keeps to by the
clock, beside a cache that is always replaced and a hundred MiB and more of garbage a second. It is recorded for so many seconds with one
sample in 128 KiB, and of each line the 95 % interval of `pyheap leaks --json` is compared with its rate; of the cache, with 0. Prints a line
for each site and one for all; exit code 0 if the intervals hold the true rates in at least 91 % of all cases.

    leak_small_64       64 B     1 MiB/s
    leak_kib_1          1 KiB    256 KiB/s
    leak_kib_64         64 KiB   4 MiB/s
    leak_slow_4k        4 KiB    32 KiB/s
    leak_dict           small dicts, header and keys, 512 KiB/s
    steady_cache        16 MiB ring of 2 KiB blocks
"""
import argparse
import collections
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time

HDR = sys.getsizeof(b"")  # what bytes(n) asks for beside n
WANTED = 0.91


def leak_small_64(out, size):
    out.append(bytes(size - HDR))


def leak_kib_1(out, size):
    out.append(bytes(size - HDR))


def leak_kib_64(out, size):
    out.append(bytes(size - HDR))


def leak_slow_4k(out, size):
    out.append(bytes(size - HDR))


def leak_dict(out, size):
    out.append({"k": None})


def steady_cache(ring, place):
    for at in range(place, place + 400):
        ring[at % len(ring)] = bytes(2048 - HDR)


def churn():
    x = None
    for i in range(2000):
        x = [(i, x), {"a": i}, bytes(i & 4095)]
        x = None


# Function, size of a block, bytes a second.
LEAKS = [(leak_small_64, 64, 1 << 20), (leak_kib_1, 1024, 256 << 10), (leak_kib_64, 65536, 4 << 20),
         (leak_slow_4k, 4096, 32 << 10), (leak_dict, sys.getsizeof({"k": None}), 512 << 10)]
RATES = dict([(leak.__name__, 60.0 * rate) for leak, _, rate in LEAKS], steady_cache=0.0)


class Preallocated:
    """A list that is long from the start, so that append allocates nothing."""

    def __init__(self, most):
        self.kept, self.count = [None] * most, 0

    def append(self, x):
        self.kept[self.count] = x
        self.count += 1


def workload(seconds):
    kept = [Preallocated(int(rate * seconds / size) + 1000) for _, size, rate in LEAKS]
    ring, place, start = [None] * 8192, 0, time.perf_counter()
    while True:
        now = time.perf_counter() - start
        if now > seconds:
            return
        for (leak, size, rate), out in zip(LEAKS, kept):
            while out.count < int(rate * now / size):
                leak(out, size)
        steady_cache(ring, place)
        place += 400
        churn()
        time.sleep(0.01)


def run(a):
    """Of one run: {function: (low, rate, high)}."""
    target = subprocess.Popen([a.python, os.path.abspath(__file__), "--workload", str(a.seconds + 60)])
    try:
        time.sleep(0.5)  # the interpreter is up
        with tempfile.TemporaryDirectory(prefix="leak-rates-") as tmp:
            base = os.path.join(tmp, "run")
            subprocess.run([a.pyheap, "record", str(target.pid), "--duration", "%ds" % a.seconds, "--period", "128KiB", "-o", base], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            out = subprocess.run([a.pyheap, "leaks", base, "--json"], check=True, stdout=subprocess.PIPE).stdout
    finally:
        target.kill()
        target.wait()
    found = {}
    for site in json.loads(out)["leaks"]:
        function = (site["own"] or {}).get("function")
        if function in RATES:
            found.setdefault(function, (site["ci95"][0], site["growth_bytes_per_min"], site["ci95"][1]))
    return found


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--pyheap", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "../target/release/pyheap"))
    ap.add_argument("--python", default=sys.executable)
    ap.add_argument("--runs", type=int, default=40)
    ap.add_argument("--jobs", type=int, default=4)
    ap.add_argument("--seconds", type=int, default=20)
    ap.add_argument("--workload", type=float)
    a = ap.parse_args()
    if a.workload is not None:
        return workload(a.workload)
    held, of, missed, widths, values = (collections.Counter(), collections.Counter(), collections.Counter(),
                                        collections.defaultdict(list), collections.defaultdict(list))
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        for found in pool.map(lambda _: run(a), range(a.runs)):
            for name, true in RATES.items():
                of[name] += 1
                if name not in found:
                    # What is not listed does not grow: right for the cache only.
                    held[name] += true == 0.0
                    missed[name] += 1
                    continue
                low, rate, high = found[name]
                held[name] += low <= true <= high
                widths[name].append((high - low) / 2)
                values[name].append(rate)
    for name, true in RATES.items():
        mean = sum(values[name]) / max(len(values[name]), 1)
        width = sum(widths[name]) / max(len(widths[name]), 1)
        print("%-14s true %8.2f MiB/min, mean %8.2f, mean half width %6.2f: %d of %d intervals hold it (%d not listed)"
              % (name, true / 2**20, mean / 2**20, width / 2**20, held[name], of[name], missed[name]))
    total = sum(held.values()) / sum(of.values())
    print("all: %d of %d, %.1f %%" % (sum(held.values()), sum(of.values()), 100 * total))
    return 0 if total >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
