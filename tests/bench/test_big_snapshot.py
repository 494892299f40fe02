"""A large memory snapshot: the most memory and the time that `look` takes, for how much of the file is needed.

`pytest -m bench -s -n 0 tests/bench/test_big_snapshot.py`, and `GPUMEM_TUI_SNAPSHOT_MIB=1200` before it for 1.2 GB.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.memory import MIB
from tests.recordings.snapshots import DATA

pytestmark = pytest.mark.bench

_SIZE_MIB = int(os.environ.get("GPUMEM_TUI_SNAPSHOT_MIB", "64"))
_RECORDING = "NiuHuangxiaozi+assignment2-systems__forward_and_backward_memory_snapshot_100.pickle__9ab7a6e9.json.gz"
_FRAMES = 40
"""A stack of Python's and C++'s frames, as `_record_memory_history` keeps them unless told otherwise."""
_BATCH = 1000
"""Items that a pickler appends at once."""
_KEYS = ("action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "pool_id", "frames")


class SnapshotPickle:
    """The bytes that Python's pickler writes of a recorded history over and over, without holding it in memory.

    Every event has a list of frames of its own, whose frames are the same dictionaries, as PyTorch makes them.
    """

    def __init__(self, recording: Path) -> None:
        body = json.loads(gzip.decompress(recording.read_bytes()))
        (self._trace,) = [trace for trace in body["traces"] if trace]
        self._segments = body["segments"]
        self._memo = 0
        self._known: dict[object, int] = {}
        self._undoing = list(_undoing(self._trace))

    def parts(self, most_bytes: int) -> Iterator[bytes]:
        """Yield a file of about so many bytes: rounds of the recording, each undone but for the last."""
        yield b"\x80\x04}" + self._memorized() + b"(" + self._text("segments")
        yield b"]" + self._memorized() + b"("
        yield from (self._segment(one) for one in self._segments)
        yield b"e" + self._text("device_traces") + b"]" + self._memorized() + b"(]" + self._memorized()
        written, events = 0, self._events()
        while batch := list(itertools.islice(events, _BATCH)):
            part = b"(" + b"".join(map(self._event, batch)) + b"e"
            written += len(part)
            self._is_last = written > most_bytes
            yield part
        yield b"eu."

    def _events(self) -> Iterator[tuple[int, tuple[str, int, int, int]]]:
        clock, self._is_last = itertools.count(1_700_000_000_000_000), False
        while True:
            is_last = self._is_last
            for event in self._trace:
                yield next(clock), event
            if is_last:
                return
            for event in self._undoing:
                yield next(clock), event

    def _event(self, timed: tuple[int, tuple[str, int, int, int]]) -> bytes:
        time_us, (action, address, size, stream) = timed
        values = (action, address, size, stream, time_us, "N/A", "", (0, 0))
        head = b"}" + self._memorized() + b"("
        for key, value in zip(_KEYS, values, strict=False):
            head += self._text(key) + self._value(value)
        return head + self._text("frames") + self._stack(f"{action} {size}") + b"u"

    def _segment(self, found: dict[str, Any]) -> bytes:
        blocks, at = [], found["address"]
        for size, requested, state in found["blocks"]:
            blocks.append({"address": at, "size": size, "requested_size": requested, "state": state, "frames": []})
            at += size
        whole = {
            "device": 0,
            **found,
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }
        return self._value({key: whole[key] for key in sorted(whole) if key != "pool"})

    def _value(self, value: Any) -> bytes:
        if isinstance(value, dict):
            head = b"}" + self._memorized() + b"("
            return head + b"".join(self._text(key) + self._value(one) for key, one in value.items()) + b"u"
        if isinstance(value, list):
            head = b"]" + self._memorized()
            return head + (b"(" + b"".join(map(self._value, value)) + b"e" if value else b"")
        if isinstance(value, tuple):
            return b"".join(map(self._value, value)) + b"\x86" + self._memorized()
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        return self._text(value) if isinstance(value, str) else _number(value)

    def _stack(self, name: str) -> bytes:
        seed = sum(name.encode())
        head = b"]" + self._memorized() + b"("
        frames = [seed * 31 % 400, *(seed % 37 * 40 + depth for depth in range(_FRAMES - 2)), 5000]
        return head + b"".join(map(self._frame, frames)) + b"e"

    def _frame(self, number: int) -> bytes:
        if number in self._known:
            return _get(self._known[number])
        self._known[number] = self._memo
        file = f"/venv/lib/python3.11/site-packages/torch/nn/modules/part{number}.py"
        return self._value({"name": f"function{number % 90}", "filename": file, "line": number})

    def _text(self, text: str) -> bytes:
        if text in self._known:
            return _get(self._known[text])
        self._known[text] = self._memo
        return b"\x8c" + struct.pack("<B", len(text)) + text.encode() + self._memorized()

    def _memorized(self) -> bytes:
        self._memo += 1
        return b"\x94"


def _get(number: int) -> bytes:
    return b"h" + struct.pack("<B", number) if number < 256 else b"j" + struct.pack("<I", number)


def _number(value: Any) -> bytes:
    return pickle.dumps(value, 3)[2:-1] if not 256 <= value < 1 << 16 else b"M" + struct.pack("<H", value)


def _undoing(trace: list[tuple[str, int, int, int]]) -> Iterator[tuple[str, int, int, int]]:
    """Yield what gives back all that is held at the end, so that the recording can begin again."""
    held: dict[int, tuple[str, int, int, int]] = {}
    segments: dict[int, tuple[str, int, int, int]] = {}
    for event in trace:
        action, address = event[0], event[1]
        if action == "alloc":
            held[address] = event
        elif action == "free_completed":
            del held[address]
        elif action == "segment_alloc":
            segments[address] = event
        elif action == "segment_free":
            del segments[address]
    for _, address, size, stream in held.values():
        yield "free_requested", address, size, stream
        yield "free_completed", address, size, stream
    for _, address, size, stream in segments.values():
        yield "segment_free", address, size, stream


def test_the_pickle_is_what_pythons_pickler_writes(tmp_path: Path) -> None:
    data = b"".join(SnapshotPickle(DATA / _RECORDING).parts(MIB))
    found = pickle.loads(data)
    assert len(found["device_traces"][0]) > 2000
    again = pickle._dumps(found, 4)  # type: ignore[attr-defined]  # in Python, not C
    assert abs(len(again) - len(data)) < len(data) / 50


_MEASURED = """
import json, sys, time
from pathlib import Path
from gpumem_tui.snapshots.analysis import analyse
from gpumem_tui.snapshots.read import read_snapshot

