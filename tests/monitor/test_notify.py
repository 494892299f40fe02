"""Alerts told to a user who does not look: by commands that work, fail, hang or talk too much."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from gpumem_tui.monitor.alerts import Alert, AlertKind, Severity
from gpumem_tui.monitor.notify import Notifier, Told, run_command
from gpumem_tui.settings import Notify
from tests.waiting import wait_for_file, wait_until

FULL = Alert(Severity.WARNING, "GPU-1", AlertKind.NEAR_FULL, "GPU 0: 97 % of memory in use", 1_700_000_000.0)
HOT = structs.replace(FULL, kind=AlertKind.HOT, message="GPU 0: 90 °C")
TOLD = Callable[[], list[dict[str, object]]]
TRIFLE = structs.replace(FULL, severity=Severity.NOTE, kind=AlertKind.THROTTLED)


class Clock:
    """A time that a test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def script(folder: Path, text: str) -> tuple[str, ...]:
    """A command as a user would write it: a script of the shell."""
    path = folder / "tell.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return (str(path),)


@pytest.fixture
def told(tmp_path: Path) -> TOLD:
    """The alerts that the command of `notifier` got so far."""

    def read() -> list[dict[str, object]]:
        lines = (tmp_path / "told").read_text().splitlines() if (tmp_path / "told").exists() else []
        return [json.loads(line) for line in lines]

    return read


def notifier_of(folder: Path, clock: Clock, **changes: Any) -> Notifier:
    """One whose command writes down what it is given."""
    command = script(folder, f"cat >> {folder}/told")
    return Notifier(structs.replace(Notify(command=command), **changes), clock=clock)


@pytest.mark.parametrize("command", ["", "  ", ()])
def test_nobody_is_told_by_a_command_of_no_words(command: str | tuple[str, ...]) -> None:
    notifier = Notifier(Notify(command=command))
    notifier.update("node-7", (FULL,))
    notifier.close()
    assert not notifier.is_wanted
    assert notifier.problem == ""


def test_an_alert_is_told_once_as_json(tmp_path: Path, told: TOLD) -> None:
    notifier = notifier_of(tmp_path, Clock())
    for alerts in ((), (FULL,), (FULL, TRIFLE), (FULL,)):
        notifier.update("node-7", alerts)
    notifier.update("node-8", (FULL,))
    wait_until(lambda: len(told()) == 2)
    first, second = told()
    assert first == {
        "schema": 1, "event": "alert", "host": "node-7", "severity": "warning", "kind": "near_full",
        "gpu_uuid": "GPU-1", "instance": "", "message": FULL.message, "since_s": FULL.since_s, "left_out": 0,
    }  # fmt: skip
    assert second["host"] == "node-8"
    notifier.close()
    assert notifier.problem == ""


def test_one_that_comes_and_goes_is_told_once_in_a_while(tmp_path: Path, told: TOLD) -> None:
    clock = Clock()
    notifier = notifier_of(tmp_path, clock)
    for _ in range(5):
        notifier.update("a", (FULL,))
        notifier.update("a", ())
        clock.now_s += 30
    clock.now_s += 300
    notifier.update("a", (HOT, FULL))
    wait_until(lambda: len(told()) == 3)
    assert [one["kind"] for one in told()] == ["near_full", "hot", "near_full"]
    notifier.close()


def test_too_many_are_counted_with_the_next(tmp_path: Path, told: TOLD) -> None:
    clock = Clock()
    notifier = notifier_of(tmp_path, clock, most_a_minute=2)
    for number in range(5):
        notifier.update(f"host{number}", (FULL,))
    clock.now_s += 61
    notifier.update("last", (FULL,))
    wait_until(lambda: len(told()) == 3)
    assert [(one["host"], one["left_out"]) for one in told()] == [("host0", 0), ("host1", 0), ("last", 3)]
    notifier.close()


def test_a_command_that_hangs_holds_nobody_up_and_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hangs = script(tmp_path, f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait")
    notifier = Notifier(Notify(command=hangs, timeout_s=0.5))
    notifier.update("a", (FULL,))
    notifier.update("a", (FULL, HOT))  # it did not wait for the first
    wait_for_file(pids)
    wait_until(lambda: notifier.problem == "notify: tell.sh was killed after 0.5 s")
    started = [int(pid) for pid in pids.read_text().split()]
    notifier.close()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in started))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo one >&2; printf 'no\\033[31m route\\n\\n' >&2; exit 3", "ended with exit code 3: no [31m route"),
        ("kill -9 $$", "ended by signal 9"),
        ("head -c 5000000 /dev/zero >&2; exit 1", "ended with exit code 1"),
    ],
)
def test_a_command_that_fails_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    problem = run_command(Notify(command=script(tmp_path, text)), Told("a", FULL).body(0))
    assert problem.startswith(f"notify: tell.sh {said}")
    assert problem.isprintable()
    assert len(problem) < 300


def test_what_a_command_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    command = script(tmp_path, f"setsid sleep 1000 & echo $! > {tmp_path}/left")
    assert run_command(Notify(command=command), {}) == ""
    os.kill(int((tmp_path / "left").read_text()), 9)


def test_a_command_that_is_not_there_is_one_line_until_another_works(tmp_path: Path, told: TOLD) -> None:
    assert run_command(Notify(command=("/nowhere/x",)), {}) == "notify: x cannot be run: No such file or directory"
    command = script(tmp_path, f"test -e {tmp_path}/mended || exit 1; cat >> {tmp_path}/told")
    notifier = Notifier(Notify(command=command))
    notifier.update("a", (FULL,))
    wait_until(lambda: notifier.problem == "notify: tell.sh ended with exit code 1")
    (tmp_path / "mended").touch()
    notifier.update("a", (FULL, HOT))
    wait_until(lambda: notifier.problem == "")
    assert [one["kind"] for one in told()] == ["hot"]
    notifier.close()


def test_where_no_file_can_be_written_that_is_said_and_later_alerts_are_told(
    tmp_path: Path, told: TOLD, monkeypatch: pytest.MonkeyPatch
) -> None:
    notifier = notifier_of(tmp_path, Clock())
    with monkeypatch.context() as full:
        full.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        notifier.update("a", (FULL,))
        wait_until(lambda: notifier.problem == "notify: tell.sh cannot be run: No such file or directory")
    notifier.update("a", (FULL, HOT))
    wait_until(lambda: len(told()) == 1 and not notifier.problem)
    notifier.close()


def test_without_a_command_nobody_is_told() -> None:
    notifier = Notifier(Notify())
    notifier.update("a", (FULL,))
    assert (notifier.is_wanted, notifier._thread) == (False, None)
    notifier.close()


def test_the_python_of_a_user_reads_it(tmp_path: Path) -> None:
    """As the manual has it."""
    program = "import json, sys; alert = json.load(sys.stdin); open(sys.argv[1], 'w').write(alert['message'])"
    command = (sys.executable, "-c", program, str(tmp_path / "out"))
    assert run_command(Notify(command=command), Told("a", HOT).body(0)) == ""
    assert (tmp_path / "out").read_text() == HOT.message
