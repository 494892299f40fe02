"""The watcher's view of rings: of processes that run, end, vanish, come again, or write another version."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpumem_tui.attach.launch import warnings
from gpumem_tui.memory import Unknown
from gpumem_tui.probe.files import Folder, default_directory, start_ticks
from gpumem_tui.probe.wire import (
    RING_BYTES,
    SLOT_BYTES,
    SLOT_COUNT,
    Heartbeat,
    Stall,
    heartbeat_patch,
    slot_offset,
    switched_off_patch,
)
from gpumem_tui.report.objects import encoded
from gpumem_tui.run import children
from gpumem_tui.watch import publishing
from gpumem_tui.watch.folders import KEEP_ENDED_S, clean
from gpumem_tui.watch.publishing import PublishingFolders, everybodys_directories, foreign_directories
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import ProcessState
from gpumem_tui.watch.report import probe_json
from tests.attach import loops
from tests.waiting import wait_for_file, wait_until
from tests.watch.rings import GONE_PID, ON_CPU, RECORD, RingFile, gone, out_of_memory, this_process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "probes"


def test_a_running_process_with_its_newest_samples(folder: Path) -> None:
    ring = RingFile(folder, this_process(rank=3, world_size=8))
    watcher = Watcher([folder])
    [process] = watcher.processes()
    assert (process.pid, process.state, process.samples, process.step) == (os.getpid(), ProcessState.RUNNING, (), 0)
    assert process.age_s == Unknown("no step has finished yet")
    ring.sample(replace(RECORD, step=1), replace(ON_CPU, step=1))
    ring.sample(replace(RECORD, step=7), replace(ON_CPU, step=7))
    [process] = watcher.processes()
    assert [(sample.device, sample.record.step) for sample in process.samples] == [("cpu", 7), ("cuda:0", 7)]
    assert isinstance(process.age_s, float)
    assert 0 <= process.age_s < 30
    assert process.problem == ""
    assert process.title == f"PID {os.getpid()}, rank 3 (python train.py)"


def test_a_device_that_is_no_longer_used_is_not_shown(folder: Path) -> None:
    ring = RingFile(folder, this_process())
    ring.sample(RECORD, replace(RECORD, device=1))
    ring.sample(replace(RECORD, step=2))
    [process] = Watcher([folder]).processes()
    assert [sample.device for sample in process.samples] == ["cuda:0"]


def test_age_is_told_by_the_monotonic_clock(folder: Path) -> None:
    """The time of day may jump; both sides read the same monotonic clock."""
    ring = RingFile(folder, this_process())
    ring.sample(replace(RECORD, wall_ns=1, monotonic_ns=5_000_000_000))
    [process] = Watcher([folder], clock_ns=lambda: 65_000_000_000).processes()
    assert process.age_s == 60.0
    assert process.problem == "no step has finished for 60 s"


def test_the_step_counter_tells_a_hang_from_a_sample_that_is_rare(folder: Path) -> None:
    ring = RingFile(folder, this_process())
    ring.sample(replace(RECORD, step=3, monotonic_ns=5_000_000_000, errors=2))
    watcher = Watcher([folder], clock_ns=lambda: 65_000_000_000)
    assert watcher.processes()[0].problem == "no step has finished for 60 s; the probe met 2 errors"
    ring.patch(*heartbeat_patch(Heartbeat(70, 64_000_000_000, 66_000_000_000, is_busy=False)))
    [process] = watcher.processes()
    assert (process.step, process.age_s, process.heard_s) == (70, 60.0, 1.0)
    assert (process.rarer, process.problem) == ("sampling slowed, samples take long", "the probe met 2 errors")
    offset, content = heartbeat_patch(Heartbeat(71, 64_000_000_000, 66_000_000_000, is_busy=True))
    ring.patch(offset, content[:8])  # half written
    assert watcher.processes()[0].heard_s == 60.0


def test_where_a_process_stands_counts_until_a_step_ends(folder: Path) -> None:
    ring = RingFile(folder, this_process())
    ring.sample(replace(RECORD, step=3, monotonic_ns=5_000_000_000))
    stall = Stall(9, 1, 30_000_000_000, "batch", "", "data.py:5", "read", busy=True, stack=("data.py:5 read",))
    ring.document(ring.files.stall, vars(stall))
    watcher = Watcher([folder], clock_ns=lambda: 65_000_000_000)
    [process] = watcher.processes()
    assert (process.stall, process.step) == (stall, 9)
    assert process.problem == "no step has finished for 60 s: in batch at data.py:5 (read), computing"
    assert json.loads(encoded(probe_json(process, process.samples[0])))["stopped_at"]["source"] == "data.py:5"
    ring.patch(*heartbeat_patch(Heartbeat(10, 31_000_000_000, 32_000_000_000, is_busy=False)))
    [process] = watcher.processes()
    assert (process.stall, process.problem) == (None, "no step has finished for 34 s"), "of an earlier stop"
    ring.document(ring.files.stall, {"phase": 3})
    assert watcher.processes()[0].problem == "no step has finished for 34 s", "a damaged one hides nothing"


def test_steps_that_take_long_are_no_silence(folder: Path) -> None:
    ring = RingFile(folder, this_process())
    ring.sample(replace(RECORD, step_s=30.0, monotonic_ns=5_000_000_000))
    assert Watcher([folder], clock_ns=lambda: 94_000_000_000).processes()[0].problem == ""
    assert Watcher([folder], clock_ns=lambda: 96_000_000_000).processes()[0].problem == "no step has finished for 91 s"


def test_what_the_probe_says_of_itself(folder: Path) -> None:
    ring = RingFile(folder, this_process())
    ring.sample(replace(RECORD, dropped=3))
    watcher = Watcher([folder])
    assert watcher.processes()[0].problem == "3 samples could not be written"
    ring.sample(replace(RECORD, errors=2))
    assert watcher.processes()[0].problem == "the probe met 2 errors"
    ring.patch(*switched_off_patch("OSError: \x1b[31mno space"))
    assert watcher.processes()[0].problem == "the probe switched itself off: OSError:  [31mno space"


def test_the_ring_goes_round(folder: Path) -> None:
    ring = RingFile(folder, this_process())
    watcher = Watcher([folder])
    for step in range(1, SLOT_COUNT + 101):
        ring.sample(replace(RECORD, step=step))
        if step in (10, 1000):
            assert watcher.processes()[0].step == step
    [process] = watcher.processes()
    steps = [sample.record.step for sample in watcher.history(process)]
    assert steps == list(range(101, SLOT_COUNT + 101))
    [afresh] = Watcher([folder]).processes()
    assert afresh.samples == process.samples


def test_only_new_samples_are_read(folder: Path) -> None:
    """Files read before may be damaged since: their contents stay. A process that is gone is not read again."""
    ring, ended = RingFile(folder, this_process()), RingFile(folder, gone())
    for one in (ring, ended):
        one.sample(replace(RECORD, step=1))
    watcher = Watcher([folder])
    watcher.processes()
    for one in (ring, ended):
        one.patch(slot_offset(1), bytes(SLOT_BYTES))
        one.sample(replace(RECORD, step=2))
    running, vanished = watcher.processes()
    assert [sample.record.step for sample in watcher.history(running)] == [1, 2]
    assert [sample.record.step for sample in watcher.history(vanished)] == [1]
    assert running.problem == vanished.problem == ""


def test_a_torn_sample_is_left_out_and_said(folder: Path) -> None:
    ring = RingFile(folder, this_process())
    ring.sample(replace(RECORD, step=1))
    ring.sample(replace(RECORD, step=2))
    ring.patch(slot_offset(1) + SLOT_BYTES // 2, b"\xff")
    watcher = Watcher([folder])
    [process] = watcher.processes()
    assert process.step == 2
    assert process.problem == "samples lost to damage: 1"
    assert [sample.record.step for sample in watcher.history(process)] == [2]


def test_how_processes_end(folder: Path) -> None:
    RingFile(folder, gone(start_ticks=1)).end()
    RingFile(folder, gone(start_ticks=2))
    out = RingFile(folder, gone(start_ticks=3))
    out.document(out.files.oom, out_of_memory(fatal=True))
    for name, last_step in ((4, 12), (5, 11)):
        caught = RingFile(folder, gone(start_ticks=name))
        caught.document(caught.files.oom, out_of_memory(fatal=False, step=11))
        caught.sample(replace(RECORD, step=last_step))
        caught.end()
    states = {process.process.start_ticks: process.state for process in Watcher([folder]).processes()}
    assert states == {
        1: ProcessState.ENDED,
        2: ProcessState.VANISHED,
        3: ProcessState.OUT_OF_MEMORY,
        4: ProcessState.ENDED,  # it went on after the error
        5: ProcessState.OUT_OF_MEMORY,  # it handled the error and left
    }
    assert all(process.pid is None for process in Watcher([folder]).processes())


def test_a_process_that_ends_while_it_is_watched(folder: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as program:
        ring = RingFile(folder, this_process(pid=program.pid, start_ticks=start_ticks(program.pid)))
        watcher = Watcher([folder])
        assert watcher.processes()[0].state is ProcessState.RUNNING
        ring.sample(RECORD)
        program.kill()
        os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)  # a zombie has ended
        [process] = watcher.processes()
        assert (process.state, process.pid, process.step) == (ProcessState.KILLED, None, 1)
        assert process.state_words == "killed (SIGKILL)"


def test_last_words_within_one_tick_of_the_clock_are_heard(folder: Path) -> None:
    """File systems tell time in ticks of milliseconds: a file may change twice in one."""
    with subprocess.Popen(["sleep", "60"]) as program:
        ring = RingFile(folder, this_process(pid=program.pid, start_ticks=start_ticks(program.pid)))
        watcher = Watcher([folder])
        assert watcher.processes()[0].state is ProcessState.RUNNING
        changed = ring.path.stat()
        ring.end()
        os.utime(ring.path, ns=(changed.st_atime_ns, changed.st_mtime_ns))
        program.kill()
        os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
        assert watcher.processes()[0].state_words == "killed (SIGKILL) at the interpreter's exit"


def test_a_pid_that_is_used_again_is_not_the_process(folder: Path) -> None:
    """The pid is ours, but the process of this ring began at another time."""
    RingFile(folder, this_process(start_ticks=start_ticks() - 1))
    [process] = Watcher([folder]).processes()
    assert (process.state, process.pid) == (ProcessState.VANISHED, None)


def test_a_writer_that_makes_its_ring_anew(folder: Path) -> None:
    """As after exec, or when somebody deleted it."""
    ring = RingFile(folder, this_process())
    for step in range(1, 6):
        ring.sample(replace(RECORD, step=step))
    watcher = Watcher([folder])
    assert watcher.processes()[0].step == 5
    ring.path.unlink()
    assert watcher.processes() == ()
    again = RingFile(folder, this_process())
    again.sample(replace(RECORD, step=1))
    [process] = watcher.processes()
    assert [sample.record.step for sample in watcher.history(process)] == [1]


def test_another_version_is_refused_and_the_others_are_read(folder: Path) -> None:
    RingFile(folder, gone()).patch(8, struct.pack("<I", 2))
    RingFile(folder, this_process()).sample(RECORD)
    watcher = Watcher([folder])
    watched = watcher.processes()
    assert len(watched) == 1
    [refused] = watcher.refused
    assert refused.reason == "4000000-12345.ring: written by another version (schema 2, this one reads 1)"


def test_a_ring_under_another_processs_name_is_refused(folder: Path) -> None:
    RingFile(folder, gone()).path.rename(folder / f"{os.getpid()}-{start_ticks()}.ring")
    watcher = Watcher([folder])
    assert watcher.processes() == ()
    [refused] = watcher.refused
    assert refused.reason.endswith(f"states that it is of process {GONE_PID}")


def test_running_processes_come_first_then_the_last_to_have_begun(folder: Path) -> None:
    RingFile(folder, gone(start_ticks=1, started_ns=10))
    RingFile(folder, gone(start_ticks=2, started_ns=20))
    RingFile(folder, this_process(started_ns=1))
    begun = [process.process.started_ns for process in Watcher([folder]).processes()]
    assert begun == [1, 20, 10]


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    watcher = Watcher([tmp_path / "nowhere"])
    watched = watcher.processes()
    assert (watched, watcher.refused) == ((), ())


def test_following_a_process_looks_where_its_environment_says(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMEM_TUI_DIR", str(tmp_path / "ours"))
    with subprocess.Popen(["sleep", "60"], env={"GPUMEM_TUI_DIR": str(folder), "PATH": os.environ["PATH"]}) as program:
        RingFile(folder, this_process(pid=program.pid, start_ticks=start_ticks(program.pid)))
        watcher = Watcher()
        assert folder not in {process.files.directory for process in watcher.processes()}
        wait_until(Path(f"/proc/{program.pid}/environ").read_bytes)  # it is on its way
        watcher.follow(program.pid)
        assert program.pid in {process.pid for process in watcher.processes()}
        program.kill()


def test_a_process_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It publishes where only it can see by that name, under a pid that is another process here."""
    folder = tmp_path / "private"
    code = f"""
import pathlib, time
from tests.attach import loops
from tests.watch.rings import RECORD, RingFile, this_process
RingFile(pathlib.Path({str(folder / "probes")!r}), this_process()).sample(RECORD)
print('published', flush=True)
time.sleep(60)
"""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("GPUMEM_TUI_DIR", str(tmp_path / "ours"))
    with loops.contained(code, folder) as pid:
        directory = Path(f"/proc/{pid}/root{folder}/probes")
        wait_for_file(directory)
        assert directory.samefile(next(path for path in foreign_directories() if path.samefile(directory)))
        watcher = Watcher()
        process = next(process for process in watcher.processes() if process.files.directory.samefile(directory))
        assert (process.pid, process.files.pid, process.step) == (pid, 1, 1)


