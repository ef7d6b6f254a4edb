"""Objects whose addresses are asked for.

    -> GO       allocate          <- MADE {"bytes": ADDRESS, "thing": ADDRESS, "old": ADDRESS, "lines": {NAME: LINE}}
    -> FREE     drop "bytes"      <- FREED
    -> EXIT

"bytes" is of 8 MiB, so its memory goes back to the system; "thing" has a header of the garbage collector before it; "old" was
there before READY.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

class Thing:
    pass


KEEP = {"old": bytes(8 << 20)}


def make_bytes():
    KEEP["bytes"] = bytes(8 << 20)  # SITE bytes


def make_thing():
    KEEP["thing"] = Thing()  # SITE thing


def main():
    with open(os.path.abspath(__file__)) as source:
        sites = {line.split("# SITE ")[1].strip(): n for n, line in enumerate(source, 1) if "  # SITE " in line}
    commands = Commands()
    ready()
    while True:
        command = commands.next()
        if command == "GO":
            make_bytes()
            make_thing()
            made = {name: id(KEEP[name]) for name in ("bytes", "thing", "old")}
            say("MADE", dict(made, lines=sites))
        elif command == "FREE":
            del KEEP["bytes"]
            say("FREED")
        elif command == "EXIT":
            return


main()
