"""Recordings: what is written comes back, in every case to the file."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumem_tui.memory import GIB
from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.monitor.wire import HostReport, encoded
from gpumem_tui.recording import file
from gpumem_tui.recording.file import RecordingError, RecordingFile
from gpumem_tui.recording.player import Player
from gpumem_tui.recording.recording import GpuRecorder, GpuRecording, RecordedPicture, record_source
from gpumem_tui.text import cleaned
from tests.monitor.snapshots import START_S, anything, gpu, machine, memory
from tests.waiting import wait_until

_FULL = "File too large; free space there, or name another file"


def _record(path: Path, count: int) -> list[Snapshot]:
    snapshots = [machine([gpu(0, used_bytes=(n % 70) << 30)], after_s=n) for n in range(count)]
    recorder = GpuRecorder(path)
    for snapshot in snapshots:
        recorder.add(snapshot)
    recorder.close()
    return snapshots


@settings(suppress_health_check=[HealthCheck.data_too_large])
@given(snapshots=st.lists(anything(Snapshot), min_size=1, max_size=3))
def test_any_snapshots_come_back(tmp_path_factory: pytest.TempPathFactory, snapshots: list[Snapshot]) -> None:
    path = tmp_path_factory.mktemp("recording") / "file"
    recorder = GpuRecorder(path)
    for snapshot in snapshots:
        recorder.add(snapshot)
    recorder.close()
    recording = GpuRecording(path)
    played = [cleaned(json.loads(encoded(each))) for each in recording.snapshots()]
    is_same = played == [cleaned(json.loads(encoded(HostReport.of(each).with_ledgers))) for each in snapshots]
    assert is_same  # else pytest explains all of it, for minutes
    assert recording.damage == ""


def test_a_snapshot_that_cannot_be_written_leaves_those_after_it_right(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before, after = (machine([gpu(0, power_w=50.0)], after_s=second) for second in range(2))
    other = machine([gpu(0, power_w=77.0, name=object())], after_s=2)
    last = machine([gpu(0, power_w=77.0)], after_s=3)
    recorder = GpuRecorder(path)
    recorder.add(before)
    recorder.add(after)
    with pytest.raises(TypeError):
        recorder.add(other)
    recorder.add(last)
    recorder.close()
    assert list(GpuRecording(path).snapshots()) == [HostReport.of(each).with_ledgers for each in (before, after, last)]


def test_what_a_driver_says_of_more_than_there_is_can_be_played(tmp_path: Path) -> None:
    before, after = (machine([gpu(0)], after_s=second) for second in (0, 2))
    less_than_none = replace(memory(GIB), free_bytes=2**64 - GIB)  # an unsigned number below 0
    recorder = GpuRecorder(tmp_path / "file")
    for each in (before, machine([gpu(0, memory=less_than_none)], after_s=1), after):
        recorder.add(each)
    recorder.close()
    recording = GpuRecording(tmp_path / "file")
    assert [each.gpus[0].memory for each in recording.snapshots()][1] == less_than_none
    assert recording.damage == ""


def test_an_hour_of_eight_gpus_takes_a_few_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "hour"
    recorder = GpuRecorder(path)
    for second in range(300):
        gpus = [
            gpu(n, used_bytes=((second * 7919 + n) % 70) << 30, power_w=300 + (second * 31 + n) % 97 / 10)
            for n in range(8)
        ]
        recorder.add(machine(gpus, after_s=second))
    recorder.close()
    assert path.stat().st_size / 300 * 3600 < 4_000_000


def test_a_file_cut_anywhere_plays_to_the_cut_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    snapshots = _record(path, 130)
    whole = path.read_bytes()
    header, *parts = RecordingFile(path).members(0)
    counts = {
        header.end: 0,
        **{part.end: sum(len(each.lines) for each in parts[: n + 1]) for n, part in enumerate(parts)},
    }
    assert list(counts.values()) == [0, 60, 120, 130]
    for length in sorted({*range(header.end, len(whole), len(whole) // 40), *counts}):
        path.write_bytes(whole[:length])
        recording = GpuRecording(path)
        played = list(recording.snapshots())
        assert played == snapshots[: len(played)]
        if length in counts:
            assert (len(played), recording.damage) == (counts[length], ""), "between two members nothing is missed"
        else:
            assert f"cut off {_place(len(played))}" in recording.damage


def test_a_night_is_members_that_can_be_read_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / "file"
    snapshots = _record(path, 190)
    file = RecordingFile(path)
    parts = list(file.parts())
    assert [len(part.lines) for part in parts] == [60, 60, 60, 10]
    assert all(part.lines[0].startswith(b'{"full":') for part in parts)
    assert [next(file.pictures(RecordedPicture, part.offset)).time_s for part in parts] == [
        snapshots[n].time_s for n in (0, 60, 120, 180)
    ]


def test_a_damaged_file_plays_up_to_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    snapshots = _record(path, 70)
    whole = bytearray(path.read_bytes())
    for place in range(200, len(whole), len(whole) // 60):
        path.write_bytes(whole[:place])
        before = len(list(GpuRecording(path).snapshots()))
        for damage in (bytes([whole[place] ^ 0x10]), b"\xff\xff\xff", b"abc"):
            path.write_bytes(whole[:place] + damage + whole[place + len(damage) :])
            recording = GpuRecording(path)
            played = list(recording.snapshots())
            assert played == snapshots[: len(played)]
            assert len(played) >= before, "every reading before it"
            assert len(played) == 70 or f"damaged {_place(len(played))}" in recording.damage
    sought = GpuRecording(path)  # by an index that was made before
    assert list(sought.pictures(offset=201)) == []
    assert sought.damage == f"{path}: damaged before the next snapshot"


def _place(played: int) -> str:
    return f"after snapshot {played} (" if played else "before the first snapshot"


def test_a_recording_without_checksums_of_its_lines_plays_to_where_it_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "file"
    snapshots = _record(path, 3)
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    older = [re.sub(rb',"crc":\d+}', b"}", line) for line in lines]
    assert older != lines
    path.write_bytes(gzip.compress(older[0]) + gzip.compress(b"".join(older[1:]))[:-8])
    recording = GpuRecording(path)
    assert list(recording.snapshots()) == snapshots
    assert "cut off after snapshot 3 (" in recording.damage


def test_a_killed_recorder_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = (
        "import os, sys, pathlib\n"
        "from gpumem_tui.recording.recording import GpuRecorder\n"
        "from tests.monitor.snapshots import machine, gpu\n"
        f"recorder = GpuRecorder(pathlib.Path({str(path)!r}))\n"
        "for n in range(70): recorder.add(machine([gpu()], after_s=n))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()})
    recording = GpuRecording(path)
    assert [snapshot.time_s - START_S for snapshot in recording.snapshots()] == list(range(70))
    assert recording.damage.startswith(f"{path}: cut off after snapshot 70 (20")


class _SignalAt:
    """Ends the program at one step of the writer, as the handler of a signal does."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, frame: FrameType, event: str, _: object) -> _SignalAt | None:
        if frame.f_code.co_filename != file.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if not self.left:
                raise SystemExit
        return self


