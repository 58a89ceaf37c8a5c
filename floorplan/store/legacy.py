"""Make a legacy torch.save file of a whole model fit for torch's safe reader.

( 'module'  class  'path.py'  'source text'  t Q   ->   class

The old layout puts such a record at the first use of every Module class, and the weights-only
unpickler refuses them all. Only the class stays, still subject to admission. Strings that later
opcodes fetch from the memo of a record that was cut are written out in full there.
"""

import io
import pickletools
from typing import Any, BinaryIO

_Op = tuple[str, Any, bytes]
_HEADERS = 3  # magic number, protocol version, system information
_CLOSE_MARK = {"TUPLE", "SETITEMS", "APPENDS"}
_PUT = {"BINPUT", "LONG_BINPUT"}
_GET = {"BINGET", "LONG_BINGET"}


def without_module_records(file: BinaryIO) -> BinaryIO:
    """A copy in memory of a legacy file, its third pickle freed of module records."""
    file.seek(0)
    for _ in range(_HEADERS):
        for _op in pickletools.genops(file):
            pass
    start = file.tell()
    found = [(op.name, arg, at or 0) for op, arg, at in pickletools.genops(file)]
    end = file.tell()
    file.seek(0)
    before, body, after = file.read(start), file.read(end - start), file.read()
    bounds = [at - start for _, _, at in found] + [end - start]
    ops = [(n, arg, body[bounds[i] : bounds[i + 1]]) for i, (n, arg, _) in enumerate(found)]
    return io.BytesIO(before + b"".join(code for _, _, code in _cut_records(ops)) + after)


def _cut_records(ops: list[_Op]) -> list[_Op]:
    kept: list[_Op] = []
    strings: dict[int, _Op] = {}  # memo slot -> the string written there
    lost: set[int] = set()  # slots whose writing was cut
    marks: list[int] = []
    start = 0
    for op in ops:
        name, arg, _ = op
        if name == "MARK":
            marks.append(len(kept))
        elif name in _CLOSE_MARK and marks:
            start = marks.pop()
        elif name in _PUT and kept and kept[-1][0] == "BINUNICODE":
            strings[arg] = kept[-1]
        kept.append(strings[arg] if name in _GET and arg in lost else op)
        record = kept[start:] if name == "BINPERSID" else []
        if len(record) > 1 and _said(record[1], strings) == "module":
            lost |= {a for n, a, _ in record if n in _PUT and a in strings}
            kept[start:] = _class_of(record, strings)
    return kept


def _said(op: _Op, strings: dict[int, _Op]) -> Any:
    """What an opcode writes, fetched from the memo if need be."""
    return strings[op[1]][1] if op[0] in _GET and op[1] in strings else op[1]


def _class_of(record: list[_Op], strings: dict[int, _Op]) -> list[_Op]:
    kept = []
    for before, op in zip(record, record[1:], strict=False):
        is_class = op[0] == "GLOBAL" or (op[0] in _GET and op[1] not in strings)
        if is_class or (op[0] in _PUT and before[0] == "GLOBAL"):
            kept.append(op)
    return kept
