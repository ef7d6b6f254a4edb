#!/usr/bin/env python3
"""overhead.py - what does a heap profiler cost?  Interleaved A B C A B C ...

Runs a set of workloads (workloads.py beside this file) under a set of
profilers, ROUNDS times, all profilers of one workload right after one another
within each round (the order is rotated from round to round), and prints, per
workload and profiler, the median of the *pairwise* ratios against the 'none'
run of the same round, with min-max.  Made for noisy shared machines: look at
the CPU ratio first (user+sys of the workload process over its N iterations),
at 'aa' (a second 'none') for the noise floor, and only then at wall time.

    # once: a venv with the peers and the workloads' libraries
    python3 overhead.py --make-venv VENV312 --base PYTHON312

    # peers
    python3 overhead.py --python VENV312/bin/python --rounds 5 \
        -p none -p aa -p tracemalloc1 -p tracemalloc25 -p mprofile128k \
        -p memray -p memray_attach --json OUT/o312.json --md

    # any profiler that attaches from outside (pyheap):
    python3 overhead.py --python VENV312/bin/python --rounds 7 --phases \
        -p none -p aa -p mprofile128k \
        -p 'attach:pyheap=pyheap record {pid} --duration 1h -o {out}' \
        --attach-ready 'line:(?i)attached|recording'

    # tables from raw samples taken before (several files are joined)
    python3 overhead.py --report OUT/o312.json --md
    python3 overhead.py --report a.json b.json --matrix cpu --matrix peak --md

Profilers (-p, repeatable, or one comma list without attach:):
  none            baseline, always run (added if missing)
  aa              the same again: A/A control = noise floor
  tracemallocN    in-process tracemalloc.start(N), e.g. tracemalloc1, tracemalloc25
  mprofileR       in-process mprofile.start(sample_rate=R), R = 128k, 512k, 1, ...
  memtrack        memray.Tracker started in-process (memtrack_native,
                  memtrack_pyalloc): the same cost, but can be --alternate'd
  memray          `memray run -o {out}`; memray_native adds --native,
                  memray_pyalloc adds --trace-python-allocators,
                  memray_aggregate adds --aggregate
  memray_attach   `memray attach -o {out} PID` once the workload is READY, and
                  `memray detach PID` at the end; memray_attach_pyalloc,
                  memray_attach_native likewise
  attach:NAME=CMD CMD (shell words) with {pid} {out} {python} filled in, started
                  once the workload is READY.  The clock starts when the
                  profiler is ready as --attach-ready says; afterwards CMD gets
                  SIGINT (if it still runs) and 60 s to end.

--attach-ready for attach:NAME=CMD, any of (first true wins, '|'-free list
given by repeating the option):
  exit            CMD has exited with 0 (memray attach style)
  line:REGEX      a line of CMD's stdout/stderr matches
  file            {out} exists
  delay:SECONDS   so long after the start (default: delay:2)

--phases: the workload runs its N iterations three times in the same process:
before the start or attach, while profiled, and after the stop or detach; the
table then also has in-process during/before and after/before (residual cost)
CPU ratios.  These pairs are the tightest in time; look at 'aa' for the drift.

--alternate K: the sharpest tool on a loaded machine, for profilers that can be
started and stopped in a running process (in-process and attach ones, not the
wrapping ones): per run one process does off on off on ... off, K times on, N
iterations each (use a small --seconds, e.g. 0.06), and each 'on' is compared
with the mean of its two neighbours; 'aa' gives the noise.  See it with
--matrix cpu; from 8 pairs on [quartiles] instead of (min-max) are printed.

'of minima' is min(CPU with) / min(CPU without) over all rounds: other load only
ever adds, so with 5 or more rounds it is the steadiest of the ratios.

What is measured (per run, all in the raw JSON):
  wall, cpu   over the N iterations, by the workload itself; N is calibrated
              once per workload (--seconds) without a profiler and then fixed
  peak_kb     VmHWM in that phase (reset at GO)
  ready_s     attach: from start of CMD to ready
  prof_cpu    attach: user+sys of CMD and its waited-for children
  out_bytes   size of {out} afterwards (files {out}* summed)
  total_cpu   user+sys of the workload process from exec to exit (wait4)
  total_wall  spawn to exit
A run that fails or takes longer than --timeout is recorded with its error
and left out of the ratios; only processes started here are ever signalled.
"""
import argparse
import glob
import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
WORKLOADS = os.path.join(HERE, "workloads.py")
PACKAGES = ["mprofile==0.0.15", "memray==1.20.*",
            "pyperformance", "pyperf", "numpy", "tornado", "django", "sqlglot"]


