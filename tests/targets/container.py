"""The first process of a container whose processes are all under one seccomp filter, this one included.

    python container.py FILTER STATE      FILTER: harmless, no_executable_memory; STATE: one of states.py, in a child
    -> RUN [program, argument...]   <- RAN {"code", "stderr"}   run in here; PID stands for the child's number
    -> STATUS                       <- STATUS as the child says it
    -> EXIT                         <- DONE
"""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import states  # noqa: E402
from protocol import Commands, ready, say  # noqa: E402

FILTERS = {
    "harmless": states.for_call(163, 0x00050001),  # EPERM for acct
    "no_executable_memory": states.for_call(10, 0x00050001, 2, 4),  # EPERM for mprotect with PROT_EXEC
}


def main():
    states.seccomp(FILTERS[sys.argv[1]])
    child = subprocess.Popen([sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "states.py"), sys.argv[2]],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    commands = Commands()
    first = child.stdout.readline().decode()
    if not first.startswith("READY") or states.WRONG:
        say("FAILED", [first] + states.WRONG)
        return
    ready(child=child.pid)
    while True:
        command, _, rest = commands.next().partition(" ")
        if command == "RUN":
            args = [arg.replace("PID", str(child.pid)) for arg in json.loads(rest)]
            done = subprocess.run(args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            say("RAN", {"code": done.returncode, "stdout": done.stdout.decode(), "stderr": done.stderr.decode()})
        elif command == "STATUS":
            child.stdin.write(b"STATUS\n")
            child.stdin.flush()
            os.write(1, child.stdout.readline())
        else:
            break
    child.communicate(b"EXIT\n")
    say("DONE")


if __name__ == "__main__":
    main()
