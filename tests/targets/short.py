"""A program of a few seconds, for `pyheap record -- COMMAND`: waits, allocates 8 MiB at site_short, waits, ends with code 7.

    python short.py [SECONDS before] [SECONDS after]
"""
import sys
import time


def site_short(out):
    for i in range(len(out)):
        out[i] = bytes(16384 - 33)  # SITE site_short


before, after = [float(x) for x in (sys.argv[1:] + ["1.5", "1.5"])[:2]]
time.sleep(before)
kept = [None] * 512
site_short(kept)
print("short.py: allocated", flush=True)
time.sleep(after)
print("short.py: done", flush=True)
sys.exit(7)