# --------------------------------------------------------------------------
# plug-ins

class Plugin:
    def __init__(self, name, wrap=None, inproc=None, attach=None, detach=None,
                 ready=None):
        self.name, self.wrap, self.inproc = name, wrap, inproc
        self.attach, self.detach, self.ready = attach, detach, ready

    def argv(self, python, script, args, out):
        if self.inproc:
            args = args + [self.inproc, out]
        if self.wrap:
            head = [w.format(python=python, out=out) for w in self.wrap]
            return head + [script] + args
        return [python, script] + args


def plugin(spec, ready):
    if spec in ("none", "aa"):
        return Plugin(spec)
    if re.fullmatch(r"tracemalloc\d+|mprofile\d+k?"
                    r"|memtrack(_native|_pyalloc)?", spec):
        return Plugin(spec, inproc=spec)
    flags = {"": [], "_native": ["--native"], "_aggregate": ["--aggregate"],
             "_pyalloc": ["--trace-python-allocators"]}
    m = re.fullmatch(r"memray(_attach)?(_native|_pyalloc|_aggregate)?", spec)
    if m:
        extra = flags[m.group(2) or ""]
        if m.group(1):
            return Plugin(
                spec,
                attach=["{python}", "-m", "memray", "attach", "-f"] + extra +
                       ["-o", "{out}", "{pid}"],
                detach=["{python}", "-m", "memray", "detach", "{pid}"],
                ready=["exit"])
        return Plugin(spec, wrap=["{python}", "-m", "memray", "run", "-q", "-f"]
                      + extra + ["-o", "{out}"])
    if spec.startswith("attach:"):
        name, _, cmd = spec[len("attach:"):].partition("=")
        if not cmd:
            name, cmd = "attach", name
        return Plugin(name, attach=shlex.split(cmd), ready=ready or ["delay:2"])
    raise SystemExit("unknown profiler %r" % spec)


# --------------------------------------------------------------------------
# one run

class Failed(Exception):
    pass


