"""The names in a generated step: one namespace, so that a layer may be called anything."""

import builtins
import keyword
import re
from collections.abc import Iterable

from floorplan.step import runtime

# What the text of every step calls by name, see source, and fx in the code of a graph.
_FIXED = "torch LAYOUT MICRO_BATCH SIZES build make_step model get anchor box at self device inf nan NoneType".split()
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
