"""A GPU divided by MIG on the Monitor: what each instance holds, and what the whole of them is."""

from __future__ import annotations

import pytest
from msgspec import structs
from msgspec.structs import replace
from rich.cells import cell_len

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.alerts import Alert, AlertKind, Severity
from gpumem_tui.monitor.history import Column, values_of
from gpumem_tui.monitor.ledger import device_ledger
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import GpuProcess, GpuReading, Instance, Memory
from gpumem_tui.tui.kit.shares import Share, legend
from gpumem_tui.tui.monitor.entries import entries
from gpumem_tui.tui.monitor.gpus import gpus_view, layout, shares
from gpumem_tui.tui.monitor.processes import table_view
from gpumem_tui.tui.monitor.reports import details_rows
from gpumem_tui.tui.monitor.state import MonitorState
from tests.monitor import snapshots
from tests.scenes import monitor as scene
from tests.scenes import watch as watch_scene

DENIED = Unknown("no permission")


def instance(index: int, used_gib: int, *processes: GpuProcess, total_gib: int = 10) -> Instance:
    """One that holds so much, on a driver that keeps 1 GiB of each."""
    memory = Memory(total_gib * GIB, GIB, used_gib * GIB, (total_gib - 1 - used_gib) * GIB)
    inside = tuple(structs.replace(process, instance=f"MIG-{index}") for process in processes)
    return Instance(index, f"MIG-{index}", "1g.10gb", memory, inside, device_ledger(memory, inside))


def divided(*instances: Instance, memory: Reading[Memory] = DENIED) -> GpuReading:
    """A GPU whose figures as a whole are by default for administrators only."""
    processes = tuple(p for each in instances if not isinstance(each.processes, Unknown) for p in each.processes)
    return snapshots.gpu(
        0, mig=True, instances=instances, memory=memory, ledger=device_ledger(memory, processes),
        processes=processes, utilization_percent=Unknown("not available in MIG mode"),
    )  # fmt: skip


def sizes(stretches: tuple[Share, ...]) -> dict[str, object]:
    return {share.label: share.size_bytes for share in stretches}


def test_each_instance_has_its_share_and_all_sum_to_what_can_be_seen() -> None:
    found = shares(divided(instance(0, 3, scene.process(7, 2 * GIB)), instance(2, 9, total_gib=20)), {})
    assert sizes(found) == {
        "driver reserved": 2 * GIB,
        "MIG 0 of 10.00": 3 * GIB,
        "MIG 2 of 20.00": 9 * GIB,
        "free": 16 * GIB,
    }
    notes = {share.short: share.note for share in found}
    assert notes["MIG 0"].startswith("1.00 GiB unaccounted: processes of other containers")
    assert notes["MIG 2"].startswith("9.00 GiB unaccounted: ")


def test_what_no_instance_has_is_said_where_the_whole_may_be_read() -> None:
    whole = Memory(80 * GIB, GIB, 3 * GIB, 76 * GIB)
    found = shares(divided(instance(0, 3), memory=whole), {})
    assert sizes(found)["in no instance"] == 70 * GIB
    assert sum(size for size in sizes(found).values() if isinstance(size, int)) == whole.total_bytes


def test_an_instance_that_cannot_be_read_is_a_dash_with_its_reason() -> None:
    gone = Unknown("not found")
    found = shares(divided(instance(0, 3), Instance(1, "MIG-1", "1g.10gb", gone, gone, gone)), {})
    assert sizes(found)["MIG 1"] == gone
    assert any("MIG 1: not found" in "".join(text for text, _ in row) for row in legend(found, 100, 6))


def test_the_line_of_facts_and_the_history_have_the_instances_together() -> None:
    gpu = divided(instance(0, 3), instance(1, 5))
    state = MonitorState(snapshot=scene.of([gpu]))
    said = "\n".join("".join(text for text, _ in row) for row in gpus_view(state, layout(118, 38, 1, 2), 118).rows)
    assert "8.00/20.00 GiB  44%" in said, "of what the driver leaves"
    assert "no permission" not in said
    assert values_of(gpu, {})[Column.USED] == 8 * GIB


@pytest.mark.parametrize("width", [38, 78, 118])
def test_seven_instances_fit_everywhere(width: int) -> None:
    gpu = divided(*(instance(n, n) for n in range(7)))
    state = MonitorState(snapshot=scene.of([gpu, *scene.machine(7).gpus[1:]]))
    for rows in (8, 22, 38):
        view = gpus_view(state, layout(width, rows, 7, 0), width)
        assert max(sum(cell_len(text) for text, _ in row) for row in view.rows) <= width


def test_details_name_the_instance_and_its_share() -> None:
    gpu = divided(instance(2, 5, scene.process(7, 5 * GIB)))
    state = MonitorState(snapshot=scene.of([gpu]))
    (entry,) = entries(state)
    said = "\n".join("".join(text for text, _ in row) for row in details_rows(state, entry))
    assert "2  1g.10gb" in said
    assert "5.00 GiB, 50.0% of the instance" in said


def test_the_table_has_room_for_any_instance_and_the_filter_finds_it() -> None:
    gpu = structs.replace(divided(instance(6, 5, scene.process(7, 4 * GIB), scene.process(8, GIB))), index=15)
    state = MonitorState(snapshot=scene.of([gpu, *scene.machine(2).gpus[1:]]))
    chosen = replace(state, cursor=next(entry.key for entry in entries(state) if entry.process.pid == 7))
    said = "\n".join("".join(text for text, _ in row) for row in table_view(chosen, 120, 20).rows)
    assert "▸15:6       7 " in said
    for words, pids in (("gpu15:6", {7, 8}), ("gpu15", {7, 8}), ("gpu1:6", set())):
        assert {entry.process.pid for entry in entries(replace(state, filter=words))} == pids


@pytest.mark.parametrize("listed", [True, False])
def test_a_probe_in_an_instance_stands_with_its_process(listed: bool) -> None:
    processes = (scene.process(7, 5 * GIB),) if listed else ()
    found = watch_scene.published(watch_scene.watched(7, (watch_scene.record(), "MIG-2")))
    state = MonitorState(snapshot=scene.of([divided(instance(2, 5, *processes))]), published=found)
    (entry,) = entries(state)
    assert entry.watched is not None
    assert entry.gpu is state.gpus[0]


def test_a_full_instance_is_a_warning_of_its_gpu() -> None:
    gpu = divided(instance(0, 9), instance(2, 1))
    other = snapshots.gpu(1)
    full = Alert(Severity.WARNING, gpu.uuid, AlertKind.NEAR_FULL, "GPU 0 MIG 0 at 100 %", 0.0, "MIG-0")
    state = MonitorState(alerts=(full,))
    assert state.warns(gpu, AlertKind.NEAR_FULL)
    assert not state.warns(gpu, AlertKind.HOT)
    assert not state.warns(other, AlertKind.NEAR_FULL)
