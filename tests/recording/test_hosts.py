"""Several hosts in one recording: as each of them stood, with what its probes said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gpumem_tui.memory import GIB
from gpumem_tui.monitor.alerts import Alerts
from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.monitor.wire import HostReport, ReportWriter
from gpumem_tui.recording.file import RecordingEnds, RecordingError, RecordingFile, RecordingWriter
from gpumem_tui.recording.player import Player, RecordingIndex
from gpumem_tui.recording.recording import GpuRecorder, GpuRecording, HostsPicture, RecordedPicture, record_hosts
from gpumem_tui.remote.hosts import parse_host
from gpumem_tui.remote.status import HostPhase, HostStatus
from tests.monitor.snapshots import START_S, gpu, machine
from tests.remote.standins import DENIED, Ssh
from tests.waiting import wait_until

SECONDS, FULL_FROM = 130, 70
A, B = parse_host("a"), parse_host("me@b:2222")


@pytest.mark.parametrize("rank", [[3], 10**30, -1, "3", None])
def test_a_host_that_says_anything_for_a_rank_harms_no_recording(tmp_path: Path, rank: object) -> None:
    full = machine([gpu(0, used_bytes=79 * GIB)])
    said = {(gpu(0).uuid, pid): {"rank": each, "world_size": 4} for pid, each in ((7, rank), (8, 2))}
    status = HostStatus(A, HostPhase.LIVE, HostReport.of(full, Alerts().update(full), said))
    recorder = GpuRecorder(tmp_path / "file", of_one_machine=False)
    (mark,) = recorder.add_hosts(HostsPicture(START_S, (status,)))
    recorder.close()
    index = RecordingIndex(GpuRecording(tmp_path / "file"))
    index.start()
    index.wait()
    assert (list(index.marks), mark.ranks, index.damage) == ([mark], (2,), "")


def pictures() -> list[HostsPicture]:
    """Two hosts; on the second one rank 3 fills up, and later it is away."""
    judges = {"a": Alerts(), B.name: Alerts()}
    made = []
    last: dict[str, HostReport] = {}
    for number in range(SECONDS):
        statuses = []
        for host, rank in ((A, 1), (B, 3)):
            is_away = host is B and number >= 100
            if not is_away:
                full = host is B and number >= FULL_FROM
                snapshot = machine([gpu(0, used_bytes=(79 if full else 40) * GIB)], after_s=number)
                probes = {("GPU-00000000", 4000): {"rank": rank, "world_size": 4, "step": number}}
                last[host.name] = HostReport.of(snapshot, judges[host.name].update(snapshot), probes)
            phase, problem = (HostPhase.AWAY, "silent for 15 s") if is_away else (HostPhase.LIVE, "")
            statuses.append(HostStatus(host, phase, last[host.name], time.monotonic(), problem))
        made.append(HostsPicture(START_S + number, tuple(statuses)))
    return made


PICTURES = pictures()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "hosts"
    recorder = GpuRecorder(path, of_one_machine=False)
    for picture in PICTURES:
        seen_s = time.monotonic() - 5.0
        recorder.add_hosts(
            replace(picture, statuses=tuple(replace(each, received_s=seen_s) for each in picture.statuses))
        )
    recorder.close()
    return path


def without_ages(picture: HostsPicture) -> HostsPicture:
    return replace(picture, statuses=tuple(replace(each, received_s=None) for each in picture.statuses))


def test_every_picture_comes_back(recorded: Path) -> None:
    recording = GpuRecording(RecordingFile(recorded))
    played = list(recording.pictures())
    assert [without_ages(each) for each in played] == [without_ages(each) for each in PICTURES]
    assert recording.damage == ""


def test_when_did_rank_3_fill_up(recorded: Path) -> None:
    index = RecordingIndex(GpuRecording(RecordingFile(recorded)))
    index.start()
    index.wait()
    (mark,) = [mark for mark in index.marks if 3 in mark.ranks]
    assert mark.host == B.name
    assert mark.time_s == START_S + FULL_FROM


def test_a_host_that_is_away_costs_next_to_nothing(tmp_path: Path) -> None:
    recorder = GpuRecorder(tmp_path / "file", of_one_machine=False)
    (_, away) = PICTURES[-1].statuses
    began_s = time.monotonic()
    for _ in range(60):
        recorder.add_hosts(
            HostsPicture(START_S + time.monotonic() - began_s, (replace(away, received_s=began_s - 30.5),))
        )
    recorder.close()
    (part,) = RecordingFile(tmp_path / "file").parts()
    first, *others = part.lines
    assert len(first) > 1000
    assert max(map(len, others)) < 60, "the time alone"


def test_a_replay_is_to_a_screen_what_connections_are(recorded: Path) -> None:
    replay = Player(GpuRecording(RecordingFile(recorded)), 1.0, past_s=30.0)
    assert [status.host for status in replay.statuses] == [A, B], "before it plays"
    replay.hold(True)
    replay.start()
    replay.seek(START_S + 110)
    wait_until(lambda: replay.now_s == START_S + 110)
    a, b = replay.connections["a"], replay.connections[B.name]
    assert a.notice == "a"
    assert b.notice == f"{B.name} away: silent for 15 s"
    latest = a.latest()
    assert latest is not None
    assert latest.time_s == START_S + 110
    assert a.wait(latest, 0.05) is None
    assert [round(each.time_s - START_S) for each in a.past()][-3:] == [107, 108, 109]
    age_s = b.status.age_s(replay.shown_s)
    assert age_s is not None
    assert age_s < 60, "as old as it was then"
    replay.stop()


def test_hosts_are_recorded_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    now = [PICTURES[0].statuses]
    told: list[str] = []
    recorded = record_hosts(
        lambda: now[0],
        GpuRecorder(path, of_one_machine=False),
        0.01,
        lambda marks: told.extend(mark.message for mark in marks),
    )
    recorded.start()
    wait_until(lambda: len(list(GpuRecording(RecordingFile(path)).pictures())) > 2)
    now[0] = PICTURES[FULL_FROM].statuses
    wait_until(lambda: told)
    recorded.stop()
    assert recorded.notice == ""
    recording = GpuRecording(RecordingFile(path))
    *_, last = recording.pictures()
    assert recording.damage == ""
    assert last.statuses[1].report == PICTURES[FULL_FROM].statuses[1].report


def _has(told: list[str], count: int) -> bool:
    return len(told) == count


def test_who_is_away_is_said_once_and_recorded_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    told: list[str] = []
    now = [HostStatus(A, HostPhase.AWAY, problem="Connection refused")]
    recorded = record_hosts(
        lambda: now,
        GpuRecorder(path, of_one_machine=False),
        0.01,
        tell_away=lambda marks: told.extend(f"{mark.who} {mark.message}" for mark in marks),
    )
    recorded.start()
    (live, _) = PICTURES[0].statuses
    wait_until(lambda: len(told) == 1)
    now[0] = replace(now[0], phase=HostPhase.CONNECTING)
    for count, status in enumerate((replace(now[0], problem="timed out"), live, now[0]), 2):
        now[0] = replace(status, phase=HostPhase.AWAY) if status.problem else status
        wait_until(partial(_has, told, count))
    recorded.stop()
    assert told == ["a away: Connection refused", "a away: timed out", "a answers again", "a away: Connection refused"]
    index = RecordingIndex(GpuRecording(RecordingFile(path)))
    index.start()
    index.wait()
    assert [f"{mark.who} {mark.message}" for mark in index.marks] == told
    assert GpuRecording(RecordingFile(path)).has_reading


def test_versions_are_told_apart(recorded: Path, tmp_path: Path) -> None:
    assert not GpuRecording(recorded).of_one_machine
    GpuRecorder(tmp_path / "one").close()
    assert GpuRecording(tmp_path / "one").of_one_machine
    RecordingWriter(tmp_path / "later", 4, RecordedPicture).close()
    with pytest.raises(
        RecordingError, match="recording of version 4; install a newer gpumem-tui, as this one plays versions 1 to 3"
    ):
        GpuRecording(tmp_path / "later")


def test_what_is_no_picture_ends_it_with_one_line(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "file", 2, Snapshot)
    writer.add(machine())
    writer.close()
    recording = GpuRecording(RecordingFile(tmp_path / "file"))
    assert list(recording.pictures()) == []
    assert "damaged" in recording.damage


def test_a_host_that_cannot_be_reached_is_said_while_recording_and_when_played(tmp_path: Path) -> None:
    ssh = Ssh(tmp_path)
    ssh.host("c", f"echo '{DENIED}' >&2", "exit 255")
    own = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    program, path = [sys.executable, "-m", "gpumem_tui", "monitor"], str(tmp_path / "away")
    process = subprocess.Popen(
        [*program, "--host", "c", "--interval", "0.2", "--record", path],
        env=own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(2)]
        wait_until(lambda: next(RecordingFile(Path(path)).pictures(RecordedPicture), None))
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
    finally:
        process.kill()
        process.wait()
    assert said[0].startswith("gpumem-tui: recording c to ")
    assert said[1].startswith("gpumem-tui: c: away: no key is accepted")
    played = subprocess.run([*program, "--replay", path], env=own, capture_output=True, text=True, check=True)
    assert "warning   c: away: no key is accepted" in played.stdout
    assert (
        played.stderr
        == f"gpumem-tui: {path} has no reading: no host answered; see `gpumem-tui monitor --host HOST --once`\n"
    )


def _count(path: Path) -> int:
    """How many pictures a file has that is still written."""
    found: list[RecordedPicture] = []
    with suppress(RecordingEnds):
        found.extend(RecordingFile(path).pictures(RecordedPicture))
    return len(found)


@pytest.mark.parametrize(("quiet", "lines"), [([], 1), (["--quiet"], 0)])
def test_an_alert_of_a_host_is_a_line_of_a_recording_but_with_quiet(
    quiet: list[str], lines: int, tmp_path: Path
) -> None:
    full, writer = machine([gpu(used_bytes=79 * GIB, processes=())]), ReportWriter()
    Ssh(tmp_path).writes("full", [writer.line(HostReport.of(full, Alerts().update(full))).encode()])
    own = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    path = tmp_path / "file"
    command = [sys.executable, "-m", "gpumem_tui", "monitor", "--host", "full", "--interval", "0.2", *quiet]
    process = subprocess.Popen(
        [*command, "--record", path],
        env=own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("gpumem-tui: recording full to ")
        wait_until(lambda: _count(path) > 2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert len(out.splitlines()) == lines, out
    assert out.count("full: GPU 0: 99 % of memory in use") == lines
