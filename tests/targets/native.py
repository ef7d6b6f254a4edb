"""Sites in native code of known size and number.

    python native.py LIBRARY [SCALE [COPY.so]]

    -> GO           allocate everything, once         <- TRUTH {"sites": {...}}
    -> GRID         allocate by five functions in many sizes, with the GIL and without, and by eight threads; some are freed  <- TRUTH {...}
    -> FREE         give everything back              <- TRUTH {"sites": {}}
    -> CHURN N      N rounds of malloc and free       <- DONE {}
    -> ELSEWHERE    free every other block of site_calloc by a pointer that the loader was asked for  <- DONE {}
    -> LOOP         load and unload COPY.so all the time, in a thread of its own; again: end that   <- DONE {"loads"}
    -> CTYPES       allocate by functions of the C library that ctypes has looked up at the start  <- TRUTH {"sites": {...}, "wrong": [...]}
    -> SECOND       the same through another libffi, ffi.so beside LIBRARY  <- TRUTH {"sites": {...}}
    -> RELEASE      free all that by such functions   <- DONE {}
    -> COPY         copy malloc's address             <- DONE {}
    -> USE          call what was copied              <- DONE {}
    -> DEEP N       eight threads that recurse N deep and stay there, and two mappings by the module mmap  <- TRUTH {"threads", "sites": [...]}
    -> RETURN       they return, and the mappings are closed  <- DONE {}
    -> EXIT

LIBRARY is native.c, COPY.so a copy of it. TRUTH's sites are as in accuracy.py, with "domain" and "native", the function in the library. Half of the sites
are called with the GIL, half without; site_threads by eight threads at once, without.
"""
import _ctypes
import ctypes
import mmap
import os
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say, site_lines  # noqa: E402

HERE = os.path.abspath(__file__)
WITH, WITHOUT = ctypes.PyDLL(sys.argv[1]), ctypes.CDLL(sys.argv[1])
SCALE = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
SITES = {}
MIB = 1 << 20


def hold(function, native, size, count, unmap=False):
    count = max(8, int(count * SCALE)) // 8 * 8
    out = (ctypes.c_void_p * count)()
    SITES[function] = (out, native, size, unmap)
    return out, ctypes.c_long(count), ctypes.c_size_t(size)


def site_malloc(out, n, size):
    WITH.site_malloc(out, n, size)  # SITE site_malloc


def site_pointer(out, n, size):
    WITHOUT.site_pointer(out, n, size)  # SITE site_pointer


def site_calloc(out, n, size):
    WITHOUT.site_calloc(out, n, size)  # SITE site_calloc


def site_realloc(out, n, size):
    WITH.site_realloc(out, n, size)  # SITE site_realloc


def site_aligned(out, n, size):
    WITHOUT.site_aligned(out, n, size)  # SITE site_aligned


def site_mmap(out, n, size):
    WITH.site_mmap(out, n, size)  # SITE site_mmap


def site_mremap(out, n, size):
    WITHOUT.site_mremap(out, n, size)  # SITE site_mremap


def site_threads(out, n, size):
    WITHOUT.site_malloc(out, n, size)  # SITE site_threads


