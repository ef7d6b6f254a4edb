"""Does all kinds of things through C, in two threads, until its standard input ends.

    python native_busy.py        <- READY
"""
import ast
import ctypes
import functools
import json
import os
import re
import sys
import threading
import zlib

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready  # noqa: E402

try:
    import sqlite3
except ImportError:
    sqlite3 = None


def compare(a, b):
    return (a[0] > b[0]) - (a[0] < b[0])


def sorting(n):
    return sorted([(n * 7919 % 101, str(n)) for n in range(n)], key=functools.cmp_to_key(compare))


def searching():
    return re.sub(r"(\w+) (\w+)", lambda found: found.group(2).upper() * 40, "some words to be found here " * 5)


def parsing():
    return ast.dump(ast.parse("def f(x):\n    return [y ** 2 for y in x if y]\n" * 5))


def querying(connection):
    connection.create_function("twice", 1, lambda value: json.dumps([value] * 30))
    return connection.execute("SELECT twice(name) || ' ' FROM sqlite_master, (SELECT 1 UNION SELECT 2)").fetchall()


CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))


def calling_back():
    numbers = (ctypes.c_int * 9)(*range(9, 0, -1))
    order = CALLBACK(lambda a, b: len(sorting(4)) and a[0] - b[0])
    ctypes.CDLL(None).qsort(numbers, 9, 4, order)


def recursing(depth):
    return sum(map(lambda _: recursing(depth - 1), [0])) if depth else len(zlib.compress(b"x" * 100000))


def work():
    if sqlite3:
        connection = sqlite3.connect(":memory:")
        connection.execute("CREATE TABLE words (word TEXT)")
    while True:
        sorting(20)
        searching()
        parsing()
        if sqlite3:
            querying(connection)
        calling_back()
        recursing(20)


for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
ready()
while Commands().next() != "EXIT":
    pass
os._exit(0)
