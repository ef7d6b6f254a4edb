"""A program that would notice a child which it has not made.

    python freezing.py [OBJECTS]          so many small dicts are kept, default 1,000
    <- READY {"buffer": address}          64 bytes, all of them 1
    -> WAITS   <- WAITS {"wrong": []}     makes children and waits for them in every way, a hundred times
    -> CLOSE   <- CLOSED {"wrong": []}    closes one end of each socket pair, which the other end must see at once
    -> WRITE   <- WRITTEN                 the buffer's bytes become 2
    -> LOCKED  <- LOCKED {"wrong": []}    its record lock is there, as another process sees it
    -> STATUS  <- STATUS {"signals", "forks", "timer"}   SIGCHLDs that came, children that were made, ticks of a timer
    -> EXIT
"""
import ctypes
import fcntl
import os
import signal
import socket
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

SEEN = {"signals": 0, "forks": 0, "timer": 0}


def child_signal(*_):
    SEEN["signals"] += 1


def tick(*_):
    SEEN["timer"] += 1


def no_child(wait):
    """Without a child of its own, every way to wait must say so."""
    try:
        return ["%r instead of no child" % (wait(),)]
    except ChildProcessError:
        return []


def fork(code):
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    SEEN["forks"] += 1
    return pid


def waits():
    wrong = []
    for number in range(25):
        pid = fork(number)
        got = os.wait()
        if got != (pid, number << 8):
            wrong.append("wait: %r instead of %r" % (got, (pid, number << 8)))
        pid = fork(3)
        got = os.waitid(os.P_ALL, 0, os.WEXITED)
        if got.si_pid != pid:
            wrong.append("waitid: %r instead of %d" % (got, pid))
        wrong += no_child(os.wait)
        wrong += no_child(lambda: os.waitpid(-1, os.WNOHANG))
        wrong += no_child(lambda: os.waitpid(0, 0))
        wrong += no_child(lambda: os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG))
        wrong += no_child(lambda: os.waitid(os.P_PGID, os.getpgrp(), os.WEXITED | os.WNOHANG))
    return wrong


def close(pairs):
    wrong = []
    for here, there in pairs:
        here.close()
        there.settimeout(5)
        try:
            if there.recv(1) != b"":
                wrong.append("bytes instead of an end")
        except OSError as error:
            wrong.append("the other end is still open: %r" % error)
        there.close()
    return wrong


def locked(path):
    pid = fork_to_try(path)
    status = os.waitpid(pid, 0)[1]
    return [] if status == 7 << 8 else ["the lock is gone: %d" % status]


def fork_to_try(path):
    pid = os.fork()
    if pid:
        SEEN["forks"] += 1
        return pid
    try:
        with open(path, "w") as f:
            fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os._exit(0)
    except OSError:
        os._exit(7)


def main():
    keep = [{"number": n} for n in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)]
    signal.signal(signal.SIGCHLD, child_signal)
    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    buffer = ctypes.create_string_buffer(b"\1" * 64, 64)
    waiting = threading.Thread(target=threading.Event().wait, daemon=True)
    waiting.start()
    with tempfile.NamedTemporaryFile() as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        commands = Commands()
        ready(buffer=ctypes.addressof(buffer))
        pairs = [socket.socketpair() for _ in range(3)]
        while True:
            command = commands.next()
            if command == "WAITS":
                say("WAITS", {"wrong": waits()})
            elif command == "CLOSE":
                say("CLOSED", {"wrong": close(pairs)})
                pairs = [socket.socketpair() for _ in range(3)]
            elif command == "WRITE":
                ctypes.memset(buffer, 2, 64)
                say("WRITTEN")
            elif command == "LOCKED":
                say("LOCKED", {"wrong": locked(lock.name)})
            elif command == "STATUS":
                time.sleep(0)  # signals that are pending are handled
                say("STATUS", SEEN)
            elif command == "EXIT":
                break
        signal.setitimer(signal.ITIMER_REAL, 0)
    del keep


main()
