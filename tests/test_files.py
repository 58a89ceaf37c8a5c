"""Outputs: whole or not at all, never in the place of something that is no file."""

import os
import stat
from pathlib import Path

import pytest

from floorplan.errors import FloorplanError
from floorplan.files import ensure_writable, write_text


def test_text_is_written_with_the_users_permissions(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        write_text(tmp_path / "a.json", "1")
    finally:
        os.umask(old)
    assert (tmp_path / "a.json").read_text() == "1"
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_link_keeps_pointing_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "through")
        assert os.read(reader, 99) == b"through" and stat.S_ISFIFO(pipe.stat().st_mode)
    finally:
        os.close(reader)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 240 + ".pt", "a\0b", ".", "no/such/folder.pt"])
def test_names_that_cannot_be_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(FloorplanError) as e:
        ensure_writable(tmp_path / name, force=True)
    assert "\n" not in str(e.value) and not list(tmp_path.iterdir())


def test_what_is_there_stays_without_force(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FloorplanError, match="exists already; --force overwrites it"):
        write_text(tmp_path / "a", "theirs", force=False)
    assert (tmp_path / "a").read_text() == "mine"
