"""Threads that stand in known stacks. Prints, a line each:

    thread PTHREAD_ID frames ID:LINE ...      (innermost frame first; ID is the code object's)

then "ready", and waits. The frames of threading itself are among them.
"""
import functools
import os
import sys
import threading
import time

R, W = os.pipe()
SCENES = []
READY = []


def block():
    READY.append(threading.get_ident())
    os.read(R, 1)


def scene(f):
    SCENES.append(f)
    return f


@scene
def plain():
    def inner(a):
        return block()

    def outer():
        x = [1,
             2,
             inner(3)]
    outer()


@scene
def generators():
    def leaf():
        yield block()

    def middle():
        yield from leaf()

    for _ in middle():
        pass


@scene
def comprehension():
    [block() for i in range(1)]


@scene
def generator_expression():
    list(block() for i in range(1))


@scene
def coroutines():
    async def a():
        block()

    async def b():
        await a()

    try:
        b().send(None)
    except StopIteration:
        pass


@scene
def through_c():
    def key(x):
        block()
        return x
    sorted([1], key=key)


@scene
def reduced():
    functools.reduce(lambda a, b: block(), [1, 2])


class Specialised(object):
    def __init__(self, n):
        self.n = n
        if n < 0:
            block()


@scene
def specialised_init():
    def make(n):
        return Specialised(n)
    for i in range(300):
        make(i)
    make(-1)


@scene
def deep():
    def down(n):
        if n:
            down(n - 1)
        else:
            block()
    down(200)


def tell():
    mine = threading.get_ident()
    for ident, frame in sys._current_frames().items():
        fields = []
        while frame is not None:
            if frame.f_code is not tell.__code__:
                fields.append("%d:%d" % (id(frame.f_code), frame.f_lineno))
            frame = frame.f_back
        if ident != mine:
            out.write("thread %d frames %s\n" % (ident, " ".join(fields)))


out = os.fdopen(1, "w")
for f in SCENES:
    thread = threading.Thread(target=f)
    thread.daemon = True
    thread.start()
while len(READY) < len(SCENES):
    time.sleep(0.01)
time.sleep(0.2)
tell()
out.write("ready\n")
out.flush()
sys.stdin.read(1)
