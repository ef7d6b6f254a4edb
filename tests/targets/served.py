"""A program of which it is known what it keeps, at each moment.

    python served.py [WORKERS]

    -> KEEP N SIZE   keeps N blocks of SIZE bytes      <- KEPT {"bytes", "objects"}   of all that is kept, as asked for
    -> DROP          lets half of them go              <- KEPT {...}
    -> CHURN N       allocates and frees N blocks      <- CHURNED {"seconds"}
    -> FORK          forks a worker that keeps 20 MB   <- FORKED {"pid"}
    -> EXIT

A forked worker keeps its blocks as soon as its parent writes a line into its pipe (KEEPALL), and ends with it.
"""
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

# What bytes(n) takes beside its content.
HEAD = bytes().__sizeof__()
KEPT = []
WORKERS = []


def keep_one(size):
    # One object and nothing else, whatever the version.
    return b"x" * size


def keep_some(count, size):
    for _ in range(count):
        KEPT.append(keep_one(size))


def churn_some(count):
    for i in range(count):
        block = bytes(3000 + i % 100)
    del block


def told():
    say("KEPT", {"bytes": sum(len(b) + HEAD for b in KEPT), "objects": len(KEPT)})


def work_one(size):
    return b"x" * size


def worker(read, write):
    mine = []
    while os.read(read, 1):
        for _ in range(4000):
            mine.append(work_one(5000))
        os.write(write, b"x")
    os._exit(0)


def fork():
    read, write = os.pipe()
    back, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.close(0)
        worker(read, done)
    os.close(read)
    WORKERS.append((write, back))
    say("FORKED", {"pid": pid})


def main():
    ready()
    commands = Commands()
    while True:
        words = commands.next().split()
        if words[0] == "KEEP":
            keep_some(int(words[1]), int(words[2]))
            told()
        elif words[0] == "DROP":
            del KEPT[::2]
            told()
        elif words[0] == "CHURN":
            begun = time.monotonic()
            churn_some(int(words[1]))
            say("CHURNED", {"seconds": time.monotonic() - begun})
        elif words[0] == "FORK":
            fork()
        elif words[0] == "KEEPALL":
            for write, back in WORKERS:
                os.write(write, b"x")
                os.read(back, 1)
            told()
        elif words[0] == "EXIT":
            for write, _ in WORKERS:
                os.close(write)
            for _ in WORKERS:
                os.wait()
            return


if __name__ == "__main__":
    main()
