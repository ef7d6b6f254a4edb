"""Programs of which it is known what they leak.

    python leaks.py MODE ROUNDS

    -> GO      ROUNDS rounds of work, 20 a second, then      <- TRUTH {...}
    -> EXIT

MODE  leaky    two leaks, each among sites that do not leak
      healthy  the same without the leaks
      native   memory that is not Python's: mapped pages
      holes    peaks that get higher and leave holes: what is live in between stays the same

TRUTH: {"seconds", "stall" (the longest round, in seconds), "kept": {FUNCTION: bytes kept for good}}.
"""
import json
import mmap
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

SESSIONS = []
REPORTS = {}
RING = [None] * 150
CACHE = {}
TABLE = []
MAPS = []
PINS = []
KEPT = {}


def keep(name, size):
    KEPT[name] = KEPT.get(name, 0) + size


def open_session():
    # A leak on a busy path.
    SESSIONS.append(bytes(2000))
    keep("open_session", 2033)


def report_error(number):
    # A leak on a path that is rarely taken; what it keeps is allocated by a library.
    text = json.dumps([[number, "cell %d" % i] for i in range(1000)])
    REPORTS[number] = text
    keep("report_error", len(text) + 49)


def remember(number):
    # A cache with a limit, always being replaced.
    RING[number % len(RING)] = bytes(3000)


def look_up(key):
    # A cache of everything there is: it fills, and then it has everything.
    if key not in CACHE:
        CACHE[key] = bytes(5000)


def load_table():
    for _ in range(300):
        TABLE.append(bytes(1000))


def churn():
    for i in range(40):
        row = [{"n": i, "text": "x" * i}, bytes(i)]
        del row


def peak(number, rounds):
    # Up to 48 MiB at once; of them one in 500 stays, until the next time, so that hardly any arena can be given back.
    many = [bytes(400) for _ in range(100000 * (number + 1) // rounds)]
    PINS[:] = many[::500]


def work(mode, number, rounds):
    if mode == "holes":
        peak(number, rounds)
        return
    if mode == "native":
        area = mmap.mmap(-1, 1 << 18)
        area.write(b"x" * len(area))
        MAPS.append(area)
        return
    churn()
    for i in range(8):
        remember(8 * number + i)
    # All keys have come after a quarter of the time.
    look_up(number % (rounds // 4))
    if mode == "leaky":
        for _ in range(3):
            open_session()
        if number % 6 == 3:
            report_error(number)


def main():
    mode, rounds = sys.argv[1], int(sys.argv[2])
    ready()
    commands = Commands()
    while True:
        command = commands.next()
        if command == "EXIT":
            return
        begun = last = time.monotonic()
        stall = 0.0
        load_table()
        for number in range(rounds):
            work(mode, number, rounds)
            time.sleep(0.05)
            now = time.monotonic()
            last, stall = now, max(stall, now - last)
        say("TRUTH", {"seconds": last - begun, "stall": stall, "kept": KEPT})


if __name__ == "__main__":
    main()
