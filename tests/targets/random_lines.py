"""Threads that stand at random lines, and the truth about where.

    python random_lines.py THREADS SEED
    -> MOVE   <- TRUTH {ident: {"name", "frames": [[function, file, line], ...]}}
              every thread has gone to another random place; innermost frame first
    -> TELL   <- TRUTH ...      the same, asked for again without moving
    -> EXIT
    python random_lines.py gil   one thread spins, one waits; -> EXIT

Each thread calls through a chain of functions, at lines that a seeded generator draws: in expressions over several lines,
generators, coroutines, comprehensions, `with`, `try`, constructors, class methods, calls through C. At its end it waits
for a lock or a pipe, naps, or spins, on one line that it does not leave before it is told to.
"""
import functools
import json
import os
import sys
import threading
import time

try:
    import select
except ImportError:  # an interpreter that can load no extension module
    select = None

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

LINES = 40  # ways of each shape

SHAPES = {
    "plain": "        if at == {i}:\n            {x}CHOSEN()\n",
    "spread": "        if at == {i}:\n            x = [{i},\n                 (1,\n                  CHOSEN())]\n",
    "generator": "        if at == {i}:\n            for _ in (CHOSEN()\n                      for _ in range(1)): pass\n",
    "comprehension": "        if at == {i}:\n            y = [CHOSEN()\n                 for k in range(1)]\n",
    "with": "        if at == {i}:\n            with LOCAL.lock:\n                CHOSEN()\n",
    "try": "        if at == {i}:\n            try:\n                raise KeyError({i})\n            except KeyError:\n"
           "                CHOSEN()\n            finally:\n                at = -1\n",
    "sorted": "        if at == {i}:\n            sorted([{i}], key=lambda _:\n                   CHOSEN())\n",
    "partial": "        if at == {i}:\n            functools.partial(\n                CHOSEN)()\n",
    "init": "        if at == {i}:\n            Made(CHOSEN,\n                 {i})\n",
    "coroutine": "        if at == {i}:\n            async def nap():\n                CHOSEN()\n            try:\n"
                 "                nap().send(\n                    None)\n            except StopIteration:\n                pass\n",
    "yieldfrom": "        if at == {i}:\n            def inner():\n                yield CHOSEN()\n            def outer():\n"
                 "                yield from inner()\n            for _ in outer():\n                pass\n",
    "method": "        if at == {i}:\n            Made.again(\n                CHOSEN)\n",
}


class Random:
    """The module `random` needs extension modules, which not every interpreter can load."""

    def __init__(self, seed):
        self.state = seed + 1

    def randrange(self, low, high):
        self.state = self.state * 6364136223846793005 + 1442695040888963407 & 2 ** 64 - 1
        return low + (self.state >> 33) % (high - low)

    def choice(self, list):
        return list[self.randrange(0, len(list))]


class Made(object):
    def __init__(self, f, n):
        self.n = n
        f()

    @classmethod
    def again(cls, f):
        for _ in range(1):
            f()


LOCAL = threading.local()


def build(name, shape):
    text = "def make():\n    def %s(at, next):\n        CHOSEN = next\n" % name
    for i in range(LINES):
        text += "\n" * (i % 3) + SHAPES[shape].format(i=i, x="")
    text += "    return %s\nMADE = make()\n" % name
    scope = {"Made": Made, "LOCAL": LOCAL, "functools": functools}
    exec(compile(text, "/random/%s.py" % name, "exec"), scope)
    return scope["MADE"]


FUNCTIONS = [build("in_%s" % shape, shape) for shape in sorted(SHAPES)]


class Thread(threading.Thread):
    def __init__(self, number, seed):
        threading.Thread.__init__(self, name="thread-%d-\xe9" % number)
        self.daemon = True
        self.number = number
        self.random = Random(seed)
        self.go = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        self.back = threading.Semaphore(0)
        self.leave = False
        self.way = 0
        self.pipe = os.pipe()
        self.lock = threading.Lock()
        self.lock.acquire()

    def run(self):
        LOCAL.lock = threading.RLock()
        while True:
            self.go.acquire()
            self.descend(self.random.randrange(1, 9))
            self.back.release()

    def descend(self, depth):
        if depth == 0:
            return self.stand()
        function = self.random.choice(FUNCTIONS)
        return function(self.random.randrange(0, LINES), functools.partial(self.descend, depth - 1))

    def stand(self):
        """Stays on one line, one of those that are marked, until it is told to leave. Few threads do so without waiting."""
        ways = ["spin", "sum", "read"] if self.number < 2 else ["nap", "read"] if self.number < 4 else []
        self.way = self.random.choice(ways or ["read", "select" if select else "read", "lock"])
        self.arrived.release()
        if self.way == "spin":
            while not self.leave: pass  # stands  # noqa: E701
        elif self.way == "sum":
            while not self.leave: sum(range(300))  # stands  # noqa: E701
        elif self.way == "nap":
            while not self.leave: time.sleep(0.01)  # stands  # noqa: E701
        elif self.way == "lock":
            self.lock.acquire()  # stands
        elif self.way == "select":
            select.select([self.pipe[0]], [], [])  # stands
            os.read(self.pipe[0], 1)
        else:
            os.read(self.pipe[0], 1)  # stands

    def move(self):
        """Out of where it stands, and on."""
        if self.way:
            self.leave = True
            if self.way in ("read", "select"):
                os.write(self.pipe[1], b"x")
            if self.way == "lock":
                self.lock.release()
            self.back.acquire()
        self.leave = False
        self.go.release()
        self.arrived.acquire()


with open(os.path.abspath(__file__)) as source:
    STANDS = {number for number, line in enumerate(source, 1) if "# stands" in line}


def all_stand(threads):
    """Whether all threads have come to the line on which they stay."""
    frames = sys._current_frames()
    tops = [frames[thread.ident] for thread in threads]
    return all(top.f_code is Thread.stand.__code__ and top.f_lineno in STANDS for top in tops)


def truth(threads):
    told = {}
    frames = sys._current_frames()
    for thread in threads:
        frame, stack = frames[thread.ident], []
        while frame is not None:
            code = frame.f_code
            name = getattr(code, "co_qualname", code.co_name)
            stack.append([name, code.co_filename, frame.f_lineno])
            frame = frame.f_back
        told[thread.ident] = {"name": thread.name, "frames": stack}
    return told


def hold_the_gil(commands):
    """One thread that spins, one that waits; the main thread waits, too."""
    pipe = os.pipe()

    def spin():
        while True: pass  # noqa: E701

    def wait():
        os.read(pipe[0], 1)

    threads = [threading.Thread(target=f, name=f.__name__) for f in (spin, wait)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    ready()
    commands.next()


def main():
    commands = Commands()
    if sys.argv[1] == "gil":
        hold_the_gil(commands)
        os._exit(0)
    # The threads that spin hand the GIL over soon.
    sys.setswitchinterval(0.0005)
    threads = [Thread(number, int(sys.argv[2]) * 1000003 + number) for number in range(int(sys.argv[1]))]
    for thread in threads:
        thread.start()
    ready()
    while True:
        command = commands.next()
        if command == "EXIT":
            os._exit(0)
        if command == "MOVE":
            for thread in threads:
                thread.move()
            while not all_stand(threads):
                time.sleep(0.001)
        say("TRUTH", truth(threads))


main()
