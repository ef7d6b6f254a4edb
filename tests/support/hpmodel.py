#!/usr/bin/env python3
"""An independent model of the heapprof files: says as JSON what it finds in BASE.hpm and BASE.hpd.

Written from docs/format.md alone, with the standard library only, and strict: what pyheap writes must be read without
any of the lenience that its own reader has.

usage: hpmodel.py BASE [DIGEST_INTERVAL_MS]
"""
import json
import struct
import sys

FREE = 0x40000000
NEGATIVE = 0x80000000


class Cursor:
    def __init__(self, data):
        self.data, self.pos = data, 0

    def take(self, size):
        piece = self.data[self.pos:self.pos + size]
        if len(piece) != size:
            raise EOFError("cut at %d" % self.pos)
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
                assert byte or not shift, "not the shortest form"
                return value
        raise ValueError("varint longer than ten bytes")

    def more(self):
        return self.pos < len(self.data)


def read_hpm(path):
    cur = Cursor(open(path, "rb").read())
    assert cur.u32() == 1
    start = [cur.u64(), cur.u64()]
    table = [[cur.u64(), cur.u32()] for _ in range(cur.varint())]
    assert [b for b, _ in table] == sorted({b for b, _ in table})
    traces = []
    while cur.more():
        frames = []
        while True:
            line = cur.varint()
            if line == 0:
                break
            frames.append([cur.take(cur.varint()).decode("utf-8"), line - 1])
        traces.append(frames[::-1])
    return start, table, traces


def read_hpd(path):
    cur = Cursor(open(path, "rb").read())
    events = []
    now = 0
    while cur.more():
        head = cur.u32()
        seconds, micros, size = cur.varint(), cur.varint(), cur.varint()
        assert micros < 1000000
        step = seconds * 1000000 + micros
        now += -step if head & NEGATIVE else step
        events.append([now, head & 0x3FFFFFFF, -size if head & FREE else size])
    return events


def f32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def factor(table, size, single):
    for bound, fixed in table:
        if size < bound:
            value = 0xFFFFFFFF / fixed if fixed else 0.0
            return f32(value) if single else value
    return None


def scaled(table, size, single):
    by = factor(table, abs(size), single)
    if by is None:
        return size
    value = int(f32(f32(abs(size)) * by)) if single else abs(size) * by
    return value if size >= 0 else -value


def digest(table, events, millis):
    interval = millis / 1000
    due, live, before, now, snapshots = interval, {}, 0, 0.0, []
    for at, index, size in events:
        value = scaled(table, size, True)
        total = live.get(index, 0) + value
        if index in live and total == 0:
            del live[index]
        else:
            live[index] = total
        if at > before:
            now += (at - before) // 1000000 + 1e-6 * ((at - before) % 1000000)
        before = at
        while now >= due:
            snapshots.append(sorted(live.items(), key=lambda kv: (-kv[1], kv[0])))
            due += interval
    return snapshots


def main():
    base = sys.argv[1]
    start, table, traces = read_hpm(base + ".hpm")
    events = read_hpd(base + ".hpd")
    live = {}
    for _, index, size in events:
        live[index] = live.get(index, 0) + scaled(table, size, False)
    answer = {"start": start, "table": table, "traces": traces, "events": events, "live": sorted(live.items())}
    if len(sys.argv) > 2:
        answer["digest"] = digest(table, events, int(sys.argv[2]))
    json.dump(answer, sys.stdout)


main()
