"""A WSGI application for a prefork server: answers with the sha256 of what it was sent, and the number of its process."""
import hashlib
import os


def application(environ, start_response):
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    kept = [str(n) * 7 for n in range(500)] + [bytes(n) for n in range(0, 5000, 50)]
    digest = hashlib.sha256(body + str(sum(map(len, kept)) * 0).encode()).hexdigest()
    text = ("%d %s" % (os.getpid(), digest)).encode()
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))])
    return [text]