def test_a_signal_at_any_step_leaves_a_whole_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_MEMBER_LINES", 2)
    snapshots = [machine([gpu(0, used_bytes=n << 30)], after_s=n) for n in range(3)]
    step, played = 0, set[int]()
    while True:
        step += 1
        path = tmp_path / str(step)
        recorder = GpuRecorder(path)
        recorder.add(snapshots[0])
        signalled = _SignalAt(step)
        traced = sys.gettrace()
        sys.settrace(signalled)
        try:
            for snapshot in snapshots[1:]:  # the first of these ends a member
                recorder.add(snapshot)
        except SystemExit:
            pass
        finally:
            sys.settrace(traced)
        recorder.close()
        recording = GpuRecording(path)
        played.add(len(list(recording.snapshots())))
        assert recording.damage == "", step
        if signalled.left:
            break
    assert played == {1, 2, 3}
    assert step > 100


def test_zcat_shows_json_lines(tmp_path: Path) -> None:
    _record(tmp_path / "file", 3)
    lines = gzip.decompress((tmp_path / "file").read_bytes()).splitlines()
    assert [line[:9] for line in lines] == [b'{"gpumem_', b'{"full":{', b'{"patch":', b'{"patch":']


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(RecordingError, match="exists already"):
        GpuRecorder(path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no recording"),
        (b"hello", "is no recording"),
        (gzip.compress(b"hello\n"), "is no recording"),
        (gzip.compress(b"[1]\n"), "is no recording"),
        (
            gzip.compress(b'{"gpumem_tui_recording":99}\n'),
            "of version 99; install a newer gpumem-tui, as this one plays versions 1 to 3",
        ),
    ],
    ids=["empty", "text", "compressed text", "compressed JSON", "a later version"],  # gzip's bytes hold the time
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=said):
        GpuRecording(path)


