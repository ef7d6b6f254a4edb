"""Threads that allocate as fast as they can and whose every result is checked.

    python busy.py [THREADS]      default 8
    -> STATUS   <- STATUS {"rounds": [per thread], "wrong": N, "errors": [...], "rss_kb"}
    -> EXIT     <- DONE (the same, after all threads ended)

Each round computes a digest over dicts, lists, strings, big integers, sorts, growing lists (realloc), bytearrays of
1 byte to 256 KiB and objects in reference cycles; it depends on the thread's number only, so every round of a thread must
give the digest of its first, which the main thread has computed before.
"""
import gc
import hashlib
import json
import os
import sys
import threading
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, rss_kb, say  # noqa: E402


class Node:
    def __init__(self, value):
        self.value = value
        self.me = self  # only the cyclic collector frees it


def compute(seed):
    h = hashlib.sha256()
    table, x = {}, seed * 2654435761 + 1
    for i in range(1500):
        x = (x * 6364136223846793005 + 1442695040888963407) & (1 << 64) - 1
        table["k%d" % (x >> 40)] = [x, str(x), (x, i)]
    for k in sorted(table):
        h.update(k.encode())
        h.update(table[k][1].encode())
    grown = []
    for i in range(3000):
        grown.append(i ^ x)
    h.update(str(sum(grown)).encode())
    text = ""
    for i in range(200):
        text += chr(97 + (x >> i % 60) % 26)
    h.update(text.encode())
    h.update(str(pow(3, 2000) * (x | 1)).encode())
    for size in (1, 33, 500, 513, 4096, 70000, 1 << 18):
        block = bytearray(size)
        block[size // 2] = x & 255
        block.extend(block[:100])  # realloc
        h.update(hashlib.md5(bytes(block)).digest())
    nodes = [Node(json.loads(json.dumps({"a": [i, x, None], "b": "z" * (i % 50)}))) for i in range(100)]
    h.update(json.dumps([n.value for n in nodes], sort_keys=True).encode())
    return h.hexdigest()


class Worker(threading.Thread):
    def __init__(self, seed):
        threading.Thread.__init__(self, daemon=True)
        self.seed, self.rounds, self.wrong, self.errors = seed, 0, 0, []
        self.want = compute(seed)

    def run(self):
        while not STOP.is_set():
            try:
                self.wrong += compute(self.seed) != self.want
                self.rounds += 1
            except BaseException:
                self.errors.append(traceback.format_exc())
                return


STOP = threading.Event()


def status(workers):
    return {"rounds": [w.rounds for w in workers], "wrong": sum(w.wrong for w in workers),
            "errors": [e for w in workers for e in w.errors], "rss_kb": rss_kb()}


def main():
    commands = Commands()
    workers = [Worker(k) for k in range(int(sys.argv[1]) if len(sys.argv) > 1 else 8)]
    for w in workers:
        w.start()
    ready()
    while True:
        c = commands.next()
        if c == "EXIT":
            break
        gc.collect()
        say("STATUS", status(workers))
    STOP.set()
    for w in workers:
        w.join(60)
        if w.is_alive():
            w.errors.append("thread hangs")
    say("DONE", status(workers))


if __name__ == "__main__":
    main()