class Child:
    """A process we started, with line-wise reading and a deadline."""

    def __init__(self, argv, env, stderr, stdin=subprocess.PIPE, merge=False):
        self.t0 = time.perf_counter()
        self.p = subprocess.Popen(
            argv, env=env, stdin=stdin, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge else stderr,
            start_new_session=True)
        self.buf = b""
        self.ru = None
        self.status = None
        self.end = None

    def line(self, timeout):
        """Next stdout line, None on timeout, raises Failed on EOF."""
        end = time.perf_counter() + timeout
        while b"\n" not in self.buf:
            left = end - time.perf_counter()
            if left <= 0:
                return None
            if select.select([self.p.stdout], [], [], left)[0]:
                chunk = os.read(self.p.stdout.fileno(), 65536)
                if not chunk:
                    raise Failed("process ended early")
                self.buf += chunk
        l, self.buf = self.buf.split(b"\n", 1)
        return l.decode(errors="replace")

    def expect(self, tag, timeout):
        end = time.perf_counter() + timeout
        while True:
            l = self.line(end - time.perf_counter())
            if l is None:
                raise Failed("timeout waiting for " + tag)
            m = re.search(tag + r" (\{.*\})", l)
            if m:
                return json.loads(m.group(1))

    def say(self, cmd):
        try:
            self.p.stdin.write((cmd + "\n").encode())
            self.p.stdin.flush()
        except (BrokenPipeError, OSError):
            raise Failed("process is gone")

    def poll(self):
        if self.status is None:
            try:
                pid, st, ru = os.wait4(self.p.pid, os.WNOHANG)
            except ChildProcessError:
                self.status = 0
                return self.status
            if pid:
                self.status, self.ru, self.end = st, ru, time.perf_counter()
                self.p.returncode = os.waitstatus_to_exitcode(st)
        return self.status

    def wait(self, timeout, drain=True):
        end = time.perf_counter() + timeout
        while self.poll() is None:
            if time.perf_counter() > end:
                return False
            if drain and select.select([self.p.stdout], [], [], 0.01)[0]:
                if not os.read(self.p.stdout.fileno(), 65536):
                    drain = False
            else:
                time.sleep(0.002)
        return True

    def cpu(self):
        return self.ru.ru_utime + self.ru.ru_stime if self.ru else None

    def kill(self):
        if self.poll() is None:
            try:
                os.killpg(self.p.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.wait(10)
        for f in (self.p.stdin, self.p.stdout):
            if f:
                try:
                    f.close()
                except OSError:
                    pass


def wait_ready(att, ready, out, timeout):
    """Block until the attached profiler counts as ready; seconds since start."""
    start, lines, eof = att.t0, [], False
    while True:
        now = time.perf_counter() - start
        if not eof:
            try:
                l = att.line(0.005)
                if l is not None:
                    lines.append(l)
                    for r in ready:
                        if r.startswith("line:") and re.search(r[5:], l):
                            return time.perf_counter() - start
                    continue
            except Failed:
                eof = True
        else:
            time.sleep(0.005)
        if att.poll() is not None:
            if att.status == 0 and "exit" in ready:
                return att.end - start
            raise Failed("attach command ended with status %r: %s" % (
                att.p.returncode, " / ".join(lines)[-400:]))
        for r in ready:
            if r == "file" and os.path.exists(out):
                return now
            if r.startswith("delay:") and now >= float(r[6:]):
                return now
        if now > timeout:
            raise Failed("attach not ready after %g s" % timeout)


KEEP = ("wall", "cpu", "peak_kb", "rss_kb")


def one_run(pl, python, wl, n, opt, tmp):
    out = os.path.join(tmp, "out")
    for f in glob.glob(out + "*"):
        os.unlink(f)
    env = dict(os.environ, PYTHONHASHSEED="0", PYTHONUNBUFFERED="1")
    env.pop("PYTHONTRACEMALLOC", None)
    aenv = dict(env)
    argv = pl.argv(python, WORKLOADS, [wl, str(n)], out)
    if opt.cpu is not None:
        argv = ["taskset", "-c", opt.cpu] + argv
    res = {"profiler": pl.name, "workload": wl, "n": n}
    errf = open(os.path.join(tmp, "stderr"), "w+b")
    child = att = None

    def go():
        child.say("GO")
        r = child.expect("RESULT", opt.timeout)
        return {k: r[k] for k in KEEP}

    def start():
        nonlocal att
        if pl.inproc:
            child.say("START")
            res["ready_s"] = child.expect("STARTED", opt.timeout)["start"]
        if pl.attach:
            att = Child([w.format(**fill) for w in pl.attach], aenv, errf,
                        stdin=subprocess.DEVNULL, merge=True)
            res["ready_s"] = wait_ready(att, pl.ready, out, opt.attach_timeout)

    def stop():
        if pl.inproc:
            child.say("STOP")
            r = child.expect("STOPPED", opt.timeout)
            res["stop_s"], res["stats"] = r["stop"], r["stats"]
        if pl.attach:
            t = time.perf_counter()
            if pl.detach:
                subprocess.run([w.format(**fill) for w in pl.detach], env=aenv,
                               stdin=subprocess.DEVNULL, stdout=errf,
                               stderr=errf, timeout=opt.attach_timeout)
            if att.poll() is None:
                os.kill(att.p.pid, signal.SIGINT)
            if not att.wait(60):
                raise Failed("profiler did not end within 60 s of SIGINT")
            res["stop_s"] = time.perf_counter() - t
            res["prof_cpu"] = att.cpu()
            att.kill()                  # closes the pipe; it has ended

    try:
        child = Child(argv, env, errf)
        res["setup"] = child.expect("READY", opt.timeout)
        pid = res["setup"]["pid"]
        fill = dict(pid=pid, out=out, python=python)
        if opt.alternate:
            off, on = [go()], []
            for _ in range(opt.alternate):
                start()
                on.append(go())
                stop()
                off.append(go())
            res.update(on[-1])
            for k in ("cpu", "wall"):
                res[k] = statistics.median(r[k] for r in on)
                res["pairs_" + k] = [
                    2 * b[k] / (off[i][k] + off[i + 1][k])
                    for i, b in enumerate(on)]
        else:
            if opt.phases:
                res["before"] = go()
            start()
            res.update(go())
            stop()
            if opt.phases:
                res["after"] = go()
        child.say("EXIT")
        if not child.wait(opt.timeout):
            raise Failed("workload did not exit")
        res["exit_status"] = child.p.returncode
        if child.p.returncode:
            raise Failed("workload exited with %r" % child.p.returncode)
        res["total_cpu"] = child.cpu()
        res["total_wall"] = child.end - child.t0
        res["out_bytes"] = sum(os.path.getsize(f) for f in glob.glob(out + "*"))
    except (Failed, subprocess.TimeoutExpired) as e:
        errf.flush()
        errf.seek(0)
        tail = errf.read()[-300:].decode(errors="replace")
        res["error"] = "%s; stderr: %s" % (e, tail.strip().replace("\n", " / "))
    finally:
        for c in (att, child):
            if c:
                c.kill()
        errf.close()
    return res


# --------------------------------------------------------------------------
# report

def fmt(vals, pat="%.2f"):
    """median (min-max); from 8 values on median (lower-upper quartile)"""
    if not vals:
        return "-"
    if len(vals) >= 8:
        q = statistics.quantiles(vals, n=4)
        return (pat + " [" + pat + "–" + pat + "]") % (
            statistics.median(vals), q[0], q[2])
    return (pat + " (" + pat + "–" + pat + ")") % (
        statistics.median(vals), min(vals), max(vals))


def mib(kb):
    return kb / 1024.0


def report(data, md):
    runs, sets = data["runs"], data.get("sets", {})
    wls = sorted({r["workload"] for r in runs},
                 key=[r["workload"] for r in runs].index)
    profs = []
    for r in runs:
        if r["profiler"] not in profs and r["profiler"] != "none":
            profs.append(r["profiler"])
    rows, geo = [], {p: {"cpu": [], "wall": [], "during": [], "after": [],
                         "low": []} for p in profs}
    for wl in wls:
        base = {}
        for r in runs:
            if r["workload"] == wl and r["profiler"] == "none" \
                    and "error" not in r:
                base[r["key"]] = r
        if not base:
            continue
        rows.append((wl, "none", "%.2f s" % (
            statistics.median(b["cpu"] for b in base.values())), "", "", "",
            "%.2f s" % (statistics.median(b["wall"] for b in base.values())),
            "%.0f MiB" % mib(statistics.median(b["peak_kb"]
                                               for b in base.values())),
            "", "", ""))
        for p in profs:
            mine = [r for r in runs if r["workload"] == wl
                    and r["profiler"] == p]
            if not mine:
                continue
            ok = [r for r in mine if "error" not in r and r["key"] in base]
            pair = [(r, base[r["key"]]) for r in ok]
            cpu = [r["cpu"] / b["cpu"] for r, b in pair]
            wall = [r["wall"] / b["wall"] for r, b in pair]
            peak = [mib(r["peak_kb"] - b["peak_kb"]) for r, b in pair]
            outs = [r["out_bytes"] / 1048576.0 for r in ok if r.get("out_bytes")]
            pc = [100 * r["prof_cpu"] / r["wall"] for r in ok
                  if r.get("prof_cpu") is not None]
            note = ""
            bad = [r for r in mine if "error" in r]
            if bad:
                note = "%d of %d failed" % (len(bad), len(mine))
            ph = [r for r in ok if "after" in r]
            inproc = ["", ""]
            if ph:
                inproc = [fmt([r["cpu"] / r["before"]["cpu"] for r in ph]),
                          fmt([r["after"]["cpu"] / r["before"]["cpu"]
                               for r in ph])]
                geo[p]["during"].append((wl, statistics.median(
                    r["cpu"] / r["before"]["cpu"] for r in ph)))
                geo[p]["after"].append((wl, statistics.median(
                    r["after"]["cpu"] / r["before"]["cpu"] for r in ph)))
            low = ""
            if ok:
                low = "%.2f" % (min(r["cpu"] for r in ok) /
                                min(b["cpu"] for b in base.values()))
                geo[p]["low"].append((wl, float(low)))
            if cpu:
                geo[p]["cpu"].append((wl, statistics.median(cpu)))
                geo[p]["wall"].append((wl, statistics.median(wall)))
            rows.append((wl, p, fmt(cpu), low, *inproc, fmt(wall),
                         fmt(peak, "%+.0f") if peak else "-",
                         "%.1f" % statistics.median(outs) if outs else "",
                         "%.0f%%" % statistics.median(pc) if pc else "",
                         note))
    head = ("workload", "profiler", "CPU ratio", "of minima",
            "in-process during/before", "after/before", "wall ratio",
            "extra peak RSS, MiB", "output, MiB", "prof. proc. CPU", "notes")
    print_table(head, rows, md)
    print()
    grows = []
    kinds = [k for k in ("cpu", "low", "during", "after", "wall")
             if any(geo[p][k] for p in profs)]
    names = {"cpu": "CPU", "low": "CPU minima", "during": "during/before",
             "after": "after/before", "wall": "wall"}
    for p in profs:
        row = [p]
        for s in ("real", "micro"):
            for kind in kinds:
                v = [x for w, x in geo[p][kind] if w in sets.get(s, [])]
                row.append("%.2f (%.2f–%.2f)" % (
                    math.exp(statistics.mean(map(math.log, v))), min(v),
                    max(v)) if v else "-")
        rd = [r["ready_s"] for r in runs if r["profiler"] == p
              and r.get("ready_s") is not None]
        row.append(fmt(rd) if rd else "")
        grows.append(row)
    print("Geometric mean over workloads of the medians (min–max workload)\n")
    print_table(["profiler"] + ["%s, %s" % (s, names[k])
                                for s in ("real", "micro") for k in kinds] +
                ["start/attach, s"], grows, md)
    errs = [r for r in runs if "error" in r]
    if errs:
        print("\n%d failed runs, e.g.:" % len(errs))
        seen = set()
        for r in errs:
            k = (r["profiler"], r["workload"])
            if k not in seen:
                seen.add(k)
                print("- %s under %s: %s" % (k[1], k[0], r["error"][:300]))


def wrapped(name):
    return name in ("none", "aa") or (
        name.startswith("memray") and not name.startswith("memray_attach"))


def best(runs, wl, prof):
    """CPU ratios of one cell, most trustworthy kind first: in-process
    during/before pairs where the profiler came in after 'before', otherwise
    pairs with the 'none' run of the same round."""
    mine = [r for r in runs if r["workload"] == wl and r["profiler"] == prof
            and "error" not in r]
    if any("pairs_cpu" in r for r in mine):
        return sorted(x for r in mine for x in r.get("pairs_cpu", []))
    if not wrapped(prof) and any("before" in r for r in mine):
        return [r["cpu"] / r["before"]["cpu"] for r in mine if "before" in r]
    base = {r["key"]: r for r in runs if r["workload"] == wl
            and r["profiler"] == "none" and "error" not in r}
    return [r["cpu"] / base[r["key"]]["cpu"] for r in mine if r["key"] in base]


def matrix(data, md, what):
    runs, sets = data["runs"], data.get("sets", {})
    profs, wls = [], []
    for r in runs:
        for v, l in ((r["profiler"], profs), (r["workload"], wls)):
            if v not in l:
                l.append(v)
    profs.remove("none")
    rows, means = [], {p: {} for p in profs}
    order = sets.get("real", []) + sets.get("micro", [])
    wls.sort(key=lambda w: order.index(w) if w in order else 99)
    for wl in wls:
        row = [wl]
        for p in profs:
            if what == "cpu":
                v, pat = best(runs, wl, p), "%.2f"
            else:
                base = {r["key"]: r for r in runs if r["workload"] == wl
                        and r["profiler"] == "none" and "error" not in r}
                ok = [r for r in runs if r["workload"] == wl and
                      r["profiler"] == p and "error" not in r
                      and r["key"] in base]
                if what == "peak":
                    v = [mib(r["peak_kb"] - base[r["key"]]["peak_kb"])
                         for r in ok]
                    pat = "%+.0f"
                else:       # output per second of unprofiled run, MiB
                    v = [r["out_bytes"] / 1048576 / base[r["key"]]["cpu"]
                         / (3 if wrapped(p) and "before" in r else 1)
                         for r in ok if r.get("out_bytes")]
                    pat = "%.1f"
            if v:
                means[p][wl] = statistics.median(v)
            bad = any(r["workload"] == wl and r["profiler"] == p and
                      "error" in r for r in runs)
            row.append((fmt(v, pat) if v else "-") + (" !" if bad else ""))
        rows.append(row)
    if what == "cpu":
        for s in ("real", "micro"):
            row = ["geomean, " + s]
            for p in profs:
                v = [means[p][w] for w in means[p] if w in sets.get(s, [])]
                row.append("**%.2f**" % math.exp(statistics.mean(
                    map(math.log, v))) if v else "-")
            rows.append(row)
    print_table(["workload"] + profs, rows, md)


def print_table(head, rows, md):
    rows = [[str(c) for c in r] for r in rows]
    if md:
        print("| " + " | ".join(head) + " |")
        print("|" + " --- |" * len(head))
        for r in rows:
            print("| " + " | ".join(r) + " |")
        return
    w = [max(len(head[i]), *(len(r[i]) for r in rows)) if rows else len(head[i])
         for i in range(len(head))]
    for r in [head] + rows:
        print("  ".join(c.ljust(w[i]) for i, c in enumerate(r)).rstrip())


# --------------------------------------------------------------------------

def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--python", default=sys.executable,
                    help="interpreter (of a venv) that runs the workloads")
    ap.add_argument("-p", "--profiler", action="append", default=[])
    ap.add_argument("-w", "--workloads", default="all",
                    help="comma list, or real, micro, all")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--seconds", type=float, default=1.0,
                    help="length of a run without a profiler (CPU bound)")
    ap.add_argument("--timeout", type=float, default=180)
    ap.add_argument("--attach-timeout", type=float, default=60)
    ap.add_argument("--attach-ready", action="append", default=[])
    ap.add_argument("--phases", action="store_true")
    ap.add_argument("--alternate", type=int, default=0, metavar="K",
                    help="K off/on/off/... pairs within one process")
    ap.add_argument("--cpu", help="pin the workload, e.g. 1 or 0,1 (taskset)")
    ap.add_argument("--json", help="write (and keep adding to) raw samples")
    ap.add_argument("--tmp", help="folder for output files")
    ap.add_argument("--md", action="store_true")
    ap.add_argument("--report", nargs="+", help="only print tables from JSON")
    ap.add_argument("--matrix", action="append",
                    choices=("cpu", "peak", "out"),
                    help="with --report: compact workload x profiler tables")
    ap.add_argument("--make-venv")
    ap.add_argument("--base", help="interpreter for --make-venv")
    a = ap.parse_args()

    if a.make_venv:
        subprocess.check_call([a.base or sys.executable, "-m", "venv",
                               a.make_venv])
        py = os.path.join(a.make_venv, "bin", "python")
        for pkg in PACKAGES:        # one by one: a missing peer is no failure
            subprocess.call([py, "-m", "pip", "install", "-q", pkg])
        return

    if a.report:
        data = {"runs": [], "sets": {}}
        for f in a.report:
            with open(f) as fh:
                d = json.load(fh)
            data["sets"].update(d.get("sets", {}))
            for r in d["runs"]:
                r["key"] = f + str(r["key"])
                data["runs"].append(r)
        for what in a.matrix or []:
            print("\n%s\n" % {"cpu": "CPU ratio, median (min–max)",
                              "peak": "extra peak RSS, MiB",
                              "out": "output, MiB per CPU second of the "
                                     "unprofiled run"}[what])
            matrix(data, a.md, what)
        if not a.matrix:
            report(data, a.md)
        return

    sets = json.loads(subprocess.check_output([a.python, WORKLOADS, "list"]))
    if a.workloads in ("all", "real", "micro"):
        wls = (sets["real"] + sets["micro"] if a.workloads == "all"
               else sets[a.workloads])
    else:
        wls = a.workloads.split(",")
    specs = []
    for s in a.profiler or ["none", "aa", "tracemalloc1", "tracemalloc25",
                            "mprofile128k", "memray", "memray_attach"]:
        specs += [s] if s.startswith("attach:") else s.split(",")
    plugins = [plugin(s, a.attach_ready) for s in specs]
    if not any(p.name == "none" for p in plugins):
        plugins.insert(0, Plugin("none"))

    data = {"sets": sets, "python": a.python, "runs": [], "n": {},
            "seconds": a.seconds, "argv": sys.argv[1:]}
    prev = 0
    if a.json and os.path.exists(a.json):
        with open(a.json) as fh:
            data = json.load(fh)
        prev = 1 + max((r["key"] for r in data["runs"]), default=-1)
    tmp = tempfile.mkdtemp(prefix="overhead-", dir=a.tmp)
    try:
        for wl in wls:
            if wl not in data["n"]:
                cal = subprocess.check_output(
                    [a.python, WORKLOADS, wl, "calibrate", str(a.seconds)],
                    env=dict(os.environ, PYTHONHASHSEED="0"))
                m = re.search(rb"CAL (\{.*\})", cal)
                data["n"][wl] = json.loads(m.group(1))["n"]
        for rnd in range(a.rounds):
            for wl in wls:
                k = rnd % len(plugins)
                for pl in plugins[k:] + plugins[:k]:
                    r = one_run(pl, a.python, wl, data["n"][wl], a, tmp)
                    r["key"] = prev + rnd
                    data["runs"].append(r)
                    print("%d/%d %-16s %-22s %s" % (
                        rnd + 1, a.rounds, wl, pl.name,
                        r["error"] if "error" in r else
                        "cpu %.3f wall %.3f peak %d MiB out %.1f MiB" % (
                            r["cpu"], r["wall"], mib(r["peak_kb"]),
                            r["out_bytes"] / 1048576)),
                        file=sys.stderr, flush=True)
                if a.json:
                    with open(a.json + ".tmp", "w") as fh:
                        json.dump(data, fh)
                    os.replace(a.json + ".tmp", a.json)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    if a.alternate:
        matrix(data, a.md, "cpu")
    else:
        report(data, a.md)


if __name__ == "__main__":
    main()
