"""What pyheap itself takes, and what its part of the target takes: processor time and memory.

    python own.py --pyheap FILE [--python PATH] [--seconds N] [--rate SAMPLES_A_SECOND] [--live SAMPLES]

(1) A target that is sampled at a fixed rate with the default period; utime and stime of pyheap from /proc, which other load on
the machine hardly changes. (2) A target that keeps so many live samples; the memory of the region in it, and of pyheap.
"""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

PERIOD = 128 << 10
SMALL_PERIOD = 1 << 10

TARGET = r"""
import collections, math, sys, time
what, rate, period, live = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
if what == "live":
    print("READY", flush=True)
    sys.stdin.readline()
    kept = [bytes(900) for _ in range(int(live / -math.expm1(-933 / period)))]
    print("KEPT", len(kept), flush=True)
    sys.stdin.readline()
    sys.exit()
kept = collections.deque(maxlen=4000)
def keep(n):
    for _ in range(n): kept.append(bytes(8000))
def drop(n):
    for _ in range(n): bytearray(8000)
def lists(n):
    for _ in range(n): [0] * 1000
def down(depth, function, n):
    return down(depth - 1, function, n) if depth else function(n)
print("READY", flush=True)
due, turn = time.monotonic(), 0
while True:
    turn += 1
    n = int(rate * period * 0.01 / 8000 / 3)
    for number, function in enumerate((keep, drop, lists)):
        down(8 + (turn + number) % 16, function, n)
    due += 0.01
    time.sleep(max(0, due - time.monotonic()))
"""


def read(path):
    with open(path) as f:
        return f.read()


def cpu_ticks(pid):
    fields = read("/proc/%d/stat" % pid).rsplit(") ", 1)[1].split()
    return int(fields[11]), int(fields[12])


def status_kib(pid, key):
    return int(re.search(r"^%s:\s+(\d+)" % key, read("/proc/%d/status" % pid), re.M).group(1))


def region_kib(a, pid):
    """What is resident of pyheap's region in the target."""
    info = subprocess.run([a.pyheap, "info", str(pid), "--json"], stdout=subprocess.PIPE, check=True).stdout
    places = [(r["base"], r["len"]) for r in json.loads(info)["regions"]]
    total, inside = 0, False
    for line in read("/proc/%d/smaps" % pid).splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            start = int(found.group(1), 16)
            inside = any(base <= start < base + size for base, size in places)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def start(a, tmp, what, period):
    target = subprocess.Popen([a.python, "-c", TARGET, what, str(a.rate), str(period), str(a.live)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, universal_newlines=True)
    assert target.stdout.readline().startswith("READY")
    recording = subprocess.Popen([a.pyheap, "record", str(target.pid), "-o", os.path.join(tmp, what), "--period", str(period)],
                                 stderr=subprocess.PIPE, universal_newlines=True)
    for line in recording.stderr:
        if line.startswith("recording"):
            return target, recording
    raise SystemExit("pyheap could not record")


def end(target, recording):
    recording.send_signal(signal.SIGINT)
    recording.communicate()
    target.kill()
    target.wait()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--pyheap", required=True)
    ap.add_argument("--python", default=sys.executable)
    ap.add_argument("--seconds", type=float, default=60)
    ap.add_argument("--rate", type=float, default=5000)
    ap.add_argument("--live", type=int, default=100000)
    a = ap.parse_args()
    hz = os.sysconf("SC_CLK_TCK")
    with tempfile.TemporaryDirectory(prefix="pyheap-own-") as tmp:
        target, recording = start(a, tmp, "rate", PERIOD)
        time.sleep(5)
        before, begun = cpu_ticks(recording.pid), time.monotonic()
        time.sleep(a.seconds)
        user, system = (b - c for b, c in zip(cpu_ticks(recording.pid), before))
        took = time.monotonic() - begun
        print("pyheap at some %.0f samples a second: %.2f %% of a core (user %.2f, system %.2f) over %.0f s, %d KiB at most; load %.1f" % (
            a.rate, 100 * (user + system) / hz / took, 100 * user / hz / took, 100 * system / hz / took, took,
            status_kib(recording.pid, "VmHWM"), os.getloadavg()[0]))
        print("its part of the target: %d KiB" % region_kib(a, target.pid))
        end(target, recording)
        target, recording = start(a, tmp, "live", SMALL_PERIOD)
        print("its part of the target, just attached: %d KiB" % region_kib(a, target.pid))
        target.stdin.write("\n")
        target.stdin.flush()
        target.stdout.readline()
        time.sleep(3)
        top = subprocess.run([a.pyheap, "top", os.path.join(tmp, "live"), "--json"], stdout=subprocess.PIPE, check=True).stdout
        print("with %d live samples: its part of the target %d KiB, pyheap %d KiB (at most %d KiB)" % (
            json.loads(top)["samples"], region_kib(a, target.pid), status_kib(recording.pid, "VmRSS"),
            status_kib(recording.pid, "VmHWM")))
        end(target, recording)


if __name__ == "__main__":
    main()
