"""A parent with workers that allocate, and with workers that come and go.

    python fleet.py WORKERS MB_PER_SECOND [LIFE] [EXTRA]
    -> STATUS   <- STATUS {"workers": [pid...], "ended": {"pid": status}}
    -> EXIT     <- DONE {"ended": {...}}

WORKERS processes are forked and each allocates MB_PER_SECOND; with LIFE, one of them is replaced every LIFE seconds. Each keeps
(leaks) 1 % of what it allocates, up to 40 MB, at the line of `keep`. With EXTRA the workers are programs of their own (exec).
"""
import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
KEPT = []


def keep(size):
    KEPT.append(bytearray(size))


def churn(size):
    return [bytearray(size) for _ in range(16)]


def work(rate):
    """Allocates `rate` bytes a second, in pieces of 16 KiB, until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    parent = os.getppid()
    begun, done, kept = time.monotonic(), 0, 0
    while os.getppid() == parent:
        due = (time.monotonic() - begun) * rate
        while done < due:
            churn(1024)
            done += 16 * 1024
            if kept < done // 100 and kept < 40 << 20:
                keep(4096)
                kept += 4096
        time.sleep(0.02)


def main():
    from protocol import Commands, ready, say

    count, rate = int(sys.argv[1]), int(float(sys.argv[2]) * 1e6)
    life = float(sys.argv[3]) if len(sys.argv) > 3 else 0
    workers, ended = [], {}

    def start():
        pid = os.fork()
        if pid == 0:
            os.close(0)
            if len(sys.argv) > 4:
                os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), "worker", str(rate)])
            work(rate)
            os._exit(0)
        workers.append(pid)

    def stop(pid):
        os.kill(pid, signal.SIGTERM)
        ended[pid] = os.waitpid(pid, 0)[1]

    for _ in range(count):
        start()
    ready(workers=workers)

    import select

    next_change = time.monotonic() + life
    commands = Commands()
    while True:
        if b"\n" in commands.buf or select.select([0], [], [], 0.05)[0]:
            command = commands.next()
            if command == "STATUS":
                say("STATUS", {"workers": workers, "ended": ended})
            else:
                break
        if life and time.monotonic() >= next_change:
            next_change += life
            start()
            stop(workers.pop(0))
    for pid in workers:
        stop(pid)
    say("DONE", {"ended": ended})


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        work(int(sys.argv[2]))
    else:
        main()
