"""Containers that a model returns, as data."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from floorplan.errors import LoadError
from floorplan.layers.records import record_name, record_named


@dataclass
class Out:
    logits: Any
    hidden: Any = None


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Both(OrderedDict[str, Any]):  # as the outputs of Hugging Face models are
    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        self.update({k: v for k, v in vars(self).items() if v is not None})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Out, "record dataclass Out logits hidden"),
        (Pair, "record tuple Pair a b"),
        (Both, "record mapping Both logits hidden"),
    ],
)
def test_a_class_and_back(kind: type, text: str) -> None:
    assert record_name(kind) == text
    found = record_named(text, "here")
    assert found is not kind and found is record_named(text, "here") and found.__name__ == kind.__name__
    assert record_name(found) == text  # what was loaded is saved again


def test_a_stand_in_is_read_as_its_own_class_is() -> None:
    out = record_named("record dataclass Out logits hidden", "here")(logits=3)
    assert out.logits == 3 and out.hidden is None
    pair = record_named("record tuple Pair a b", "here")(1, 2)
    assert pair.b == 2 and tuple(pair) == (1, 2)
    for kind in (Both, record_named("record mapping Both logits hidden", "here")):
        both = kind(logits=3)
        assert both.logits == both["logits"] == 3 and both.hidden is None and list(both) == ["logits"]
    assert both[0] == 3 and both[:1] == (3,)


@pytest.mark.parametrize("other", [dict, tuple, len, 3, OrderedDict])
def test_what_is_no_container_of_fields(other: Any) -> None:
    assert record_name(other) is None


@pytest.mark.parametrize(
    "text",
    ["record tuple", "record set A a", "record dataclass A __class__", "record dataclass A a a",
     "record tuple A class", "record dataclass A a=print()", "record mapping __A a",
     "record dataclass A " + " ".join("a" * n for n in range(1, 300))],
)  # fmt: skip
def test_a_hostile_text_is_refused(text: str) -> None:
    with pytest.raises(LoadError, match="^graph node x: .* is not a container; refused$"):
        record_named(text, "graph node x")


def test_any_other_text_is_none() -> None:
    assert record_named("torch.relu", "here") is None
