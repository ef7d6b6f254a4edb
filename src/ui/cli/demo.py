"""A small web-like program with a leak, for `pyheap demo`."""

import random
import sys
import time

SESSIONS = {}
RECENT = []


class Session:
    def __init__(self, user):
        self.user = user
        self.history = ["page-%d" % n for n in range(20)]
        self.token = bytes(400)


def open_session(number):
    # The leak: sessions are kept for ever.
    SESSIONS[number] = Session("user-%d" % number)


def render(number):
    # Much is allocated here, and all of it is freed again.
    rows = [{"row": n, "text": "cell " * 20 + str(n)} for n in range(50)]
    return "".join(row["text"] for row in rows)


def remember(page):
    # A cache with a limit: it fills up and then stays as large as it is.
    RECENT.append(page)
    if len(RECENT) > 200:
        RECENT.pop(0)


def serve(seconds):
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        for _ in range(40):
            number += 1
            remember(render(number))
            open_session(number)
        time.sleep(0.01 + random.random() * 0.005)


if __name__ == "__main__":
    print("ready", flush=True)
    serve(float(sys.argv[1]))
