"""Mutation testing of the files where a silent fault would be worst: for every small change, does some test fail?

    python benchmarks/mutation.py [FILE …]      what is new or changed; --again: what survived so far as well

needs `pip install mutmut`, whose operators it uses (mutants.py). The tests of a file are loaded once and forked for
every mutant, the code object of the changed function in place of the old one; those that reach the changed statement
run, the fastest first and SECONDS of them at most, until one fails. What was found is kept in results/mutation.json,
function by function; docs/mutation.md is written from it and from equivalent_mutants.toml, which says why a survivor
is no fault.
"""

import argparse
import gc
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from types import FrameType, FunctionType
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from benchmarks.mutants import Mutant, Unit, code_at, units
from benchmarks.mutation_table import RESULTS, page, write

SECONDS = 10.0  # of tests a mutant, as they take without a change
TARGETS = {
    "floorplan/layers/bits.py": ["layers/test_bits.py", "layers/test_activations.py"],
    "floorplan/layers/geometry.py": ["layers/test_geometry.py", "layers/test_lowrank.py", "step/test_ops.py"],
    "floorplan/layers/lowrank.py": ["layers/test_lowrank.py", "step/test_ops.py", "layers/test_fused.py"],
    "floorplan/layers/fused.py": [
        "layers/test_fused.py",
        "layers/test_layer.py",
        "passes/test_fuse_sites.py",
        "passes/test_insert_memflora.py",
        "ledger/test_macs.py",
    ],
    "floorplan/step/ops.py": ["step/test_ops.py", "step/test_region.py"],
    "floorplan/ledger/storage.py": ["ledger/test_storage.py", "ledger/test_recorder.py", "ledger/test_marks.py"],
    "floorplan/ledger/names.py": ["ledger/test_names.py", "ledger/test_criterion.py"],
    "floorplan/ledger/criterion.py": ["ledger/test_criterion.py", "ledger/test_names.py"],
}
FORK = get_context("fork")


def forked(work: Callable[[], Any], seconds: float = 900.0) -> Any:
    """work() in a fork, without its output; None if that dies or never ends."""
    mine, theirs = FORK.Pipe(False)

    def child() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        theirs.send(work())
        os._exit(0)

    process = FORK.Process(target=child)
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(seconds) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


@dataclass
class Reached:
    """A test: the lines of the file that it runs, and how long it takes."""

    index: int
    lines: set[int] = field(default_factory=set)
    seconds: float = 0.0


def passes(item: pytest.Item) -> bool:
    """Run one test; whether it passes or is skipped."""
    return not any(r.failed for r in runtestprotocol(item, log=False, nextitem=None))


def watched(items: list[pytest.Item], path: str) -> list[Reached] | str:
    """Every test with the lines that it reaches; the name of one that fails without any change."""
    found = []
    for index, item in enumerate(items):
        one = Reached(index)

        def local(frame: FrameType, event: str, arg: Any, one: Reached = one) -> Any:
            one.lines.add(frame.f_lineno)
            return local

        def trace(frame: FrameType, event: str, arg: Any, local: Any = local) -> Any:
            return local(frame, event, arg) if frame.f_code.co_filename == path else None

        began = perf_counter()
        threading.settrace(trace), sys.settrace(trace)
        good = passes(item)
        sys.settrace(None), threading.settrace(None)  # type: ignore[arg-type]
        one.seconds = perf_counter() - began
        if not good:
            return item.nodeid
        found.append(one)
    return found


