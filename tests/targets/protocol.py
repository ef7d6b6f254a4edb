"""The line protocol of the test targets: one tag and one JSON object a line.

    <- READY {"pid": ...}      said once; nothing of interest was allocated yet
    -> GO, STATUS, EXIT ...    what each target understands is in its own head
    <- TRUTH {...} etc.        the answers

Standard library only, CPython 3.8 and later, PyPy too.
"""
import json
import os


def say(tag, obj=None):
    line = tag if obj is None else "%s %s" % (tag, json.dumps(obj))
    os.write(1, (line + "\n").encode())


def ready(**facts):
    facts["pid"] = os.getpid()
    say("READY", facts)


class Commands:
    """Lines from standard input, one at a time; EXIT at its end. Blocks in read(0)."""

    def __init__(self):
        self.buf = b""

    def next(self):
        while b"\n" not in self.buf:
            chunk = os.read(0, 4096)
            if not chunk:
                return "EXIT"
            self.buf += chunk
        line, self.buf = self.buf.split(b"\n", 1)
        return line.decode().strip()


def site_lines(path):
    """The lines of a target that are marked `# SITE name`, by name."""
    lines = {}
    with open(path) as f:
        for i, text in enumerate(f, 1):
            if "# SITE " in text and '"# SITE' not in text:
                lines[text.split("# SITE ")[1].strip()] = i
    return lines


def rss_kb():
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("VmRSS"):
                return int(line.split()[1])
    return 0
