"""Starts and stops tracemalloc when it is told to, and checks what it allocates.

    python company.py tracemalloc | churn      churn: it also does so by itself, all the time
    -> START, STOP   <- DONE
    -> STATUS        <- STATUS {"rounds", "wrong"}
    -> EXIT          <- DONE
"""
import os
import sys
import threading
import time
import tracemalloc

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

STATE = {"rounds": 0, "wrong": 0}
STOP = threading.Event()


def work(seed):
    kept = [bytes(n) for n in range(0, 2000, 7)] + [str(i * seed) for i in range(500)]
    return hash(tuple(map(len, kept))), kept


def worker(seed):
    want, old = work(seed)
    while not STOP.is_set():
        now, kept = work(seed)
        STATE["wrong"] += now != want
        STATE["rounds"] += 1
        old = kept  # frees what was allocated under other hooks
    del old


def churn():
    while not STOP.is_set():
        tracemalloc.start()
        time.sleep(0.0005)
        tracemalloc.stop()
        time.sleep(0.0005)


def main():
    commands = Commands()
    threads = [threading.Thread(target=worker, args=(seed,), daemon=True) for seed in (3, 5)]
    if sys.argv[1] == "churn":
        threads.append(threading.Thread(target=churn, daemon=True))
    for thread in threads:
        thread.start()
    ready()
    while True:
        command = commands.next()
        if command == "START":
            tracemalloc.start()
        elif command == "STOP":
            tracemalloc.stop()
        elif command == "STATUS":
            say("STATUS", STATE)
            continue
        else:
            break
        say("DONE")
    STOP.set()
    for thread in threads:
        thread.join(60)
    say("DONE")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
