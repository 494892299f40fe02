"""Files that the program wrote before recordings of one machine and of several became one format: they still play.

`old/machine` and `old/hosts` were written by commit e53e7f4, and `old/second`, of version 2, by 32eef21; none is ever
written anew.
"""

from __future__ import annotations

from pathlib import Path

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.readings import NOT_READ_YET
from gpumem_tui.monitor.snapshot import HOLDERS
from gpumem_tui.recording.file import RecordingFile
from gpumem_tui.recording.player import RecordingIndex
from gpumem_tui.recording.recording import GpuRecording
from gpumem_tui.remote.status import HostPhase
from tests.monitor.snapshots import START_S, gpu, machine, process

SINCE = dict.fromkeys(
    ("nvlink_rx_bytes", "nvlink_tx_bytes", "nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s", "energy_j"), NOT_READ_YET
)
"""Readings that came later."""
OLD = Path(__file__).with_name("old")
FULL_FROM, AWAY_FROM, SECONDS = 40, 60, 70


def test_one_machine() -> None:
    recording = GpuRecording(OLD / "machine")
    filling = [(79 if second >= FULL_FROM else 40) * GIB for second in range(SECONDS)]
    assert list(recording.snapshots()) == [
        machine([gpu(0, used, holders=HOLDERS, **SINCE)], after_s=n) for n, used in enumerate(filling)
    ]
    assert recording.damage == ""
    index = RecordingIndex(recording)
    index.start()
    index.wait()
    assert [(mark.time_s - START_S, mark.host, mark.ranks) for mark in index.marks] == [(FULL_FROM, "", (3,))]


def test_the_second_version() -> None:
    recording = GpuRecording(OLD / "second")
    expected = []
    for n in range(8):
        fan = Unknown(f"not supported {n // 2}") if n < 6 else n
        throttle = ("heat",) if n % 2 else ("power",)
        first = gpu(
            0, (10 + n) * GIB, holders=HOLDERS, power_w=300.0 + n, fan_percent=fan, throttle=throttle,
            compute_capability=(8, n),
        )  # fmt: skip
        listed = Unknown("no permission") if n % 3 else (process(7, n * GIB),)
        expected.append(machine([first, gpu(1, holders=HOLDERS, processes=listed)], after_s=n))
    assert list(recording.snapshots()) == expected
    assert recording.damage == ""


def test_several_hosts() -> None:
    recording = GpuRecording(RecordingFile(OLD / "hosts"))
    pictures = list(recording.pictures())
    assert [picture.time_s - START_S for picture in pictures] == list(range(SECONDS))
    for second, picture in enumerate(pictures):
        a, b = picture.statuses
        assert (a.host.name, b.host.destination, b.host.port) == ("a", "me@b", 2222)
        assert (b.phase is HostPhase.AWAY, bool(b.problem)) == (second >= AWAY_FROM, second >= AWAY_FROM)
        assert a.report is not None
        assert a.report.said == {("GPU-00000000", 4000): {"rank": 1, "world_size": 4, "step": second}}
        assert b.report is not None
        assert bool(b.report.alerts) == (second >= FULL_FROM)
    assert recording.damage == ""
    index = RecordingIndex(recording)
    index.start()
    index.wait()
    assert [(mark.time_s - START_S, mark.who, mark.severity.value) for mark in index.marks] == [
        (FULL_FROM, "me@b:2222 rank 3", "warning"),
        (AWAY_FROM, "me@b:2222", "warning"),
    ]
