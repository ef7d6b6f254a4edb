#!/usr/bin/env python3
"""A model of the heapprof files, written from docs/format.md and sharing no code with pyheap.

    hpmodel.py live BASE             what BASE.hpm and BASE.hpd say is alive at the end, as JSON
    hpmodel.py digest BASE SECONDS   the snapshots of a compatible digest with that interval: [[[trace, bytes], ...], ...]
    hpmodel.py synthesize KIND BASE  writes a small profile of that kind

The JSON of `live`: {"live": [{"frames": [[file, line], ...] outermost first, "bytes", "objects", "samples"}], "events",
"traces", "damage": [what a strict reader would complain about]}. Bytes and objects are estimates by the file's own
sampling table, in double precision. Standard library only, Python 3.8 and later.
"""
import json
import random
import struct
import sys

FREE, NEGATIVE, INDEX = 0x40000000, 0x80000000, 0x3FFFFFFF


class Truncated(Exception):
    pass


class Cursor:
    def __init__(self, data):
        self.data, self.pos = data, 0

    def take(self, size):
        piece = self.data[self.pos:self.pos + size]
        if len(piece) != size:
            raise Truncated
        self.pos += size
        return piece

    def u32(self):
        return struct.unpack(">I", self.take(4))[0]

    def u64(self):
        return struct.unpack(">Q", self.take(8))[0]

    def varint(self):
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("varint of more than ten bytes")


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_hpm(path, damage):
    cur = Cursor(open(path, "rb").read())
    if cur.u32() != 1:
        raise SystemExit("%s: version" % path)
    sec, nsec = cur.u64(), cur.u64()
    if nsec > 999999999 or not 10**9 < sec < 10**10:
        damage.append("start time %d.%09d" % (sec, nsec))
    table = [(cur.u64(), cur.u32()) for _ in range(cur.varint())]
    if table != sorted(table) or len({bound for bound, _ in table}) != len(table):
        damage.append("sampling table out of order")
    traces = []
    while cur.pos < len(cur.data):
        start = cur.pos
        try:
            frames = []
            while True:
                line = cur.varint()
                if line == 0:
                    break
                raw = cur.take(cur.varint())
                name = raw.decode("utf-8", "replace")
                if name.startswith("<"):
                    damage.append("frame of %s in trace %d" % (name, len(traces) + 1))
                if name.encode("utf-8") != raw:
                    damage.append("file name of trace %d is not UTF-8" % (len(traces) + 1))
                frames.append((name, line - 1))
            traces.append(frames[::-1])  # innermost first in the file
        except Truncated:
            damage.append("hpm cut at %d" % start)
            break
    return table, traces


def read_hpd(path, damage):
    cur = Cursor(open(path, "rb").read())
    while cur.pos < len(cur.data):
        start = cur.pos
        try:
            word, sec, usec, size = cur.u32(), cur.varint(), cur.varint(), cur.varint()
        except Truncated:
            damage.append("hpd cut at %d" % start)
            return
        if usec > 999999:
            damage.append("%d microseconds at %d" % (usec, start))
        if word & NEGATIVE:
            damage.append("time goes back at %d" % start)
        yield word & INDEX, bool(word & FREE), size, (-1 if word & NEGATIVE else 1) * (sec + usec / 1e6)


def scale(table, size):
    for bound, p in table:
        if size < bound:
            return 4294967295 / p if p else 0.0
    return 1.0


def live(base):
    damage = []
    table, traces = read_hpm(base + ".hpm", damage)
    table = sorted(dict(table).items())
    blocks, events = {}, 0  # (trace, size) -> number
    for index, is_free, size, _ in read_hpd(base + ".hpd", damage):
        events += 1
        if index > len(traces):
            damage.append("event of trace %d, which is not there" % index)
        n = blocks.get((index, size), 0) + (-1 if is_free else 1)
        if n < 0:
            damage.append("a free without its allocation: trace %d, %d bytes" % (index, size))
        blocks[index, size] = n
    out = {}
    for (index, size), n in sorted(blocks.items()):
        if n:
            entry = out.setdefault(index, {"frames": traces[index - 1] if 0 < index <= len(traces) else [],
                                           "bytes": 0.0, "objects": 0.0, "samples": 0})
            entry["bytes"] += n * size * scale(table, size)
            entry["objects"] += n * scale(table, size)
            entry["samples"] += n
    return {"live": list(out.values()), "events": events, "traces": len(traces), "damage": damage[:20]}


