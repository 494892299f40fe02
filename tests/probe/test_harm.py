"""The training stays unchanged if anything happens to the probe and its files: every loss, the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumem_tui.probe.ring import Ring
from gpumem_tui.probe.wire import HEADER_BYTES, RING_BYTES
from gpumem_tui.watch.documents import decode_header
from tests.probe.watched import SCRIPTS, Run, run
from tests.sharing import made_once
from tests.watch.rings import RECORD

HARMED = SCRIPTS / "harmed.py"


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("unwatched")
    done = made_once(tmp_path_factory, "unwatched", lambda: run([HARMED], directory, watched=False))
    assert len(done.output.split()) == 60
    assert done.published == []
    return done


def _same(done: Run, unwatched: Run, runs: int = 1) -> None:
    assert done.output.split() == unwatched.output.split() * runs
    assert done.code == unwatched.code == 7


def _cut(ring: Path) -> None:
    os.truncate(ring, HEADER_BYTES)


def _replaced(ring: Path) -> None:
    copy = ring.with_suffix(".copy")
    copy.write_bytes(ring.read_bytes())
    copy.rename(ring)


@pytest.mark.parametrize("harm", [_cut, _replaced])
def test_a_ring_that_is_not_as_it_was_made_is_made_again(
    harm: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not written on: a file that was cut would have holes, and another's file is not ours."""
    monkeypatch.setenv("GPUMEM_TUI_DIR", str(tmp_path / "published"))
    import torch  # noqa: F401  the header names its version

    ring = Ring("run")
    path = ring.files.ring
    made = path.stat().st_ino
    ring.append([RECORD])
    assert path.stat().st_ino == made
    harm(path)
    harmed = path.read_bytes()
    with path.open("rb") as before:
        ring.append([RECORD])
        assert before.read() == harmed
    assert path.stat().st_size == RING_BYTES
    assert decode_header(path.read_bytes()).written == 2


@pytest.mark.slow
def test_files_are_deleted_cut_and_replaced_and_the_clock_jumps(unwatched: Run, tmp_path: Path) -> None:
    done = run([HARMED], tmp_path / "published", more={"HARM": "files"})
    _same(done, unwatched)
    assert "Traceback" not in done.errors
    (found,) = done.published  # the ring was made again after step 30, and again after step 50
    assert 50 <= found.records[0].step < found.last.step == 60
    assert found.last.errors >= 2  # the link and the garbage in place of a request


@pytest.mark.slow
def test_the_directory_cannot_be_made(unwatched: Run) -> None:
    done = run([HARMED], Path("/dev/null/published"))
    _same(done, unwatched)
    assert done.errors.count("gpumem-tui stops watching this process: ") == 1


def test_the_disk_is_full(unwatched: Run, tmp_path: Path) -> None:
    done = run([HARMED], tmp_path / "published", more={"HARM": "disk full"})
    _same(done, unwatched)
    assert list((tmp_path / "published").iterdir()) == []
    assert "File too large" in done.errors


def test_the_probe_fails(unwatched: Run, tmp_path: Path) -> None:
    """It stops after a few failures in a row; what it wrote before stays."""
    done = run([HARMED], tmp_path / "published", more={"HARM": "exceptions"})
    _same(done, unwatched)
    (found,) = done.published
    assert 1 <= found.last.step <= 10
    assert found.header.switched_off == "ZeroDivisionError: division by zero"
    assert found.header.ended_ns > 0
    assert done.errors.count("ZeroDivisionError") == 1


@pytest.mark.slow
def test_forks_publish_for_themselves_workers_nothing_and_exec_begins_anew(unwatched: Run, tmp_path: Path) -> None:
    """Two children in each of two runs step five times each; the two workers of the DataLoader never step."""
    done = run([HARMED], tmp_path / "published", more={"HARM": "fork exec"}, python=sys.executable)
    _same(done, unwatched, runs=2)
    assert done.errors == ""
    forked = [found for found in done.published if found.last.step < 60]
    (found,) = [found for found in done.published if found not in forked]
    first, second, third, fourth = sorted(one.last.step for one in forked)
    assert 11 <= first <= second <= 15
    assert 31 <= third <= fourth <= 35
    assert [record.step for record in found.records] == sorted(record.step for record in found.records)
    assert found.header.process.command[-1] == "again"
    assert found.last.step == 60
    assert found.header.ended_ns > 0
