"""What only its own tests use is used, or goes: every public name of a module is read by the product or run by hand."""

import ast
from collections.abc import Iterator
from pathlib import Path

from rooms import FACE, ROOT, sources

PROMISED = {*FACE, "data", "before"}  # what users import: the README names it


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((*(("floorplan",) if parts[0] != "floorplan" else ()), *parts)).removesuffix(".__init__")


def named(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of every import, and of every attribute read from an imported module."""
    known: dict[str, tuple[str, str]] = {}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom):
            known |= {a.asname or a.name: (str(n.module), a.name) for a in n.names}
    yield from known.values()
    for n in ast.walk(tree):
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in known:
            yield ".".join(known[n.value.id]), n.attr


def said(tree: ast.Module) -> str:
    """Strings that are no docstrings: generated code and child processes call what they name."""
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    strings = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs)
    return " ".join(n.value for n in strings if isinstance(n.value, str))


def public(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Functions and classes of a module; a decorated function is registered where it stands."""
    for n in tree.body:
        if isinstance(n, ast.ClassDef) or (isinstance(n, ast.FunctionDef) and not n.decorator_list):
            if not n.name.startswith("_"):
                yield n.name, n


def read_in(tree: ast.Module, name: str, own: ast.stmt) -> bool:
    """Whether the rest of its own module reads a name."""
    rest = (x for n in tree.body if n is not own for x in ast.walk(n))
    return any(isinstance(x, ast.Name) and x.id == name and isinstance(x.ctx, ast.Load) for x in rest)


def test_every_public_name_is_used() -> None:
    trees = {path: ast.parse(path.read_text()) for _, path in sources()}
    by_hand = [*(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    read = {use for t in [*trees.values(), *(ast.parse(p.read_text()) for p in by_hand)] for use in named(t)}
    words = set(" ".join(map(said, trees.values())).replace("(", " ").replace(":", " ").replace(".", " ").split())
    unused = [
        f"{module_of(path)}.{name}"
        for room, path in sources()
        if room not in PROMISED
        for name, own in public(trees[path])
        if (module_of(path), name) not in read and name not in words and not read_in(trees[path], name, own)
    ]
    assert not unused, f"only tests use {', '.join(unused)}"
