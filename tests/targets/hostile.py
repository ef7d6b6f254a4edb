"""Works against whoever reads it.

    hostile.py ring
        -> SCRIBBLE {"mode": ..., addresses}   writes over pyheap's memory in this process, in the way that `mode` says:
               noise       random bytes over head, counters and records, again and again
               head        random positions of the ring's head
               samples     well-formed samples without end, each with an id of its own
               names       well-formed code objects and stacks without end, each with a name of its own
               table       a table of live samples full of nonsense, and a counter that asks to have it read
               unmap       the ring is unmapped
        <- SCRIBBLING                          it begins; it goes on until STOP (<- STOPPED)

    hostile.py frames
        Parks threads in C code and rewrites their frames, code objects and names at full speed: they never run again.
        <- ROUNDS n                            in answer to STATUS
"""
import array
import ctypes
import json
import os
import random
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import protocol

PAD, ALLOC, FREE, STACK, CODE, FORGET = range(6)


def put(address, data):
    ctypes.memmove(address, data, len(data))


def words(*values):
    return array.array("Q", values).tobytes()


def head_word(length, kind, flags=0):
    return length | kind << 32 | flags << 48


class Scribbler(threading.Thread):
    def __init__(self, places):
        super().__init__(daemon=True)
        self.__dict__.update(places)
        self.rounds = 0
        self.next_id = 1 << 40
        self.going = True

    def run(self):
        work = getattr(self, self.mode)
        random.seed(1)
        while self.going:
            work()
            self.rounds += 1

    def get(self, address):
        return ctypes.c_uint64.from_address(address).value

    def set(self, address, value):
        ctypes.c_uint64.from_address(address).value = value & (1 << 64) - 1

    def noise(self):
        put(self.ring + random.randrange(0, self.ring_len - 65536, 8), os.urandom(65536))
        put(self.counters, os.urandom(128))
        self.set(self.head, self.get(self.head) + random.randrange(0, self.ring_len, 8))

    def head_(self):
        self.set(self.head, random.getrandbits(random.randrange(1, 65)))

    def publish(self, records):
        """Puts whole records where the reader looks next, if it has read all that was there."""
        here, read = self.get(self.head), self.get(self.tail)
        if here != read:
            return
        offset = here % self.ring_len
        room = self.ring_len - offset
        if room < len(records):
            put(self.ring + offset, words(head_word(room, PAD)))
            self.set(self.head, here + room)
            return
        put(self.ring + offset, records)
        self.set(self.head, here + len(records))

    def samples(self):
        count = 4096
        first = self.next_id
        self.next_id += count
        records = array.array("Q", [head_word(56, ALLOC, 2), 0, 4096, 100, 1, 0, self.period]) * count
        records[1::7] = array.array("Q", range(first, first + count))
        # Stacks that nobody has announced, too.
        records[5::7] = array.array("Q", range(first, first + count))
        self.publish(records.tobytes())

    def names(self):
        """A code object is sent as pieces of memory; here whatever was put together from a real one, renamed."""
        out = []
        for _ in range(8):
            self.next_id += 1
            name = ("%d_" % self.next_id * 900)[:12000]
            out.append(self.code_record(self.next_id, name))
            frames = [self.next_id << 32 & (1 << 64) - 1 | 0] * 8
            body = words(head_word(24 + 8 * len(frames), STACK), self.next_id, len(frames), *frames)
            sample = words(head_word(56, ALLOC, 2), self.next_id, 4096, 100, 1, self.next_id, self.period)
            out.append(body + sample)
        self.publish(b"".join(out))

    def code_record(self, number, name):
        code = compile("pass", name, "exec")
        segments = []
        table = getattr(code, "co_linetable", None) or code.co_lnotab
        filename = code.co_filename
        for thing, size in ((code, 320), (filename, sys.getsizeof(filename)), (code.co_name, sys.getsizeof(code.co_name)),
                            (table, sys.getsizeof(table))):
            size = min(size, type(thing).__sizeof__(thing) if thing is not code else size)
            data = ctypes.string_at(id(thing), size)
            segments.append(words(id(thing), size | size << 32) + data + bytes(-size % 8))
        length = 32 + sum(map(len, segments))
        return words(head_word(length, CODE, len(segments)), number & 0xFFFFFFFF, id(code), 0) + b"".join(segments)

    def table(self):
        # The shim works with the same table: it would hang in what is written here, which is our harm and nobody else's.
        self.set(self.gate, 0)
        entries = min(self.slab_entries, 20000)
        if self.rounds == 0:
            self.entries = array.array("Q", [1, 4096, 100, 1, 1, self.period, 0, 1]) * entries
        self.next_id += entries
        ids = array.array("Q", range(self.next_id, self.next_id + entries))
        self.entries[0::8] = ids
        self.entries[7::8] = ids
        put(self.slab, self.entries.tobytes())
        self.set(self.slab_used, 1 << 60)
        self.set(self.last_id, self.next_id + entries)
        self.set(self.counters + 16, self.get(self.counters + 16) + 1)

    def unmap(self):
        if self.rounds == 0:
            # The shim must not write there itself: it is switched off before, and its table forgotten, as it tells of frees even then.
            self.set(self.gate, 0)
            put(self.buckets, bytes(self.buckets_len))
            ctypes.CDLL(None).munmap(ctypes.c_void_p(self.ring), ctypes.c_size_t(self.ring_len))
            self.set(self.head, self.get(self.head) + 4096)
        self.going = False


