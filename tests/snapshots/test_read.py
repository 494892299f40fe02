"""Any snapshot opens, whichever version of PyTorch wrote it; nothing in a file is executed."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumem_tui.memory import MIB
from gpumem_tui.snapshots import pickles
from gpumem_tui.snapshots.analysis import Analysis, analyse
from gpumem_tui.snapshots.model import SnapshotError, Stacks
from gpumem_tui.snapshots.read import read_snapshot
from tests.snapshots import files
from tests.snapshots.files import BASE, written


def opened(folder: Path, snapshot: Any, name: str = "snapshot.pickle", protocol: int = 4) -> Analysis:
    """The first device of a snapshot that was written and read."""
    found = read_snapshot(written(folder, snapshot, name, protocol))
    return analyse(found, found.devices[0])


def figures(analysis: Analysis) -> tuple[object, ...]:
    """Results that must not depend on how a file is written."""
    return (
        analysis.peak_allocated_bytes,
        analysis.peak_reserved_bytes,
        analysis.by_category,
        analysis.by_line,
        analysis.by_stack,
        analysis.timeline,
        [(segment.address, segment.taken, segment.free_sizes) for segment in analysis.segments],
        analysis.duration_s,
    )


class TestForms:
    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_every_protocol(self, tmp_path: Path, protocol: int) -> None:
        expected = figures(opened(tmp_path, files.training()))
        assert figures(opened(tmp_path, files.training(), protocol=protocol)) == expected

    @pytest.mark.parametrize("name", ["snapshot.json", "snapshot.json.gz", "snapshot.pickle.gz"])
    def test_json_and_gzip(self, tmp_path: Path, name: str) -> None:
        assert figures(opened(tmp_path, files.training(), name)) == figures(opened(tmp_path, files.training()))

    def test_by_pythons_own_pickler(self, tmp_path: Path) -> None:
        path = tmp_path / "plain.pickle"
        path.write_bytes(pickle._dumps(files.training(), protocol=4))  # type: ignore[attr-defined]  # in Python, not C
        found = read_snapshot(path)
        assert figures(analyse(found, 0)) == figures(opened(tmp_path, files.training()))

    @pytest.mark.parametrize("protocol", [2, 4])
    def test_parts_that_events_have_in_common(self, tmp_path: Path, protocol: int) -> None:
        """Events share a pool's id or have one each, and a request shares its stack with its release."""
        one_pool, frames, events = (0, 3), [*files.FORWARD], []
        for number in range(2500):
            pool = one_pool if number % 2 else (number % 5, 1 << number % 12)
            for action in ("alloc", "free_requested", "free_completed"):
                entry = files.event(action, BASE + number % 7 * MIB, 1000 + number, pool_id=pool)
                events.append({**entry, "frames": frames if number % 3 else list(files.BACKWARD)})
        found = read_snapshot(written(tmp_path, files.body(events, [files.segment(BASE, [])]), protocol=protocol))
        history = found.history(0)
        assert (len(history), len(found.stacks)) == (7500, 3)
        assert history.sizes[7499] == 3499
        for number in (0, 1, 2499):
            expected = files.FORWARD if number % 3 else files.BACKWARD
            for event in range(number * 3, number * 3 + 3):
                assert [one.function for one in found.stacks[history.stacks[event]]] == [
                    one["name"] for one in expected
                ]

    def test_events_are_not_remembered(self) -> None:
        """A pickle's memo is as long as its events are many; a number each is kept of it, and no object."""
        data = pickle.dumps(files.body([files.event("alloc", BASE, 512 + n, files.FORWARD) for n in range(5000)], []))
        unpickler = pickles.SnapshotUnpickler(data, Stacks(), lambda _: None)
        unpickler.load()
        assert len(unpickler._numbers) > 10_000
        assert len(unpickler._memo) < 100

    def test_long_traces_and_many_frames(self, tmp_path: Path) -> None:
        """Batches of 1,000, references of more than a byte, and stacks that come again."""
        stacks = [
            [{"filename": f"/home/ada/m{number}_{depth}.py", "line": depth, "name": "f"} for depth in range(40)]
            for number in range(50)
        ]
        events = []
        for number in range(2500):
            address = BASE + number % 7 * MIB
            events.append(files.event("alloc", address, 1000 + number, stacks[number % 50]))
            events.append(files.event("free_requested", address, 1000 + number, stacks[number % 50]))
            events.append(files.event("free_completed", address, 1000 + number, stacks[number % 50]))
        found = read_snapshot(written(tmp_path, files.body(events, [])))
        history = found.history(0)
        assert len(history) == 7500
        assert list(history.sizes[:7500:3]) == list(range(1000, 3500))
        for number in (0, 49, 50, 2499):
            frames = found.stacks[history.stacks[number * 3]]
            assert [frame.file for frame in frames] == [frame["filename"] for frame in stacks[number % 50]]

    def test_segments_alone(self, tmp_path: Path) -> None:
        analysis = opened(tmp_path, files.training()["segments"])
        assert (analysis.events, analysis.end_allocated_bytes) == (0, 48 * MIB)

    def test_reduced_recordings(self, tmp_path: Path) -> None:
        reduced = {
            "settings": None,
            "traces": [[["segment_alloc", BASE, 20 * MIB, 0], ["alloc", BASE, 3 * MIB, 0]]],
            "segments": [
                {
                    "device": 0, "address": BASE, "total_size": 20 * MIB, "stream": 0, "segment_type": "large",
                    "blocks": [[3 * MIB, 3 * MIB, "active_allocated"], [17 * MIB, 0, "inactive"]],
                }
            ],
        }  # fmt: skip
        analysis = opened(tmp_path, reduced, "run.json.gz")
        assert (analysis.peak_allocated_bytes, analysis.peak_reserved_bytes) == (3 * MIB, 20 * MIB)
        assert analysis.difference_bytes == 0


