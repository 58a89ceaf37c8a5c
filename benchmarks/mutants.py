"""Small changes of a source file, one at a time: mutmut's operators on the functions of the file.

Not changed, for no test can tell: annotations, decorators, docstrings, the type of a `cast`, `strict=` of a `zip`.
An argument is left out; None in its place, which nearly every call refuses, is not tried.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from types import CodeType
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal

STRICT = re.compile(r"strict=(True|False|None)")
Place = tuple[str, int]  # qualified name and first line of a function, as its code object tells them


@dataclass(frozen=True)
class Mutant:
    """A file with one change."""

    lines: tuple[int, int]  # of the changed statement
    change: str  # the line before -> the line after
    text: str = field(repr=False)


@dataclass(frozen=True)
class Unit:
    """A function or method, what is in it included."""

    place: Place
    source: str
    mutants: tuple[Mutant, ...] = field(repr=False)


def units(path: Path) -> Iterator[Unit]:
    """Every function and method of a file with its mutants."""
    text = path.read_text()
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    where = wrapper.resolve(PositionProvider)
    for name, f in _functions(wrapper.module, ""):
        f = f.with_changes(leading_lines=[])
        first, last = where[f.decorators[0] if f.decorators else f.name], where[f.body].end.line
        yield Unit((name, first.start.line), *_changed(text, wrapper.module, f, (first.start.line, last), where))


def _changed(text: str, module: cst.Module, f: cst.FunctionDef, at: tuple[int, int], where: Any) -> tuple[str, Any]:
    """Source of a function and its mutants, each once."""
    lines, found = text.splitlines(keepends=True), dict[str, Mutant]()
    source = "".join(lines[at[0] - 1 : at[1]])
    margin = source[: len(source) - len(source.lstrip())]
    for statement, new in _mutations(f):
        code = indent(module.code_for_node(new), margin)
        if _plain(code) != _plain(source):
            whole = "".join((*lines[: at[0] - 1], code, *lines[at[1] :]))
            span = where[statement]
            found[_plain(code)] = Mutant((span.start.line, span.end.line), _change(source, code), whole)
    return source, tuple(found.values())


def _functions(node: cst.CSTNode, prefix: str) -> Iterator[tuple[str, cst.FunctionDef]]:
    """Functions outside of other functions, with their qualified names."""
    for child in node.children:
        if isinstance(child, cst.FunctionDef):
            yield prefix + child.name.value, child
        elif isinstance(child, cst.ClassDef):
            yield from _functions(child, f"{prefix}{child.name.value}.")
        else:
            yield from _functions(child, prefix)


def _mutations(f: cst.FunctionDef) -> Iterator[tuple[cst.CSTNode, cst.FunctionDef]]:
    """The statement that is changed, and the function with the change."""
    for node, statement in _nodes(f.body, f.body):
        for kind, operator in mutation_operators:
            for new in operator(node) if isinstance(node, kind) else ():
                if operator is not operator_arg_removal or len(new.args) < len(node.args):  # type: ignore[attr-defined]
                    yield statement, f.deep_replace(node, new)  # type: ignore[misc]


def _nodes(node: cst.CSTNode, statement: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """Every node that may change, with the statement it is in."""
    if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
        statement = node
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "cast":
        yield from _nodes(node.args[1], statement)
        return
    yield node, statement
    for child in node.children:
        strict = isinstance(child, cst.Arg) and child.keyword is not None and child.keyword.value == "strict"
        if isinstance(child, cst.FunctionDef):
            yield from _nodes(child.body, child)
        elif not isinstance(child, cst.Annotation) and not strict:
            head = isinstance(node, cst.BaseCompoundStatement) and not isinstance(child, cst.BaseSuite)
            yield from _nodes(child, child if head else statement)


def _plain(code: str) -> str:
    """Code without what no test can tell."""
    return re.sub(r",\s*\)", ")", STRICT.sub("", code))


def _change(before: str, after: str) -> str:
    """What differs, the lines around it apart."""
    a, b = before.splitlines(), after.splitlines()
    while a and b and a[0] == b[0]:
        del a[0], b[0]
    while a and b and a[-1] == b[-1]:
        del a[-1], b[-1]
    return " -> ".join(" ".join(" ".join(lines).split()) for lines in (a, b))


def code_at(text: str, path: str, place: Place) -> CodeType | None:
    """The code object of a function in a changed file."""
    todo = [compile(text, path, "exec", dont_inherit=True)]
    while todo:
        code = todo.pop()
        if (code.co_qualname, code.co_firstlineno) == place:
            return code
        todo += [c for c in code.co_consts if isinstance(c, CodeType)]
    return None
