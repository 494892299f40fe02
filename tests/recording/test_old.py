"""Files that the program wrote before recordings of one machine and of several became one format: they still play.

`old/machine` and `old/hosts` were written by commit e53e7f4 and are never written anew.
"""

from __future__ import annotations

from pathlib import Path

from gpumem_tui.memory import GIB
from gpumem_tui.monitor.readings import NOT_READ_YET
from gpumem_tui.monitor.snapshot import HOLDERS
from gpumem_tui.recording.file import RecordingFile
from gpumem_tui.recording.player import RecordingIndex
from gpumem_tui.recording.recording import GpuRecording
from gpumem_tui.remote.status import HostPhase
from tests.monitor.snapshots import START_S, gpu, machine

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
