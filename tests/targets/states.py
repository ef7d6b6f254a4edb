"""A process in a state that is hard on whoever comes from outside; one state a function below.

    python states.py STATE
    -> STATUS   <- STATUS {"steps", "wrong": [...]}     steps must go on, wrong stay empty
    -> GAP      <- GAP {"ms"}   the longest time that the main thread saw itself not running (states ticker… only)
    -> EXIT     <- DONE

Each state is a function that sets itself up and returns a step, which the main thread makes again and again; a step returns
what was wrong, or nothing. Where no other thread is needed there is none.
"""
import ctypes
import hashlib
import os
import select
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402

STATES, WRONG, GAP, KEEP = {}, [], [0.0], []
libc = ctypes.CDLL(None, use_errno=True)


def state(f):
    STATES[f.__name__] = f
    return f


def work(seed=3):
    return hash(tuple((str(i * seed), (i,) * (i % 5)) for i in range(300)))


WANT = work()


def check():
    return None if work() == WANT else "another result"


def thread(f, *args):
    t = threading.Thread(target=f, args=args, daemon=True)
    t.start()
    return t


def forever(f):
    def run():
        while True:
            f()
    return thread(run)


@state
def cpu():
    return check


@state
def sleep():
    return lambda: time.sleep(0.05)


@state
def wait_in_select():
    return lambda: select.select([], [], [], 0.05) and None


@state
def wait_in_poll():
    p = select.poll()
    return lambda: p.poll(50) and None


@state
def wait_in_epoll():
    p = select.epoll()
    KEEP.append(p)
    return lambda: p.poll(0.05) and None


@state
def wait_for_lock():
    lock = threading.Lock()
    lock.acquire()
    return lambda: lock.acquire(timeout=0.05) and "got it" or None


@state
def ticker():
    def step():
        last = time.perf_counter()
        end = last + 0.005
        while last < end:
            now = time.perf_counter()
            GAP[0] = max(GAP[0], now - last)
            last = now
    return step


@state
def ticker_beside_others():
    for _ in range(8):
        thread(threading.Event().wait)
    return ticker()


@state
def holds_the_gil():
    hold = ctypes.PyDLL(None).usleep
    return lambda: hold(200000) and None


@state
def native_malloc():
    # regcomp allocates some hundred blocks, without the GIL.
    def compile_expression():
        room = ctypes.create_string_buffer(512)
        if libc.regcomp(room, b"\\(a*b[c-z]\\|[0-9]\\{3,5\\}\\)*x", 0) == 0:
            libc.regfree(room)
    for _ in range(4):
        forever(compile_expression)
    return check


@state
def dlopen_loop():
    import _ctypes
    name = next(n for n in ("libnsl.so.1", "libutil.so.1", "librt.so.1", "libm.so.6", "libc.so.6") if try_open(n))
    forever(lambda: _ctypes.dlclose(_ctypes.dlopen(name, 2)))
    forever(lambda: _ctypes.dlclose(_ctypes.dlopen(name, 2)))
    return check


def try_open(name):
    try:
        ctypes.CDLL(name)
        return True
    except OSError:
        return False


@state
def five_hundred_threads():
    threading.stack_size(256 << 10)
    for _ in range(500):
        thread(threading.Event().wait)
    return check


@state
def threads_come_and_go():
    forever(lambda: thread(work).join())
    forever(lambda: thread(int).join())
    return check


@state
def timer_signals():
    count = [0]

    def handler(number, frame):
        count[0] += 1
        KEEP.append([bytes(n) for n in range(500, 530)])  # allocates wherever it comes
        del KEEP[:]
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)

    def step():
        before, end = count[0], time.monotonic() + 60
        while count[0] == before:
            if time.monotonic() > end:
                return "no signal for a minute"
            problem = check()
            if problem:
                return problem
    return step


@state
def finalizers_that_allocate():
    class Finalized(object):
        def __init__(self):
            self.me = self

        def __del__(self):
            self.more = [bytes(n) for n in range(600)]

    return lambda: [Finalized() for _ in range(20)] and check()


@state
def deep_recursion():
    sys.setrecursionlimit(12000)

    def down(n):
        return [n] if n == 0 else down(n - 1) + [n]

    return lambda: None if len(down(3000)) == 3001 else "another result"


@state
def small_stacks():
    threading.stack_size(32 << 10)

    def run():
        if sum(range(100)) != 4950:
            WRONG.append("small stack")
    forever(lambda: [t.join() for t in [thread(run) for _ in range(4)]])
    return check


@state
def wide_registers():
    # OpenSSL works in vector registers, without the GIL.
    data = bytes(bytearray(range(256))) * 4096
    want = hashlib.sha256(data).digest(), hashlib.sha512(data).digest()

    def digest():
        if (hashlib.sha256(data).digest(), hashlib.sha512(data).digest()) != want:
            WRONG.append("another digest")
    forever(digest)
    digest()
    return lambda: digest()


@state
def no_descriptor_left():
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    return check


@state
def closes_all_descriptors():
    return lambda: os.closerange(3, 300) or check()


@state
def locks_all_memory():
    if libc.mlockall(3) != 0:
        WRONG.append("mlockall: errno %d" % ctypes.get_errno())
    return check


@state
def real_time_priority():
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    return lambda: time.sleep(0.002) or check()


@state
def not_dumpable():
    libc.prctl(4, 0)  # PR_SET_DUMPABLE
    return check


@state
def subinterpreter():
    try:
        import _xxsubinterpreters as sub
    except ImportError:
        try:
            import _interpreters as sub
        except ImportError:
            return check
    one = sub.create()
    KEEP.append(one)
    script = "x = [str(n) * 3 for n in range(200)]"
    return lambda: (getattr(sub, "run_string", None) or sub.exec)(one, script) and None


