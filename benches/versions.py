"""What the hooks of one or more builds of pyheap cost, side by side: toggled.py's blocks, in turns, with a fixed period.

    python versions.py --python PATH [--period SIZE] [--pairs N] [--rounds N] WORKLOAD PYHEAP...

toggled.rs measures the build that it belongs to; this one runs any `pyheap record`, so that a build can be held against
another, or against one whose wrappers have been changed by hand. pyheap is stopped (SIGSTOP) while the blocks run: it would take it that
its hooks were lost. So the ring must have room for the samples of one run, and the period does not adapt.

A process in which the shim does not lie in the 128 GiB block of the interpreter's code pays more for each call
(docs/performance.md): "far". The medians are of the others.
"""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

TOGGLED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "toggled.py")
BLOCK = 1 << 37


def trimmed(times):
    """Mean without the slowest tenth."""
    kept = sorted(times)[:max(1, -(-len(times) * 9 // 10))]
    return sum(kept) / len(kept)


def line(stream, start, who):
    for text in stream:
        if text.startswith(start):
            return text
    raise SystemExit("%s has ended" % who)


def is_far(pyheap, pid):
    """Whether the shim lies in another block than the interpreter's code: libpython's, or else the program's."""
    info = subprocess.run([pyheap, "info", str(pid), "--json"], stdout=subprocess.PIPE, check=True).stdout
    base = json.loads(info)["regions"][0]["base"]
    with open("/proc/%d/maps" % pid) as maps:
        code = [text for text in maps if " r-xp " in text]
    code = next((text for text in code if "/libpython" in text), code[0])
    return base // BLOCK != int(code.split("-")[0], 16) // BLOCK


def run(a, pyheap):
    target = subprocess.Popen([a.python, TOGGLED, str(a.pairs), "0.3", a.workload], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              universal_newlines=True)
    line(target.stdout, "READY", "the target")
    with tempfile.TemporaryDirectory(prefix="pyheap-versions-") as tmp:
        recording = subprocess.Popen([pyheap, "record", str(target.pid), "-o", os.path.join(tmp, "run"), "--period", a.period],
                                     stderr=subprocess.PIPE, universal_newlines=True)
        line(recording.stderr, "recording", "pyheap")
        far = is_far(pyheap, target.pid)
        # Past its first second's work.
        time.sleep(0.3)
        recording.send_signal(signal.SIGSTOP)
        try:
            target.stdin.write("\n")
            target.stdin.flush()
            found = json.loads(line(target.stdout, "{", "the target"))
        finally:
            recording.send_signal(signal.SIGCONT)
        recording.send_signal(signal.SIGINT)
        recording.communicate()
    restored = target.communicate("\n")[0]
    if "RESTORED True" not in restored:
        raise SystemExit("the allocators are not what they were: %s" % restored)
    return 100 * (trimmed(found["on"]) / trimmed(found["off"]) - 1), far


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--python", default=sys.executable)
    ap.add_argument("--period", default="64MiB")
    ap.add_argument("--pairs", type=int, default=300)
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("workload")
    ap.add_argument("pyheap", nargs="+")
    a = ap.parse_args()
    near = {pyheap: [] for pyheap in a.pyheap}
    for turn in range(a.rounds):
        for pyheap in a.pyheap if turn % 2 == 0 else a.pyheap[::-1]:
            added, far = run(a, pyheap)
            if not far:
                near[pyheap].append(added)
            print("%-16s %s %+.2f %% %s, load %.1f" % (a.workload, pyheap, added, "far" if far else "near", os.getloadavg()[0]), flush=True)
    for pyheap, added in near.items():
        if added:
            print("%-16s %s: median %+.2f %% (%+.1f … %+.1f) of %d near, period %s" % (
                a.workload, pyheap, statistics.median(added), min(added), max(added), len(added), a.period))


if __name__ == "__main__":
    main()
