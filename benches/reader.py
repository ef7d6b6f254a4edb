#!/usr/bin/env python3
"""The reader beside the original heapprof: CPU seconds of the same steps on the same profile, in turns in one run.

usage: reader.py [--dir DIR] [--heapprof PYTHON] [--rounds N] [--only STEP,STEP...] [--events N]

Makes a profile of 20 million events and 20,000 traces in DIR (target/bench; 300 MB with the digests), once. Each step runs in a
process of its own, pyheap's benches/reader.rs and the original's in turns, N (3) times; printed are the medians of user and
system time, with the range, and the largest peak of memory. pyheap's time is that of the whole process; the original's begins
when its modules are imported. PYTHON is a CPython 3.7 with heapprof; without it only pyheap is measured.

Standard library only.
"""
import argparse
import glob
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
AT, AT_SECOND = 1800.0, 2400.0
# Graphs are drawn from the digest of a minute; the plot of each digest comes right after it.
STEPS = ("digest60", "flow", "flow2", "flame", "plot", "digest1", "plot", "events")


def original(step, base, lines):
    """Runs in heapprof's Python."""
    import io
    import resource
    import time

    import heapprof.reader as theirs

    before = time.process_time()
    reader = theirs.Reader(base)
    if step.startswith("digest"):
        reader.makeDigest(float(step[6:]), 0.0, False)
    elif step == "flow":
        reader.flowGraphAt(AT)
    elif step == "flow2":
        reader.flowGraphAt(AT)
        before = time.process_time()
        reader.flowGraphAt(AT_SECOND)
    elif step == "flame":
        reader.flameGraphAt(AT, io.StringIO())
    elif step == "plot":
        reader.timePlot({line: line for line in lines})
    elif step == "events":
        for _ in reader.hpd:
            pass
    spent = time.process_time() - before
    print("%s %.3f %d" % (step, spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))


def run(command):
    """CPU seconds and MiB."""
    _, seconds, mib = subprocess.run(command, stdout=subprocess.PIPE, check=True, universal_newlines=True).stdout.split()
    return float(seconds), int(mib)


def some_lines(base, count=5):
    """Lines that many traces pass: the files' middle, whatever the profile."""
    import random

    import big_profile

    traces = big_profile.make_traces(random.Random(1), 2000)
    seen = {}
    for trace in traces:
        for line in set(trace):
            seen[line] = seen.get(line, 0) + 1
    most = sorted(seen, key=lambda line: (-seen[line], line))[:count]
    return ["%s:%d" % line for line in most]


def main():
    if sys.argv[1:2] == ["original"]:
        return original(sys.argv[2], sys.argv[3], sys.argv[4:])
    args = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1], description=__doc__.split("\n\n", 2)[2])
    args.add_argument("--dir", default=os.path.join(os.path.dirname(HERE), "target", "bench"))
    args.add_argument("--heapprof")
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--only", default=",".join(dict.fromkeys(STEPS)))
    args.add_argument("--events", type=int, default=20000000)
    args = args.parse_args()
    os.makedirs(args.dir, exist_ok=True)
    big = os.path.join(args.dir, "big-%d" % args.events)
    if not os.path.exists(big + ".hpd"):
        subprocess.run([sys.executable, os.path.join(HERE, "big_profile.py"), big + ".part", "--events", str(args.events)], check=True)
        for ending in (".hpm", ".hpd"):
            os.rename(big + ".part" + ending, big + ending)
    ours = max(glob.glob(os.path.join(os.path.dirname(HERE), "target", "release", "deps", "reader-*[!.d]")), key=os.path.getmtime)
    lines = some_lines(big)
    commands = {"pyheap": [ours]}
    if args.heapprof:
        commands["original"] = [args.heapprof, os.path.abspath(__file__), "original"]
    for name in commands:
        for ending in (".hpm", ".hpd"):
            link = "%s-%s%s" % (big, name, ending)
            if not os.path.exists(link):
                os.link(big + ending, link)
    wanted, results = args.only.split(","), {}
    for turn in range(args.rounds):
        digest = ""
        for step in STEPS:
            digest = step[6:] if step.startswith("digest") else digest
            # A digest is needed by what comes after it.
            if step not in wanted and not (step.startswith("digest") and turn == 0):
                continue
            for name, command in commands.items():
                more = lines if step == "plot" else []
                label = "plot, %s s digest" % digest if step == "plot" else step
                results.setdefault(label, {}).setdefault(name, []).append(run(command + [step, big + "-" + name] + more))
                print(label, name, *results[label][name][-1], file=sys.stderr)
    print("| step | pyheap, CPU s | MiB | original, CPU s | MiB | times |\n|---|---|---|---|---|---|")
    for label, of in results.items():
        row, middle = [label], {}
        for name in ("pyheap", "original"):
            times = [seconds for seconds, _ in of.get(name, [])]
            middle[name] = statistics.median(times) if times else 0
            row.append("%.3f (%.3f–%.3f)" % (middle[name], min(times), max(times)) if times else "")
            row.append(str(max(mib for _, mib in of[name])) if times else "")
        row.append("%.0f" % (middle["original"] / middle["pyheap"]) if middle["original"] and middle["pyheap"] else "")
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