KEYS = st.sampled_from(["address", "size", "segment_pool_id", "frames", "state", "ä"]) | st.integers()
NUMBERS = st.integers() | st.integers(-(2**2100), 2**2100) | st.floats(allow_nan=False) | st.none() | st.booleans()
TEXTS = st.sampled_from(["inactive", "address", ""]) | st.text(max_size=300)


def afresh(value: Any) -> Any:
    """An equal value of other containers, as a C extension makes them for each segment and event."""
    if isinstance(value, dict):
        return {key: afresh(one) for key, one in value.items()}
    return type(value)(map(afresh, value)) if isinstance(value, list | tuple) else value


@st.composite
def plain_values(draw: st.DrawFn, bytes_too: bool) -> Any:
    """Containers of plain values in each other, some shared and some alike, of few entries and of many."""
    leaves = NUMBERS | TEXTS | (st.binary(max_size=300) if bytes_too else st.nothing())
    pool: list[Any] = draw(st.lists(leaves, min_size=1, max_size=5))
    for _ in range(draw(st.integers(1, 12))):
        inside = draw(st.lists(st.sampled_from(pool), max_size=5))
        kind = draw(st.sampled_from(["tuple", "list", "dict", "afresh"]))
        if kind == "afresh":
            pool.append(afresh(pool[-1]))
        elif kind == "dict":
            pool.append({draw(KEYS): value for value in inside})
        else:
            pool.append(tuple(inside) if kind == "tuple" else inside)
    times = draw(st.sampled_from([1, 2, 260, 1001]))
    whole = [pool[-1], *pool[-2:] * times]
    padding = draw(st.sampled_from([0, 255, 256, 65_500, 65_536, 70_000]))
    return ["x" * padding, afresh(whole) if draw(st.booleans()) else whole, whole]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@given(data=st.data())
def test_plain_values_are_read_as_python_reads_them(protocol: int, data: st.DataObject) -> None:
    dumps = data.draw(st.sampled_from([pickle.dumps, pickle._dumps]))  # type: ignore[attr-defined]  # in C, in Python
    written = dumps(data.draw(plain_values(bytes_too=protocol > 2)), protocol=protocol)
    read = pickles.SnapshotUnpickler(written, Stacks(), lambda _: None).load()
    same = repr(read) == repr(pickle.loads(written))
    assert same, "what differs in texts so long takes pytest minutes to find"


