"""A session on a GPU, without one: what is kept, in which order things run, how it ends; a rehearsal of some of it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyte
import pytest

from tests.gpu import packing, screens, session
from tests.gpu.activities import Activity, Unfinished, Uses
from tests.gpu.place import Machine
from tests.gpu.processes import Ended, Started, TimeIsUp, kill_all, run
from tests.gpu.session import Done, State, StateError, Step
from tests.sharing import WarmPython
from tests.waiting import wait_until, wait_until_gone

MACHINE = Machine(gpu="NVIDIA H200", driver="580", packages={"torch": "2.11.0"})
LANES = {"gpu": 3, "processor": 1}


def step(name: str, uses: Uses, work: Callable[[float], object] = lambda limit_s: None, limit_s: float = 60.0) -> Step:
    def done(limit_s: float) -> Done:
        work(limit_s)
        return Done(name=name)

    return Step(activity=Activity(name, uses, limit_s, lambda *_: "", least_s=0.0), work=done)


def test_what_is_done_is_there_after_a_kill(tmp_path: Path) -> None:
    State(tmp_path, MACHINE).add(Done(name="doctor", said="all is well"))
    with (tmp_path / "state.ndjson").open("ab") as file:
        file.write(b'{"name":"half a li')
    state = State(tmp_path, MACHINE)
    assert set(state.done) == {"machine", "doctor"}
    state.add(Done(name="watched"))
    assert set(State(tmp_path, MACHINE).done) == {"machine", "doctor", "watched"}


def test_a_folder_of_another_machine_is_refused(tmp_path: Path) -> None:
    State(tmp_path, MACHINE)
    with pytest.raises(StateError, match="holds a session of NVIDIA H200"):
        State(tmp_path, Machine(gpu="NVIDIA T4", driver="580", packages={"torch": "2.11.0"}))


def test_a_folder_with_another_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.ndjson").write_text("not a session\n")
    with pytest.raises(StateError, match=r"is not a session's"):
        State(tmp_path, MACHINE)


def test_the_card_is_alone_and_the_rest_is_side_by_side(tmp_path: Path) -> None:
    together = threading.Barrier(3, timeout=60)
    at_work: set[str] = set()
    seen: dict[str, set[str]] = {}

    def working(name: str, meet: bool) -> Callable[[float], None]:
        def work(limit_s: float) -> None:
            at_work.add(name)
            if meet:
                together.wait()
            seen[name] = {each for each in at_work if not each.startswith("processor")}
            at_work.discard(name)

        return work

    steps = [step(f"gpu{i}", "gpu", working(f"gpu{i}", True)) for i in range(3)]
    steps += [step("card", "card", working("card", False)), step("processor", "processor")]
    steps += [step(f"late{i}", "gpu", working(f"late{i}", True)) for i in range(3)]
    state = State(tmp_path, MACHINE)
    session._run_all(steps, state, time.monotonic() + 60, LANES)
    assert seen["card"] == {"card"}
    assert set(state.done) == {"machine", *(each.activity.name for each in steps)}


def test_a_failure_is_a_line_and_not_the_end(tmp_path: Path) -> None:
    def fails(limit_s: float) -> None:
        raise RuntimeError("broken")

    state = State(tmp_path, MACHINE)
    session._run_all([step("bad", "gpu", fails), step("good", "gpu")], state, time.monotonic() + 60, LANES)
    assert (state.done["bad"].failed, state.done["bad"].said) == (True, "RuntimeError: broken")
    assert not state.done["good"].failed


def test_what_the_end_of_the_budget_stops_is_left_for_the_next_call(tmp_path: Path) -> None:
    def sleeps(limit_s: float) -> None:
        with suppress(TimeIsUp):
            run([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "sleeps", limit_s)

    state = State(tmp_path, MACHINE)
    began_s = time.monotonic()
    session._run_all([step("long", "card", sleeps), step("next", "gpu")], state, began_s + 0.5, LANES)
    assert set(state.done) == {"machine"}
    assert time.monotonic() - began_s < 60


def test_what_is_unfinished_is_left_for_the_next_call(tmp_path: Path) -> None:
    def stops(limit_s: float) -> None:
        raise Unfinished("12 runs left")

    state = State(tmp_path, MACHINE)
    session._run_all([step("record", "gpu", stops)], state, time.monotonic() + 60, LANES)
    assert set(state.done) == {"machine"}


def test_what_cannot_be_kept_ends_it_and_leaves_no_program(tmp_path: Path) -> None:
    sleeper: list[Started] = []
    ended: list[Ended] = []

    def sleeps(limit_s: float) -> None:
        sleeper.append(Started([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "sleeps"))
        ended.append(sleeper[0].wait(limit_s))

    class Full(State):
        def add(self, line: Done) -> None:
            if line.machine is None:
                raise OSError(28, "No space left on device")

    first = step("first", "processor", lambda _: wait_until(lambda: sleeper))
    with pytest.raises(OSError, match="No space"):
        session._run_all([step("long", "gpu", sleeps), first], Full(tmp_path, MACHINE), time.monotonic() + 60, LANES)
    assert [each.code for each in ended] == [-signal.SIGTERM]


def test_a_program_that_is_ended_takes_along_what_it_started(tmp_path: Path) -> None:
    stays = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    inner = f"{stays}; print(os.getpid(), flush=True); signal.pause()"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}]).wait()"
    started = Started([sys.executable, "-c", script], tmp_path / "log")
    child = int(wait_until(lambda: (tmp_path / "log.out").read_text()))
    kill_all()
    assert started.wait(60).code == -signal.SIGTERM
    wait_until_gone([child])


# Packing


def test_files_are_packed_and_packed_again_with_what_came_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PART_BYTES", 10_000)
    work = tmp_path / "work"
    for call in range(2):
        work.mkdir()
        for number in range(3):
            (work / f"{call}-{number}.json.gz").write_bytes(bytes([number]) * 4000)
        (work / "again.txt").write_text(f"call {call}")
        assert packing.pack(work, tmp_path) == []
        assert not work.exists()
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == ["session-1.zip", "session-2.zip", "session-3.zip"]
    assert all(part.stat().st_size <= 10_000 for part in parts)
    files = [zipfile.ZipFile(part) for part in parts]
    found = {name: file.read(name) for file in files for name in file.namelist()}
    assert len(found) == sum(len(file.namelist()) for file in files)
    assert found.pop("again.txt") == b"call 1"
    assert {name: len(body) for name, body in found.items()} == {
        f"{call}-{number}.json.gz": 4000 for call in range(2) for number in range(3)
    }


def test_what_finds_no_room_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PART_BYTES", 10_000)
    work = tmp_path / "work"
    work.mkdir()
    (work / "large.gz").write_bytes(bytes(11_000))
    (work / "small.gz").write_bytes(bytes(10))
    assert packing.pack(work, tmp_path) == ["large.gz"]
    assert [path.name for path in work.iterdir()] == ["large.gz"]


def test_a_terminals_screen_becomes_a_picture(tmp_path: Path) -> None:
    screen = pyte.Screen(20, 3)
    pyte.Stream(screen).feed("\x1b[38;2;1;2;3m█ GPU\x1b[0m \x1b[1;91mhot")
    screens.keep(screen, tmp_path / "seen")
    assert (tmp_path / "seen.txt").read_text() == "█ GPU hot\n\n\n"
    picture = (tmp_path / "seen.svg").read_text()
    assert "#010203" in picture
    assert "hot" in picture
    assert re.findall(r"terminal-\w+", picture)[0].startswith("terminal-seen")


# The command


def called(folder: Path, *arguments: str, python: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.gpu.session", "--out", str(folder), *arguments]
    words += ["--python", python] if python else []
    return subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    ended = called(tmp_path, python=WarmPython.path())
    assert (ended.returncode, ended.stdout) == (4, "")
    assert re.fullmatch(r"torch 2\S* finds no CUDA device; run this next to .* --rehearse\n", ended.stderr)


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    ended = called(tmp_path, "--rehearse", python="/nowhere/python")
    assert ended.returncode == 4
    assert re.fullmatch(r"/nowhere/python: .*No such file.*; --python PATH names one that has torch\n", ended.stderr)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = called(tmp_path / "file" / "out", "--rehearse", python=WarmPython.path())
    assert (ended.returncode, ended.stderr) == (2, f"--out {tmp_path}/file/out: Not a directory\n")


@pytest.mark.scripts
def test_a_rehearsal_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """Some of each kind: what the program states, a program both ways, one that cannot run here, the recorder."""
    some = ["--rehearse", "--only", "^doctor$|^readings$|[.]graphed-callables$|[.]deeplab$", "--budget", "300"]
    words = [sys.executable, "-m", "tests.gpu.session", "--out", str(tmp_path), *some]
    with subprocess.Popen(words, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if " s  " in line:  # one is done
                first.terminate()
                break
        assert "run the same command again" in first.stdout.read()
    second = called(tmp_path, *some)
    assert second.returncode == 0, second.stderr
    assert "all is done" in second.stdout
    assert int(re.findall(r"(\d+) of 6 activities to do", second.stdout)[0]) < 6
    assert {path.name for path in tmp_path.iterdir()} == {"session-1.zip", "state.ndjson", "table.csv", "table.md"}
    with zipfile.ZipFile(tmp_path / "session-1.zip") as part:
        assert {"doctor.out", "graphed-callables.json", "graphed-callables.events.json.gz"} <= {*part.namelist()}
    assert "NVIDIA H200" in (tmp_path / "table.md").read_text()
    assert "graphed-callables" in (tmp_path / "table.csv").read_text()
