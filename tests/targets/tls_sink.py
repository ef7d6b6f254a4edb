"""A server that speaks https and takes what is posted to it.

    python tls_sink.py CERTIFICATE KEY
    -> (nothing)    <- READY {"port"}
                    <- REFUSED {"why"}          a client that did not like the certificate
                    <- TAKEN {"line", "body"}   the first line of a request, and its body in hex
    -> EXIT
"""
import os
import socket
import ssl
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402


def take(context, connection):
    with context.wrap_socket(connection, server_side=True) as stream:
        data = b""
        while b"\r\n\r\n" not in data:
            part = stream.recv(65536)
            if not part:
                return
            data += part
        head, body = data.split(b"\r\n\r\n", 1)
        lines = head.decode().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:"))
        while len(body) < length:
            body += stream.recv(65536)
        stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        say("TAKEN", {"line": lines[0], "body": body.hex()})


def serve(context, listener):
    while True:
        connection, _ = listener.accept()
        connection.settimeout(60)
        try:
            take(context, connection)
        except OSError as error:
            say("REFUSED", {"why": str(error)})


def main():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[1], sys.argv[2])
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(context, listener), daemon=True).start()
    ready(port=listener.getsockname()[1])
    commands = Commands()
    while commands.next() != "EXIT":
        pass


main()
