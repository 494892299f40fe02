"""Files of processes that ended are kept for a while, and then removed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from gpumem_tui.probe.files import start_ticks
from gpumem_tui.watch.cleaning import KEEP_ENDED_S, KEEP_PROCESSES, KEEP_S, clean
from gpumem_tui.watch.reader import Watcher
from tests.watch.rings import RECORD, RingFile, gone, out_of_memory, this_process

NOW_S = 1_700_000_000.0


def ended(folder: Path, ticks: int, age_s: float) -> RingFile:
    ring = RingFile(folder, gone(start_ticks=ticks, started_ns=0))
    ring.sample(replace(RECORD, wall_ns=int((NOW_S - age_s) * 1e9)))
    ring.document(ring.files.oom, out_of_memory())
    return ring


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_old_go_with_all_their_files_and_the_running_stay(tmp_path: Path) -> None:
    folder = tmp_path / "probes"
    young = ended(folder, 1, KEEP_S - 60)
    old = ended(folder, 2, KEEP_S + 60)
    (folder / f".{old.path.name}.77").write_text("left over by a write that was interrupted")
    running = RingFile(folder, this_process(started_ns=0))
    assert clean(Watcher([folder]).processes(), NOW_S) == 1
    assert left(folder) == {young.path.name, young.files.oom.name, running.path.name}


def test_who_ended_as_it_should_is_not_kept_for_long(tmp_path: Path) -> None:
    folder = tmp_path / "probes"
    rings = [RingFile(folder, gone(start_ticks=ticks, started_ns=0)) for ticks in range(3)]
    for ring, age_s in zip(rings, (KEEP_ENDED_S + 60, KEEP_ENDED_S - 60, KEEP_ENDED_S + 60), strict=True):
        ring.sample(replace(RECORD, wall_ns=int((NOW_S - age_s) * 1e9)))
    for ring in rings[:2]:
        ring.end()
    clean(Watcher([folder]).processes(), NOW_S)
    assert left(folder) == {rings[1].path.name, rings[2].path.name}, "the last one vanished"


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "probes"
    for number in range(KEEP_PROCESSES + 3):
        ended(folder, 100 + number, age_s=number)
    assert clean(Watcher([folder]).processes(), NOW_S) == 3
    kept = {process.process.start_ticks for process in Watcher([folder]).processes()}
    assert kept == set(range(100, 100 + KEEP_PROCESSES))


def test_a_process_whose_number_begins_alike_keeps_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "probes"
    ended(folder, 2, KEEP_S + 60)
    alike = ended(folder, 22, 60)
    clean(Watcher([folder]).processes(), NOW_S)
    assert left(folder) == {alike.path.name, alike.files.oom.name}


def test_what_attaching_left_goes_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "probes"
    folder.mkdir(mode=0o700)
    lives = f"{os.getpid()}-{start_ticks()}"
    names = {
        "3999999-7.probe-00ff00ff.zip": False,  # its process is gone
        "3999999-7.attach-00ff00ff.json": False,
        "probe-1.2.3.zip": False,
        f"{lives}.attach-00ff00ff.json": False,  # nobody waits for the answer any more
        f"{lives}.probe-00ff00ff.zip": True,  # the process imports the probe from it
        "notes.json": True,
        "3999999-7.model.json": True,
    }
    for name in names:
        (folder / name).touch()
        os.utime(folder / name, (NOW_S - 3600, NOW_S - 3600))
    young = folder / "3999998-7.attach-00ff00ff.json"
    young.touch()
    os.utime(young, (NOW_S, NOW_S))
    clean((), NOW_S, [folder])
    assert left(folder) == {young.name, *(name for name, stays in names.items() if stays)}
