"""Targets that are hard on a profiler.

    python hard.py busy              -> STATUS   <- STATUS {"wrong", "rounds"}   8 threads with checkable results
    python hard.py zombie            -> STATUS   <- STATUS {"rounds"}   the main thread has ended, another one answers
    python hard.py signals           -> STATUS   <- STATUS {"count"}   counts SIGRTMIN
    python hard.py replace N         -> GO       <- DONE {"sizes": {file: bytes}}   functions that differ by file name only
    python hard.py churn             -> GO       <- GOING, -> VOLUME <- VOLUME {"bytes"}: so much was allocated meanwhile, at least;
                                     then -> FREE <- FREED   allocates heavily, then frees it all
    -> EXIT
"""
import ctypes
import os
import sys
import threading
import zlib

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

STATE = {"wrong": 0, "rounds": 0}


def work(seed):
    data = {i: [str(i * seed)] * (i % 5) for i in range(300)}
    return zlib.crc32(repr(sorted(data.items())).encode())


def worker(seed):
    want = work(seed)
    while True:
        if work(seed) != want:
            STATE["wrong"] += 1
        STATE["rounds"] += 1


def answer(commands):
    ready()
    while commands.next() == "STATUS":
        say("STATUS", STATE)
    os._exit(0)


def busy():
    for seed in range(1, 9):
        threading.Thread(target=worker, args=(seed,), daemon=True).start()
    answer(Commands())


def zombie():
    threading.Thread(target=worker, args=(3,), daemon=True).start()
    threading.Thread(target=answer, args=(Commands(),)).start()
    # Only this thread ends; without releasing the GIL in Python's way there would be no other one to run.
    libc = ctypes.CDLL(None)
    libc.syscall.argtypes = [ctypes.c_long, ctypes.c_long]
    libc.syscall(60, 0)


def signals():
    # Queued signals are taken by a thread that waits for them: none may be lost, whatever is done to the threads.
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
    STATE["count"] = 0

    def take():
        while True:
            signal.sigwait({signal.SIGRTMIN})
            STATE["count"] += 1

    threading.Thread(target=take, daemon=True).start()
    answer(Commands())


def replace(n):
    def f(size):
        return bytes(size)

    commands = Commands()
    ready()
    kept, sizes = [], {}
    while commands.next() == "GO":
        for i in range(n):
            file = "/generated/m%05d.py" % i
            code = f.__code__.replace(co_filename=file)
            g = type(f)(code, globals())
            size = 200000 + i
            kept.append(g(size))
            sizes[file] = size + 33
            del g, code
        say("DONE", {"sizes": sizes})


def churn():
    commands = Commands()
    ready()
    kept = []
    stop = threading.Event()

    def run():
        while not stop.is_set():
            # No generator: up to 3.10 its code object keeps a frame that is alive, rightly, after all was freed.
            kept.extend(map(bytes, range(100, 4000, 3)))
            if len(kept) > 20000:
                del kept[:15000]

    def volume():
        # 100 to 4000 bytes in steps of 3.
        for _ in range(60):
            kept.extend(map(bytes, range(100, 4000, 3)))
            del kept[:-1300]
        return {"bytes": 60 * sum(range(100, 4000, 3))}

    thread = threading.Thread(target=run)
    while True:
        command = commands.next()
        if command == "GO":
            thread.start()
            say("GOING")
        elif command == "VOLUME":
            say("VOLUME", volume())
        elif command == "FREE":
            stop.set()
            thread.join()
            del kept[:]
            say("FREED")
        else:
            break


if __name__ == "__main__":
    mode = sys.argv[1]
    if mode == "replace":
        replace(int(sys.argv[2]))
    else:
        {"busy": busy, "zombie": zombie, "signals": signals, "churn": churn}[mode]()
