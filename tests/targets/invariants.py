"""Threads that do different things, each of which knows what must come out; nothing of it may ever go wrong.

    python invariants.py [COMPUTING [LIBRARY...]]
                COMPUTING threads that allocate, default 2; with libraries (native.c and copies of it) one that calls the first all the
                time, and one that loads, calls and unloads the others
    -> STATUS   <- STATUS {"steps": {name: N}, "wrong": [...], "rss_kb", "malloc_kb"}
    -> EXIT     <- DONE (the same)

Checked: results of computations, the order of bytes in a pipe, messages through a socket pair, time-outs that are not too
short and end without an error, also of system calls that are made without Python's own repetition after EINTR, and
signals that are counted.
"""
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, rss_kb, say  # noqa: E402

try:
    from zlib import crc32
except ImportError:  # musl's interpreters have no libz beside them
    crc32 = hash

STEPS, WRONG, STOP = {}, [], threading.Event()
KEEP = []  # descriptors that threads use up to the end
SHORT = 0.02  # seconds of a time-out


def worker(f):
    """Runs f until the end; whatever it returns or raises is wrong."""
    name = "%s-%d" % (f.__name__, len(STEPS))
    STEPS[name] = 0

    def run():
        try:
            step = f()
            while not STOP.is_set():
                problem = step()
                if problem:
                    WRONG.append("%s: %s" % (name, problem))
                STEPS[name] += 1
        except BaseException:
            WRONG.append("%s: %s" % (name, traceback.format_exc()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def compute(seed):
    def work():
        data = {i: [str(i * seed)] * (i % 5) for i in range(300)}
        blocks = [bytearray(n) for n in (1, 40, 511, 513, 5000, 70000)]
        for block in blocks:
            block.extend(b"x" * 100)
        return crc32(repr(sorted(data.items())).encode()) ^ sum(map(len, blocks))

    def computing():
        want = work()

        def step():
            if seed % 2:
                time.sleep(0.005)  # not all of them need a whole processor
            return None if work() == want else "another result"
        return step
    return computing


def timed(call, want):
    """A step that makes a call with a time-out of SHORT."""
    def step():
        start = time.monotonic()
        got = call()
        took = time.monotonic() - start
        if got != want:
            return "%r instead of %r" % (got, want)
        # poll and epoll have a resolution of a millisecond.
        if took < SHORT - 0.0011:
            return "ended after %.6f s instead of %s" % (took, SHORT)
    return step


def sleeping():
    return timed(lambda: time.sleep(SHORT), None)


def locked():
    lock = threading.Lock()
    lock.acquire()
    return timed(lambda: lock.acquire(timeout=SHORT), False)


def selecting():
    keep = os.pipe()
    return timed(lambda: (keep, select.select([keep[0]], [], [], SHORT))[1], ([], [], []))


def polling():
    keep = os.pipe()
    poll = select.poll()
    poll.register(keep[0], select.POLLIN)
    return timed(lambda: (keep, poll.poll(SHORT * 1000))[1], [])


def raw_polling():
    import ctypes
    lib = ctypes.CDLL(None)
    r, w = os.pipe()
    fds = ctypes.create_string_buffer(struct.pack("ihh", r, 1, 0), 8)
    return timed(lambda: (w, lib.poll(fds, ctypes.c_ulong(1), int(SHORT * 1000)))[1], 0)


def raw_sleeping():
    import ctypes
    lib = ctypes.CDLL(None)
    ts = ctypes.create_string_buffer(struct.pack("qq", 0, int(SHORT * 1e9)), 16)
    return timed(lambda: lib.nanosleep(ts, None), 0)


def pipe():
    r, w = os.pipe()

    def write():
        n = 0
        while True:
            os.write(w, struct.pack("Q", n))
            n += 1
            if n % 64 == 0:
                time.sleep(0.01)
    threading.Thread(target=write, daemon=True).start()
    count = [0]

    def step():
        piece = b""
        while len(piece) < 8:
            piece += os.read(r, 8 - len(piece))
        want, count[0] = count[0], count[0] + 1
        got = struct.unpack("Q", piece)[0]
        return None if got == want else "%d instead of %d" % (got, want)
    return step


def sockets():
    a, b = socket.socketpair()
    KEEP.extend([a, b])

    def echo():
        while True:
            b.sendall(b.recv(65536))
    threading.Thread(target=echo, daemon=True).start()
    message = bytes(bytearray(range(256))) * 200

    def step():
        time.sleep(0.005)
        a.sendall(message[:20000])
        got = b""
        while len(got) < 20000:
            got += a.recv(65536)
        return None if got == message[:20000] else "other bytes"
    return step


def malloc_kb():
    """What is in use of the C library's heaps; 0 where it cannot tell (mallinfo2: glibc 2.33)."""
    try:
        import ctypes

        class Info(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in
                        "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (ImportError, AttributeError):
        return 0
    mallinfo2.restype = Info
    return mallinfo2().uordblks >> 10


def allocating():
    import ctypes
    library, size = ctypes.CDLL(sys.argv[2]), 3000
    blocks = (ctypes.c_void_p * 50)()

    def step():
        library.site_malloc(blocks, ctypes.c_long(len(blocks)), ctypes.c_size_t(size))
        for number, block in enumerate(blocks):
            ctypes.memset(block, number, size)
        wrong = [n for n, block in enumerate(blocks) if ctypes.string_at(block, size) != bytes(bytearray([n])) * size]
        library.give_back(blocks, ctypes.c_long(len(blocks)))
        library.churn(ctypes.c_long(100), ctypes.c_size_t(100))
        return "blocks have other bytes: %s" % wrong if wrong else None
    return step


def loading():
    import ctypes
    from _ctypes import dlclose
    turn = [0]

    def step():
        others = sys.argv[3:]
        turn[0] += 1
        library = ctypes.CDLL(others[turn[0] % len(others)])
        library.churn(ctypes.c_long(30), ctypes.c_size_t(50))
        if turn[0] % 16 == 0:
            time.sleep(0.03)  # long enough to be met, now and then
        dlclose(library._handle)
        time.sleep(0.001)
    return step


def status():
    return {"steps": STEPS, "wrong": WRONG[:20], "rss_kb": rss_kb(), "malloc_kb": malloc_kb()}


def main():
    commands = Commands()
    seen = [0]

    def handler(number, frame):
        seen[0] += 1
    signal.signal(signal.SIGUSR1, handler)
    threads = [worker(compute(seed)) for seed in range(1, 1 + int((sys.argv[1:] or ["2"])[0]))]
    kinds = [sleeping, locked, selecting, polling, pipe, sockets]
    try:
        import ctypes  # noqa: F401
        kinds += [raw_polling, raw_sleeping]
    except ImportError:
        pass
    kinds += [allocating] * (len(sys.argv) > 2) + [loading] * (len(sys.argv) > 3)
    threads += [worker(kind) for kind in kinds]
    ready()
    while commands.next() == "STATUS":
        STEPS["signals"] = seen[0]
        say("STATUS", status())
    STOP.set()
    for thread in threads:
        thread.join(60)
        if thread.is_alive():
            WRONG.append("a thread hangs")
    say("DONE", status())
    sys.stdout.flush()


if __name__ == "__main__":
    main()