@state
def faulthandler_on():
    import faulthandler
    faulthandler.enable()
    faulthandler.dump_traceback_later(3600)
    # Its thread is there at once, but begins by changing its mask: the C library blocks its own two signals until then.
    end = time.monotonic() + 60
    while any(starting(tid) for tid in os.listdir("/proc/self/task")) and time.monotonic() < end:
        time.sleep(0.001)
    return check


def starting(tid):
    with open("/proc/self/task/%s/status" % tid) as f:
        mask = next(line for line in f if line.startswith("SigBlk"))
    return int(mask.split()[1], 16) >> 31 & 3 != 0


@state
def tracemalloc_on():
    import tracemalloc
    tracemalloc.start()
    return check


def native(name):
    """A library of tests/targets/*.c that the test has built."""
    return ctypes.CDLL(os.path.join(os.environ["NATIVE"], name + ".so"))


@state
def native_handler_allocates():
    # A handler in C that asks Python's raw domain for memory, wherever it comes, while the main thread does the same all the
    # time. The domain's own allocator, which both reach in the end, is fit for that.
    lib = native("handler")
    lib.start(500)

    def step():
        wrong = lib.work(2000)
        return "%d blocks were overwritten" % wrong if wrong else None
    KEEP.append(lib)
    return step


@state
def live_tiles_and_vectors():
    # All vector registers, and the tiles of AMX where there are any, hold known values most of the time.
    lib = native("registers")
    lib.check.argtypes = [ctypes.c_long]

    def compare():
        if lib.check(2000):
            WRONG.append("a register has changed")
    for _ in range(2):
        forever(compare)
    return compare


@state
def alternate_signal_stack():
    # The handler runs there, in C and for most of the time: faulthandler's is installed by the interpreter in each thread.
    lib = native("handler")
    if lib.start_on_own_stack(200) != 0:
        WRONG.append("sigaltstack")
    return check


# ---- what must be refused -------------------------------------------------------------------------------------------
def seccomp(program):
    """Puts the calling thread under a filter: (code, jt, jf, k) each."""
    class Filter(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]

    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Filter))]

    array = (Filter * len(program))(*program)
    argument = Program(len(program), array)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if libc.prctl(22, 2, ctypes.byref(argument)) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        WRONG.append("seccomp: errno %d" % ctypes.get_errno())


def for_call(number, result, argument=None, mask=0):
    """Gives `result` for a call (with any bit of `mask` in its argument), allows all else."""
    if argument is None:
        return [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, result), (0x06, 0, 0, 0x7fff0000)]
    return [(0x20, 0, 0, 0), (0x15, 0, 3, number), (0x20, 0, 0, 16 + 8 * argument), (0x45, 0, 1, mask),
            (0x06, 0, 0, result), (0x06, 0, 0, 0x7fff0000)]


@state
def seccomp_that_matters_not():
    seccomp(for_call(101, 0x80000000))  # kill for ptrace
    return check


@state
def seccomp_errno():
    seccomp(for_call(10, 0x00050001, 2, 4))  # EPERM for mprotect with PROT_EXEC
    return check


@state
def seccomp_trap():
    seccomp(for_call(127, 0x00030000))  # SIGSYS for rt_sigpending
    return check


@state
def seccomp_kill():
    seccomp(for_call(9, 0x80000000, 3, 0x100000))  # kill for mmap with MAP_FIXED_NOREPLACE
    return check


@state
def syscall_user_dispatch():
    selector = ctypes.create_string_buffer(1)
    KEEP.append(selector)
    if libc.prctl(59, 1, 0, 0, selector) != 0:
        WRONG.append("prctl: errno %d" % ctypes.get_errno())
    return check


@state
def address_space_exhausted():
    import resource
    with open("/proc/self/statm") as f:
        used = int(f.read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20),) * 2)
    return check


@state
def stopped():
    step = check
    thread(lambda: (time.sleep(0.1), os.kill(os.getpid(), signal.SIGSTOP)))
    return step


@state
def blocked_in_vfork():
    # posix_spawn waits, uninterruptibly and with the GIL, until its child has opened the FIFO.
    fifo = os.environ["FIFO"]

    def step():
        pid = os.posix_spawn("/bin/true", ["true"], os.environ,
                             file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
        os.waitpid(pid, 0)
        return None
    return step


@state
def shutting_down():
    # The interpreter is finalizing and waits for an object to be finalised.
    class Last(object):
        def __del__(self, read=os.read, write=os.write):
            write(1, b"SHUTDOWN\n")
            read(0, 100)
            write(1, b"DONE\n")
    last = Last()
    last.me = last

    def step():
        # Past the last command: main() returns, and the interpreter's last collection finds the object.
        return "end"
    sys.modules["pyheap_last"] = last
    return step


def main():
    commands = Commands()
    step = STATES[sys.argv[1]]()
    steps = 0
    ready()
    if sys.argv[1] == "shutting_down":
        return
    while True:
        problem = step()
        if problem:
            WRONG.append(str(problem))
        steps += 1
        # Without an object that makes a descriptor, since there may be none left.
        if not select.select([0], [], [], 0)[0]:
            continue
        command = commands.next()
        if command == "STATUS":
            say("STATUS", {"steps": steps, "wrong": WRONG[:5]})
        elif command == "GAP":
            say("GAP", {"ms": GAP[0] * 1000})
            GAP[0] = 0.0
        else:
            break
    if sys.argv[1] == "timer_signals":
        signal.setitimer(signal.ITIMER_REAL, 0)
    say("DONE")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
