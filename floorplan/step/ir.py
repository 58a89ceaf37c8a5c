"""Straight-line code: names, instructions on named values, their last uses, and the text they become.

    z = conv_site(x, s1, None)          z's buffer is new and the step owns it
    z_1 = act_(z)                       may overwrite z if nothing reads z afterwards
    del z                               every name goes at its last use

What an instruction may overwrite is decided here, from liveness alone.
"""

import builtins
import keyword
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from networkx.utils import UnionFind

from floorplan.step import runtime

# What the text of every step calls by name, see source, and fx in the code of a graph.
_FIXED = "torch LAYOUT MICRO_BATCH SIZES build make_step model get anchor box at self device inf nan NoneType".split()
_FOREIGN = ""  # in the set of what is not the step's to write to
_RESERVED = frozenset([*keyword.kwlist, *dir(builtins), *runtime.__all__, *_FIXED])


class Names:
    """Every name stands for one thing, and hides no helper, builtin or keyword. Nodes keep theirs where they can."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self._taken = set(_RESERVED)
        self._drawn: dict[tuple[str, str], str] = {}
        for n in nodes:
            self.of("", n)

    def fresh(self, stem: str) -> str:
        """A name that nothing has yet: the stem, or stem_2, stem_3, …"""
        stem = re.sub(r"\W", "_", stem, flags=re.ASCII)
        stem = stem if stem.isidentifier() or keyword.iskeyword(stem) else f"_{stem}"
        name, k = stem, 1
        while name in self._taken:
            name, k = f"{stem}_{k + 1}", k + 1
        self._taken.add(name)
        return name

    def of(self, role: str, thing: str, stem: str = "") -> str:
        """The name of what a node (or a region) has under this role, the same whenever asked."""
        if (role, thing) not in self._drawn:
            self._drawn[role, thing] = self.fresh(stem or (f"{role}_{thing}" if role else thing))
        return self._drawn[role, thing]


@dataclass(frozen=True)
class Instr:
    """out = code.format(*reads); `inplace` is a variant that takes the buffer of reads[0]."""

    node: str
    out: tuple[str, ...]
    code: str
    reads: tuple[str, ...] = ()
    inplace: str = ""
    shares: tuple[str, ...] = ()  # values whose buffers the results may lie in
    fresh: bool = True  # what is new in the results may be overwritten
    commutes: bool = False  # reads[0] and reads[1] may change places


@dataclass
class Function:
    """One function of a generated step: arguments, body, results."""

    name: str
    arguments: tuple[str, ...]
    body: list[Instr]
    results: tuple[str, ...]
    owned: bool = True  # the buffers of its arguments may be overwritten
    comments: dict[str, str] = field(default_factory=dict)  # node -> what it is


def last_uses(f: Function) -> list[set[str]]:
    """For each instruction, the values that nothing reads after it."""
    live = set(f.results)
    out: list[set[str]] = []
    for i in reversed(f.body):
        touched = set(i.reads) | set(i.out)
        out.append({v for v in touched if v not in live})
        live = (live - set(i.out)) | set(i.reads)
    return out[::-1]


def _overwriting(i: Instr, dead: set[str], buffers: UnionFind, live: set[str]) -> tuple[str, ...] | None:
    """The reads with one in front that may be overwritten: nobody sees it, the instruction's other reads included."""

    def free(name: str) -> bool:
        """Whether nothing but `name` itself can see a write to its buffer."""
        return all(buffers[other] != buffers[name] for other in (_FOREIGN, *live - {name}))

    orders = [i.reads, *([(i.reads[1], i.reads[0], *i.reads[2:])] if i.commutes else [])] if i.inplace else []
    for r in orders:
        if r[0] in dead and r.count(r[0]) == 1 and free(r[0]):
            return r
    return None


def statements(f: Function) -> Iterator[tuple[str, str]]:
    """(node, line) of every statement: instructions with their dels."""
    buffers = UnionFind([_FOREIGN, *f.arguments])  # values in one set may share memory
    if not f.owned:
        buffers.union(_FOREIGN, *f.arguments)
    live = set(f.arguments)
    unread = [a for a in f.arguments if all(a not in i.reads for i in f.body) and a not in f.results]
    if unread:
        yield "", f"del {', '.join(unread)}"
        live -= set(unread)
    for i, dead in zip(f.body, last_uses(f), strict=True):
        reads = _overwriting(i, dead, buffers, live)
        code = i.code.format(*i.reads) if reads is None else i.inplace.format(*reads)
        shares = i.shares if reads is None else (*i.shares, reads[0])
        for name in i.out:
            buffers.union(name, *shares, *(() if i.fresh or reads is not None else (_FOREIGN,)))
        yield i.node, f"{', '.join(i.out)} = {code}" if i.out else code
        live = (live | set(i.out)) - dead
        if gone := sorted(dead & (set(i.reads) | set(i.out))):
            yield i.node, f"del {', '.join(gone)}"


def text(f: Function, marked: str = "") -> list[str]:
    """The function's source; its arguments come in a list that it empties. `marked`: the direction to tell."""
    lines = [f"def {f.name}(box):"]
    if f.arguments:
        lines.append(f"    {', '.join(f.arguments)}{',' if len(f.arguments) == 1 else ''} = box")
        lines.append("    box.clear()")
    seen = ""
    for node, line in statements(f):
        if node and node != seen:
            lines += [f"    # {f.comments[node]}"] if node in f.comments else []
            lines += [f"    at({node!r}, {marked!r})"] if marked else []
            seen = node
        lines.append(f"    {line}")
    results = ", ".join(f.results)
    return [*lines, f"    return ({results}{',' if len(f.results) == 1 else ''})" if results else "    return ()"]
