"""Files of processes that ended are kept for a while, and then removed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from gpumem_tui.probe.files import start_ticks
from gpumem_tui.watch.folders import KEEP_ENDED_S, KEEP_PROCESSES, KEEP_S, clean
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


def test_files_of_those_that_never_published_go(tmp_path: Path) -> None:
    """As an attach leaves them that was answered too late, or the probe that was sent into a container."""
    folder = tmp_path / "probes"
    young = ended(folder, 1, 60)
    stays = [f"{young.files.pid}-1.probe-0123abcd.zip", f"{os.getpid()}-{start_ticks()}.attach-77.json", "notes.txt"]
    goes = [f"{young.files.pid}-9.attach-0123abcd.json", f".{young.files.pid}-9.attach-0123abcd.json.5"]
    for name in (*stays, *goes):
        (folder / name).touch()
        os.utime(folder / name, (NOW_S - KEEP_ENDED_S - 60,) * 2)
    (folder / f"{young.files.pid}-10.attach-0123abcd.json").touch()
    os.utime(folder / f"{young.files.pid}-10.attach-0123abcd.json", (NOW_S - 60,) * 2)
    clean(Watcher([folder]).processes(), NOW_S, folder)
    new = f"{young.files.pid}-10.attach-0123abcd.json"
    assert left(folder) == {young.path.name, young.files.oom.name, *stays, new}
