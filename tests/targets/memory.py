"""A program whose memory is mostly of one kind.

    python memory.py KIND
        web         an HTTP server that keeps sessions
        numpy       a job on a large array (of numpy, if it is there, else of the array module)
        fragmented  many small objects, of which few are left
        threads     threads with deep stacks
        mapped      a large file that is mapped and read
        native      blocks from malloc that nobody frees
        small       nothing of note
    <- READY {"kind", "bytes"}      how much of that kind there is
    -> STATS  <- STATS {"used"}     bytes in blocks in use, as pymalloc says itself; absent without it
    -> EXIT
"""
import ctypes
import mmap
import os
import re
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

KEEP = []
SIZE = 64 << 20


def web():
    import http.client
    import http.server

    sessions = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            for _ in range(1000):
                number = len(sessions)
                sessions[number] = {"user": "user-%d" % number, "cart": [number, str(number)], "path": self.path}
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for number in range(80):
        client = http.client.HTTPConnection(*server.server_address)
        client.request("GET", "/%d" % number)
        client.getresponse().read()
        client.close()
    KEEP.append(sessions)
    return 0


def numpy():
    try:
        import numpy
    except ImportError:
        import array
        KEEP.append(array.array("d", bytes(SIZE)))
        return SIZE
    KEEP.append(numpy.full(SIZE // 8, 1.5))
    return SIZE


def fragmented():
    many = [(number, str(number)) for number in range(600000)]
    KEEP.extend(many[::300])
    del many
    return 0


def threads():
    touched, deep = threading.Barrier(21), 3 << 20
    threading.stack_size(8 << 20)

    def work():
        # What is far below us on our own stack.
        ctypes.memset(threading.get_ident() - deep - (1 << 20), 1, deep)
        touched.wait()
        threading.Event().wait()

    for _ in range(20):
        threading.Thread(target=work, daemon=True).start()
    touched.wait()
    return 20 * deep


def mapped():
    with tempfile.NamedTemporaryFile(dir=os.environ.get("SCRATCH")) as file:
        file.write(b"x" * SIZE)
        file.flush()
        there = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        KEEP.append(there)
        assert there[::4096].count(b"x") == SIZE // 4096
    return SIZE


def native():
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    malloc.argtypes = [ctypes.c_size_t]
    for _ in range(SIZE // 5000):
        ctypes.memset(malloc(5000), 1, 5000)
    return SIZE


def small():
    return 0


def stats():
    """What pymalloc says of itself, which it does on descriptor 2 only."""
    if not hasattr(sys, "_debugmallocstats"):
        return {}
    with tempfile.TemporaryFile() as file:
        old = os.dup(2)
        os.dup2(file.fileno(), 2)
        sys._debugmallocstats()
        os.dup2(old, 2)
        os.close(old)
        file.seek(0)
        text = file.read().decode()
    used = re.search(r"# bytes in allocated blocks\s*=\s*([\d,]+)", text)
    return {"used": int(used.group(1).replace(",", ""))} if used else {}


def main():
    size = globals()[sys.argv[1]]()
    commands = Commands()
    ready(kind=sys.argv[1], bytes=size)
    while True:
        command = commands.next()
        if command == "STATS":
            say("STATS", stats())
        elif command == "EXIT":
            break
    # A process with waiting threads ends at once.
    sys.stdout.flush()
    os._exit(0)


main()
