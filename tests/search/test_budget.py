"""A step is compared with a budget and with an earlier prediction: what grew, where, by how much."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumem_tui.errors import OptionError
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.search.budget import Footprint, Gate, GateObject, GateTerms, PlaceTaken


def footprint(places: list[tuple[str, str, int]], used: int = GIB, batch_size: int = 8) -> Footprint:
    """A step whose peak is these (source, function, bytes), all of them activations."""
    total = sum(size for *_, size in places)
    taken = [PlaceTaken("activations", *place) for place in places]
    return Footprint(
        "python train.py", "a100-40gb", batch_size, "2.13.0", (used, used), total, {"activations": total}, taken
    )


BEFORE = footprint([("train.py:10", "forward", 300 * MIB), ("train.py:20", "forward", 100 * MIB)])


@pytest.mark.parametrize(("budget", "code"), [(GIB, 0), (GIB - 1, 3), (2 * GIB, 0)])
def test_the_high_end_of_the_device_total_is_what_must_be_within(budget: int, code: int) -> None:
    gate = Gate(footprint([], used=GIB), budget)
    assert gate.exit_code == code
    assert GateObject.of(gate).is_open == (code == 0)


def test_a_total_known_as_a_range_is_judged_by_its_most() -> None:
    unsure = replace(footprint([]), device_used_bytes=(GIB, 3 * GIB))
    assert [Gate(unsure, budget).exit_code for budget in (2 * GIB, 3 * GIB)] == [3, 0]
    wider = replace(unsure, device_used_bytes=(GIB, 4 * GIB))
    (fault,) = Gate(wider, None, unsure).faults
    assert fault.startswith("the device total has grown by +1.00 GiB, +33.3 %: from 3.00 GiB to 4.00 GiB")
    assert Gate(unsure, None, wider).faults == []


def test_lines_that_only_moved_have_not_changed() -> None:
    now = footprint([("train.py:13", "forward", 300 * MIB), ("train.py:23", "forward", 100 * MIB)])
    assert Gate(now, None, BEFORE).places == []


def test_what_grew_is_named_with_its_place() -> None:
    now = footprint(
        [("train.py:13", "forward", 450 * MIB), ("train.py:23", "forward", 100 * MIB), ("loss.py:3", "focal", 8 * MIB)]
    )
    gate = Gate(now, None, BEFORE, tolerance=0.1)
    changes = {change.name: change.size_bytes for change in gate.places}
    assert changes == {"train.py:13 forward (activations)": 150 * MIB, "loss.py:3 focal (activations)": 8 * MIB}
    assert [(change.name, change.size_bytes) for change in gate.buckets] == [("activations", 158 * MIB)]
    (fault,) = gate.faults
    assert "the allocated peak has grown by +0.15 GiB, +39.5 %" in fault
    assert "| `train.py:13 forward (activations)` | 0.29 GiB | 0.44 GiB | +0.15 GiB |" in gate.markdown()
    assert any("loss.py:3 focal" in line for line in gate.lines())


@given(grown=st.integers(-400 * MIB, 400 * MIB), tolerance=st.floats(0, 2))
def test_growth_within_the_tolerance_and_any_saving_is_let_through(grown: int, tolerance: float) -> None:
    now = footprint([("train.py:10", "forward", 300 * MIB), ("train.py:20", "forward", 100 * MIB + grown)])
    gate = Gate(now, None, BEFORE, tolerance)
    assert bool(gate.faults) == (grown > tolerance * 400 * MIB)


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from("fg"), st.integers(1, 99)), max_size=8), st.data())
def test_the_changes_of_lines_sum_to_the_change_of_the_peak(
    lines: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    def taken(found: list[tuple[int, str, int]]) -> Footprint:
        sizes = {(f"a.py:{line}", function): size for line, function, size in found}
        return footprint([(*place, size) for place, size in sizes.items()])

    before, now = taken(lines), taken([(line + data.draw(st.integers(0, 2)), *rest) for line, *rest in lines])  # type: ignore[misc]
    changed = sum(change.size_bytes for change in Gate(now, None, before).places)
    assert changed == now.peak_allocated_bytes - before.peak_allocated_bytes


def test_a_baseline_is_written_once_and_read_again(tmp_path: Path) -> None:
    terms = GateTerms(None, tmp_path / "base.json", 1.0)
    assert terms.held(BEFORE).before is None
    larger = footprint([("train.py:10", "forward", 900 * MIB)])
    assert terms.held(larger).before == BEFORE
    with pytest.raises(OptionError, match="is of batch size 8 on a simulated a100-40gb, not of batch size 9 on"):
        terms.held(footprint([], batch_size=9))
    (tmp_path / "base.json").write_text("{}")
    with pytest.raises(OptionError, match="is no baseline"):
        terms.held(BEFORE)