Scribbler.head_mode = Scribbler.head_


class Frames:
    """Threads that are parked in read(), and what they stand on."""

    def __init__(self):
        self.rounds = 0
        self.places = []
        self.kept = []
        ends = os.pipe()
        for number in range(8):
            namespace = {"os": os, "fd": ends[0], "frame": sys._getframe}
            source = "def f%d(depth):\n    if depth: return f%d(depth - 1)\n    found.append(frame(0)); os.read(fd, 1)\n" % (number, number)
            namespace["found"] = found = []
            exec(compile(source, "parked%d.py" % number, "exec"), namespace)
            threading.Thread(target=namespace["f%d" % number], args=(20,), daemon=True).start()
            while not found:
                pass
            frame = found[0]
            code = frame.f_code
            self.kept += [namespace, frame, code, code.co_filename, code.co_name]
            table = getattr(code, "co_linetable", None) or code.co_lnotab
            self.kept.append(table)
            for thing, skip, size in ((code, 16, 160), (code.co_filename, 16, 48), (code.co_name, 16, 40), (table, 16, 40), (frame, 16, 64)):
                self.places.append((id(thing) + skip, ctypes.string_at(id(thing) + skip, size)))
        self.targets = [at for at, _ in self.places]

    def run(self):
        random.seed(2)
        while True:
            at, good = random.choice(self.places)
            offset = random.randrange(0, len(good) - 8, 8)
            value = random.choice([0, 1, 8, -1, 1 << 20, 1 << 31, 1 << 40, 1 << 62, random.getrandbits(64),
                                   random.choice(self.targets), random.choice(self.targets) - 16])
            ctypes.c_uint64.from_address(at + offset).value = value & (1 << 64) - 1
            if random.random() < 0.3:
                ctypes.memmove(at, good, len(good))
            self.rounds += 1


def main():
    commands = protocol.Commands()
    scribbler = frames = None
    if sys.argv[1] == "frames":
        frames = Frames()
        threading.Thread(target=frames.run, daemon=True).start()
    protocol.ready()
    while True:
        command = commands.next()
        if command.startswith("SCRIBBLE "):
            places = json.loads(command.split(" ", 1)[1])
            if places["mode"] == "head":
                places["mode"] = "head_mode"
            # `head` is an address as well.
            scribbler = Scribbler(places)
            # Afterwards nothing is certain here.
            protocol.say("SCRIBBLING")
            scribbler.start()
        elif command == "STATUS":
            protocol.say("ROUNDS", (frames or scribbler).rounds)
        elif command == "STOP":
            scribbler.going = False
            scribbler.join()
            protocol.say("STOPPED")
        elif command == "EXIT":
            # Nothing that was broken here is taken apart in good order.
            os._exit(0)


main()
