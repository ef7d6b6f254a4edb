"""malloc and free of 56 bytes in a loop of C, one thread and eight, before, while and after pyheap records natively.

    python malloc_threads.py PYHEAP [PERIOD]

CPU time for a pair, in nanoseconds: the third of nine of the main thread's, the second of five of all of eight threads together.
"""
import ctypes
import os
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import workloads  # noqa: E402

lib = workloads._malloc_c()


def pair(run, pairs):
    start = time.process_time()
    run()
    return (time.process_time() - start) / pairs * 1e9


def show(when):
    one = sorted(pair(lambda: lib.tight(ctypes.c_long(400000)), 400000) for _ in range(9))
    eight = sorted(pair(lambda: lib.threads(ctypes.c_long(200000), ctypes.c_int(1)), 1600000) for _ in range(5))
    mixed = sorted(pair(lambda: lib.threads(ctypes.c_long(20000), ctypes.c_int(0)), 160000) for _ in range(5))
    print("%-6s one thread %.2f ns, eight %.2f ns; mixed sizes, eight %.1f ns" % (when, one[2], eight[1], mixed[1]), flush=True)


def main():
    period = sys.argv[2:3] or ["auto"]
    show("before"), show("before")
    with tempfile.TemporaryDirectory() as place:
        command = [sys.argv[1], "record", str(os.getpid()), "--native", "--period", period[0], "-o", os.path.join(place, "run")]
        pyheap = subprocess.Popen(command, stderr=subprocess.PIPE, universal_newlines=True)
        for line in pyheap.stderr:
            if line.startswith("recording"):
                break
        time.sleep(1)
        show("with"), show("with")
        pyheap.send_signal(2)
        pyheap.communicate()
    show("after"), show("after")


if __name__ == "__main__":
    main()
