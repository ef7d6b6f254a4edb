"""prefork_app.py with a leak: each worker keeps a megabyte a second, in `open_session`, up to 120, as long as there are requests."""
import time

import prefork_app

SESSIONS = []
BEGAN = []


def open_session(size):
    SESSIONS.append(bytearray(size))


def application(environ, start_response):
    if not BEGAN:
        BEGAN.append(time.monotonic())
    due = min((time.monotonic() - BEGAN[0]) * 1e6, 120e6)
    while len(SESSIONS) * 8192 < due:
        open_session(8192)
    return prefork_app.application(environ, start_response)