def test_a_file_that_is_no_ring_is_named(folder: Path) -> None:
    ring = RingFile(folder, gone())
    ring.path.write_bytes(b"x" * RING_BYTES)
    watcher = Watcher([folder])
    assert watcher.processes() == ()
    [refused] = watcher.refused
    assert refused.reason == f"{ring.path.name}: not a ring"


def test_a_full_folder_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RingFile(folder, gone()).sample(RECORD)
    for name in ("statvfs", "fstatvfs"):
        monkeypatch.setattr(os, name, lambda _: SimpleNamespace(f_bavail=3, f_frsize=4096))
    watcher = Watcher([folder])
    found = watcher.processes()
    assert len(found) == 1
    [refused] = watcher.refused
    assert refused.reason == f"{folder} is full (12.0 KiB free, 516.0 KiB needed): no other process can publish there"
    [warned] = warnings(["true"], folder)
    assert warned.startswith(f"nothing will be published: {refused.reason}; ")


def test_a_folder_may_go_at_every_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write in /tmp can have it go while root's viewer looks into it."""
    goes = folder / "goes"
    for step in ("__enter__", "names"):
        goes.mkdir(0o700, parents=True)
        does = getattr(Folder, step)

        def gone_then(opened: Folder, *most: int, does: Callable[..., object] = does) -> object:
            found = does(opened, *most)
            shutil.rmtree(opened.path)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Folder, step, gone_then)
            watcher = Watcher([goes])
            assert watcher.processes() == ()
            assert watcher.refused == ()


