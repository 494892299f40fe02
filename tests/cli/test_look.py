"""`look FILE` as a user types it."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from gpumem_tui.memory import MIB
from tests.cli.conftest import Program
from tests.snapshots import files
from tests.snapshots.files import written


def test_lines(program: Program, tmp_path: Path) -> None:
    done = program("look", str(written(tmp_path, files.fragmented())))
    assert (done.code, done.err) == (0, "")
    for said in ("out of memory at event 4", "enough, but not in one piece", "the peak by source line", "4 segments"):
        assert said in done.out


def test_json(program: Program, tmp_path: Path) -> None:
    done = program("look", str(written(tmp_path, files.training())), "--json")
    assert (done.code, done.err) == (0, "")
    (device,) = json.loads(done.out)["devices"]
    assert device["peak"]["allocated_bytes"] == 100 * MIB
    for by in ("by_category", "by_source", "by_stack"):
        assert sum(part["bytes"] for part in device["peak"][by]) == 100 * MIB
    assert device["segments"]["stranded_bytes"] == 72 * MIB
    assert device["out_of_memory"] == []


def test_needs_no_torch(program: Program, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('looked for')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = program("look", str(written(tmp_path, files.training())), env={"PYTHONPATH": path})
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps([1]), pickle.dumps({}), b"\x80\x04cos\nsystem\n."])
def test_what_is_no_snapshot_is_one_line_and_code_2(program: Program, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.pickle"
    path.write_bytes(content)
    done = program("look", str(path))
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert str(path) in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.pickle"], "missing.pickle: No such file"),
        (["999999999"], "there is no process 999999999"),
        (["x.pickle", "--json", "--plain"], "--json and --plain: give only one of them"),
        (["x.pickle", "y.pickle", "z.pickle"], "give one FILE, or two to compare"),
        (["999999999", "--html", "x.html"], "--html is for files"),
    ],
)
def test_bad_input(program: Program, arguments: list[str], said: str) -> None:
    done = program("look", *arguments)
    assert done.code == 2
    assert said in done.err


def test_two_files_are_compared(program: Program, tmp_path: Path) -> None:
    before, after = written(tmp_path, files.training(), "a.pickle"), written(tmp_path, files.fragmented(), "b.pickle")
    done = program("look", str(before), str(after))
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("-60.0 MiB (100.0 MiB → 40.0 MiB allocated at the peak): -40.0 MiB model at")
    done = program("look", str(before), str(after), "--json")
    (device,) = json.loads(done.out)["devices"]
    assert done.out.count("\n") == 1
    assert device["figures"][0] == {
        "name": "allocated at the peak", "before_bytes": 100 * MIB, "after_bytes": 40 * MIB,
    }  # fmt: skip
    for by in ("by_category", "by_source"):
        assert sum(row["after_bytes"] - row["before_bytes"] for row in device[by]) == -60 * MIB


def test_a_page_is_written_beside_the_answer(program: Program, tmp_path: Path) -> None:
    path, page = written(tmp_path, files.fragmented()), tmp_path / "out.html"
    done = program("look", str(path), "--html", str(page))
    assert done.code == 0
    assert done.out.splitlines() == [program("look", str(path)).out.splitlines()[0]]
    assert done.err == f"{page}: a page of {page.stat().st_size >> 10} KiB, open it in a browser\n"
    assert "Out of memory at event 4" in page.read_text()
    done = program("look", str(path), str(path), "--html", str(tmp_path / "no" / "out.html"))
    assert done.code == 2
    assert "No such file or directory; give another name" in done.err
