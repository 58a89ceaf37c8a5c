"""A placed step for a runtime that allocates nothing: JSON, or a C header.

Each storage has a name, its offset and bytes in the arena, and the first and last step that needs it.
The header needs C99 and nothing else; it checks itself when compiled.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from floorplan.cost_models.arena import Placement, verify
from floorplan.errors import FloorplanError
from floorplan.timeline.blocks import StepTimeline, intervals

SCHEMA = "floorplan.arena/1"


@dataclass(frozen=True)
class Slot:
    """One storage in the arena, needed in steps first .. last."""

    name: str  # a C identifier, unique in the arena
    node: str
    op: str
    direction: str
    offset: int
    bytes: int
    first: int
    last: int


def slots(timeline: StepTimeline, placement: Placement) -> list[Slot]:
    """Storages in order of birth; what takes no room or is never alive is left out. The placement is verified."""
    verify(intervals(timeline.blocks), placement)
    taken: set[str] = set()
    found = []
    for b, offset in zip(timeline.blocks, placement.offsets, strict=True):
        if b.nbytes and b.died > b.born:
            name = _unique(_identifier(b.node or b.direction, b.op), taken)
            found.append(Slot(name, b.node, b.op, b.direction, offset, b.nbytes, b.born, b.died - 1))
    return found


def as_json(timeline: StepTimeline, placement: Placement) -> dict[str, Any]:
    """Plain data, version 1."""
    figures = {k: getattr(placement, k) for k in ("size", "alignment", "bound", "raw_bound", "order")}
    storages = [asdict(s) for s in slots(timeline, placement)]
    return {"schema": SCHEMA, "name": timeline.name, **figures, "steps": timeline.events, "storages": storages}


def as_c_header(timeline: StepTimeline, placement: Placement, name: str = "arena") -> str:
    """C99 (and C++) source; every identifier begins with `name`, in capitals where it is a macro.

    With NAME_IMPLEMENTATION defined in one file, a table `name_storages` of all storages is defined too.
    FloorplanError where `name` is no C identifier.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise FloorplanError(f"arena: {name!r}: not a C identifier; use letters, digits and _")
    found, big = slots(timeline, placement), name.upper()
    parts = [*_head(timeline, placement, name, len(found)), *_storages(found, name), *_table(found, name)]
    return "\n".join([*parts, "", f"#endif /* FLOORPLAN_{big}_H */", ""])


def _head(timeline: StepTimeline, placement: Placement, name: str, count: int) -> Iterator[str]:
    big = name.upper()
    yield f"/* Arena of one training step of {_words(timeline.name) or 'a model'}:"
    yield f"   {placement.size} bytes for {count} storages."
    yield f"   {big}_OFFSET_x, {big}_BYTES_x: where storage x lies; FIRST and LAST: the steps that need it. */"
    yield f"#ifndef FLOORPLAN_{big}_H\n#define FLOORPLAN_{big}_H\n\n#include <stddef.h>\n"
    yield f"#define {big}_SIZE {placement.size}u"
    yield f"#define {big}_ALIGNMENT {placement.alignment}u"
    yield f"#define {big}_STEPS {timeline.events}u"
    yield f"#define {big}_COUNT {count}u"
    yield f"typedef char {name}_fits_size_t[(size_t){big}_SIZE == {big}_SIZE ? 1 : -1];\n"


def _storages(found: list[Slot], name: str) -> Iterator[str]:
    big = name.upper()
    for i, s in enumerate(found):
        x = s.name.upper()
        yield f"/* {i}: {_words(s.node)} {_words(s.op)}, {_words(s.direction)} */"
        for what, value in (("OFFSET", s.offset), ("BYTES", s.bytes), ("FIRST", s.first), ("LAST", s.last)):
            yield f"#define {big}_{what}_{x} {value}u"
        room = f"{big}_SIZE - {big}_BYTES_{x}"  # a sum of offset and bytes could wrap around
        fits = f"{big}_BYTES_{x} <= {big}_SIZE && {big}_OFFSET_{x} <= {room}"
        yield f"typedef char {name}_fits_{s.name}[{fits} ? 1 : -1];"


def _table(found: list[Slot], name: str) -> Iterator[str]:
    big = name.upper()
    fields = "  const char *name;\n  size_t offset, bytes;\n  unsigned long first, last;"
    yield f"\ntypedef struct {{\n{fields}\n}} {name}_storage;\n"
    yield f"#define {big}_AT(base, x) ((void *)((unsigned char *)(base) + {big}_OFFSET_##x))\n"
    if not found:
        return
    yield f"extern const {name}_storage {name}_storages[{big}_COUNT];"
    yield f"#ifdef {big}_IMPLEMENTATION\nconst {name}_storage {name}_storages[{big}_COUNT] = {{"
    for s in found:
        yield f'  {{"{s.name}", {s.offset}u, {s.bytes}u, {s.first}u, {s.last}u}},'
    yield "};\n#endif"


def _words(text: str) -> str:
    """Nothing that could end a comment or leave ASCII."""
    return re.sub(r"[^A-Za-z0-9_.,:]+", " ", text).strip()


def _identifier(node: str, op: str) -> str:
    """features_0_0 and aten.convolution.default -> features_0_0_convolution."""
    parts = op.split(".")
    short = parts[1] if len(parts) > 2 else op
    return re.sub(r"[^A-Za-z0-9]+", "_", f"{node}_{short}").strip("_").lower() or "storage"


def _unique(name: str, taken: set[str]) -> str:
    number, tried = 1, name
    while tried in taken:
        number += 1
        tried = f"{name}_{number}"
    taken.add(tried)
    return tried
