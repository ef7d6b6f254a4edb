# Says "ready" and waits; runs on any Python there is, MicroPython included.
import sys

print("ready")
if hasattr(sys.stdout, "flush"):
    sys.stdout.flush()
sys.stdin.read(1)