class TestVersions:
    def test_without_frames_times_and_later_keys(self, tmp_path: Path) -> None:
        older = files.training()
        for entry in older["device_traces"][0]:
            for key in ("frames", "time_us", "compile_context", "user_metadata"):
                del entry[key]
        for segment in older["segments"]:
            for key in ("frames", "is_expandable", "segment_pool_id", "device"):
                del segment[key]
            for block in segment["blocks"]:
                del block["frames"], block["address"]
        del older["allocator_settings"], older["external_annotations"]
        analysis = opened(tmp_path, older)
        assert analysis.peak_allocated_bytes == 100 * MIB
        assert analysis.duration_s is None
        assert {part.name for part in analysis.by_category} == {"before the recording", "no stack"}

    def test_blocks_with_a_history(self, tmp_path: Path) -> None:
        older = files.training()
        for segment in older["segments"]:
            for block in segment["blocks"]:
                frames = block.pop("frames")
                del block["address"], block["requested_size"]
                if block["state"] != "inactive":
                    block["history"] = [{"addr": 0, "real_size": 5, "frames": frames}]
        found = read_snapshot(written(tmp_path, older))
        block = found.segments[0].blocks[0]
        assert block.requested_bytes == 5
        assert [frame.function for frame in found.stacks[block.stack]] == ["convert", "_apply", "<module>"]

    def test_several_devices(self, tmp_path: Path) -> None:
        snapshot = files.training()
        other = copy.deepcopy(snapshot["segments"])
        for segment in other:
            segment["device"] = 2
        snapshot["segments"] += other
        snapshot["device_traces"] += [[], copy.deepcopy(snapshot["device_traces"][0][:1]), []]
        found = read_snapshot(written(tmp_path, snapshot))
        assert found.devices == [0, 2]
        assert [analyse(found, device).events for device in found.devices] == [8, 1]

    def test_actions_of_later_versions_are_passed_over(self, tmp_path: Path) -> None:
        snapshot = files.training()
        snapshot["device_traces"][0].insert(3, files.event("workspace_snapshot", 0, 0))
        analysis = opened(tmp_path, snapshot)
        assert (analysis.events, analysis.peak_allocated_bytes) == (9, 100 * MIB)


class Malicious:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder / "pwned"),)


BAD = {
    "empty": b"",
    "text": b"hello",
    "an ELF file": b"\x7fELF" + bytes(100),
    "a checkpoint": b"PK\x03\x04" + bytes(100),
    "a broken gzip": b"\x1f\x8b" + bytes(20),
    "another pickle": pickle.dumps({"a": 1}),
    "a number": pickle.dumps(5),
    "segments of something": pickle.dumps({"segments": [{"a": 1}]}),
    "events of something": pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": "x"}]]}),
    "an event without an action": pickle.dumps({"segments": [], "device_traces": [[{"action": "a"}, {"b": 1}]]}),
    "a negative size": pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "size": -1}]]}),
    "a trace of numbers": pickle.dumps({"segments": [], "device_traces": [[1, 2]]}),
    "blocks that do not fill": pickle.dumps({"segments": [files.segment(0, []) | {"total_size": 5}]}),
    "a size beyond all": pickle.dumps({"segments": [files.segment(0, [files.block(0, 1 << 2000, "inactive")])]}),
    "an address beyond all": pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": 1 << 70}]]}),
    "a device beyond all": pickle.dumps({"segments": [files.segment(0, [], device=1 << 40)]}),
    "JSON": b'{"a": 1}',
    "JSON events": b'{"segments": [], "device_traces": [[{"addr": 1}]]}',
    "JSON cut off": b'{"segments": [',
    "deep JSON": b"[" * 100_000,
    "a memo out of the way": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "a string that is not there": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
    "nothing on the stack": b"\x80\x04.",
    "nested without end": b"\x80\x04" + b"]" * 1_000_000,
    "marks without end": b"\x80\x04" + b"(" * 1_000_000,
    "a list in itself": b"\x80\x04]\x94h\x00a.",
    "memos without end": b"\x80\x04N" + b"\x94" * 4_000_000,
    "an unknown instruction": b"\x80\x04\xff.",
    "keys that are lists": b"\x80\x04}]Ns.",
}