def peak_kib():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

before = peak_kib()
began_s = time.process_time()
found = read_snapshot(Path(sys.argv[1]))
read_s = time.process_time() - began_s
history = found.history(0)
columns = (history.addresses, history.sizes, history.streams, history.times_us, history.stacks)
needed = sum(len(column) * column.itemsize for column in columns) + len(history.actions) + len(history.categories)
began_s = time.process_time()
analyse(found, 0)
print(json.dumps([len(history), needed, before, peak_kib(), read_s, time.process_time() - began_s]))
"""


def test_memory_and_time(tmp_path: Path) -> None:
    path = tmp_path / "big.pickle"
    with path.open("wb") as file:
        file.writelines(SnapshotPickle(DATA / _RECORDING).parts(_SIZE_MIB * MIB))
    done = subprocess.run([sys.executable, "-c", _MEASURED, str(path)], capture_output=True, text=True, check=True)
    events, needed, before_kib, peak_kib, read_s, analysed_s = json.loads(done.stdout)
    taken = (peak_kib - before_kib) << 10
    print(
        f"\n{path.stat().st_size / MIB:,.0f} MiB, {events:,} events of {needed / MIB:.0f} MiB: "
        f"peak {peak_kib >> 10} MiB, "
        f"{taken / needed:.2f} times the events beyond Python itself; read in {read_s:.1f} s, "
        f"{read_s / events * 1e6:.1f} µs an event, taken apart in {analysed_s:.1f} s"
    )
    assert taken < 1.5 * needed + 8 * MIB
