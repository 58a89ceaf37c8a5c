"""A placed step as JSON and as a C header that compiles, checks itself and says what the placement says."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from floorplan.cost_models.arena import Placement, place
from floorplan.errors import FloorplanError
from floorplan.timeline.arena import as_c_header, as_json, slots
from floorplan.timeline.blocks import Block, StepTimeline, intervals

GCC = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def block(born: int, died: int, nbytes: int, node: str, op: str = "aten.convolution.default") -> Block:
    return Block(born, died, nbytes, node, "forward", op, (nbytes,), "uint8", "temporary")


LINE = StepTimeline(
    'Tiny*/Net "é"',
    (
        block(0, 5, 100, "features_0_0"),
        block(1, 3, 4096, "features_0_0"),
        block(2, 8, 64, "features_0_0_convolution_2", "x"),
        block(3, 4, 0, "empty"),
        block(4, 4, 12, "never"),
        block(4, 9, 7, "", "aten.sum.dim_IntList"),
        block(5, 9, 9, 'größe*/ \\ "', "floorplan::pack_gate"),
        block(6, 9, 1 << 33, "huge", "int"),
    ),
    9,
)
PLACED = place(intervals(LINE.blocks))


def test_json_is_the_placement() -> None:
    data = json.loads(json.dumps(as_json(LINE, PLACED)))
    assert data["schema"] == "floorplan.arena/1" and data["size"] == PLACED.size and data["alignment"] == 64
    assert data["bound"] == PLACED.bound and data["raw_bound"] == LINE.peak and data["steps"] == 9
    kept = [(b, at) for b, at in zip(LINE.blocks, PLACED.offsets, strict=True) if b.nbytes and b.died > b.born]
    found = [(s["node"], s["op"], s["offset"], s["bytes"], s["first"], s["last"]) for s in data["storages"]]
    assert found == [(b.node, b.op, at, b.nbytes, b.born, b.died - 1) for b, at in kept]


def test_names_are_identifiers_and_unique() -> None:
    names = [s.name for s in slots(LINE, PLACED)]
    assert names == [
        "features_0_0_convolution",
        "features_0_0_convolution_2",
        "features_0_0_convolution_2_x",
        "forward_sum",
        "gr_e_floorplan_pack_gate",
        "huge_int",
    ]
    same = StepTimeline("n", tuple(block(i, i + 1, 8, n) for i, n in enumerate(["a", "a", "a_convolution_2", "A"])), 4)
    names = [s.name for s in slots(same, place(intervals(same.blocks)))]
    assert len(set(names)) == 4 and all(re.fullmatch("[a-z][a-z0-9_]*", n) for n in names)


def test_a_wrong_placement_is_not_exported() -> None:
    wrong = Placement((0,) * 8, PLACED.size, PLACED.bound, "by hand")
    for export in (as_json, as_c_header):
        with pytest.raises(FloorplanError, match="blocks 0 and 1"):
            export(LINE, wrong)


@pytest.mark.parametrize("name", ["", "1st", "a-b", "été", "a b"])
def test_a_name_that_c_has_not_is_refused(name: str) -> None:
    with pytest.raises(FloorplanError, match="not a C identifier"):
        as_c_header(LINE, PLACED, name)


def compile_c(folder: Path, header: str, main: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "net.h").write_text(header, encoding="ascii")
    (folder / "main.c").write_text(main)
    command = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", *options, "main.c", "-o", "main"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


MAIN = """
#include <stdio.h>
#define NET_IMPLEMENTATION
#include "net.h"
#include "net.h"
int main(void) {
  static unsigned char room[128];
  unsigned i;
  for (i = 0; i < NET_COUNT; i++)
    printf("%s %lu %lu %lu %lu\\n", net_storages[i].name, (unsigned long)net_storages[i].offset,
           (unsigned long)net_storages[i].bytes, net_storages[i].first, net_storages[i].last);
  return NET_AT(room, FORWARD_SUM) != (void *)(room + NET_OFFSET_FORWARD_SUM);
}
"""


@GCC
def test_the_header_compiles_and_says_the_same(tmp_path: Path) -> None:
    done = compile_c(tmp_path, as_c_header(LINE, PLACED, "net"), MAIN)
    assert done.returncode == 0, done.stderr
    out = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out == [f"{s.name} {s.offset} {s.bytes} {s.first} {s.last}" for s in slots(LINE, PLACED)]


@GCC
def test_the_header_alone_compiles_without_warnings(tmp_path: Path) -> None:
    empty = StepTimeline("nothing", (), 0)
    for line, placed in ((LINE, PLACED), (empty, place([]))):
        done = compile_c(tmp_path, as_c_header(line, placed, "net"), '#include "net.h"\nint main(void) { return 0; }\n')
        assert done.returncode == 0, done.stderr


@GCC
def test_a_storage_that_sticks_out_does_not_compile(tmp_path: Path) -> None:
    header = as_c_header(LINE, PLACED, "net")
    broken = header.replace(f"NET_SIZE {PLACED.size}u", f"NET_SIZE {PLACED.size - 64}u")
    assert broken != header
    done = compile_c(tmp_path, broken, '#include "net.h"\nint main(void) { return 0; }\n')
    assert done.returncode != 0 and "negative" in done.stderr
