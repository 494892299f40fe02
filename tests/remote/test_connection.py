"""A connection: what a host prints, states and fails to say becomes readings or one line; the next try comes later."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_tui.memory import MIB
from gpumem_tui.monitor.wire import KEY, HostReport, ReportReader
from gpumem_tui.remote import connection as module
from gpumem_tui.remote import ssh as ssh_module
from gpumem_tui.remote.connection import BackOff, Connection, Fleet
from gpumem_tui.remote.hosts import parse_host
from gpumem_tui.remote.ssh import ANYWHERE, installed_from
from gpumem_tui.remote.status import HostPhase, HostStatus
from tests.remote.standins import DENIED, STAYS, UNKNOWN_KEY, Ssh, line_of, lines_of, reading
from tests.waiting import wait_until

Connect = Callable[[str], Connection]
GONE = ", which is gone: install gpumem-tui anew there, or name one with it by --remote-command"
TITLE = r"\033]0;me@a: ~\007\033[1;32mready\033[0m "
"""As a prompt sets a window's title, and a text after it that no line's end follows."""


@pytest.fixture
def ssh(tmp_path: Path) -> Ssh:
    return Ssh(tmp_path)


@pytest.fixture
def connect(ssh: Ssh) -> Iterator[Connect]:
    made: list[Connection] = []

    def connect(name: str) -> Connection:
        made.append(Connection(parse_host(name), ssh.options))
        made[-1].start()
        return made[-1]

    yield connect
    for each in made:
        each.stop()


def becomes(connection: Connection, phase: HostPhase) -> HostStatus:
    wait_until(lambda: connection.status.phase is phase)
    return connection.status


def test_many_hosts_take_more_descriptors_than_are_usual(ssh: Ssh) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    names = [f"n{number}" for number in range(24)]
    for name in names:
        ssh.prints(name, [reading()])
    fleet = Fleet(map(parse_host, names), ssh.options)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 32, hard))
    try:
        fleet.start()
        assert [status.phase for status in fleet.settled()] == [HostPhase.LIVE] * 24
    finally:
        fleet.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_readings_arrive_as_they_are_printed(ssh: Ssh, connect: Connect) -> None:
    ssh.prints("a", [reading(2), reading(2, after_s=1.0)])
    a = connect("a")
    wait_until(lambda: a.latest() is not None and a.latest() == second())
    assert a.status.phase is HostPhase.LIVE
    assert a.status.problem == ""
    assert a.notice == "a"
    assert "monitor --wire --interval" in ssh.called[0]


def second() -> object:
    return HostReport.of(reading(2, after_s=1.0)).with_ledgers


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"echo '{UNKNOWN_KEY}' >&2; exit 255", "its host key is not known: `ssh -p 2222 me@a` once"),
        (f"echo '{DENIED}' >&2; exit 255", "no key is accepted, and a password cannot be asked for"),
        ("echo 'WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!' >&2; exit 255", "its host key has changed"),
        ("echo 'ssh: connect to host a port 22: Connection refused' >&2; exit 255", "connect to host a port 22: Conn"),
        ("echo 'sh: 1: gpumem-tui: not found' >&2; exit 127", "gpumem-tui is not in its PATH"),
        ("echo 'gpumem-tui: settings.toml:1: unknown key' >&2; exit 2", "settings.toml:1: unknown key"),
        (
            "echo 'gpumem-tui: No such option: --wire' >&2; exit 2",
            "its gpumem-tui is of another version: install the same one there (No such option: --wire)",
        ),
        (r"printf '\033[2Jno \033]52;c;aGk=\007route\n' >&2; exit 255", "no route"),
        ("exit 3", "gpumem-tui ended with code 3"),
        ("exit 0", "gpumem-tui ended with code 0 and no reason: see what `ssh -p 2222 me@a` prints"),
        (
            "echo 'sh: 1: exec: /opt/x/bin/gpumem-tui: not found' >&2; exit 127",
            f"/opt/x/bin/gpumem-tui there needs its Python{GONE}",
        ),
        (
            "echo 'bash: line 1: /opt/x/gpumem-tui: /opt/x/bin/python: bad interpreter: No such file' >&2; exit 126",
            f"/opt/x/gpumem-tui there needs /opt/x/bin/python{GONE}",
        ),
        ("echo 'zsh:1: /opt/x/gpumem-tui: bad interpreter: /opt/python: no such file' >&2; exit 127", GONE),
        (
            "echo 'fish: The file “/opt/x/g” specified the interpreter “/opt/python”, which is not an' >&2; exit 127",
            f"/opt/x/g there needs /opt/python{GONE}",
        ),
        (
            "echo 'This account is currently not available.'; exit 1",
            "its login shell prints “This account is currently",
        ),
        ("printf 'no shell for you'; exit 1", "its login shell prints “no shell for you” and ends: name a user with"),
        ("echo '/usr/bin/python3: No module named gpumem_tui' >&2; exit 1", "/usr/bin/python3 has no gpumem-tui: inst"),
        (
            "echo 'gpumem-tui: needs Python 3.10 or later, and /usr/bin/python3 is 3.8.10' >&2; exit 2",
            "needs Python 3.10 or later, and /usr/bin/python3 is 3.8.10: install it with a newer one there, or name",
        ),
        (
            "printf 'Traceback (most recent call last):\\nTypeError: unsupported operand type(s) for |: a' >&2; exit 1",
            "its Python is perhaps too old (TypeError: unsupported operand type(s) for |: a): gpumem-tui needs 3.10",
        ),
        (
            """echo "ModuleNotFoundError: No module named 'click'" >&2; exit 1""",
            "its gpumem-tui lacks the package click: install gpumem-tui anew there",
        ),
        ("exec yes garbage", "prints “garbage”, which is no reading"),
        ("exec tr '\\0' x < /dev/zero", "prints a line of more than 4 MiB"),
    ],
)
def test_one_line_says_why_a_host_is_away(ssh: Ssh, connect: Connect, script: str, said: str) -> None:
    ssh.host("me@a", script)
    status = becomes(connect("me@a:2222"), HostPhase.AWAY)
    assert said in status.problem
    assert "\n" not in status.problem
    assert status.report is None


@pytest.mark.parametrize(
    ("runner", "source", "said"),
    [
        ("uvx", "WHEEL", "but uvx: --remote-command 'uvx --from WHEEL gpumem-tui', WHEEL being its wheel there"),
        ("uvx", "git+https://h/p@ab12", "'uvx --from git+https://h/p@ab12 gpumem-tui' has it fetched"),
        ("~/.local/bin/pipx", "WHEEL", "'~/.local/bin/pipx run --spec WHEEL gpumem-tui'"),
    ],
)
def test_what_could_run_it_there_is_offered_with_where_it_came_from_here(
    ssh: Ssh, connect: Connect, monkeypatch: pytest.MonkeyPatch, runner: str, source: str, said: str
) -> None:
    monkeypatch.setattr(ssh_module, "installed_from", lambda: source)
    ssh.host("a", f"echo 'gpumem-tui is offered by: {runner}' >&2; exit 127")
    assert said in becomes(connect("a"), HostPhase.AWAY).problem


def test_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "some_tool-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: some-tool\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    origins = {
        '{"url": "https://h/p.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}}': "git+https://h/p.git@ab12",
        '{"url": "https://h/p.whl", "archive_info": {}}': "https://h/p.whl",
        '{"url": "file:///home/me/p", "dir_info": {}}': ANYWHERE,
    }
    assert installed_from.__wrapped__("some-tool") == "some-tool==1.0"
    for origin, requirement in origins.items():
        (record / "direct_url.json").write_text(origin)
        assert installed_from.__wrapped__("some-tool") == requirement
    assert installed_from.__wrapped__("no-such-tool-here") == ANYWHERE


def test_a_greeting_before_the_readings_is_passed_over_and_named(ssh: Ssh, connect: Connect) -> None:
    ssh.prints("a", [reading()], before="echo 'Welcome to a!'; echo '{not json'")
    status = becomes(connect("a"), HostPhase.LIVE)
    assert "Welcome to a!" in status.note
    assert status.report is not None


@pytest.mark.parametrize("printed", [TITLE, "hello\\n  Loading {modules} … ", '{"a": 1}'])
def test_what_a_shell_prints_need_not_end_the_line(ssh: Ssh, connect: Connect, printed: str) -> None:
    ssh.prints("a", [reading(), reading(after_s=1.0)], before=f"printf '{printed}'")
    a = connect("a")
    wait_until(lambda: a.latest() is not None and a.latest() == HostReport.of(reading(after_s=1.0)).with_ledgers)
    assert a.status.note.startswith("its shell prints “")
    assert "]0;" not in a.status.note
    assert a.status.note.isprintable()


def test_a_reading_that_was_damaged_on_its_way_is_no_other_version(ssh: Ssh, connect: Connect) -> None:
    first, second = lines_of(reading(), reading(2, after_s=1.0))
    ssh.writes("a", [first[:90] + b"Broadcast message", second])
    problem = becomes(connect("a"), HostPhase.AWAY).problem
    assert "is damaged" in problem
    assert "does its shell write to stdout?" in problem


def test_a_first_reading_that_is_damaged_is_told_at_once(ssh: Ssh, connect: Connect) -> None:
    ssh.writes("a", [line_of(reading())[:-9]])
    assert "a reading of its is damaged" in becomes(connect("a"), HostPhase.AWAY).problem


@pytest.mark.parametrize("changes", [{KEY: 2}, {"full": {}}])
def test_other_lines_are_of_another_version(ssh: Ssh, connect: Connect, changes: dict[str, object]) -> None:
    ssh.writes("a", [json.dumps({**json.loads(line_of(reading())), **changes}).encode()])
    assert "another version: install the same one there" in becomes(connect("a"), HostPhase.AWAY).problem


def test_readings_that_never_end_are_a_flood(ssh: Ssh, connect: Connect) -> None:
    ssh.prints("a", [reading()] * 20, then='exec sh "$0"')
    status = becomes(connect("a"), HostPhase.AWAY)
    assert "lines a second" in status.problem
    assert status.report is not None, "what was read stays"


def test_a_silent_host_is_away_and_keeps_its_last_reading(
    ssh: Ssh, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAST_SILENCE_S", 0.0)
    monkeypatch.setattr(module, "_SILENT_INTERVALS", 1)
    ssh.prints("a", [reading()])
    a = connect("a")
    wait_until(lambda: a.status.phase is HostPhase.AWAY)
    assert a.status.problem.startswith("silent for ")
    assert a.status.age_s(1e9) is not None
    assert "away: silent" in a.notice


def test_no_first_answer_ends_the_try(ssh: Ssh, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_ANSWER_S", 0.5)
    ssh.host("a", STAYS)
    assert becomes(connect("a"), HostPhase.AWAY).problem.startswith("no answer within")


def test_a_host_that_never_answers_is_away_for_who_waits(ssh: Ssh) -> None:
    ssh.host("silent", "echo Welcome", STAYS)
    ssh.prints("a", [reading()])
    fleet = Fleet([parse_host("silent:2222"), parse_host("a")], ssh.options)
    fleet.start()
    try:
        silent, a = fleet.settled(0.5)
        assert silent.phase is HostPhase.AWAY
        assert silent.problem.startswith("no answer within 0.5 s: see what `ssh -p 2222 silent` does, or allow more")
        assert (a.phase, a.problem) == (HostPhase.LIVE, "")
    finally:
        fleet.stop()


def test_a_connected_host_that_stands_still_does_not_answer(ssh: Ssh, connect: Connect) -> None:
    ssh.prints("a", [reading()])
    a = becomes(connect("a"), HostPhase.LIVE)
    assert a.received_s is not None
    assert a.late(a.received_s + 4.0) == ""
    assert a.late(a.received_s + 11.2) == "no answer for 11 s"
    seldom = replace(a, interval_s=60.0)
    assert seldom.late(a.received_s + 90.0) == "", "it is asked once a minute"


def test_it_connects_again_by_itself_and_at_once_when_asked(ssh: Ssh, connect: Connect) -> None:
    ssh.host("a", "exit 127")
    a = connect("a")
    becomes(a, HostPhase.AWAY)
    ssh.prints("a", [reading()], then="exit 1")
    a.connect_now()
    wait_until(lambda: a.latest() is not None)
    ssh.prints("a", [reading(3)])  # the next try comes by itself, a second later
    wait_until(lambda: a.latest() is not None and len(a.latest().gpus) == 3)  # type: ignore[union-attr]
    assert len(ssh.called) == 3


def test_each_try_that_fails_waits_longer_for_the_next_up_to_a_bound() -> None:
    back_off = BackOff()
    waits = [back_off.after(answered=False, is_refused=False) for _ in range(8)]
    assert waits[:5] == [2.0, 4.0, 8.0, 15.0, 30.0]
    assert waits[5:] == [30.0, 30.0, 30.0]
    assert back_off.after(answered=True, is_refused=False) == 1.0, "from the beginning again"
    assert back_off.after(answered=False, is_refused=False) == 2.0


def test_what_only_a_person_can_mend_is_tried_seldom() -> None:
    back_off = BackOff()
    assert [back_off.after(answered=False, is_refused=True) for _ in range(2)] == [60.0, 60.0]
    assert back_off.after(answered=True, is_refused=False) == 1.0


def test_a_connection_waits_as_its_back_off_says(ssh: Ssh, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BACK_OFF_S", (1000.0, 2000.0, 3000.0))
    monkeypatch.setattr(module, "_REFUSED_BACK_OFF_S", 9000.0)
    ssh.host("a", "exit 1")
    a = connect("a")

    def waits(tries: int) -> int:
        """In thousands of seconds, after so many tries."""
        wait_until(lambda: len(ssh.called) == tries and a.status.phase is HostPhase.AWAY)
        assert a.status.retry_s is not None
        return round((a.status.retry_s - time.monotonic()) / 1000)

    assert waits(1) == 2
    a.connect_now()
    assert waits(2) == 3
    ssh.prints("a", [reading()], then="exit 1")
    a.connect_now()
    assert waits(3) == 1, "it had answered"
    ssh.host("a", f"echo '{DENIED}' >&2; exit 255")
    a.connect_now()
    assert waits(4) == 9, "a key that is refused stays refused"


def test_an_error_of_ours_is_named_and_the_next_try_goes_well(
    ssh: Ssh, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh.prints("a", [reading()])
    with monkeypatch.context() as broken:
        broken.setattr(ReportReader, "read", lambda _self, _line: 1 // 0)
        a = connect("a")
        problem = becomes(a, HostPhase.AWAY).problem
    assert problem.startswith("an error of gpumem-tui itself: ZeroDivisionError")
    assert "remote/connection.py:" in problem
    a.connect_now()
    becomes(a, HostPhase.LIVE)


def test_many_hosts_ask_for_the_interpreter_seldom_as_long_as_they_are_watched(
    ssh: Ssh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MANY", 1)
    usual_s = sys.getswitchinterval()
    for name in ("a", "b"):
        ssh.prints(name, [reading()])
    fleet = Fleet([parse_host("a"), parse_host("b")], ssh.options)
    fleet.start()
    assert sys.getswitchinterval() > usual_s
    fleet.stop()
    fleet.stop()
    assert sys.getswitchinterval() == usual_s


def test_a_fleet_ends_every_process(ssh: Ssh) -> None:
    for name in ("a", "b"):
        ssh.prints(name, [reading()])
    fleet = Fleet([parse_host("a"), parse_host("b")], ssh.options)
    fleet.start()
    wait_until(lambda: all(status.phase is HostPhase.LIVE for status in fleet.statuses))
    threads = [each._thread for each in fleet.connections.values()]
    fleet.stop()
    wait_until(lambda: not any(thread.is_alive() for thread in threads))


@pytest.fixture
def most_bytes() -> Iterator[Callable[[], int]]:
    """Give what tells the most that Python has held since the test began, including other tests' leftovers."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("flood", "said"),
    [
        ("exec yes garbage", "which is no reading"),
        ("exec yes '{}'", "which is no reading"),
        ("exec tr '\\0' x < /dev/zero", "a line of more than 4 MiB"),
        ("exec yes garbage 3>&1 >&2", "more than 1 MiB to stderr"),
        ('cat "$0.lines"; exec sh "$0"', "lines a second"),
    ],
)
def test_a_host_that_floods_harms_no_other(
    ssh: Ssh, connect: Connect, most_bytes: Callable[[], int], flood: str, said: str
) -> None:
    ssh.prints("flood", [reading()] * 20)
    ssh.host("flood", flood)
    ssh.prints("a", [reading()], then='sleep 0.05; exec sh "$0"')
    a, floods = connect("a"), connect("flood")
    heard: list[float | None] = []
    a.subscribe(lambda: heard.append(a.status.received_s))
    for _ in range(3):
        assert said in becomes(floods, HostPhase.AWAY).problem
        so_far = len(heard)
        floods.connect_now()
        wait_until(lambda so_far=so_far: len(heard) >= so_far + 5)  # type: ignore[misc]
    assert a.status.phase is HostPhase.LIVE, a.status.problem
    assert most_bytes() < 64 * MIB
