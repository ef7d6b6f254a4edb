"""A large heap, and what a census of it costs: pyheap's processor time and memory, and the pause of the process, beside plain forks of the
same process.

    benches/census_scale.py [--objects N] [--python FILE] [--pyheap FILE]
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import time

TARGET = r'''
import os, sys, time

class Session(object):
    def __init__(self, i):
        self.id = i + 1000
        self.user = "user-%d-%s" % (i, "x" * int(sys.argv[2]))

keep = []
for i in range(int(sys.argv[1]) // 6):
    session = Session(i)
    session.tags = ["a%d" % i, "b%d" % i]
    keep.append(session)
print("READY", flush=True)
for line in sys.stdin:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        child = os.fork()
        if child == 0:
            os._exit(0)
        times.append(time.perf_counter() - start)
        os.waitpid(child, 0)
    print("FORKS", *times, flush=True)
'''


def run(pyheap, *args):
    """What it printed, its processor time, its time, its peak in MiB."""
    start = time.monotonic()
    p = subprocess.Popen([pyheap, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out = p.stdout.read()
    _, status, usage = os.wait4(p.pid, 0)
    if status:
        sys.exit("%s: %s" % (" ".join(args), p.stderr.read().decode()))
    return json.loads(out), usage.ru_utime + usage.ru_stime, time.monotonic() - start, usage.ru_maxrss / 1024


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    ap.add_argument("--objects", type=int, default=10_000_000)
    ap.add_argument("--padding", type=int, default=850, help="characters in each sixth object: 850 make 2 GiB of 10 million")
    ap.add_argument("--python", default=sys.executable)
    ap.add_argument("--pyheap", default=os.path.join(root, "target/release/pyheap"))
    a = ap.parse_args()
    target = subprocess.Popen([a.python, "-c", TARGET, str(a.objects), str(a.padding)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        target.stdout.readline()
        pid = str(target.pid)
        with open("/proc/%s/statm" % pid) as f:
            gib = int(f.read().split()[1]) * resource.getpagesize() / 2 ** 30
        print("%d objects asked for, %.2f GiB resident" % (a.objects, gib))
        commands = [("frozen", ["--max-freeze", "10m"]), ("live", ["--live"]), ("why", ["--why", "__main__.Session", "--max-freeze", "10m"])]
        for name, more in commands:
            said, cpu, took, peak = run(a.pyheap, "census", pid, "--json", "--max-pause", "10s", *more)
            census = said.get("census", said)
            line = "%-7s %.1f s processor time, %.1f s, peak %.0f MiB; %d objects" % (name, cpu, took, peak, census["total"]["count"])
            cost = census.get("copy")
            if cost:
                pause = cost["paused_nanos"] / 1e6
                line += "; paused %.0f ms (%.0f a GiB)" % (pause, pause / gib)
            print(line, flush=True)
        target.stdin.write("FORK\n")
        target.stdin.flush()
        forks = sorted(float(word) * 1e3 for word in target.stdout.readline().split()[1:])
        print("os.fork() of the same process: %s ms (%.0f a GiB)" % (", ".join("%.0f" % ms for ms in forks), forks[2] / gib))
    finally:
        target.kill()
        target.wait()


main()
