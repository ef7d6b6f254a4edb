"""Knows its own heap: objects of many kinds, counted by itself.

    -> MAKE N   make some 30 * N objects, N of the main kinds      <- MADE
    -> COUNT    count everything, as a census should               <- TRUTH {TYPE: [OBJECTS, TRACKED, BYTES]}
    -> CHURN    make and drop objects at full speed from now on, with the collector at work     <- CHURNING
    -> BREAK    break lists, sizes, tables and types on purpose     <- BROKEN
    -> PLANT    keep objects in seven ways                      <- PLANTED
    -> EXIT

The truth is `gc.get_objects()` and all that these refer to, as `gc.get_referents` says, and all keys of dicts, with `sys.getsizeof`. While it is
found out the collector is off, so what is there afterwards is what was counted, but for the answer.
"""
import array
import bisect
import collections
import functools
import gc
import itertools
import os
import sys
import threading
import weakref

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402


class Plain(object):
    def __init__(self, i):
        self.number = 100000 + i
        self.text = "text %d" % i


class Slotted(object):
    __slots__ = ("a", "b", "__weakref__")

    def __init__(self, i):
        self.a = "slot %d" % i
        self.b = float(i)


class MyDict(dict):
    pass


class MyList(list):
    __slots__ = ("extra",)


class MyStr(str):
    pass


class MyInt(int):
    pass


class MyFloat(float):
    pass


class MyBytes(bytes):
    pass


class MyTuple(tuple):
    pass


class MySet(set):
    pass


class Meta(type):
    pass


class Outer(object):
    class Inner(object):
        pass


Made = Meta("Made", (object,), {"x": "y"})
Point = collections.namedtuple("Point", "x y")


def generator(i):
    local = "local %d" % i
    yield local
    yield i


def closure(i):
    cell = "cell %d" % i

    def inner():
        return cell

    return inner


def with_attribute(objects, name):
    for i, each in enumerate(objects):
        each.attribute = "%s attribute %d" % (name, i)
    return objects


def rotated():
    queue = collections.deque("r%d" % j for j in range(300))
    for _ in range(200):
        queue.popleft()
    return queue


def with_holes():
    table = dict(("hole %d" % i, i + 10 ** 6) for i in range(1000))
    for i in range(0, 1000, 2):
        del table["hole %d" % i]
    return table


