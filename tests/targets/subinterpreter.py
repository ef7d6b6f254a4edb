"""A second interpreter in a thread of its own, standing in a function of its own.

    <- READY {"second": true}      false where this Python has no module for it
    -> EXIT
"""
import os
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready  # noqa: E402

CODE = """
import os
def within():
    os.write(%d, b"x")
    os.read(%d, 1)
within()
"""

try:
    import _interpreters as interpreters
    run = interpreters.exec
except ImportError:
    try:
        import _xxsubinterpreters as interpreters
        run = interpreters.run_string
    except ImportError:
        interpreters = None

if interpreters:
    inside, stay = os.pipe(), os.pipe()
    other = interpreters.create()
    thread = threading.Thread(target=run, args=(other, CODE % (inside[1], stay[0])))
    thread.daemon = True
    thread.start()
    os.read(inside[0], 1)
ready(second=interpreters is not None)
Commands().next()
os._exit(0)
