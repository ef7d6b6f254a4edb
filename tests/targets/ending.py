"""Allocates for a while and then ends in one of the ways in which a process can end.

    python ending.py exit|raise|abort|segv|kill|exec SECONDS
    -> GO       allocates at site_kept for SECONDS     <- ENDING {"line", "kept"}, then the end

exec: becomes a fresh interpreter that runs `ending.py after_exec`, says EXECED {"pid"} and waits for EXIT.
"""
import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402


def site_kept(out, n):
    out.append(bytes(n))  # SITE site_kept


def main():
    how = sys.argv[1]
    commands = Commands()
    if how == "after_exec":
        say("EXECED", {"pid": os.getpid()})
        while commands.next() != "EXIT":
            pass
        return
    ready()
    if commands.next() != "GO":
        return
    out, end = [], time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        for _ in range(16):
            site_kept(out, 16384)
        time.sleep(0.01)
    say("ENDING", {"kept": len(out) * (16384 + 33), "line": site_kept.__code__.co_firstlineno + 1})
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise RuntimeError("as asked")
    if how == "abort":
        os.abort()
    if how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exec":
        # A launcher that is no full `python` has no sys.executable that would run a script: take the kernel's word.
        exe = os.readlink("/proc/self/exe")
        os.execv(exe, [exe, os.path.abspath(__file__), "after_exec"])


if __name__ == "__main__":
    main()
