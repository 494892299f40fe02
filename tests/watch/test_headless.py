"""Watching without a screen, until the process ends."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gpumem_tui.probe.files import start_ticks
from gpumem_tui.watch import headless
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import State
from tests.watch.rings import RECORD, RingFile, gone, out_of_memory, this_process


@pytest.mark.parametrize("as_json", [True, False])
def test_one_process_until_it_ends(as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "probes"
    RingFile(folder, this_process()).sample(RECORD)  # another one
    with subprocess.Popen(["sleep", "0.5"]) as program:
        ring = RingFile(folder, this_process(pid=program.pid, start_ticks=start_ticks(program.pid)))
        ring.sample(RECORD)
        ring.document(ring.files.oom, out_of_memory())
        process = headless.watch(Watcher([folder]), program.pid, 0.05, as_json=as_json)
    assert process is not None
    assert (process.state, process.files.pid) == (State.OUT_OF_MEMORY, program.pid)
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
        assert ended.endswith(": out of memory at step 1")


def test_what_is_not_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "probes"
    with subprocess.Popen(["sleep", "0.2"]) as program:
        RingFile(folder, this_process(pid=program.pid, start_ticks=start_ticks(program.pid)))
        RingFile(folder, gone()).path.chmod(0o622)
        headless.watch(Watcher([folder]), program.pid, 0.05, as_json=True)
    assert "gpumem-tui: not read: 4000000-12345.ring can be written by other users" in capsys.readouterr().err


def test_the_last_sample_of_one_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RingFile(tmp_path / "probes", gone()).sample(RECORD)
    [process] = Watcher([tmp_path / "probes"]).processes()
    headless.show_last(process, as_json=True)
    assert json.loads(capsys.readouterr().out)["state"] == "vanished"
