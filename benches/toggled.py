"""What the hooks cost, measured within one process: the target of benches/toggled.rs.

    python toggled.py PAIRS SETTLE WORKLOAD

Runs the workload for SETTLE seconds, in which pyheap may choose another period, and then in blocks of about 2 ms of CPU time, alternately with the interpreter's allocators as they were and
with pyheap's wrappers (those in slots of native code too, if a line says where they are), in the order off on on off, so that whatever drifts (clock frequency, other load, caches) meets
both alike. Prints READY and waits for a line, and SETTLED and waits for another one: of nothing, or a
list of [slot, what it held before]; then a line of JSON; then waits for another line (pyheap has
left) and says whether the allocators are what they were.
"""
import ctypes
import importlib.util
import json
import os
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


class Allocator(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("ctx", "malloc", "calloc", "realloc", "free")]


api = ctypes.pythonapi
api.PyMem_GetAllocator.restype = api.PyMem_SetAllocator.restype = None


def get():
    found = [Allocator() for _ in range(3)]
    for domain, allocator in enumerate(found):
        api.PyMem_GetAllocator(ctypes.c_int(domain), ctypes.byref(allocator))
    return found


def put(allocators):
    for domain, allocator in enumerate(allocators):
        api.PyMem_SetAllocator(ctypes.c_int(domain), ctypes.byref(allocator))


def words(allocators):
    return [[getattr(a, name) for name, _ in Allocator._fields_] for a in allocators]


class Slots:
    """The words through which objects call malloc and its like."""

    def __init__(self, line):
        self.off = json.loads(line) if line.strip() else []
        self.memory = os.open("/proc/self/mem", os.O_RDWR) if self.off else -1
        self.on = [(at, int.from_bytes(os.pread(self.memory, 8, at), "little")) for at, _ in self.off]

    def put(self, is_on):
        for at, value in self.on if is_on else self.off:
            os.pwrite(self.memory, value.to_bytes(8, "little"), at)


# Workloads: functions of a number of rounds.

def small_objects(n):
    for _ in range(n):
        for _ in range(1000):
            object()


def floats(n):
    x = 0.5
    for _ in range(n):
        for _ in range(1000):
            x = x * 1.0000001


def list_of_tuples(n):
    for _ in range(n):
        [(i, i) for i in range(1000)]


def dict_churn(n):
    for _ in range(n):
        for i in range(200):
            {"a": i, "b": i, "c": [i]}


def str_concat(n):
    for _ in range(n):
        s = ""
        for i in range(1000):
            s += "item, "


def list_append(n):
    for _ in range(n):
        out = []
        for i in range(2000):
            out.append(i * 0.5)


def bytes_600(n):
    for _ in range(n):
        for _ in range(500):
            bytes(600)


def bytes_64k(n):
    for _ in range(n):
        for _ in range(100):
            bytes(65536)


def raw_threads(n):
    """Four native threads in the raw domain, without the GIL."""
    from workloads import _RAW_C, _cc
    lib = raw_threads.lib = getattr(raw_threads, "lib", None) or ctypes.CDLL(_cc(_RAW_C, "rawhammer"))
    lib.raw_hammer.argtypes = [ctypes.c_long, ctypes.c_ulong]
    threads = [threading.Thread(target=lib.raw_hammer, args=(n * 10, 77 + i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def threads_8(n):
    """Eight threads of Python that allocate; on a build without the GIL all at once."""
    def work():
        for _ in range(n * 20):
            [(i, i) for i in range(100)]
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


MICRO = [small_objects, floats, list_of_tuples, dict_churn, str_concat, list_append, bytes_600, bytes_64k, raw_threads, threads_8]


def load(name):
    for function in MICRO:
        if function.__name__ == name:
            return function
    import workloads
    return getattr(workloads, "w_" + name)()


def timed(run, n):
    start = time.process_time_ns()
    run(n)
    return time.process_time_ns() - start


def calibrate(run):
    n = 1
    while True:
        used = min(timed(run, n) for _ in range(3))
        if used > 1_000_000:
            return max(1, round(n * 2_000_000 / used))
        n *= 2


def main():
    pairs, settle, name = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    run = load(name)
    run(1)
    n = calibrate(run)
    off = get()
    print("READY", os.getpid(), flush=True)
    sys.stdin.readline()
    on = get()
    if words(on) == words(off):
        raise SystemExit("nothing is hooked")
    end = time.monotonic() + settle
    while time.monotonic() < end:
        run(n)
    print("SETTLED", flush=True)
    # With pyheap's answer nobody but us touches the slots.
    slots = Slots(sys.stdin.readline())
    samples = {False: [], True: []}
    # Long rounds: fewer of them.
    count = max(10, min(pairs, int(pairs * 4_000_000 / max(timed(run, n), 1))))
    for pair in range(count):
        for which in ((False, True) if pair % 2 else (True, False)):
            put(on if which else off)
            slots.put(which)
            samples[which].append(timed(run, n))
    put(on)
    slots.put(True)
    print(json.dumps({"rounds": n, "off": samples[False], "on": samples[True]}), flush=True)
    sys.stdin.readline()
    print("RESTORED", words(get()) == words(off), flush=True)


if __name__ == "__main__":
    main()
