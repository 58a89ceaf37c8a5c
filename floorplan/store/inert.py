"""What stands in a file beside weights, and is neither a tensor nor a layer: read as nothing.

argparse.Namespace(lr=0.1)   ->   a Nothing, made without importing or calling anything
AttributeDict, defaultdict   ->   a plain dict or list of what the file puts in, such as hyperparameters

torch's safe reader puts items into plain dicts and lists alone, so a pass over the opcodes tells first which of
the file's classes are filled with items.
"""

import pickletools
from collections.abc import Iterator
from typing import Any, BinaryIO

from floorplan.errors import LoadError
from floorplan.store.admit import modern

# What no checkpoint needs: a file that names one of these is refused whatever else it holds.
_HARMFUL = frozenset(
    """_frozen_importlib _io _posixsubprocess _socket _thread asyncio bdb cgi code codeop commands compileall cProfile
    ctypes dbm distutils ensurepip ftplib gc glob http idlelib imaplib importlib inspect io linecache marshal mmap
    multiprocessing nt ntpath os pdb pickle pip pipes pkgutil popen2 poplib posix posixpath profile pty pydoc runpy
    setuptools shelve shutil signal site smtplib socket socketserver sqlite3 ssl subprocess sys sysconfig tarfile
    telnetlib tempfile test threading timeit trace unittest urllib venv webbrowser winreg xmlrpc zipfile zipimport
    zipapp zoneinfo""".split()
)
_HARMFUL_BUILTINS = frozenset("__import__ breakpoint compile eval exec execfile file input open".split())
_ITEMS = {"SETITEM": dict, "SETITEMS": dict, "APPEND": list, "APPENDS": list}
_MARK = object()


class Nothing:
    """In the place of an object of the file; it takes what the file puts into it, and drops it."""

    def __init__(self, refusal: LoadError) -> None:
        self.refusal = refusal  # why it was not read

    def __setstate__(self, state: object) -> None:
        """Drop what the object held."""


class Inert:
    """In the place of a class or function that a file names: calling or making it gives an empty object."""

    def __init__(self, refusal: LoadError, filled: type | None) -> None:
        self.refusal, self.filled = refusal, filled
        self.made: list[Any] = []  # held, so that nothing else gets their ids
        # The unpickler makes objects by cls.__new__(cls, *args): this is found before object's.
        self.__dict__["__new__"] = self

    def __call__(self, *_: object) -> Any:
        self.made.append(Nothing(self.refusal) if self.filled is None else self.filled())
        return self.made[-1]


def is_harmful(name: str) -> bool:
    """Whether a global runs programs or code, or reaches files or the network: nothing that stands beside weights."""
    root, _, rest = name.partition(".")
    return root in _HARMFUL or (root == "builtins" and rest in _HARMFUL_BUILTINS)


def filled_with_items(pickled: BinaryIO) -> dict[str, type]:
    """Global -> dict or list, for those whose objects get items from this pickle; read from its opcodes alone."""
    found: dict[str, type] = {}
    try:
        for name, kind in _filled(pickled):
            found[name] = kind
    except (IndexError, KeyError, ValueError):
        pass  # damaged: the reader says so
    return found


def _filled(pickled: BinaryIO) -> Iterator[tuple[str, type]]:
    """A machine whose values are the names of globals, and of what was made from them."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for op, arg, _ in pickletools.genops(pickled):
        if op.name == "GLOBAL":
            stack.append(("global", modern(str(arg))))
        elif op.name == "MARK":
            stack.append(_MARK)
        elif "PUT" in op.name:
            memo[arg] = stack[-1]
        elif "GET" in op.name:
            stack.append(memo[arg])
        else:
            before = len(op.stack_before)
            if pickletools.markobject in op.stack_before:
                at = len(stack) - 1 - stack[::-1].index(_MARK)
                before = len(stack) - at + op.stack_before.index(pickletools.markobject)
            taken = stack[len(stack) - before :]
            del stack[len(stack) - before :]
            made: Any = taken[0] if taken else None
            if op.name in ("REDUCE", "NEWOBJ"):
                made = ("made", made[1]) if isinstance(made, tuple) else None
            elif op.name in _ITEMS:
                if isinstance(made, tuple) and made[0] == "made":
                    yield made[1], _ITEMS[op.name]
            elif op.name != "BUILD":
                made = None
            stack += [made] * len(op.stack_after)
