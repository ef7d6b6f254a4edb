"""Says "ready" and waits, in a function, in two threads."""
import sys
import threading


def wait():
    sys.stdin.read(1)


def in_thread():
    threading.Event().wait()


thread = threading.Thread(target=in_thread)
thread.daemon = True
thread.start()
sys.stdout.write("ready\n")
sys.stdout.flush()
wait()
