"""One blocking call with a timeout; says what came out and how long it took.

    python blocking.py CALL TIMEOUT

    -> GO     <- BLOCKING {}   about to make the call
              <- RESULT {"call", "result", "elapsed", "expected"}
    -> EXIT

`result` must equal `expected`, and `elapsed` be TIMEOUT, whatever a profiler did in between. Calls whose names begin
with raw_ are made straight through ctypes: there nobody repeats the call after an EINTR, so a leaked EINTR shows.
Calls named spare_… have a second, idle thread in the process, which a profiler should rather stop than the one in a call
that the kernel does not restart. Calls named …_data end by data or a release that comes at TIMEOUT from another thread.
    python blocking.py list   prints the names
"""
import os
import queue
import select
import socket
import struct
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

CALLS = {}


def call(f):
    CALLS[f.__name__] = f
    return f


def later(seconds, f):
    t = threading.Timer(seconds, f)
    t.daemon = True
    t.start()


@call
def sleep(t):
    return lambda: time.sleep(t), None


@call
def select_timeout(t):
    r, w = os.pipe()
    return lambda: select.select([r], [], [], t), ([], [], [])


@call
def poll(t):
    r, w = os.pipe()
    p = select.poll()
    p.register(r, select.POLLIN)
    return lambda: p.poll(int(t * 1000)), []


@call
def epoll(t):
    r, w = os.pipe()
    p = select.epoll()
    p.register(r, select.EPOLLIN)
    return lambda: p.poll(t), []


@call
def lock_timeout(t):
    lock = threading.Lock()
    lock.acquire()
    return lambda: lock.acquire(timeout=t), False


@call
def lock_data(t):
    lock = threading.Lock()
    lock.acquire()

    def wait():
        later(t, lock.release)
        return lock.acquire()
    return wait, True


@call
def condition_timeout(t):
    c = threading.Condition()

    def wait():
        with c:
            return c.wait(t)
    return wait, False


@call
def event_timeout(t):
    e = threading.Event()
    return lambda: e.wait(t), False


@call
def join_timeout(t):
    thread = threading.Thread(target=time.sleep, args=(t * 100,), daemon=True)

    def wait():
        thread.join(t)
        return thread.is_alive()
    thread.start()
    return wait, True


@call
def queue_timeout(t):
    q = queue.Queue()

    def wait():
        try:
            return q.get(timeout=t)
        except queue.Empty:
            return "Empty"
    return wait, "Empty"


@call
def recv_timeout(t):
    a, b = socket.socketpair()
    a.settimeout(t)
    KEEP.append(b)

    def wait():
        try:
            return a.recv(10)
        except socket.timeout:
            return "timeout"
    return wait, "timeout"


@call
def accept_timeout(t):
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    s.listen(1)
    s.settimeout(t)

    def wait():
        try:
            return s.accept()
        except socket.timeout:
            return "timeout"
    return wait, "timeout"


@call
def recv_data(t):
    a, b = socket.socketpair()

    def wait():
        later(t, lambda: b.sendall(b"0123456789"))
        return a.recv(100).decode()
    return wait, "0123456789"


@call
def read_pipe_data(t):
    r, w = os.pipe()

    def wait():
        later(t, lambda: os.write(w, b"abc"))
        return os.read(r, 100).decode()
    return wait, "abc"


@call
def waitpid_data(t):
    def wait():
        return subprocess.call(["sleep", "%.3f" % t])
    return wait, 0


@call
def sigwait_timeout(t):
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    return lambda: signal.sigtimedwait([signal.SIGUSR1], t), None


# ---- straight to libc ---------------------------------------------------------------------------------------------
def libc():
    import ctypes
    lib = ctypes.CDLL(None, use_errno=True)

    def errno_of(value):
        return [value, ctypes.get_errno() if value == -1 else 0]
    return ctypes, lib, errno_of


