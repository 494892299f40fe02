"""Watching without a screen, until the process ends."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_tui.probe.files import start_ticks
from gpumem_tui.watch import report as headless
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import ProbedProcess, ProcessState
from tests.watch.rings import GONE_PID, RECORD, RingFile, gone, out_of_memory, this_process


class Ends(Watcher):
    """Ends a program once it has been looked at a few times.

    Args:
        program: waits for its stdin to be closed.
    """

    def __init__(self, folder: Path, program: subprocess.Popen[bytes]) -> None:
        super().__init__([folder])
        self._program = program
        self._looks = 0

    def processes(self) -> tuple[ProbedProcess, ...]:
        self._looks += 1
        if self._looks == 5:
            self._program.communicate()
        return super().processes()


def waiting() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE)


@pytest.mark.parametrize("as_json", [True, False])
def test_one_process_until_it_ends(as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "probes"
    RingFile(folder, this_process()).sample(RECORD)  # another one
    with waiting() as program:
        ring = RingFile(folder, this_process(pid=program.pid, start_ticks=start_ticks(program.pid)))
        ring.sample(RECORD)
        ring.document(ring.files.oom, out_of_memory())
        process = headless.watch(Ends(folder, program), program.pid, 0.01, as_json=as_json)
    assert process is not None
    assert (process.state, process.files.pid) == (ProcessState.OUT_OF_MEMORY, program.pid)
    lines = capsys.readouterr().out.splitlines()
    if as_json:
        sample, ended = map(json.loads, lines)
        assert (sample["event"], sample["pid"], sample["state"]) == ("sample", program.pid, "running")
        assert (ended["event"], ended["pid"], ended["state"]) == ("ended", program.pid, "out of memory")
    else:
        begun, heads, sample, ended = lines
        assert begun.startswith(f"PID {program.pid} (python train.py)")
        assert heads.split()[0] == "PID"
        assert sample.split()[0] == str(program.pid)
        assert ended.endswith(": out of memory; the last step seen was 1; a few may have followed")


def test_what_is_not_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "probes"
    with waiting() as program:
        RingFile(folder, this_process(pid=program.pid, start_ticks=start_ticks(program.pid)))
        RingFile(folder, gone()).path.chmod(0o622)
        headless.watch(Ends(folder, program), program.pid, 0.01, as_json=True)
    assert "gpumem-tui: not read: 4000000-12345.ring can be written by other users" in capsys.readouterr().err


def test_the_last_sample_of_one_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RingFile(tmp_path / "probes", gone()).sample(RECORD)
    [process] = Watcher([tmp_path / "probes"]).processes()
    headless.show_last(process, as_json=True)
    sample, ended = map(json.loads, capsys.readouterr().out.splitlines())
    assert (sample["event"], sample["state"]) == ("sample", "vanished")
    assert (ended["event"], ended["exit_code"], ended["signal"]) == ("ended", None, None)


def test_those_that_ended_lately_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And then it continues until it is interrupted."""
    folder = tmp_path / "probes"
    now_ns = time.time_ns()
    for place, ago_s in enumerate((60, 5, 7200)):
        ring = RingFile(folder, gone(pid=GONE_PID + place))
        ring.sample(replace(RECORD, wall_ns=now_ns - ago_s * 10**9))

    class Done(Exception):
        pass

    class Once(Watcher):
        reads = 0

        def processes(self) -> tuple[ProbedProcess, ...]:
            self.reads += 1
            if self.reads > 3:
                raise Done
            return super().processes()

    with pytest.raises(Done):
        headless.watch(Once([folder]), None, 0.01, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [str(GONE_PID), str(GONE_PID + 1)]
    assert all("killed or crashed" in line for line in lines)


def test_why_it_is_silent_is_asked_while_nothing_publishes(tmp_path: Path) -> None:
    """Again after each look, but not while a process runs that publishes."""
    folder = tmp_path / "probes"
    asked: list[int] = []

    def while_silent() -> None:
        asked.append(len(asked))
        if len(asked) == 3:
            raise InterruptedError

    with waiting() as program:
        RingFile(folder, this_process(pid=program.pid, start_ticks=start_ticks(program.pid))).sample(RECORD)
        headless.watch(Ends(folder, program), program.pid, 0.01, as_json=True, while_silent=while_silent)
    assert asked == []
    with pytest.raises(InterruptedError):
        headless.watch(Watcher([folder]), None, 0.01, as_json=True, while_silent=while_silent)
    assert asked == [0, 1, 2]


def test_a_process_that_ended_just_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RingFile(tmp_path / "probes", gone()).sample(replace(RECORD, wall_ns=time.time_ns()))
    process = headless.watch(Watcher([tmp_path / "probes"]), GONE_PID, 0.05, as_json=True)
    assert process is not None
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["sample", "ended"]
