"""A process that makes children in every way, while its own threads allocate.

    python children.py
    -> GO      <- RESULT {"fork": [...], "subprocess": [...], "multiprocessing": [...], "grandchild": N}
    -> EXIT

Every list must hold the values that its twin in "expected" holds.
"""
import multiprocessing
import os
import subprocess
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402


def work(n):
    return sum(len(str({i: [i] * (i % 7)})) for i in range(n))


def forked(f):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(w, b"%d" % f())
            code = 0
        finally:
            os._exit(code)
    os.close(w)
    with os.fdopen(r, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    return int(text or -1) if status == 0 else -status


def churn(stop):
    while not stop.is_set():
        work(200)


def main():
    commands = Commands()
    ready()
    while True:
        c = commands.next()
        if c == "EXIT":
            break
        stop = threading.Event()
        threads = [threading.Thread(target=churn, args=(stop,), daemon=True) for _ in range(3)]
        for t in threads:
            t.start()
        result = {
            "fork": [forked(lambda: work(2000)) for _ in range(10)],
            "grandchild": forked(lambda: forked(lambda: work(2000))),
            "subprocess": [subprocess.call(["sh", "-c", "exit %d" % k]) for k in range(10)],
        }
        try:
            with multiprocessing.get_context("fork").Pool(2) as pool:
                result["multiprocessing"] = pool.map(work, [500] * 8)
        except ImportError as e:  # an interpreter without _multiprocessing
            result["multiprocessing"] = str(e)
        stop.set()
        for t in threads:
            t.join(30)
        result["expected"] = {"fork": [work(2000)] * 10, "grandchild": work(2000), "subprocess": list(range(10)),
                              "multiprocessing": [work(500)] * 8}
        say("RESULT", result)


if __name__ == "__main__":
    main()
