"""An echo server under load, and the load: every byte is checked on both sides.

    python server.py serve [KEEP]                <- READY {"pid", "port"}; it keeps the last KEEP messages
        -> STATUS   <- STATUS {"connections", "bytes", "errors"}       -> EXIT
    python server.py load PORT THREADS           <- READY {"pid"}
        -> STATUS   <- STATUS {"messages", "bytes", "errors"}          -> EXIT (stops, then) <- DONE {...}

A message: length (4 bytes), checksum of the payload (4 bytes), payload. The server checks it, builds a list of small
objects out of the payload (allocations), joins it again and sends it back; the client compares byte by byte.
"""
import collections
import hashlib
import os
import random
import socket
import struct
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

LOCK = threading.Lock()
COUNT = {"connections": 0, "messages": 0, "bytes": 0, "errors": []}
STOP = threading.Event()
KEPT = collections.deque(maxlen=0)


def checksum(data):
    # Not zlib's: a Python that was built elsewhere may lack its library.
    return int.from_bytes(hashlib.md5(data).digest()[:4], "big")


def exactly(sock, n):
    parts = []
    while n:
        piece = sock.recv(min(n, 65536))
        if not piece:
            raise EOFError
        parts.append(piece)
        n -= len(piece)
    return b"".join(parts)


def error(what):
    with LOCK:
        COUNT["errors"].append(what)


def serve_one(sock):
    with LOCK:
        COUNT["connections"] += 1
    try:
        while True:
            length, crc = struct.unpack("!II", exactly(sock, 8))
            payload = exactly(sock, length)
            if checksum(payload) != crc:
                error("server: bad CRC")
            words = [payload[i:i + 40] for i in range(0, length, 40)]
            KEPT.append(words)
            # Counted before the client can know of it: whoever has the answer finds it counted.
            with LOCK:
                COUNT["bytes"] += length
                COUNT["messages"] += 1
            sock.sendall(struct.pack("!II", length, crc) + b"".join(words))
    except EOFError:
        pass
    except Exception as e:  # an EINTR or a reset that should not be
        error("server: %r" % e)
    sock.close()


def accept(listener):
    while True:
        try:
            sock, _ = listener.accept()
        except Exception as e:
            if not STOP.is_set():
                error("accept: %r" % e)
            return
        threading.Thread(target=serve_one, args=(sock,), daemon=True).start()


def load_one(port, seed):
    rng = random.Random(seed)
    try:
        while not STOP.is_set():
            with socket.create_connection(("127.0.0.1", port)) as sock:
                for _ in range(50):
                    payload = bytes(bytearray(rng.getrandbits(8) for _ in range(64))) * rng.randrange(1, 400)
                    sock.sendall(struct.pack("!II", len(payload), checksum(payload)) + payload)
                    length, crc = struct.unpack("!II", exactly(sock, 8))
                    if exactly(sock, length) != payload:
                        error("client: other bytes came back")
                    with LOCK:
                        COUNT["messages"] += 1
                        COUNT["bytes"] += length
                    if STOP.is_set():
                        break
    except Exception as e:
        error("client: %r" % e)


def main():
    commands = Commands()
    threads = []
    if sys.argv[1] == "serve":
        global KEPT
        KEPT = collections.deque(maxlen=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        ready(port=listener.getsockname()[1])
    else:
        port, n = int(sys.argv[2]), int(sys.argv[3])
        threads = [threading.Thread(target=load_one, args=(port, k), daemon=True) for k in range(n)]
        for t in threads:
            t.start()
        ready()
    while True:
        c = commands.next()
        if c == "EXIT":
            break
        with LOCK:
            say("STATUS", COUNT)
    STOP.set()
    for t in threads:
        t.join(30)
        if t.is_alive():
            error("client thread hangs")
    say("DONE", COUNT)


if __name__ == "__main__":
    main()