class TestForeign:
    @pytest.mark.parametrize("name", BAD)
    def test_is_one_line(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(BAD[name])
        with pytest.raises(SnapshotError) as raised:
            read_snapshot(path)
        message = str(raised.value)
        assert message.startswith(str(path))
        assert message.isprintable()
        assert len(message) < len(str(path)) + 300

    def test_lists_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """So many that are kept, and no more: a file of a few bytes cannot take the machine's memory."""
        assert pickles._MOST_CONTAINERS == 3_000_000
        monkeypatch.setattr(pickles, "_MOST_CONTAINERS", 30_000)
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(b"\x80\x04]" + b"]a" * 80_000)
        with pytest.raises(SnapshotError, match="holds more than 30,000 lists and dictionaries") as raised:
            read_snapshot(path)
        assert str(raised.value).startswith(str(path))

    def test_a_folder_and_a_missing_file(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "missing.pickle"):
            with pytest.raises(SnapshotError, match=str(path)):
                read_snapshot(path)

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_no_class_is_loaded(self, tmp_path: Path, protocol: int) -> None:
        with pytest.raises(SnapshotError, match=r"asks for (posix|os)\.mkdir: .* nothing of it was loaded"):
            opened(tmp_path, {"segments": [], "extra": Malicious(tmp_path)}, protocol=protocol)
        assert [path.name for path in tmp_path.iterdir()] == ["snapshot.pickle"]

    @pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9, 0.999])
    def test_a_file_that_was_cut_off(self, tmp_path: Path, share: float) -> None:
        path = written(tmp_path, files.training())
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(SnapshotError, match="ends in the middle"):
            read_snapshot(path)

    @given(st.data())
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_damaged_file_is_read_or_refused(self, tmp_path: Path, data: st.DataObject) -> None:
        path = written(tmp_path, files.training())
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(2, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        try:
            found = read_snapshot(path)
        except SnapshotError:
            return
        for device in found.devices:
            assert analyse(found, device).peak_allocated_bytes >= 0

    def test_text_is_made_harmless(self, tmp_path: Path) -> None:
        hostile = "\x1b]0;owned\x07\x1b[2J\u202e\n"
        snapshot = files.training()
        frames = [{"filename": f"/home/{hostile}/a.py", "line": 3, "name": hostile}]
        snapshot["device_traces"][0][0]["frames"] = frames
        snapshot["device_traces"][0][0]["category"] = hostile
        snapshot["external_annotations"] = [{"name": hostile, "stage": "START", "device": 0, "time_us": 1}]
        for name in ("snapshot.pickle", "snapshot.json"):
            analysis = opened(tmp_path, snapshot, name)
            shown = [part.name for part in (*analysis.by_category, *analysis.by_line, *analysis.by_stack)]
            shown += [frame for part in analysis.by_stack for frame in part.frames]
            shown += [mark for _, mark in analysis.marks]
            assert all(text.isprintable() for text in shown)
            assert any("owned" in text for text in shown)


@pytest.mark.slow
def test_a_large_file_takes_a_fraction_of_its_size(tmp_path: Path) -> None:
    """Python's unpickler takes three times as much as the file has; here it is what the columns take."""
    frames = [{"filename": f"/home/ada/module_{number}.py", "line": number, "name": "forward"} for number in range(900)]
    events: list[dict[str, Any]] = []
    for number in range(40_000):
        stack = [frames[(number // 3 * 7 + depth * 11) % 900] for depth in range(80)]
        address = BASE + number % 64 * MIB
        events.append(files.event("alloc", address, MIB, stack, time_us=number))
        events.append(files.event("free_requested", address, MIB, stack, time_us=number))
        events.append(files.event("free_completed", address, MIB, stack, time_us=number))
    path = written(tmp_path, files.body(events, []))
    size = path.stat().st_size
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from gpumem_tui.snapshots.read import read_snapshot\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "shares = []\n"
        "found = read_snapshot(Path(sys.argv[1]), shares.append)\n"
        "assert len(found.history(0)) == 120_000 and shares == sorted(shares) and len(shares) > 10\n"
        "with open('/proc/self/status') as status:\n"
        "    anonymous = next(int(line.split()[1]) for line in status if line.startswith('RssAnon'))\n"
        "print(anonymous * 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert size > 20 * MIB
    assert int(done.stdout) < size + 60 * MIB
