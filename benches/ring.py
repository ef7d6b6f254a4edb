"""The highest rate of samples that reaches pyheap's files without a loss, in steps of 100,000 a second.

    python ring.py --pyheap FILE [--python PATH] [--seconds N] [--depth FRAMES] [--rates R,R,...] [--ring-size BYTES] [--share]

A target allocates so many blocks a second, in slots of a millisecond, on 64 different stacks of this depth; half of them live until
10,000 others have come. `pyheap record --period 64` takes each block of 633 bytes as a sample (but for one in 20,000) and each free with
it, and writes the files: nothing is left out of what a recording does. The target gets the first processor and pyheap the second, both (for root) in real time, before all others;
with --share they are placed as the kernel likes. A rate counts as offered only if the target reached it.

For each rate: what was offered, what the ring lost, and the processor time that each of pyheap's threads took for a sample and its free.
"""
import argparse
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

TARGET = r"""
import collections, itertools, sys, time
depth = int(sys.argv[1])
kept = collections.deque(maxlen=10000)
gone = collections.deque(maxlen=0)
blocks = lambda n: itertools.starmap(bytes, itertools.repeat((600,), n))
source = "def keep_%d(n): kept.extend(blocks(n))\ndef drop_%d(n): gone.extend(blocks(n))\n"
exec("".join(source % (k, k) for k in range(32)))
inner = [f for k in range(32) for f in (globals()["keep_%d" % k], globals()["drop_%d" % k])]
def down(depth, function, n):
    return down(depth - 1, function, n) if depth > 0 else function(n)
def slot(n):
    for function in inner:
        down(depth - 4, function, n // 64)
print("READY", flush=True)
for line in sys.stdin:
    rate, seconds = map(float, line.split())
    n = int(rate / 1000) // 64 * 64
    slot(n)
    begun = time.monotonic()
    slots = 0
    while time.monotonic() - begun < seconds:
        slot(n)
        slots += 1
        time.sleep(max(0, begun + slots * (n / rate) - time.monotonic()))
    print(slots * n / (time.monotonic() - begun), flush=True)
"""


def prefer(pid, core):
    """Gives a process and its threads this processor, before others."""
    for task in map(int, os.listdir("/proc/%d/task" % pid)):
        if core is not None:
            os.sched_setaffinity(task, {core})
            if os.getuid() == 0:
                os.sched_setscheduler(task, os.SCHED_FIFO, os.sched_param(1))


def thread_times(pid):
    """Nanoseconds on a processor, by the name of the thread."""
    times = {}
    for task in glob.glob("/proc/%d/task/*" % pid):
        with open(task + "/comm") as name, open(task + "/schedstat") as stat:
            name = name.read().strip()
            times[name] = times.get(name, 0) + int(stat.read().split()[0])
    return times


def measure(a, rate, tmp, cores):
    base = os.path.join(tmp, "run")
    target = subprocess.Popen([a.python, "-c", TARGET, str(a.depth)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, universal_newlines=True)
    try:
        assert target.stdout.readline().startswith("READY")
        prefer(target.pid, cores[0])
        command = [a.pyheap, "record", str(target.pid), "-o", base, "--period", "64"]
        recording = subprocess.Popen(command + (["--ring-size", a.ring_size] if a.ring_size else []), stderr=subprocess.PIPE, universal_newlines=True)
        for line in recording.stderr:
            if line.startswith("recording"):
                break
        else:
            raise SystemExit("pyheap could not record")
        prefer(recording.pid, cores[1])
        # All stacks have been told of, and pyheap looks as rarely as it does when little comes.
        target.stdin.write("6400 0.5\n")
        target.stdin.flush()
        target.stdout.readline()
        before = thread_times(recording.pid)
        target.stdin.write("%f %f\n" % (rate, a.seconds))
        target.stdin.flush()
        offered = float(target.stdout.readline())
        time.sleep(0.5)
        after = thread_times(recording.pid)
        recording.send_signal(signal.SIGINT)
        recording.communicate()
        info = json.loads(subprocess.run([a.pyheap, "info", base, "--json"], stdout=subprocess.PIPE, check=True).stdout)
        samples = offered * a.seconds
        return offered, info.get("losses", {}), {name: (after[name] - before.get(name, 0)) / samples for name in after}
    finally:
        target.kill()
        target.wait()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--pyheap", required=True)
    ap.add_argument("--python", default=sys.executable)
    ap.add_argument("--seconds", type=float, default=3)
    ap.add_argument("--depth", type=int, default=30)
    ap.add_argument("--rates", default="200000,400000,600000,700000,800000,900000,1000000")
    ap.add_argument("--ring-size")
    ap.add_argument("--share", action="store_true")
    a = ap.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    cores = (None, None) if a.share or len(cores) < 2 else cores[:2]
    best = 0
    with tempfile.TemporaryDirectory(prefix="pyheap-ring-") as tmp:
        for rate in map(float, a.rates.split(",")):
            offered, losses, times = measure(a, rate, tmp, cores)
            lost = losses.get("events_lost_ring_full", 0)
            if not lost:
                best = max(best, offered)
            print("asked for %7.0f: %7.0f samples a second and as many frees, %6d events lost; ns each: %s; load %.1f" % (
                rate, offered, lost, ", ".join("%s %.0f" % (name, t) for name, t in sorted(times.items()) if t >= 1), os.getloadavg()[0]),
                flush=True)
    print("without a loss: %.0f samples a second" % best)


if __name__ == "__main__":
    main()
