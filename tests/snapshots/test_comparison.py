"""Two snapshots compared: what grew and where, what was freed, and what is not comparable."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.memory import MIB
from gpumem_tui.snapshots.analysis import analyse
from gpumem_tui.snapshots.comparison import Comparison, answer_words, compare
from gpumem_tui.snapshots.read import read_snapshot
from gpumem_tui.snapshots.recording import record, snapshot
from gpumem_tui.snapshots.report import comparison_lines
from tests.scenes.snapshot import training
from tests.snapshots import files
from tests.snapshots.files import BASE, block, event, segment, written


def compared(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> list[Comparison]:
    """The devices of two snapshots that were written and read."""
    taken = []
    for name, body in (("before.pickle", before), ("after.pickle", after)):
        found = read_snapshot(written(folder, body, name))
        taken.append((found, [analyse(found, device) for device in found.devices]))
    return compare(*taken)


def _leak(steps: int) -> dict[str, Any]:
    """A process that keeps 10 MiB of each step's forward, and had 40 MiB of optimizer state for the first two steps."""
    events, held, clock = [], [], 1_000_000
    state = BASE + 512 * MIB
    events.append(event("alloc", state, 40 * MIB, files.OPTIMIZER, time_us=clock))
    for step in range(steps):
        clock += 10
        events.append(event("alloc", BASE + step * 10 * MIB, 10 * MIB, files.FORWARD, time_us=clock))
        held.append(block(BASE + step * 10 * MIB, 10 * MIB, "active_allocated", files.FORWARD))
        if step == 1:
            events.append(event("free_requested", state, 40 * MIB, time_us=clock + 1))
            events.append(event("free_completed", state, 40 * MIB, time_us=clock + 1))
    blocks = [*held, block(BASE + steps * 10 * MIB, 100 * MIB - steps * 10 * MIB, "inactive")]
    first = block(
        state, 40 * MIB, "inactive" if steps > 1 else "active_allocated", files.OPTIMIZER if steps < 2 else []
    )
    return files.body(events, [segment(BASE, blocks), segment(state, [first])])


def test_a_leak_of_one_run_is_what_was_held_when_written(tmp_path: Path) -> None:
    """The first file's last event is in the second: peaks of a longer recording would say nothing."""
    (found,) = compared(tmp_path, _leak(3), _leak(7))
    assert (found.is_one_run, found.moment, found.totals) == (True, "when written", (30 * MIB, 70 * MIB))
    assert answer_words(found) == (
        "+40.0 MiB (30.0 MiB → 70.0 MiB allocated when written): +40.0 MiB forward at ada/model.py:12 forward"
    )
    (line,) = found.by_line
    assert (line.before_blocks, line.after_blocks) == (3, 7)


def test_clocks_of_one_process_differ_a_little_in_two_files(tmp_path: Path) -> None:
    later = _leak(7)
    for one in later["device_traces"][0]:
        one["time_us"] += 2
    (found,) = compared(tmp_path, _leak(3), later)
    assert found.is_one_run


def test_two_simulated_runs_that_end_alike_are_two(tmp_path: Path) -> None:
    """A simulated run counts its events for time, and ends at the addresses of any other of the same script."""
    before, after = _leak(3), _leak(7)
    after["device_traces"][0][1]["size"] = 5 * MIB
    (found,) = compared(tmp_path, before, after)
    assert (found.is_one_run, found.moment) == (False, "at the peak")
    assert not answer_words(found).startswith("No change")


def test_freed_memory_is_shown_next_to_what_grew(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, _leak(1), _leak(3))
    assert [(line.name, line.bytes_more) for line in found.by_line] == [
        ("ada/train.py:11 <module>", -40 * MIB),
        ("ada/model.py:12 forward", 20 * MIB),
    ]
    assert answer_words(found).startswith(
        "-20.0 MiB (50.0 MiB → 30.0 MiB allocated when written): -40.0 MiB optimizer at"
    )
    reserved, free = found.figures[3], found.figures[4]
    assert reserved == ("reserved when written", 140 * MIB, 140 * MIB)
    assert free == ("free between blocks", 90 * MIB, 70 * MIB)


