"""Compiles the standard library and prints what Python itself says of every code object.

Arguments: the number of modules. One line a code object:

    code ID FIRSTLINE NAME QUALNAME FILENAME START:END:LINE ...

Names are UTF-8 in hex, QUALNAME is "-" where there is none; START and END are bytes of bytecode, LINE is "-" for none.
Then "ready"; the code objects stay alive until the process is killed.
"""
import dis
import os
import sys
import types

KEEP = []


def text(s):
    """A lone surrogate cannot be UTF-8: it becomes U+FFFD. Long strings are cut, with a mark."""
    if len(s) > 4096:
        s = s[:4096] + "\u2026"
    s = "".join("\ufffd" if 0xD800 <= ord(c) <= 0xDFFF else c for c in s)
    return s.encode("utf-8").hex() or "''"


def ranges(code):
    if hasattr(code, "co_lines"):
        for start, end, line in code.co_lines():
            yield start, end, line
    else:
        end = len(code.co_code)
        starts = list(dis.findlinestarts(code)) + [(end, None)]
        # Bytecode before the first entry belongs to the first line.
        if starts[0][0] > 0:
            yield 0, starts[0][0], code.co_firstlineno
        for (start, line), (after, _) in zip(starts, starts[1:]):
            yield start, after, line


def tell(code):
    KEEP.append(code)
    fields = [
        "code",
        str(id(code)),
        str(max(code.co_firstlineno, 0)),
        text(code.co_name),
        text(code.co_qualname) if hasattr(code, "co_qualname") else "-",
        text(code.co_filename),
    ]
    for start, end, line in ranges(code):
        fields.append("%d:%d:%s" % (start, end, "-" if line is None else line))
    out.write(" ".join(fields) + "\n")
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            tell(const)


out = os.fdopen(1, "w")
wanted = int(sys.argv[1])
# Where os is frozen it has no __file__.
library = next(p for p in sys.path if os.path.exists(os.path.join(p, "argparse.py")))
paths = []
for folder, folders, files in os.walk(library):
    folders[:] = sorted(d for d in folders if d not in ("test", "tests", "site-packages", "dist-packages", "lib2to3"))
    paths += [os.path.join(folder, f) for f in sorted(files) if f.endswith(".py")]
step = max(1, len(paths) // wanted)
for path in paths[::step]:
    try:
        with open(path, "rb") as f:
            tell(compile(f.read(), path, "exec", dont_inherit=True))
    except (SyntaxError, ValueError):
        pass


class Text(str):
    """Not compact, and not of the type str itself."""


def rename(code, **names):
    """A copy with other names."""
    if hasattr(code, "replace"):
        return code.replace(**names)
    fields = "argcount kwonlyargcount nlocals stacksize flags code consts names varnames filename name firstlineno lnotab"
    fields = ["co_" + field for field in (fields + " freevars cellvars").split()]
    return types.CodeType(*[names.get(field, getattr(code, field)) for field in fields])


def f(x):
    return x + (
        1)


base = f.__code__
ODD = [
    "caf\xe9", "\u6587\u4ef6", "a\U0001f600b", "\udcff\udc80.py", "\U0001f600\ud800", "x" * 10000,
    "\u6587" * 4096, "\u6587" * 4097, "a\x00b", "\x7f\x80\xff",
]
for name in ODD:
    tell(rename(base, co_name=name, co_filename=name + "!"))
for name in ("ascii", "caf\xe9", "\u6587", "\U0001f600"):
    code = rename(base, co_name=Text(name), co_filename=Text(name))
    assert type(code.co_filename) is Text
    tell(code)
exec(compile("def caf\xe9():\n" + "\n" * 300 + "  def \u6587():\n    x = [1,\n" + "0,\n" * 200 + " y]\n", "odd.py", "exec"))
tell(globals()["caf\xe9"].__code__)
out.write("ready\n")
out.flush()
sys.stdin.read(1)
