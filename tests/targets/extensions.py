"""Memory that extension modules of real packages keep, by plain malloc.

    python extensions.py CASE

    -> GO N     keep N more            <- TRUTH {"sites": {...}, "malloc": bytes that malloc has given out in between, if it tells}
    -> EXIT

CASE     numpy        arrays that are kept: their data is malloc's before numpy 2.5
         selectolax   0.3.13: a parser's selectors are never given back (its issue 90)
         tokenizers   0.19.1: a model's cache keeps each text that it has seen, in calls that release the GIL (its issue 1539)
         library      mappings by a C library's function that ctypes calls (LIBRARY, native.c, in the environment), for scripts/native-leaks
         ctypes       mappings by ctypes itself

TRUTH's sites are as in accuracy.py, with "domain"; "sizes" only where it is known.
"""
import ctypes
import os
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say, site_lines  # noqa: E402

HERE = os.path.abspath(__file__)
KEPT = []
PAGE = "<div>" + '<p class="x">hello <b>world</b></p>' * 30 + "</div>"


class Info(ctypes.Structure):
    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def given_out():
    """What malloc has given out, of all its arenas; None where it does not tell."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    ask.restype = Info
    info = ask()
    return info.uordblks + info.hblkhd


def numpy_case():
    import numpy

    def work(count):
        for _ in range(count):
            KEPT.append(numpy.ones(1000))  # SITE ones
        for _ in range(count // 8):
            KEPT.append(numpy.zeros((10, 1000)))  # SITE zeros
        KEPT.append(numpy.empty(count * 1000))  # SITE empty

    return work, lambda count: {"ones": (8000, count), "zeros": (80000, count // 8), "empty": (8000 * count, 1)}


def selectolax_case():
    from selectolax.lexbor import LexborHTMLParser

    def work(count):
        for _ in range(count):
            LexborHTMLParser(PAGE).css("p")  # SITE parse

    return work, lambda count: {"parse": None}


def tokenizers_case():
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer, models
    letters = {chr(97 + i): i for i in range(26)}
    tokenizer = Tokenizer(models.BPE(vocab=dict(letters, ab=26), merges=[("a", "b")]))
    seen = [0]

    def encode(count):
        for _ in range(count):
            seen[0] += 1
            text = "".join(chr(97 + (seen[0] >> (i % 16)) % 26) for i in range(4000))
            tokenizer.encode_batch([text])  # SITE encode

    def work(count):
        thread = threading.Thread(target=encode, args=(count,), name="tokenizer")
        thread.start()
        thread.join()

    return work, lambda count: {"encode": None}


def library_case():
    library = ctypes.CDLL(os.environ["LIBRARY"])

    def work(count):
        size = 2 << 20
        for _ in range(count):
            out = (ctypes.c_void_p * 1)()
            library.site_mmap(out, ctypes.c_long(1), ctypes.c_size_t(size))  # SITE map
            # What nobody touches is no growth of the process.
            ctypes.memset(out[0], 1, size)

    return work, lambda count: {"map": (2 << 20, count)}


def ctypes_case():
    # Looked up once, long before anybody attaches.
    call = ctypes.CDLL(None).mmap
    call.restype, call.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]

    def work(count):
        size = 2 << 20
        for _ in range(count):
            place = call(None, size, 3, 0x22, -1, 0)  # SITE call
            ctypes.memset(place, 1, size)

    return work, lambda count: {"call": (2 << 20, count)}


def main():
    case = sys.argv[1]
    work, kept = globals()[case + "_case"]()
    lines = site_lines(HERE)
    # What is loaded and made once.
    work(8)
    ready()
    commands = Commands()
    while True:
        command, *rest = commands.next().split()
        if command == "EXIT":
            break
        before = given_out()
        work(int(rest[0]))
        after = given_out()
        sites = {}
        for name, known in kept(int(rest[0])).items():
            site = {"file": HERE, "line": lines[name], "domain": "mmap" if case in ("library", "ctypes") else "malloc"}
            if known:
                site.update(sizes={known[0]: known[1]}, bytes=known[0] * known[1], count=known[1])
            sites[name] = site
        say("TRUTH", {"sites": sites, "malloc": None if before is None else after - before})


main()