def allocate():
    site_malloc(*hold("site_malloc", "site_malloc", 64, 20 * MIB // 64))
    site_pointer(*hold("site_pointer", "site_pointer", 2048, 4096))
    site_calloc(*hold("site_calloc", "site_calloc", 4096, 4096))
    site_realloc(*hold("site_realloc", "site_realloc", 65536, 256))
    site_aligned(*hold("site_aligned", "site_aligned", 1024, 8192))
    site_mmap(*hold("site_mmap", "site_mmap", 16 * MIB, 8, True))
    site_mremap(*hold("site_mremap", "site_mremap", 64 * MIB, 8, True))
    out, count, size = hold("site_threads", "site_malloc", 512, 32768)
    each = count.value // 8
    address = ctypes.addressof(out)

    def work(part):
        place = ctypes.c_void_p(address + part * each * ctypes.sizeof(ctypes.c_void_p))
        site_threads(place, ctypes.c_long(each), size)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


GRID_SIZES = [64, 512, 4096, 65536, MIB, 16 * MIB, 64 * MIB]
GRID = {}


def one_line(number):
    """A function whose call stands in a line of its own."""
    space = {}
    exec(compile("\n" * number + "def call(function, *rest): function(*rest)", "grid.py", "exec"), space)
    return space["call"]


def grid_site(name, library, function, size, threads=1, freed=False):
    # Some megabytes, but eight blocks at least.
    count = max(8, int(5 * MIB * SCALE) // size // 8 * 8)
    out = (ctypes.c_void_p * count)()
    line = len(GRID) + 1
    call = one_line(line - 1)
    each = count // threads

    def work(part):
        place = ctypes.c_void_p(ctypes.addressof(out) + part * each * ctypes.sizeof(ctypes.c_void_p))
        call(getattr(library, function), place, ctypes.c_long(each), ctypes.c_size_t(size))

    if threads == 1:
        work(0)
    else:
        workers = [threading.Thread(target=work, args=(part,)) for part in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    unmap = function == "site_mmap"
    if freed:
        if unmap:
            WITHOUT.unmap(out, ctypes.c_long(count), ctypes.c_size_t(size))
        else:
            WITH.give_back(out, ctypes.c_long(count))
    GRID[name] = {"bytes": 0 if freed else size * count, "sizes": {} if freed else {size: count}, "file": "grid.py", "line": line,
                  "domain": "mmap" if unmap else "malloc", "big": threads == 1 and not freed, "threads": threads}


def allocate_grid():
    for function in ("malloc", "calloc", "realloc", "aligned", "mmap"):
        sizes = [size for size in GRID_SIZES if function != "mmap" or size >= MIB]
        for size in sizes:
            short = "%d%s" % ((size, "") if size < 1024 else (size >> 10, "K") if size < MIB else (size >> 20, "M"))
            for library, gil in ((WITH, "gil"), (WITHOUT, "no")):
                grid_site("%s-%s-%s" % (function, short, gil), library, "site_" + function, size)
            grid_site("%s-%s-8thr" % (function, short), WITHOUT, "site_" + function, size, threads=8)
        grid_site(function + "-freed", WITHOUT, "site_" + function, sizes[-2], freed=True)


def give_back():
    for out, _, size, unmap in SITES.values():
        if unmap:
            WITHOUT.unmap(out, ctypes.c_long(len(out)), ctypes.c_size_t(size))
        else:
            WITH.give_back(out, ctypes.c_long(len(out)))
    SITES.clear()


def free_elsewhere():
    out, native, size, unmap = SITES["site_calloc"]
    WITH.free_by(ctypes.CDLL(None).free, out, ctypes.c_long(len(out)))
    for at in range(0, len(out), 2):
        out[at] = None


class Foreign:
    """Calls of the C library by ctypes itself: nobody's slot has these addresses."""
    ADDRESS = 0x50000000

    def __init__(self):
        self.library = ctypes.CDLL(None, use_errno=True)
        self.blocks, self.maps, self.sites = [], [], {}
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.malloc = self.function("malloc", pointer, size)
        self.calloc = self.function("calloc", pointer, size, size)
        self.realloc = self.function("realloc", pointer, pointer, size)
        self.posix_memalign = self.function("posix_memalign", number, pointer, size, size)
        self.aligned_alloc = self.function("aligned_alloc", pointer, size, size)
        self.free = self.function("free", None, pointer)
        self.mmap = self.function("mmap", pointer, pointer, size, number, number, number, ctypes.c_long)
        self.mremap = self.function("mremap", pointer, pointer, size, size, number)
        self.munmap = self.function("munmap", number, pointer, size)
        self.plain_malloc, self.plain_mmap = self.library["malloc"], self.library["mmap"]

    def function(self, name, answer, *arguments):
        found = self.library[name]
        found.restype, found.argtypes = answer, arguments
        return found

    def site(self, name, domain, size):
        bytes_, count, _ = self.sites.get(name, (0, 0, domain))
        self.sites[name] = (bytes_ + size, count + 1, domain)

    def allocate(self):
        self.sites = {}
        for _ in range(50):
            self.blocks.append(self.malloc(3000))  # SITE ctypes_malloc
            self.site("ctypes_malloc", "malloc", 3000)
            self.blocks.append(self.calloc(10, 500))  # SITE ctypes_calloc
            self.site("ctypes_calloc", "malloc", 5000)
            block = self.realloc(None, 200)
            self.blocks.append(self.realloc(block, 70000))  # SITE ctypes_realloc
            self.site("ctypes_realloc", "malloc", 70000)
            place = ctypes.c_void_p()
            self.posix_memalign(ctypes.addressof(place), 64, 700)  # SITE ctypes_posix_memalign
            self.site("ctypes_posix_memalign", "malloc", 700)
            self.blocks.append(place.value)
            self.blocks.append(self.aligned_alloc(64, 6400))  # SITE ctypes_aligned_alloc
            self.site("ctypes_aligned_alloc", "malloc", 6400)
            # Neither types of arguments nor one of the answer: what is left of that cannot be freed.
            self.plain_malloc(900)  # SITE ctypes_plain
            self.site("ctypes_plain", "malloc", 900)
        for _ in range(10):
            self.maps.append((self.mmap(None, 2 * MIB, 3, 0x22, -1, 0), 2 * MIB))  # SITE ctypes_mmap
            self.site("ctypes_mmap", "mmap", 2 * MIB)
            old = self.mmap(None, MIB, 3, 0x22, -1, 0)
            self.maps.append((self.mremap(old, MIB, 4 * MIB, 1), 4 * MIB))  # SITE ctypes_mremap
            self.site("ctypes_mremap", "mmap", 4 * MIB)

    def second(self):
        library = ctypes.CDLL(os.path.join(os.path.dirname(sys.argv[1]), "ffi.so"))
        out = (ctypes.c_void_p * 40)()
        library.site_second(self.malloc, out, ctypes.c_long(40), ctypes.c_size_t(6000))  # SITE second
        self.blocks += list(out)
        return {"sites": {"second": {"bytes": 40 * 6000, "count": 40, "file": HERE, "line": site_lines(HERE)["second"], "domain": "malloc"}}}

    def release(self):
        for block in self.blocks:
            self.free(block)
        for place, size in self.maps:
            if self.munmap(place, size) != 0:
                raise OSError("munmap")
        self.blocks, self.maps = [], []

    def wrong(self):
        """What such calls answer and leave in errno is what it always was."""
        wrong = []

        def expect(what, value, wanted):
            if value != wanted:
                wrong.append("%s is %r and not %r" % (what, value, wanted))

        failed = ctypes.c_void_p(-1).value
        ctypes.set_errno(0)
        expect("a mapping that is too large", self.mmap(None, 1 << 60, 3, 0x22, -1, 0), failed)
        expect("its errno", ctypes.get_errno(), 12)
        expect("an odd alignment", self.posix_memalign(ctypes.addressof(ctypes.c_void_p()), 3, 100), 22)
        expect("unmapping what is odd", self.munmap(1, 4096), -1)
        expect("its errno", ctypes.get_errno(), 22)
        # Answers and arguments that are narrower than a word, one argument too many, and one that is no integer.
        plain = self.plain_mmap
        for more in ((), (7,), (ctypes.c_double(1.5),)):
            expect("a mapping at an address", plain(self.ADDRESS, ctypes.c_uint(4096), ctypes.c_ubyte(3), ctypes.c_short(0x22),
                                                    ctypes.c_byte(-1), 0, *more), self.ADDRESS)
            expect("what is there", ctypes.string_at(self.ADDRESS, 4096), bytes(4096))
            expect("unmapping it", self.munmap(self.ADDRESS, 4096), 0)
        block = self.calloc(300, 10)
        expect("a fresh block", ctypes.string_at(block, 3000), bytes(3000))
        ctypes.memset(block, 7, 3000)
        block = self.realloc(block, 90000)
        expect("a moved block", ctypes.string_at(block, 3000), bytes(bytearray([7]) * 3000))
        expect("a block that is too large", self.realloc(block, (1 << 63) + 5), None)
        expect("what it was", ctypes.string_at(block, 3000), bytes(bytearray([7]) * 3000))
        self.free(block)
        self.free(None)
        return wrong

    def truth(self):
        lines = site_lines(HERE)
        return {"wrong": self.wrong(), "sites": {
            name: {"bytes": size, "count": count, "file": HERE, "line": lines[name], "domain": domain}
            for name, (size, count, domain) in self.sites.items()}}


class Loop(threading.Thread):
    def __init__(self):
        super().__init__()
        self.loads = 0
        self.ended = False

    def run(self):
        while not self.ended:
            library = ctypes.CDLL(sys.argv[3])
            library.churn(ctypes.c_long(3), ctypes.c_size_t(50))
            _ctypes.dlclose(library._handle)
            self.loads += 1


class Deep:
    """Threads whose frames take just more than half of a chunk of 16 KiB each, so that every call maps one. (With more, chunks would
    be larger: the interpreter adds room for 1,000 words.)"""
    LINE = 4
    SOURCE = """def deep(n, reached, end):
    if n == 0:
        return reached(), end.wait()
    deep(n - 1, reached, end)
    if reached is None:
        %s = None
""" % " = ".join("v%d" % n for n in range(1012))

    def __init__(self, depth):
        space = {}
        exec(compile(self.SOURCE, "deep.py", "exec"), space)
        deep = space["deep"]
        self.end, reached = threading.Event(), threading.Semaphore(0)
        start = threading.Barrier(8)

        def work():
            start.wait()
            deep(depth, reached.release, self.end)

        self.threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            reached.acquire()
        self.maps = [mmap.mmap(-1, 4 * MIB) for _ in range(2)]  # SITE site_module

    def truth(self, depth):
        module = site_lines(HERE)["site_module"]
        return {"threads": 8, "sites": [
            {"file": "deep.py", "line": self.LINE, "bytes": 8 * depth * 16384},
            {"file": HERE, "line": module, "bytes": 8 * MIB}]}

    def finish(self):
        self.end.set()
        for thread in self.threads:
            thread.join()
        for each in self.maps:
            each.close()


def truth():
    lines = site_lines(HERE)
    return {"sites": {
        name: {"bytes": size * len(out), "count": len(out), "sizes": {size: len(out)}, "function": name, "file": HERE,
               "line": lines[name], "domain": "mmap" if unmap else "malloc", "native": native}
        for name, (out, native, size, unmap) in SITES.items()}}


def main():
    commands = Commands()
    loop = deep = None
    foreign = Foreign()
    ready()
    while True:
        command, *rest = commands.next().split()
        if command == "EXIT":
            break
        if command == "GO":
            allocate()
            say("TRUTH", truth())
        elif command == "GRID":
            allocate_grid()
            say("TRUTH", {"sites": GRID})
        elif command == "FREE":
            give_back()
            say("TRUTH", truth())
        elif command == "DEEP":
            deep = Deep(int(rest[0]))
            say("TRUTH", deep.truth(int(rest[0])))
        elif command == "CTYPES":
            foreign.allocate()
            say("TRUTH", foreign.truth())
        elif command == "SECOND":
            say("TRUTH", foreign.second())
        elif command == "RETURN":
            deep.finish()
            say("DONE", {})
        else:
            if command == "CHURN":
                WITHOUT.churn(ctypes.c_long(int(rest[0])), ctypes.c_size_t(100))
                WITHOUT.vanish(ctypes.c_long(int(rest[0]) // 10), ctypes.c_size_t(100))
            elif command == "RELEASE":
                foreign.release()
            elif command == "COPY":
                WITHOUT.copy_address()
            elif command == "USE":
                WITHOUT.use_copy()
            elif command == "ELSEWHERE":
                free_elsewhere()
            elif command == "LOOP" and loop is None:
                loop = Loop()
                loop.start()
            elif command == "LOOP":
                loop.ended = True
                loop.join()
            say("DONE", {"loads": loop.loads if loop else 0})


main()