class Mutate:
    """A pytest plugin: instead of once, the tests run once a mutant."""

    def __init__(self, path: Path, todo: dict[str, tuple[Unit, list[Mutant]]], keep: Callable[..., None]) -> None:
        self.path, self.todo, self.keep = str(path), todo, keep

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = session.items
        found = forked(lambda: watched(self.items, self.path), 7200)
        if not isinstance(found, list):
            sys.exit(f"a test fails before anything is changed: {found}")
        self.tests = sorted(found, key=lambda t: t.seconds)
        homes: dict[Any, list[FunctionType]] = {}
        for f in gc.get_objects():
            if isinstance(f, FunctionType) and f.__code__.co_filename == self.path:
                homes.setdefault((f.__code__.co_qualname, f.__code__.co_firstlineno), []).append(f)
        for name, (unit, mutants) in self.todo.items():
            began, killers = perf_counter(), list[int]()
            outcomes = [self.outcome(unit, m, homes.get(unit.place, []), killers) for m in mutants]
            self.keep(name, unit, list(zip(mutants, outcomes, strict=True)))
            lost = sum(o == "survived" for o in outcomes)
            print(f"{name}: {len(mutants)} mutants, {lost} survived, {perf_counter() - began:.0f} s", flush=True)
        return True

    def outcome(self, unit: Unit, m: Mutant, homes: list[FunctionType], killers: list[int]) -> str:
        """killed, died or survived; tests that killed before go first."""
        chosen = list(self.reaching(m))
        chosen.sort(key=lambda t: -killers.count(t.index))
        code = code_at(m.text, self.path, unit.place)
        if code is None or not homes:
            raise RuntimeError(f"{unit.place} is not a function of the loaded file")

        def work() -> int | None:
            for f in homes:
                f.__code__ = code
            for t in chosen:
                signal.setitimer(signal.ITIMER_PROF, 4 + 10 * t.seconds)  # whoever loops dies of it
                if not passes(self.items[t.index]):
                    return t.index
            return -1

        index = forked(work)
        if index is not None and index >= 0:
            killers.append(index)
        return "died" if index is None else "survived" if index < 0 else "killed"

    def reaching(self, m: Mutant) -> Iterator[Reached]:
        """The fastest tests that run the changed statement."""
        total, lines = 0.0, set(range(m.lines[0], m.lines[1] + 1))
        for t in self.tests:
            if t.lines & lines and (total := total + t.seconds) <= SECONDS + t.seconds:
                yield t


def waiting(path: str, found: dict[str, Any], again: bool) -> dict[str, tuple[Unit, list[Mutant]]]:
    """The functions whose mutants have not been run yet, or survived."""
    todo: dict[str, tuple[Unit, list[Mutant]]] = {}
    for unit in units(ROOT / path):
        name = unit.place[0]
        while name in todo:  # the fakes of custom ops are all called _
            name += "'"
        todo[name] = (unit, list(unit.mutants))
    for name, (unit, mutants) in list(todo.items()):
        old = found["functions"].get(name, {})
        if old.get("source") == digest(unit.source):
            todo[name] = (unit, [m for m in mutants if again and m.change in old["survivors"]])
    found["functions"] = {n: r for n, r in found["functions"].items() if n in todo}
    return {n: (u, ms) for n, (u, ms) in todo.items() if ms}


def digest(source: str) -> str:
    """What tells whether a function has changed."""
    return hashlib.sha1(source.encode()).hexdigest()[:10]


def run(path: str, again: bool) -> None:
    """All mutants of a file that wait, in a process that has loaded its tests."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = results.setdefault(path, {"functions": {}})
    todo = waiting(path, found, again)

    def keep(name: str, unit: Unit, outcomes: list[tuple[Mutant, str]]) -> None:
        survivors = [m.change for m, o in outcomes if o == "survived"]
        old = found["functions"].get(name)
        if old and old["source"] == digest(unit.source):
            found["functions"][name] = old | {"survivors": survivors}
        else:
            died = sum(o == "died" for _, o in outcomes)
            found["functions"][name] = {
                "source": digest(unit.source),
                "mutants": len(outcomes),
                "died": died,
                "survivors": survivors,
            }
        write(results)

    if todo:
        torch.set_num_threads(1)
        settings.register_profile("mutation", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutation")
        tests = [str(ROOT / "tests" / t) for t in TARGETS[path]]
        options = ["-s", "-p", "no:terminal", "-p", "no:xdist", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
        pytest.main([*options, *tests], plugins=[Mutate(ROOT / path, todo, keep)])


def main() -> None:
    """Every file in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(TARGETS), metavar="FILE")
    parser.add_argument("--again", action="store_true", help="run what survived once more")
    options = parser.parse_args()
    for path in options.files:
        print(path, flush=True)
        process = FORK.Process(target=run, args=(path, options.again))
        process.start()
        process.join()
    page()


if __name__ == "__main__":
    main()
