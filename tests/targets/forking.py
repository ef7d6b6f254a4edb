"""A process with a forked child that stays.

    <- READY
    -> FORK    <- CHILD {"pid"}          the child allocates and frees until END
    -> END     <- ENDED {"status"}       wait status of the child
    -> EXIT
"""
import os
import select
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402


def child(end):
    kept = []
    while not select.select([end], [], [], 0.001)[0]:
        kept.append([bytes(200 + n % 700) for n in range(100)])
        if len(kept) > 400:
            del kept[:200]
    os._exit(0)


def main():
    commands = Commands()
    ready()
    # Allocated while hooks are in place, freed by the child after the fork.
    kept = []
    pid, write = 0, -1
    while True:
        command = commands.next()
        if command == "FORK":
            kept.extend(bytes(2000) for _ in range(5000))
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(write)
                del kept[:]
                child(read)
            os.close(read)
            say("CHILD", {"pid": pid})
        elif command == "END":
            os.close(write)
            say("ENDED", {"status": os.waitpid(pid, 0)[1]})
        else:
            break


if __name__ == "__main__":
    main()
