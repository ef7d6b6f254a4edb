"""Run by gdb's own Python: stops a process where it allocates, and writes down what gdb takes for its native stack.

    gdb -batch -ex 'python PID = 1234; STOPS = 40; OUT = "file"' -x native_stops.py

One JSON object a line: "pcs", the frames' addresses from the caller of malloc on; "registers" at malloc's entry (rbp, rbx, r12 to r15, rsp); "stack",
16 KiB from there on, in hex; "names".
"""
import json
import random

import gdb

random.seed(7)
for setting in ("pagination off", "confirm off", "debuginfod enabled off", "backtrace past-main on", "backtrace past-entry on",
                "breakpoint pending off", "print thread-events off"):
    try:
        gdb.execute("set " + setting, to_string=True)
    except gdb.error:
        pass
gdb.execute("attach %d" % PID, to_string=True)  # noqa: F821
gdb.execute("break *(void *(*)(unsigned long))malloc", to_string=True)
with open(OUT, "w") as out:  # noqa: F821
    for _ in range(STOPS):  # noqa: F821
        gdb.execute("ignore 1 %d" % random.randrange(200), to_string=True)
        gdb.execute("continue", to_string=True)
        frame = gdb.newest_frame()
        registers = {name: int(frame.read_register(name).cast(gdb.lookup_type("unsigned long")))
                     for name in ("rbp", "rbx", "r12", "r13", "r14", "r15", "rsp")}
        inferior = gdb.selected_inferior()
        stack, size = b"", 16384
        while size >= 8 and not stack:
            try:
                stack = bytes(inferior.read_memory(registers["rsp"], size))
            except gdb.error:
                size //= 2
        pcs, names = [], []
        frame = frame.older()
        while frame is not None and frame.is_valid() and len(pcs) < 1000:
            # What a compiler has put into another function has no frame of its own, nor what has ended with a jump to another one.
            if frame.type() not in (gdb.INLINE_FRAME, gdb.TAILCALL_FRAME):
                pcs.append(frame.pc())
                names.append(frame.name())
            try:
                frame = frame.older()
            except gdb.error:
                break
        out.write(json.dumps({"pcs": pcs, "registers": registers, "stack": stack.hex(), "names": names}) + "\n")
gdb.execute("delete", to_string=True)
gdb.execute("detach", to_string=True)
