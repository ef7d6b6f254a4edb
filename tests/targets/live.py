"""Allocates what it is told to, at few places of known size, and keeps it.

    -> GO      big() keeps 20 x 100,000 bytes, many() 3,000 x 600, for two callers      <- TRUTH {FUNCTION: {...}}
    -> MORE    later() keeps 10 x 50,000                                                <- TRUTH
    -> EXIT

TRUTH: {FUNCTION: {"line", "bytes", "objects"}}, with the 33 bytes that a bytes object is larger than its contents.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

# No list grows or shrinks while it is recorded: that would be an allocation at the line in question.
KEPT = [None] * 10_000
FREE = list(range(10_000))
TRUTH = {}


def kept(function, size):
    """Said before the allocation, on the line above it."""
    line = sys._getframe(1).f_lineno + 1
    entry = TRUTH.setdefault(function, {"line": line, "bytes": 0, "objects": 0})
    entry["bytes"] += size + 33
    entry["objects"] += 1


def big():
    for _ in range(20):
        kept("big", 100_000)
        KEPT[FREE.pop()] = bytes(100_000)


def many(count):
    for _ in range(count):
        kept("many", 600)
        KEPT[FREE.pop()] = bytes(600)


def first_caller():
    many(2000)


def second_caller():
    many(1000)


def later():
    for _ in range(10):
        kept("later", 50_000)
        KEPT[FREE.pop()] = bytes(50_000)


def main():
    ready()
    commands = Commands()
    while True:
        command = commands.next()
        if command == "GO":
            big()
            first_caller()
            second_caller()
        elif command == "MORE":
            later()
        else:
            return
        say("TRUTH", TRUTH)


if __name__ == "__main__":
    main()