def test_two_runs_are_compared_at_their_peaks(tmp_path: Path) -> None:
    before, after = record(training()), record(training(growth=12))
    (found,) = compared(tmp_path, snapshot(before), snapshot(after))
    assert (found.is_one_run, found.moment) == (False, "at the peak")
    (activations, *others) = found.by_category
    assert (activations.name, activations.bytes_more) == ("activations", 12 * 36 * MIB)
    assert not any(row.bytes_more for row in others)
    assert sum(line.bytes_more for line in found.by_line) == 12 * 36 * MIB
    assert answer_words(found).startswith(
        "+0.42 GiB (1.61 GiB → 2.03 GiB allocated at the peak): +0.14 GiB activations"
    )
    assert answer_words(compared(tmp_path, snapshot(before), snapshot(before))[0]).startswith("No change")


def _at_line(number: int, size: int, **more: Any) -> dict[str, Any]:
    frames = copy.deepcopy(files.FORWARD)
    frames[3]["line"] = number
    held = [block(BASE, size, "active_allocated", frames)]
    return files.body([event("alloc", BASE, size, frames, time_us=number)], [segment(BASE, held)], **more)


def test_a_line_that_moved_in_its_function_is_one_line(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, _at_line(12, 10 * MIB), _at_line(15, 14 * MIB))
    assert [(line.name, line.bytes_more) for line in found.by_line] == [("ada/model.py:12→15 forward", 4 * MIB)]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"expandable_segments": True}, "allocator settings differ: expandable_segments False → True"),
        (
            {"path": "/other/lib/python3.12/site-packages/torch/"},
            "torch is another one: /venv/lib/python3.11/",
        ),
        ({"device": 1}, "before.pickle is of cuda:0, after.pickle of cuda:1"),
        ({"history": False}, "after.pickle: no events were recorded (enabled='state')"),
        ({"category": "activations"}, "categories come from the stacks in before.pickle and from the file in after"),
    ],
    ids=["settings", "torch", "device", "history", "categories"],
)
def test_what_else_differs_is_told(tmp_path: Path, change: dict[str, Any], note: str) -> None:
    after = _at_line(12, 14 * MIB)
    if "expandable_segments" in change:
        after["allocator_settings"]["expandable_segments"] = True
    if "path" in change:
        for frame in after["segments"][0]["blocks"][0]["frames"] + after["device_traces"][0][0]["frames"]:
            frame["filename"] = frame["filename"].replace("/venv/lib/python3.11/site-packages/torch/", change["path"])
    if "device" in change:
        after["segments"][0]["device"] = 1
        after["device_traces"].insert(0, [])
    if "history" in change:
        after["device_traces"] = [[]]
    if "category" in change:
        after["segments"][0]["blocks"][0]["category"] = "activations"
    (found,) = compared(tmp_path, _at_line(12, 10 * MIB), after)
    assert any(text.startswith(note) for text in found.notes), found.notes
    assert found.totals[1] - found.totals[0] == 4 * MIB


def test_a_device_that_only_one_file_has(tmp_path: Path) -> None:
    after = _at_line(12, 10 * MIB)
    after["segments"].append({**copy.deepcopy(after["segments"][0]), "device": 3})
    first, second = compared(tmp_path, _at_line(12, 10 * MIB), after)
    assert (first.totals, second.totals) == ((10 * MIB, 10 * MIB), (0, 10 * MIB))
    assert answer_words(second).startswith("+10.0 MiB (0 B → 10.0 MiB allocated when written)")


def test_lines_begin_with_the_answer(tmp_path: Path) -> None:
    found = compared(tmp_path, _leak(1), _leak(3))
    one, other = (read_snapshot(tmp_path / f"{name}.pickle") for name in ("before", "after"))
    lines = list(comparison_lines(one, other, found))
    assert lines[0] == answer_words(found[0])
    assert lines.index("\nmore, by source line") < lines.index("\nfreed, by source line")
    assert any(line.endswith("ada/model.py:12 forward (forward, 1 → 3 blocks)") for line in lines)
