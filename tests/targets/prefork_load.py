"""Clients of prefork_app.py: checks every answer.

    python prefork_load.py PORT THREADS
    -> STATUS   <- STATUS {"answers", "wrong": [...], "pids": [...]}   pids: who has answered since the last STATUS
    -> EXIT     <- DONE
"""
import hashlib
import os
import socket
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

STATE = {"answers": 0, "wrong": []}
PIDS, LOCK, STOP = set(), threading.Lock(), threading.Event()


def ask(port, body):
    with socket.create_connection(("127.0.0.1", port), 60) as s:
        s.sendall(b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        said = b""
        while True:
            piece = s.recv(65536)
            if not piece:
                break
            said += piece
    head, _, text = said.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], text.decode()


def client(port, number):
    turn = 0
    while not STOP.is_set():
        turn += 1
        body = b"%d/%d " % (number, turn) * (1 + turn * 37 % 3000)
        try:
            status, text = ask(port, body)
            pid, _, digest = text.partition(" ")
            right = status.endswith(b" 200 OK") and digest == hashlib.sha256(body + b"0").hexdigest()
            problem = None if right else "%r %r" % (status, text[:100])
        except Exception as error:
            pid, problem = "0", repr(error)
        with LOCK:
            if problem:
                STATE["wrong"] = STATE["wrong"][:5] + [problem]
            else:
                STATE["answers"] += 1
                PIDS.add(int(pid))


def main():
    port = int(sys.argv[1])
    threads = [threading.Thread(target=client, args=(port, n)) for n in range(int(sys.argv[2]))]
    commands = Commands()
    for thread in threads:
        thread.start()
    ready()
    while commands.next() == "STATUS":
        with LOCK:
            say("STATUS", dict(STATE, pids=sorted(PIDS)))
            PIDS.clear()
    STOP.set()
    for thread in threads:
        thread.join()
    say("DONE")


if __name__ == "__main__":
    main()