def test_a_file_that_goes_while_others_are_removed_keeps_none_of_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(0o700)
    strays = [folder / f"{pid}-1.look" for pid in (1_000_001, 1_000_002)]
    for stray in strays:
        stray.touch()
    monkeypatch.setattr(Folder, "names", lambda _: ["1000003-1.look", *(stray.name for stray in strays)])
    clean((), time.time() + 2 * KEEP_ENDED_S, folder)
    assert list(folder.iterdir()) == []


def test_folders_of_runs_are_none_that_probes_publish_in() -> None:
    run = Path(tempfile.mkdtemp(prefix=children._FOLDER, dir="/tmp"))
    try:
        assert run not in everybodys_directories()
    finally:
        run.rmdir()


def test_the_folder_of_all_users_is_listed_again_only_once_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[object] = []
    listing = os.listdir

    def noted(path: Path) -> list[str]:
        listed.append(path)
        return listing(path)

    monkeypatch.setattr(publishing, "_TMP", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "listdir", noted)
    folders = PublishingFolders(proc=tmp_path / "no processes", clock_ns=lambda: 0)
    folders._foreign_at_s = 0.0
    os.utime(tmp_path, (1, 1))
    for _ in range(5):
        assert folders.directories() == (default_directory(),)
    assert listed == [tmp_path]
    later = tmp_path / "gpumem-tui-123"
    for _ in range(5):  # it has just changed, and may change again at what is the same time to the kernel
        later.mkdir(exist_ok=True)
        assert later in folders.directories()
        later.rmdir()
        assert later not in folders.directories()


def test_the_history_of_one_that_has_ended_ends_with_its_training(folder: Path) -> None:
    ring = RingFile(folder, gone())
    for step in range(1, 4):
        ring.sample(replace(RECORD, step=step, monotonic_ns=step))
    ring.sample(replace(RECORD, step=4, monotonic_ns=9, parameters_bytes=0, phase=""))
    watcher = Watcher([folder])
    [process] = watcher.processes()
    assert [sample.record.step for sample in watcher.history(process)] == [1, 2, 3]
    assert (process.step, process.samples[0].record.step) == (4, 3)