@call
def raw_poll(t):
    ctypes, lib, out = libc()
    r, w = os.pipe()
    fds = ctypes.create_string_buffer(struct.pack("ihh", r, 1, 0), 8)
    return lambda: out(lib.poll(fds, ctypes.c_ulong(1), int(t * 1000))), [0, 0]


@call
def raw_nanosleep(t):
    ctypes, lib, out = libc()
    ts = ctypes.create_string_buffer(struct.pack("qq", int(t), int(t % 1 * 1e9)), 16)
    return lambda: out(lib.nanosleep(ts, None)), [0, 0]


@call
def raw_clock_nanosleep_abs(t):
    ctypes, lib, out = libc()

    def wait():
        due = time.monotonic() + t
        ts = ctypes.create_string_buffer(struct.pack("qq", int(due), int(due % 1 * 1e9)), 16)
        return lib.clock_nanosleep(time.CLOCK_MONOTONIC, 1, ts, None)
    return wait, 0


@call
def raw_select(t):
    ctypes, lib, out = libc()
    tv = ctypes.create_string_buffer(struct.pack("qq", int(t), int(t % 1 * 1e6)), 16)
    return lambda: out(lib.select(0, None, None, None, tv)), [0, 0]


@call
def raw_read_data(t):
    ctypes, lib, out = libc()
    r, w = os.pipe()
    buf = ctypes.create_string_buffer(16)

    def wait():
        later(t, lambda: os.write(w, b"abc"))
        return out(lib.read(r, buf, 16)) + [buf.value.decode()]
    return wait, [3, 0, "abc"]


@call
def raw_recv_data(t):
    ctypes, lib, out = libc()
    a, b = socket.socketpair()
    KEEP.append(a)
    buf = ctypes.create_string_buffer(16)

    def wait():
        later(t, lambda: b.sendall(b"wxyz"))
        return out(lib.recv(a.fileno(), buf, 16, 0)) + [buf.value.decode()]
    return wait, [4, 0, "wxyz"]


def idle_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()


@call
def spare_epoll_wait(t):
    ctypes, lib, out = libc()
    idle_thread()
    ep = select.epoll()
    KEEP.append(ep)
    buf = ctypes.create_string_buffer(64)
    return lambda: out(lib.epoll_wait(ep.fileno(), buf, 4, int(t * 1000))), [0, 0]


@call
def spare_recv_rcvtimeo(t):
    ctypes, lib, out = libc()
    idle_thread()
    a, b = socket.socketpair()
    KEEP.extend([a, b])
    a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", int(t), int(t % 1 * 1e6)))
    buf = ctypes.create_string_buffer(16)
    return lambda: out(lib.recv(a.fileno(), buf, 16, 0)), [-1, 11]


@call
def spare_sigtimedwait(t):
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ctypes, lib, out = libc()
    idle_thread()
    ts = ctypes.create_string_buffer(struct.pack("qq", int(t), int(t % 1 * 1e9)), 16)
    mask = ctypes.create_string_buffer(struct.pack("Q", 1 << (signal.SIGUSR1 - 1)) + bytes(120), 128)
    return lambda: out(lib.sigtimedwait(mask, None, ts)), [-1, 11]


KEEP = []


def main():
    if sys.argv[1] == "list":
        print(" ".join(CALLS))
        return
    name, timeout = sys.argv[1], float(sys.argv[2])
    commands = Commands()
    try:
        f, expected = CALLS[name](timeout)
    except ImportError as e:  # an interpreter without ctypes
        f, expected = None, str(e)
    ready(can=f is not None)
    while True:
        c = commands.next()
        if c == "EXIT":
            break
        if c == "GO" and f:
            say("BLOCKING", {})
            start = time.monotonic()
            try:
                result = f()
            except BaseException as e:
                result = repr(e)
            elapsed = time.monotonic() - start
            if isinstance(result, tuple):
                result = list(result)
            if isinstance(expected, tuple):
                expected = list(expected)
            say("RESULT", {"call": name, "result": result, "expected": expected, "elapsed": elapsed})


if __name__ == "__main__":
    main()