def single(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def digest(base, seconds):
    """What the original's digest has: bytes scaled in single precision, one snapshot a tick, which sees the event that
    passed it already; time that goes back stands still. A trace whose first event leaves nothing stays, with 0 bytes."""
    table, _ = read_hpm(base + ".hpm", [])
    table = [(bound, single(4294967295 / p) if p else 0.0) for bound, p in sorted(dict(table).items())]
    now, due, sums, snapshots = 0.0, float(seconds), {}, []
    for index, is_free, size, step in read_hpd(base + ".hpd", []):
        factor = next((factor for bound, factor in table if size < bound), None)
        scaled = size if factor is None else int(single(single(size) * factor))
        scaled = -scaled if is_free else scaled
        if index in sums and sums[index] + scaled == 0:
            del sums[index]
        else:
            sums[index] = sums.get(index, 0) + scaled
        now += max(step, 0.0)
        while now >= due:
            snapshots.append(sorted(sums.items()))
            due += float(seconds)
    return {"snapshots": snapshots}


# ---- the other direction ---------------------------------------------------------------------------------------------
def encode_hpm(table, traces):
    out = bytearray(struct.pack(">IQQ", 1, 1600000000, 250000000)) + varint(len(table))
    for bound, p in table:
        out += struct.pack(">QI", bound, int(p * 4294967295))
    for trace in traces:
        for name, line in reversed(trace):
            raw = name if isinstance(name, bytes) else name.encode("utf-8")
            out += varint(line + 1) + varint(len(raw)) + raw
        out.append(0)
    return bytes(out)


def encode_event(index, free, usec, size):
    word = index | (FREE if free else 0) | (NEGATIVE if usec < 0 else 0)
    return struct.pack(">I", word) + varint(abs(usec) // 1000000) + varint(abs(usec) % 1000000) + varint(size)


def synthesize(kind, base):
    rng = random.Random(kind)
    table = [(128, 1e-4), (8192, 0.1)]
    traces = [[("app.py", 10), ("util.py", 2)], [("app.py", 10), ("app.py", 10), ("other.py", 300)], [("app.py", 1)]]
    if kind == "no_table":
        table = []
    if kind == "unicode":
        traces += [[("/home/mäx/日本語/🐍.py", 7)], [("a b:c.py", 0), ("", 5)]]
    if kind == "empty_traces":
        traces += [[], [("x.py", 1)], []]
    if kind == "many":
        traces = [[("f%d.py" % rng.randrange(20), rng.randrange(500)) for _ in range(rng.randrange(1, 40))] for _ in range(3000)]
    if kind == "corners":
        # A range that is never recorded, bounds that repeat (the later counts), names that are no UTF-8, lines at their limits,
        # an empty trace, one twice.
        table = [(16, 0.0), (128, 0.5), (128, 1e-4), (8192, 0.1)]
        traces += [[(b"/srv/b\xc3.py", 4), (b"\xff\xfe", 2)], [("app.py", 0), ("app.py", 2**31 - 2)], [], traces[0]]
    sizes = [1, 16, 100, 127, 128, 500, 8191, 8192, 100000] + ([2**31 - 1, 2**31, 2**32 + 5, 2**40] if kind in ("large", "corners") else [])
    if kind == "corners":
        sizes += [0, 15, 2**48]
    if kind == "large":
        table = []
    events, alive = bytearray(), []
    for _ in range(20000 if kind == "many" else 500):
        usec = rng.choice([0, 1, 17, 999999, 1000000, 2500000] + ([-1, -1500000, 90000000] if kind == "corners" else []))
        if alive and rng.random() < 0.45:
            index, size = alive.pop(rng.randrange(len(alive)))
            events += encode_event(index, True, usec, size)
        else:
            index, size = rng.randrange(1, len(traces) + 1), rng.choice(sizes)
            if kind == "corners" and rng.random() < 0.1:
                index = rng.choice([0, len(traces) + 1, INDEX])
            alive.append((index, size))
            events += encode_event(index, False, usec, size)
    hpm = encode_hpm(table, traces)
    if kind == "corners":
        # Numbers longer than they need to be, and more than a second of microseconds.
        events += struct.pack(">I", 2) + b"\x80\x00" + varint(1500000) + b"\xe4\x80\x80\x00"
    if kind in ("cut", "corners"):
        # What a kill leaves: a trace without its end, an event without its size.
        hpm += encode_hpm([], [[("never.py", 1)]])[21:-1]
        events += encode_event(1, False, 5, 70000)[:-2]
    open(base + ".hpm", "wb").write(hpm)
    open(base + ".hpd", "wb").write(bytes(events))
    return {}


if __name__ == "__main__":
    command, args = sys.argv[1], sys.argv[2:]
    json.dump({"live": live, "digest": digest, "synthesize": synthesize}[command](*args), sys.stdout)