def make(n):
    few = range(max(n // 10, 1))
    kept = {}
    kept["plain"] = [Plain(i) for i in range(n)]
    kept["slotted"] = [Slotted(i) for i in range(n)]
    kept["inner"] = [Outer.Inner() for i in few]
    kept["mydict"] = with_attribute([MyDict({i: "v%d" % i}) for i in few], "dict")
    kept["mylist"] = [MyList([i, "w%d" % i]) for i in few]
    for i, each in enumerate(kept["mylist"]):
        each.extra = "extra %d" % i
    for kind in (MyStr, MyInt, MyFloat):
        kept[kind.__name__] = with_attribute([kind(100000 + i) for i in few], kind.__name__)
    kept["mybytes"] = with_attribute([MyBytes(b"x" * i) for i in few], "bytes")
    kept["mytuple"] = with_attribute([MyTuple((i, "tuple %d" % i)) for i in few], "tuple")
    kept["myset"] = with_attribute([MySet((i, "set %d" % i)) for i in few], "set")
    kept["points"] = [Point("x%d" % i, 1e9 + i) for i in few]
    kept["sets"] = [set("element %d %d" % (i, j) for j in range(i % 20)) for i in few]
    kept["frozen"] = [frozenset("frozen %d %d" % (i, j) for j in range(i % 20)) for i in few]
    kept["dicts"] = [dict(("k%d" % j, "d%d %d" % (i, j)) for j in range(i % 30)) for i in few]
    kept["ordered"] = [collections.OrderedDict(("k%d" % j, "o%d %d" % (i, j)) for j in range(i % 30)) for i in few]
    kept["defaults"] = [collections.defaultdict(list, {i: [i]}) for i in few]
    kept["counter"] = collections.Counter("c%d" % i for i in range(n))
    kept["deques"] = [collections.deque("q%d %d" % (i, j) for j in range(i % 200)) for i in few]
    kept["rotated"] = rotated()
    kept["arrays"] = [array.array("d", [1.0] * i) for i in few]
    kept["bytearrays"] = [bytearray(b"a" * i) for i in few]
    kept["integers"] = [10 ** i for i in range(200)] + [-(10 ** i) for i in range(200)]
    kept["strings"] = [c * i for i in range(100) for c in (u"\u20ac", u"\xe9", u"\U0001f600")]
    kept["generators"] = [generator(i) for i in few]
    for each in kept["generators"]:
        next(each)
    kept["closures"] = [closure(i) for i in few]
    kept["partials"] = [functools.partial(closure, "partial %d" % i) for i in few]
    kept["weak"] = [weakref.ref(each) for each in kept["slotted"][: len(few)]]
    kept["exceptions"] = [ValueError("error %d" % i) for i in few]
    kept["types"] = [type("Dynamic%d" % (i % 3), (object,), {"value": "dynamic %d" % i}) for i in range(30)]
    kept["holes"] = with_holes()
    kept["complex"] = [complex(i, i) for i in range(100)]
    kept["iterators"] = [iter([str(i)]) for i in range(100)] + [itertools.chain(["chain"]) for i in range(50)]
    kept["made"] = [Made() for i in range(100)]
    kept["methods"] = [kept["plain"][0].__init__ for i in range(100)]
    kept["slices"] = [slice("s%d" % i, None) for i in range(100)]
    kept["properties"] = [property(closure) for i in range(100)]
    kept["threads"] = [thread_with_objects() for _ in range(2)]
    return kept


def thread_with_objects():
    """What a thread that is over has made: without the GIL its memory is abandoned."""
    made = []
    thread = threading.Thread(target=lambda: made.extend([Plain(i), Slotted(i)] for i in range(500)))
    thread.start()
    thread.join()
    return made


def name_of(kind):
    name = getattr(kind, "__qualname__", kind.__name__)
    module = kind.__module__
    return name if module == "builtins" or not isinstance(module, str) else module + "." + name


MEMORY = os.open("/proc/self/mem", os.O_RDWR)
HEAP_TYPE = 1 << 9
WORD = 8
# What a word of an object's fixed part leads to here, `gc.get_referents` does not tell.
UNTOLD = {type, type(make.__code__), type(object.__repr__), type(str.join), type(type.__dict__["__dict__"]), type(len)}
UNTOLD |= {type(Slotted.__dict__["a"]), type(dict.__dict__["fromkeys"])}


def words(address, count):
    """Words of this process's memory; none where there is no memory."""
    try:
        found = os.pread(MEMORY, count * WORD, address)
    except (OSError, OverflowError):
        return ()
    return tuple(memoryview(found).cast("P")) if len(found) == count * WORD else ()


def type_place():
    """Where an object has its type: the second word, without the GIL the fourth."""
    return words(id(make), 8).index(id(type(make)))


def writable():
    """Where objects may be: a word that leads to the program's constants leads to no object."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if line.split()[1].startswith("rw")]
    return [int(each, 16) for both in ranges for each in both]


def object_at(address):
    """The object there: it is put into a list by hand for a moment."""
    box = [None]
    place = words(id(box), type_place() + 3)[-1]
    os.pwrite(MEMORY, address.to_bytes(WORD, sys.byteorder), place)
    found = box[0]
    os.pwrite(MEMORY, id(None).to_bytes(WORD, sys.byteorder), place)
    return found


def untold(each, seen, kinds):
    """Objects that `each` refers to by a word of its fixed part: those whose type is one, and is counted by now."""
    size = type(each).__basicsize__
    if isinstance(each, type) and not each.__flags__ & HEAP_TYPE:
        size = type.__sizeof__(each)
    for word in words(id(each), size // WORD)[kinds["place"] + 1:]:
        if word < 4096 or word % WORD or word in seen or bisect.bisect(kinds["memory"], word) % 2 == 0:
            continue
        head = words(word, kinds["place"] + 1)
        # A count of references that is one: in what is free, a link to the next is there. Builds without the GIL have it in two places.
        is_counted = head and (any(head[:-1]) if len(head) > 2 else head[0] % 2 ** 32 and not head[0] >> 32 & 0xFFFF)
        if is_counted and head[-1] in kinds:
            found = object_at(word)
            # All that the collector has was seen before (3.12 has some tuples elsewhere): what only says that it has it, has been freed.
            if not gc.is_tracked(found) or isinstance(found, tuple):
                yield found


def count():
    """All objects: of the collector, what `gc.get_referents` says that they refer to, what else is in code objects, types and
    descriptors, and the types of all."""
    gc.collect()
    tracked = gc.get_objects()
    seen = {}
    for each in tracked:
        seen[id(each)] = None
    rows = {}
    todo = list(tracked)
    kinds = {"place": type_place(), "memory": writable()}
    ours = {id(each) for each in (tracked, seen, rows, todo, kinds, kinds["memory"])}
    ours.add(id(ours))
    late = []
    ours.add(id(late))
    # The collector does not tell of the variables of running calls.
    caller = sys._getframe().f_back
    while caller:
        for each in caller.f_locals.values():
            if id(each) not in seen:
                seen[id(each)] = None
                todo.append(each)
        caller = caller.f_back
    while todo or late:
        if not todo:
            # Now their types are known.
            for each in late:
                for other in untold(each, seen, kinds):
                    seen[id(other)] = None
                    todo.append(other)
            del late[:]
            continue
        each = todo.pop()
        if id(each) in ours:
            continue
        row = rows.get(type(each))
        if row is None:
            row = rows[type(each)] = [0, 0, 0]
            ours.add(id(row))
            kinds[id(type(each))] = None
        row[0] += 1
        # Not by the list: 3.12 puts the tuples of its own types aside, where `gc.get_objects()` does not look.
        row[1] += gc.is_tracked(each)
        try:
            row[2] += sys.getsizeof(each)
        except TypeError:
            pass
        referents = gc.get_referents(each)
        referents.append(type(each))
        if isinstance(each, dict):
            # It tells of keys only if one of them is no string.
            referents += list(dict.keys(each))
        if type(each) in UNTOLD or isinstance(each, type):
            late.append(each)
        for other in referents:
            if id(other) not in seen:
                seen[id(other)] = None
                todo.append(other)
    sums = {}
    for kind, row in rows.items():
        old = sums.setdefault(name_of(kind), [0, 0, 0])
        for i in range(3):
            old[i] += row[i]
    return sums


def churn():
    recent = collections.deque(maxlen=5000)
    i = 0
    while True:
        recent.append([Plain(i), {"a": i, "b": [str(i)]}, (i, float(i))])
        i += 1


class ByGlobal(Plain):
    pass


class ByCell(Plain):
    pass


class ByCall(Plain):
    pass


class ByCache(Plain):
    pass


class ByClass(Plain):
    pass


class ByLocal(Plain):
    pass


class ByC(object):
    """No list, no attributes of their own: only a count of references says that somebody has them."""
    __slots__ = ("text", "itself")


class Registry(object):
    items = []


planted = []
cached = functools.lru_cache(maxsize=None)(lambda i: ByCache(i))
of_thread = threading.local()


def with_cell():
    cell = [ByCell(i) for i in range(300)]

    def handler():
        return cell

    return handler


def waiting_call(ready_event):
    mine = [ByCall(i) for i in range(300)]
    ready_event.set()
    threading.Event().wait()
    return mine


def hold_from_c(objects):
    """A reference that nobody has: as that of a module in C which has lost it."""
    for each in objects:
        # Without the GIL: `ob_ref_shared`, above its two flags.
        place, step = (16, 4) if has_no_gil() else (0, 1)
        count = int.from_bytes(os.pread(MEMORY, 8, id(each) + place), sys.byteorder)
        os.pwrite(MEMORY, (count + step).to_bytes(8, sys.byteorder), id(each) + place)


def has_no_gil():
    return not getattr(sys, "_is_gil_enabled", lambda: True)()


handler = None


def plant():
    global handler
    planted.append({"sessions": [ByGlobal(i) for i in range(300)]})
    handler = with_cell()
    event = threading.Event()
    thread = threading.Thread(target=waiting_call, args=(event,))
    thread.daemon = True
    thread.start()
    event.wait()
    for i in range(300):
        cached(i)
    Registry.items.extend(ByClass(i) for i in range(300))
    of_thread.kept = [ByLocal(i) for i in range(300)]
    hold_from_c([ByC() for _ in range(300)])


def put(address, value):
    import ctypes
    ctypes.c_uint64.from_address(address).value = value & (1 << 64) - 1


def break_all():
    """What a program with a wild pointer does to itself. The collector must never run again."""
    lists = [[i, "list %d" % i] for i in range(100)]
    strings = ["string %d" % i for i in range(100)]
    tables = [{"key %d" % i: i} for i in range(100)]
    sets = [{i, str(i)} for i in range(100)]
    plain = [Plain(i) for i in range(1000)]
    wild = [0, 1, 8, -1, 1 << 20, 1 << 40, 1 << 47, 1 << 62, id(lists), id(strings[0]), 0x7FFFFFFFFFF8]
    for i, value in enumerate(wild):
        put(id(lists[i]) + 16, value)           # ob_size
        put(id(lists[10 + i]) + 24, value)      # ob_item
        put(id(lists[30 + i]) + 32, value)      # allocated
        put(id(strings[i]) + 16, value)         # length
        put(id(strings[20 + i]) + 8, value)     # ob_type
        put(id(tables[i]) + 32, value)          # ma_keys
        put(id(tables[20 + i]) + 40, value)     # ma_values
        put(id(sets[i]) + 32, value)            # mask
        put(id(sets[20 + i]) + 40, value)       # table
        put(id(plain[i]) + 8, value)            # ob_type
        put(id(plain[100 + 7 * i]) - 16, value)  # _gc_next
    put(id(lists[50]) - 16, id(lists[50]) - 16)     # A ring of its own.
    return [lists, strings, tables, sets, plain]


def main():
    gc.disable()
    commands = Commands()
    kept = []
    ready()
    while True:
        words = commands.next().split()
        if words[0] == "MAKE":
            kept.append(make(int(words[1])))
            say("MADE")
        elif words[0] == "COUNT":
            say("TRUTH", count())
            gc.collect()
        elif words[0] == "CHURN":
            gc.enable()
            thread = threading.Thread(target=churn)
            thread.daemon = True
            thread.start()
            say("CHURNING")
        elif words[0] == "PLANT":
            plant()
            say("PLANTED")
        elif words[0] == "BREAK":
            kept.append(break_all())
            say("BROKEN")
        else:
            os._exit(0)


main()
