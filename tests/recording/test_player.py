"""Playing a recording: any moment of it, its alerts, held or not, regardless of its age and state."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_tui.memory import GIB
from gpumem_tui.monitor.alerts import AlertMark, Alerts
from gpumem_tui.monitor.probes import ProbeReport
from gpumem_tui.monitor.snapshot import Snapshot, UnlistedProcess
from gpumem_tui.monitor.wire import encoded
from gpumem_tui.recording.player import Player, RecordingIndex
from gpumem_tui.recording.recording import GpuRecorder, GpuRecording
from gpumem_tui.tui.monitor.entries import entries
from gpumem_tui.tui.monitor.state import MonitorState
from tests.monitor.snapshots import START_S, gpu, machine, process
from tests.waiting import wait_until

FULL_FROM, SECONDS = 150, 250
RANKS = ProbeReport(said={("GPU-00000000", 4000): {"rank": 3, "world_size": 8}})


def second(number: int) -> Snapshot:
    """The GPU fills up at some time."""
    return machine([gpu(0, used_bytes=(79 if number >= FULL_FROM else 40) * GIB)], after_s=number)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "file"
    recorder, alerts = GpuRecorder(path), Alerts()
    for number in range(SECONDS):
        snapshot = second(number)
        recorder.add(snapshot, alerts.update(snapshot), RANKS)
    recorder.close()
    return path


@pytest.fixture
def replay(recorded: Path) -> Iterator[Player]:
    playing = Player(GpuRecording(recorded), past_s=60.0)
    playing.hold(True)
    playing.start()
    yield playing
    playing.stop()


def index_of(path: Path) -> RecordingIndex:
    index = RecordingIndex(GpuRecording(path))
    index.start()
    index.wait()
    return index


def shows(replay: Player, number: int) -> None:
    wait_until(lambda: replay.latest() == second(number), f"second {number}, not {replay.now_s - START_S}")


def test_what_trains_on_the_cpu_is_recorded_with_the_machine(tmp_path: Path) -> None:
    here = process(7, 0).host
    recorder = GpuRecorder(tmp_path / "cpu")
    recorder.add(machine([gpu(0)]), (), ProbeReport(said={("cpu", 7): {"device": "cpu"}}, hosts={7: here}))
    recorder.close()
    [played] = GpuRecording(tmp_path / "cpu").snapshots()
    assert played.unlisted == (UnlistedProcess(7, "cpu", here),)
    shown = [(entry.process.pid, entry.place, entry.host == here) for entry in entries(MonitorState(snapshot=played))]
    assert shown == [(4000, "", False), (7, "cpu", True)]


def test_its_alerts_have_times_and_the_ranks_that_they_concern(recorded: Path) -> None:
    index = index_of(recorded)
    (mark,) = index.marks
    assert mark.time_s == START_S + FULL_FROM
    assert mark.who == "rank 3"
    assert "GPU 0" in mark.message
    assert index.is_exact
    assert (index.first_s, index.last_s) == (START_S, START_S + SECONDS - 1)


@pytest.mark.parametrize(("wanted", "found"), [(0, 0), (59, 59), (60, 60), (61.7, 61), (249, 249), (-9, 0), (9e6, 249)])
def test_any_moment_can_be_sought(replay: Player, wanted: float, found: int) -> None:
    replay.seek(START_S + wanted)
    wait_until(lambda: replay.jumps == 1)
    shows(replay, found)


def test_what_was_before_a_sought_moment_comes_with_it(replay: Player) -> None:
    replay.seek(START_S + 200)
    wait_until(lambda: replay.jumps == 1)
    past = [round(snapshot.time_s - START_S) for snapshot in replay.past_snapshots()]
    assert past == list(range(140, 200))
    assert replay.past_step_s == 1.0


def test_back_and_on_again(replay: Player) -> None:
    for number in (200, 20, 120):
        replay.seek(START_S + number)
        shows(replay, number)


def test_held_it_stands_still_and_goes_on_from_there(recorded: Path) -> None:
    replay = Player(GpuRecording(recorded), speed=1000.0)
    replay.hold(True)
    replay.start()
    shows(replay, 0)
    assert replay.wait(replay.latest(), 0.1) is None
    replay.seek(START_S + 240)
    shows(replay, 240)
    assert replay.wait(replay.latest(), 0.1) is None
    replay.hold(False)
    shows(replay, 249)
    wait_until(lambda: replay.notice == "end of recording")
    replay.seek(START_S + 245)
    shows(replay, 249)
    replay.stop()
    wait_until(lambda: not replay._thread.is_alive())


def test_a_file_that_is_cut_off_is_sought_as_far_as_it_goes(recorded: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(recorded.read_bytes()[:-40])
    recording = GpuRecording(cut)
    replay = Player(recording)
    replay.hold(True)
    replay.start()
    replay.seek(START_S + 9e6)
    wait_until(lambda: replay.now_s > START_S + 200)
    assert len(replay.marks) == 1
    replay.seek(START_S + 130)
    shows(replay, 130)
    replay.stop()


def test_damage_ends_the_index_not_the_program(recorded: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    whole = bytearray(recorded.read_bytes())
    whole[len(whole) // 2] ^= 0x55
    damaged.write_bytes(bytes(whole))
    index = index_of(damaged)
    assert index.is_done
    assert index.last_s < START_S + SECONDS
    assert index.damage.startswith(f"{damaged}: damaged after 20")
    assert index_of(recorded).damage == ""


def test_an_older_recording_can_be_sought_and_its_alerts_are_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "older"
    members: list[list[dict[str, object]]] = [[{"gpumem_tui_recording": 1, "program": "0.1"}]]
    for begin in range(0, SECONDS, 60):
        members.append([{"full": second(number)} for number in range(begin, min(begin + 60, SECONDS))])
    lines = [b"".join(encoded(body) + b"\n" for body in member) for member in members]
    path.write_bytes(b"".join(map(gzip.compress, lines)))
    recording = GpuRecording(path)
    assert len(list(recording.snapshots())) == SECONDS
    index = index_of(path)
    assert not index.is_exact
    (mark,) = index.marks
    assert START_S + FULL_FROM <= mark.time_s < START_S + FULL_FROM + 60
    replay = Player(recording)
    replay.hold(True)
    replay.start()
    replay.seek(START_S + 77)
    shows(replay, 77)
    replay.stop()


def test_who_an_alert_concerns() -> None:
    from gpumem_tui.monitor.alerts import Severity

    assert AlertMark(0.0, Severity.NOTE, "x").who == ""
    assert AlertMark(0.0, Severity.NOTE, "x", "a").who == "a"
    assert AlertMark(0.0, Severity.NOTE, "x", "a", (1, 3)).who == "a ranks 1, 3"
