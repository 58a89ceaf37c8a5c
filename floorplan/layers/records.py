"""Containers that a model returns, as data: a file holds a container's kind, name and fields, never its code.

@dataclass                       ->  "record dataclass Out logits hidden"
class Out: logits, hidden        <-  a class of that name with these fields
"""

import dataclasses
from collections import OrderedDict, namedtuple
from functools import cache
from typing import Any

from floorplan.errors import LoadError, short

_TAG = "record "
_MOST = 256  # fields


class _Mapping(OrderedDict[str, Any]):
    """What is read by attribute, key and place, as outputs of Hugging Face models are; None is not among its keys."""

    def __init__(self, **values: Any) -> None:
        super().__init__({k: v for k, v in values.items() if v is not None})
        vars(self).update(values)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


def record_name(kind: Any) -> str | None:
    """The text that stands for a container class in a file; None for any other."""
    if not isinstance(kind, type):
        return None
    if issubclass(kind, tuple) and hasattr(kind, "__match_args__"):
        return " ".join(("record tuple", kind.__name__, *kind.__match_args__))
    if not dataclasses.is_dataclass(kind):
        return None
    how = "mapping" if issubclass(kind, dict) else "dataclass"
    return " ".join((f"record {how}", kind.__name__, *(f.name for f in dataclasses.fields(kind))))


def record_named(name: str, where: str) -> Any:
    """The class for a text of `record_name`, None for any other text; LoadError for what is no record."""
    if not name.startswith(_TAG):
        return None
    kind, *words = name.split(" ")[1:]
    plain = all(w.isascii() and w.isidentifier() and not w.startswith("_") for w in words[1:])
    named = bool(words) and words[0].isascii() and words[0].isidentifier() and not words[0].startswith("__")
    if not (named and plain and len(words) <= _MOST and len({*words[1:]}) == len(words) - 1):
        raise LoadError(f"{where}: {short(name)} is not a container; refused")
    try:
        return _made(kind, *words)
    except (KeyError, ValueError, TypeError) as e:  # no such kind, a keyword among the fields
        raise LoadError(f"{where}: {short(name)} is not a container; refused") from e


@cache
def _made(kind: str, name: str, *fields: str) -> type:
    if kind == "tuple":
        return namedtuple(name, fields)  # noqa: PYI024
    base, own = {"dataclass": (object, True), "mapping": (_Mapping, False)}[kind]
    given = [(f, Any, dataclasses.field(default=None)) for f in fields]
    return dataclasses.make_dataclass(name, given, bases=(base,), init=own, eq=own, repr=own)
