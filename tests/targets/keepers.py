"""Five threads keep objects, each of one type that it makes on one line. Another one makes and drops objects of all kinds, and
types, at full speed, so that memory changes hands all the time.

    -> GO      begin                <- GOING {NAME: [LINE, TYPE]}
    -> STATUS                       <- STATUS {"kept": NUMBER, "rounds": NUMBER}
    -> EXIT
"""
import os
import re
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

ROUND = 100     # objects, then a pause
MOST = int(sys.argv[1]) if len(sys.argv) > 1 else 100000  # objects that one thread keeps


class Slotted(object):
    __slots__ = ("a", "b")


class Outer(object):
    class Inner(object):
        pass


def keep_bytes(kept):
    for _ in range(ROUND):
        x = TEXT + b"0123456789"  # SITE bytes bytes
        kept.append(x)


def keep_complex(kept):
    for _ in range(ROUND):
        x = ONE + 2j  # SITE complex complex
        kept.append(x)


def keep_set(kept):
    for _ in range(ROUND):
        x = {1}  # SITE set set
        kept.append(x)


def keep_slotted(kept):
    for _ in range(ROUND):
        x = Slotted()  # SITE slotted __main__.Slotted
        kept.append(x)


def keep_inner(kept):
    for _ in range(ROUND):
        x = Outer.Inner()  # SITE inner __main__.Outer.Inner
        kept.append(x)


KEEPERS = [keep_bytes, keep_complex, keep_set, keep_slotted, keep_inner]
KEPT = {keeper.__name__: [] for keeper in KEEPERS}
TEXT, ONE = b"x" * 30, 1.0
STATE = {"rounds": 0, "stop": False}


def keep(keeper):
    kept, number = KEPT[keeper.__name__], 1
    while not STATE["stop"]:
        if len(kept) < MOST:
            keeper(kept)
        # Some are dropped again, and when there is no room for more, all that are dropped are made anew.
        for _ in range(ROUND // 5):
            number = (number * 1103515245 + 12345) % 2147483648
            kept[number % len(kept)] = None
        if len(kept) >= MOST:
            kept[:] = [x for x in kept if x is not None]
        time.sleep(0.002)


def churn():
    while not STATE["stop"]:
        STATE["rounds"] += 1
        made = type("Made%d" % (STATE["rounds"] % 7), (Outer.Inner,), {"__slots__": ("c",)})
        things = [made() for _ in range(20)] + [Slotted() for _ in range(20)] + [{1: [n], "b": (n, n)} for n in range(20)]
        things += [complex(n, n) for n in range(20)] + [{n} for n in range(20)] + [bytes(40 + n) for n in range(20)]
        things += [bytearray(100) for _ in range(20)] + [Outer.Inner() for _ in range(20)]
        things.append(things)
        del things, made


def main():
    with open(os.path.abspath(__file__)) as source:
        found = [(n, re.search(r"# SITE (\w+) ([\w.]+)$", line)) for n, line in enumerate(source, 1)]
    commands = Commands()
    threads = [threading.Thread(target=keep, args=(k,), name=k.__name__.replace("keep_", "keeper-")) for k in KEEPERS]
    threads.append(threading.Thread(target=churn, name="churn"))
    ready()
    while True:
        command = commands.next()
        if command == "GO":
            for thread in threads:
                thread.start()
            say("GOING", {site.group(1): [n, site.group(2)] for n, site in found if site})
        elif command == "STATUS":
            say("STATUS", {"kept": sum(map(len, KEPT.values())), "rounds": STATE["rounds"]})
        elif command == "EXIT":
            STATE["stop"] = True
            for thread in threads:
                if thread.is_alive():
                    thread.join()
            return


main()