def test_a_missing_file_and_a_full_disk_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"missing cannot be read: No such file"):
        GpuRecording(tmp_path / "missing")
    with pytest.raises(RecordingError, match="exists already"):
        GpuRecorder(tmp_path)


def test_a_full_disk_ends_the_recording_but_not_the_source(tmp_path: Path) -> None:
    code = (
        "import pathlib, resource, signal\n"
        "from gpumem_tui.recording.file import RecordingError\n"
        "from gpumem_tui.recording.recording import GpuRecorder, record_source\n"
        "from tests.monitor.scripted import Scripted\n"
        "from tests.monitor.snapshots import machine, gpu\n"
        "from tests.waiting import wait_until\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        f"recorder = GpuRecorder(pathlib.Path({str(tmp_path / 'file')!r}))\n"
        "try:\n"
        "    for n in range(1000): recorder.add(machine([gpu()], after_s=n))\n"
        "except RecordingError as error: print(error)\n"
        "recorder.close()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))\n"
        f"recorder = GpuRecorder(pathlib.Path({str(tmp_path / 'watched')!r}))\n"
        "source = Scripted(machine([gpu()]))\n"
        "def say(notice): source.notice = notice\n"
        "recorded = record_source(source, recorder, 0.1, say=say)\n"
        "recorded.start()\n"
        "wait_until(lambda: source.notice)\n"
        "print(recorded.notice, source.notice == recorded.notice, source.latest() is not None)\n"
    )
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == [
        f"recording to {tmp_path / 'file'} stopped: {_FULL}",
        f"recording to {tmp_path / 'watched'} stopped: {_FULL} True True",
    ]
    assert len(list(GpuRecording(tmp_path / "file").snapshots())) > 5


def test_a_disk_that_is_full_from_the_start_leaves_no_empty_file(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path;"
        "from gpumem_tui.recording.recording import GpuRecorder;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        "GpuRecorder(Path(sys.argv[1]))"
    )
    file = tmp_path / "file"
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        f"RecordingError: recording to {file} stopped: File too large; free space there, or name another file"
    )
    assert not file.exists()


class TestReplay:
    def test_it_keeps_the_recorded_time(self, tmp_path: Path) -> None:
        snapshots = _record(tmp_path / "file", 4)
        replay = Player(GpuRecording(tmp_path / "file"), speed=10.0)
        began_s = time.monotonic()
        replay.start()
        seen: list[Snapshot] = []
        while (snapshot := replay.wait(seen[-1] if seen else None, 30.0)) is not None:
            seen.append(snapshot)
        assert seen == snapshots
        assert time.monotonic() - began_s >= 0.3
        assert replay.latest() == snapshots[-1]
        assert replay.notice == "end of recording"

    def test_it_stops_at_once(self, tmp_path: Path) -> None:
        _record(tmp_path / "file", 4)
        replay = Player(GpuRecording(tmp_path / "file"), speed=0.001)
        replay.start()
        assert replay.wait(None, 30.0) is not None
        assert replay.wait(replay.latest(), 0.01) is None
        assert replay.notice == ""
        replay.stop()
        replay._thread.join(30.0)
        assert not replay._thread.is_alive()


def test_a_source_can_be_recorded_while_it_is_watched(tmp_path: Path) -> None:
    snapshots = _record(tmp_path / "first", 5)
    replay = Player(GpuRecording(tmp_path / "first"), speed=10.0)
    recorded = record_source(replay, GpuRecorder(tmp_path / "second"), interval_s=0.01)
    replay.start()
    recorded.start()

    def copied() -> list[Snapshot]:
        return list(GpuRecording(tmp_path / "second").snapshots())

    wait_until(lambda: snapshots[-1] in copied())
    recorded.stop()
    second = GpuRecording(tmp_path / "second")
    assert [snapshot for snapshot in snapshots if snapshot in copied()] == list(second.snapshots())
    assert copied()[-1] == snapshots[-1]
    assert (second.damage, recorded.notice) == ("", "")
