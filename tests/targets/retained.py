"""Knows what each of its objects retains: found out by doing without it.

    <- READY
    -> NODES   <- NODES {"types": {NAME: BYTES}, "objects": [[ADDRESS, BYTES]]}
    -> HOLD DIR   keep objects by the C module in DIR     <- HELD {TYPE: [OBJECTS, BYTES]}
    -> EXIT

A web of lists, dicts, tuples and objects of two classes with links here and there, held by three variables of the module. What an object
retains is what can be reached from these variables, less what can still be reached when it is left out.
"""
import gc
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Commands, ready, say  # noqa: E402


class Node(object):
    __slots__ = ("links", "name", "number")

    def __init__(self, i):
        self.links = []
        self.name = "node %d of the web" % i
        self.number = 10 ** 6 + i


class Special(Node):
    __slots__ = ("table",)


def web(number, size):
    """Nodes with links to others, some through dicts and tuples."""
    dice = random.Random(number)
    nodes = [(Special if dice.random() < 0.2 else Node)(i) for i in range(size)]
    for i, node in enumerate(nodes[1:], 1):
        # A tree at first, so that all hang together; then links that share.
        nodes[dice.randrange(i)].links.append(node)
    for _ in range(size // 3):
        dice.choice(nodes).links.append((dice.choice(nodes), "a pair %d" % dice.randrange(10 ** 9)))
    for node in nodes:
        if type(node) is Special:
            node.table = {"key %d" % i: dice.choice(nodes) for i in range(dice.randrange(4))}
    return nodes


def referents(each):
    """All that it refers to, but its class, which is held elsewhere."""
    found = [other for other in gc.get_referents(each) if not isinstance(other, type)]
    if isinstance(each, dict):
        found += list(dict.keys(each))
    return found


def reach(roots, without):
    seen, todo = {}, [each for each in roots if id(each) not in without]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = sys.getsizeof(each)
        todo.extend(other for other in referents(each) if id(other) not in without)
    return seen


def retained(without):
    """Bytes that are not reached any more without these; small numbers and the like are not in the web."""
    left = reach([first, second, third], without)
    return sum(size for address, size in everything.items() if address not in left)


def answer(objects):
    global everything
    everything = reach([first, second, third], ())
    dice = random.Random(5)
    picked = dice.sample(objects, 5)
    types = {}
    for kind in (Node, Special):
        types["__main__." + kind.__name__] = retained({id(each) for each in objects if type(each) is kind})
    result = {
        "types": types,
        "objects": [[id(each), retained({id(each)})] for each in picked + [first, second, third]],
    }
    everything = None
    return result


def hold(directory):
    """Objects that only a module in C has: with a dict, without, known to the collector and not."""
    sys.path.insert(0, directory)
    import holder
    sizes = {}
    for i in range(200):
        for each in (Held(i), "a string that only C has %d" % i, 2.0 ** 40 + i, (i + 10 ** 6, "in a tuple %d" % i)):
            holder.keep(each)
            row = sizes.setdefault(type(each).__name__, [0, 0])
            row[0] += 1
            row[1] += sys.getsizeof(each)
    return sizes


class Held(object):
    __slots__ = ("number",)

    def __init__(self, i):
        self.number = i


everything = None
first = second = third = None


def make():
    global first, second, third
    nodes = web(1, 2000)
    # The second and the third have a part of it in common.
    first, second, third = [nodes[0]], {"some %d" % len(nodes): nodes[5:9]}, (nodes[7], nodes[200], "only %d here" % len(nodes))
    return nodes


def main():
    gc.disable()
    told = answer(make())
    gc.collect()
    commands = Commands()
    ready()
    while True:
        words = commands.next().split(None, 1)
        if words[0] == "NODES":
            say("NODES", told)
        elif words[0] == "HOLD":
            say("HELD", hold(words[1]))
        else:
            os._exit(0)


main()
