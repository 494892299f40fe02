"""The Monitor's views: every size, every state, without a terminal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace
from rich.cells import cell_len

from gpumem_tui.ledger import Ledger, LedgerRow
from gpumem_tui.memory import GIB, MIB, Bucket, Unknown
from gpumem_tui.monitor.alerts import Alert, AlertKind, Alerts, Severity
from gpumem_tui.monitor.history import Column
from gpumem_tui.monitor.snapshot import DriverReading, GpuProcess, GpuReading, ProcessKind, Snapshot
from gpumem_tui.tui.kit.figures import Row, age, fit
from gpumem_tui.tui.kit.shares import bar, legend
from gpumem_tui.tui.monitor.entries import entries, entry_of, moved
from gpumem_tui.tui.monitor.gpus import gpus_view, layout, shares, short_name
from gpumem_tui.tui.monitor.header import alert_row, header_row, help_alerts, trouble_rows
from gpumem_tui.tui.monitor.history import axis_of, chart_columns, history_view
from gpumem_tui.tui.monitor.processes import table_view
from gpumem_tui.tui.monitor.reports import details_rows
from gpumem_tui.tui.monitor.screen import MonitorScreen
from gpumem_tui.tui.monitor.state import MonitorState, SortBy, device_key, focused_on, seen, sorted_by, sorted_on
from gpumem_tui.watch.published import Published
from tests.monitor import snapshots
from tests.scenes import monitor as scene

SIZES = [(38, 8), (78, 22), (118, 38), (198, 58)]
COUNTS = [1, 2, 8, 16]


def text(row: Row) -> str:
    return "".join(part for part, _ in row)


def width(row: Row) -> int:
    return sum(cell_len(part) for part, _ in row)


def state(gpus: int = 8, **changes: object) -> MonitorState:
    return replace(MonitorState(snapshot=scene.machine(gpus)), **changes)


def pids(shown: MonitorState) -> list[int]:
    return [entry.process.pid for entry in entries(shown)]


@pytest.mark.parametrize("gpus", COUNTS)
def test_gpus_are_drawn_in_no_room_at_all(gpus: int) -> None:
    """Borders take two columns of a terminal that has one."""
    for columns in range(-2, 8):
        assert gpus_view(state(gpus), layout(columns, 8, gpus, 2), columns).rows


@pytest.mark.parametrize("used_share", [0.952, 0.985, 0.99, 0.9999, 1.0])
def test_the_row_and_the_alert_have_one_percentage(used_share: float) -> None:
    """Both without what the driver keeps for itself."""
    usable_bytes = snapshots.memory(0).free_bytes
    full = snapshots.gpu(used_bytes=round(used_share * usable_bytes), processes=())
    (alert,) = Alerts().update(snapshots.machine([full]))
    told = re.search(r"(\d+) % of memory in use", alert.message)
    rows = gpus_view(MonitorState(snapshot=snapshots.machine([full])), layout(118, 38, 1, 2), 118).rows
    shown = re.search(r"GiB +(\d+)%", text(rows[0]))
    assert told is not None
    assert shown is not None
    assert told[1] == shown[1]


@given(
    columns=st.integers(MonitorScreen.SMALLEST[0] - 2, 300),
    rows=st.integers(MonitorScreen.SMALLEST[1] - 3, 100),
    gpus=st.integers(0, 64),
    processes=st.integers(0, 500),
    prefer_history=st.booleans(),
)
def test_every_size_is_divided_without_rest(
    columns: int, rows: int, gpus: int, processes: int, prefer_history: bool
) -> None:
    plan = layout(columns, rows, gpus, processes, prefer_history=prefer_history)
    assert plan.gpus + plan.history + plan.table == rows
    assert min(plan.gpus, plan.history, plan.table) >= 0
    if not prefer_history:
        assert plan.table >= 3, "the process list is never lost"


@pytest.mark.parametrize("columns", [58, 78, 118, 198])
@pytest.mark.parametrize("order", SortBy)
def test_a_heading_is_clicked_where_it_stands(order: SortBy, columns: int) -> None:
    view = table_view(state(2, sort=order), columns, 10)
    places, end = {}, 0
    for part, _ in view.rows[0]:
        begin, end = end, end + cell_len(part)
        places[part.strip(" ▾▴")] = begin, end
    assert {sort: (first, last) for first, last, sort in view.headings} == {
        sort: places[sort.value] for sort in SortBy if sort.value in places
    }


@pytest.mark.parametrize("gpus", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wider_or_longer_than_its_place(size: tuple[int, int], gpus: int) -> None:
    columns, rows = size
    shown = state(gpus)
    plan = layout(columns, rows, gpus, 3 * gpus)
    panel = gpus_view(shown, plan, columns).rows
    table = table_view(shown, columns, plan.table).rows
    chart = history_view(
        scene.machine(gpus).gpus[0],
        {},
        scene.history(60, 1).series(device_key(scene.machine(1).gpus[0]), chart_columns(columns), 600, scene.NOON_S),
        columns,
        plan.history,
        None,
        focused=False,
    )
    assert len(panel) <= plan.gpus
    assert len(table) <= plan.table
    assert len(chart) in (0, plan.history)
    for row in (*panel, *table, *chart):
        assert width(row) <= columns, text(row)


@pytest.mark.parametrize("gpus", COUNTS)
@pytest.mark.parametrize("size", SIZES)
def test_every_gpu_in_view_can_be_clicked(size: tuple[int, int], gpus: int) -> None:
    columns, rows = size
    shown = state(gpus)
    view = gpus_view(shown, layout(columns, rows, gpus, 3 * gpus), columns)
    for (top, lines, left, cells), key in view.places.items():
        assert view.at(left, top) == view.at(left + cells - 1, top + lines - 1) == key
    if size != SIZES[0]:
        assert set(view.places.values()) == {device_key(gpu) for gpu in shown.gpus}


def test_eight_gpus_leave_room_for_the_processes_at_80_by_24() -> None:
    plan = layout(78, 22, 8, 24)
    table = table_view(state(8), 78, plan.table)
    assert sum(key is not None for key in table.keys) >= 8


def test_gpus_that_do_not_fit_scroll_with_the_focus() -> None:
    shown = state(16)
    plan = layout(38, 8, 16, 32)
    for _ in range(16):
        shown = focused_on(shown, 1)
        view = gpus_view(shown, plan, 38)
        assert shown.focused is not None
        assert device_key(shown.focused) in view.places.values()
        assert sum("▸" in text(row) for row in view.rows) == 1


def test_a_heading_has_no_half_of_a_word() -> None:
    for index in range(16):
        shown = focused_on(state(16), index)
        heading = text(gpus_view(shown, layout(38, 8, 16, 48), 38).rows[0])
        assert re.fullmatch(r"GPUs \d+–\d+ of 16 +(GiB +)?util ─+", heading)


# Shares


@given(
    sizes=st.lists(st.integers(0, 9 * GIB), max_size=8),
    unaccounted=st.integers(0, GIB),
    cells=st.integers(1, 200),
    lines=st.integers(1, 6),
)
def test_the_bar_is_as_wide_as_it_should_be_and_the_legend_sums_to_the_device(
    sizes: list[int], unaccounted: int, cells: int, lines: int
) -> None:
    gpu = scene.gpu(0, [scene.process(100 + n, size) for n, size in enumerate(sizes)], unaccounted_bytes=unaccounted)
    stretches = shares(gpu, {})
    assert sum(share.size_bytes for share in stretches if isinstance(share.size_bytes, int)) == scene.TOTAL_BYTES
    assert width(bar(stretches, cells)) == cells
    assert len(legend(stretches, max(cells, 30), lines)) <= lines


def test_a_legend_that_is_too_short_sums_up_what_it_leaves_out() -> None:
    gpu = scene.gpu(0, [scene.process(100 + n, (n + 1) * GIB) for n in range(8)])
    rows = legend(shares(gpu, {}), 78, 2)
    said = "\n".join(text(row) for row in rows)
    assert "107 sleep" not in said
    assert "driver reserved" in said
    assert "more" in said
    assert "free" in said


@pytest.mark.parametrize("cells", [29, 58, 87])
def test_a_legend_of_a_few_places_still_sums_to_the_device(cells: int) -> None:
    gpu = scene.gpu(0, [scene.process(100 + n, GIB) for n in range(30)], unaccounted_bytes=20 * GIB)
    (said,) = (text(row) for row in legend(shares(gpu, {}), cells, 1))
    assert "free" in said
    if cells > 30:
        assert sum(float(number) for number in re.findall(r"\d+\.\d\d", said)) == pytest.approx(80, abs=0.02)
    if cells > 60:
        assert "unaccounted" in said
        assert "+31 more" in said


def test_wide_and_combining_characters_keep_the_legend_in_its_columns() -> None:
    def named(pid: int, name: str) -> GpuProcess:
        return structs.replace(scene.process(pid, GIB), host=structs.replace(scene.host_process(pid), name=name))

    plain = scene.gpu(0, [named(1, "one"), named(2, "two"), named(3, "three")])
    wide = scene.gpu(0, [named(1, "训练程序"), named(2, "e\u0301te\u0301"), named(3, "three")])
    for row, other in zip(legend(shares(wide, {}), 100, 3), legend(shares(plain, {}), 100, 3), strict=True):
        assert width(row) <= 100
        for mark in "▪█▓▒?·":
            places = [[cell_len(text(r).partition(mark)[0]) for r in (row, other) if mark in text(r)]]
            assert all(len(set(found)) <= 1 for found in places)


def test_unaccounted_memory_stands_with_its_reason() -> None:
    gpu = scene.gpu(0, [scene.process(100, GIB)])
    assert any("other namespaces" in text(row) for row in legend(shares(gpu, {}), 100, 4))


def test_a_share_of_unknown_size_is_a_dash_with_its_reason() -> None:
    hidden = structs.replace(scene.process(100, 0), used_bytes=Unknown("not available on this driver"))
    rows: tuple[LedgerRow[GpuProcess], ...] = (
        LedgerRow(Bucket.PROCESS, hidden.used_bytes, hidden),
        LedgerRow(Bucket.FREE, 70 * GIB),
        LedgerRow(Bucket.UNACCOUNTED, Unknown("a process's memory is not available")),
    )
    gpu = structs.replace(scene.gpu(0, []), ledger=Ledger(80 * GIB, rows))
    said = "\n".join(text(row) for row in legend(shares(gpu, {}), 100, 6))
    assert "–" in said
    assert "not available on this driver" in said


def test_a_process_with_a_probe_is_divided_into_its_buckets() -> None:
    gpu = scene.gpu(0, [scene.process(4100, 16 * GIB), scene.process(4101, 2 * GIB)])
    stretches = shares(gpu, {(gpu.uuid, 4100): scene.parts()})
    labels = {share.label: share.size_bytes for share in stretches}
    assert labels["4100 activations"] == 5 * GIB
    assert labels["4100 cache"] == GIB
    assert labels["4100 CUDA context"] == 16 * GIB - scene.parts().reserved_bytes
    assert sum(size for label, size in labels.items() if label.startswith("4100") and isinstance(size, int)) == 16 * GIB


def test_a_probe_that_says_more_than_the_driver_is_not_believed() -> None:
    gpu = scene.gpu(0, [scene.process(4100, GIB)])
    assert "4100 python" in {share.label for share in shares(gpu, {(gpu.uuid, 4100): scene.parts()})}


# Processes


def test_processes_are_sorted_by_each_column_and_unknown_ones_come_last() -> None:
    for order in SortBy:
        shown = state(4, sort=order)
        listed = pids(shown)
        assert len(listed) == 12
        assert pids(replace(shown, reverse=True)) != listed
    unmatched = structs.replace(scene.process(9, 5 * GIB), host=Unknown("pid 9 is of another namespace"))
    shown = MonitorState(scene.of([scene.gpu(0, [unmatched, scene.process(4100, GIB)])]), sort=SortBy.CPU)
    assert pids(shown) == pids(replace(shown, reverse=True)) == [4100, 9]


def test_memory_goes_down_and_names_go_up() -> None:
    sizes = [entry.process.used_bytes for entry in entries(state(4))]
    assert sizes == sorted(sizes, key=lambda size: -1 if isinstance(size, Unknown) else size, reverse=True)
    users = [entry.host.user for entry in entries(state(4, sort=SortBy.USER)) if entry.host is not None]
    assert users == sorted(users)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("ada", {4100, 4116}), ("gpu1 grace", {4117}), ("4118", {4118}), ("DOCKER", {4102, 4118}), ("nobody", set())],
)
def test_the_filter_wants_every_word(words: str, expected: set[int]) -> None:
    shown = state(2, filter=words)
    assert set(pids(shown)) == expected
    rows = "\n".join(text(row) for row in table_view(shown, 118, 20).rows)
    assert f"{len(expected)} of 6 processes: matching “{words}” · esc for all" in rows


def test_only_the_focused_gpu() -> None:
    shown = focused_on(state(4, only_focus=True), 1)
    assert {entry.key[0] for entry in entries(shown)} == {device_key(shown.gpus[1])}


def test_only_the_processes_of_who_watches() -> None:
    shown = state(2, mine=True, user="grace")
    assert {entry.host.user for entry in entries(shown) if entry.host is not None} == {"grace"}
    rows = "\n".join(text(row) for row in table_view(shown, 118, 20).rows)
    assert "2 of 6 processes: of yours · m for all" in rows
    assert pids(state(2, mine=True, user="nobody")) == []


def test_the_tree_puts_children_below_their_parent() -> None:
    parent = scene.process(10, 1 * GIB)
    child = structs.replace(scene.process(20, 9 * GIB), host=scene.host_process(20, parent_pid=10))
    grandchild = structs.replace(scene.process(30, 5 * GIB), host=scene.host_process(30, parent_pid=20))
    ranks = [structs.replace(scene.process(pid, GIB), host=scene.host_process(pid, parent_pid=7)) for pid in (40, 50)]
    shown = MonitorState(scene.of([scene.gpu(0, [parent, child, grandchild, *ranks])]), tree=True)
    assert [(entry.process.pid, entry.branch) for entry in entries(shown)] == [
        (10, ""), (20, "└ "), (30, "  └ "), (40, "┌ "), (50, "└ "),
    ]  # fmt: skip


def test_a_tree_whose_parents_go_round_loses_no_process() -> None:
    one = structs.replace(scene.process(10, GIB), host=scene.host_process(10, parent_pid=20))
    other = structs.replace(scene.process(20, GIB), host=scene.host_process(20, parent_pid=10))
    assert set(pids(MonitorState(scene.of([scene.gpu(0, [one, other])]), tree=True))) == {10, 20}


def test_a_pid_of_another_namespace_is_shown_as_such() -> None:
    unmatched = structs.replace(scene.process(9, 5 * GIB), host=Unknown("pid 9 is of another namespace"))
    shown = MonitorState(scene.of([scene.gpu(0, [unmatched])]))
    assert "pid 9 is of another namespace" in text(table_view(shown, 118, 10).rows[1])


def test_a_list_that_may_not_be_read_is_never_an_empty_one() -> None:
    refused = structs.replace(scene.gpu(0, []), processes=Unknown("no permission"))
    said = "\n".join(text(row) for row in table_view(MonitorState(scene.of([refused])), 118, 10).rows)
    assert "GPU 0: processes unknown: no permission" in said
    assert "no process on any GPU" not in said
    said = "\n".join(text(row) for row in table_view(MonitorState(scene.of([scene.gpu(0, [])])), 118, 10).rows)
    assert "no process on any GPU · 2 searches for a batch" in said


def test_the_cursor_walks_the_list_and_stays_with_its_process() -> None:
    shown = moved(state(2), 1)
    assert shown.cursor == entries(shown)[0].key
    shown = moved(moved(shown, 1), 100)
    assert shown.cursor == entries(shown)[-1].key
    upside_down = replace(shown, reverse=True)
    assert upside_down.cursor == entries(upside_down)[0].key
    gone = replace(shown, snapshot=scene.machine(1, 1))
    assert moved(gone, 1).cursor == entries(gone)[0].key
    assert moved(replace(gone, filter="nobody"), 1).cursor is None


def test_the_cursor_is_always_in_view() -> None:
    shown = state(8)
    for _ in range(24):
        shown = moved(shown, 1)
        assert shown.cursor in table_view(shown, 78, 8).keys


def test_a_mig_process_names_its_instance_in_the_details() -> None:
    process = structs.replace(scene.process(4100, GIB), instance="MIG-1")
    shown = MonitorState(scene.of([scene.gpu(0, [process])]))
    entry = entry_of(shown, entries(shown)[0].key)
    assert entry is not None
    assert any("MIG-1" in text(row) for row in details_rows(shown, entry))


# State


def test_sorting_by_the_same_column_again_turns_it_round() -> None:
    once = sorted_on(state(), SortBy.PID)
    assert (once.sort, once.reverse) == (SortBy.PID, False)
    assert sorted_on(once, SortBy.PID).reverse
    assert sorted_by(sorted_by(once, 1), -1) == once


def test_the_focus_goes_round_and_survives_a_lost_gpu() -> None:
    shown = focused_on(state(3), -1)
    assert shown.focused is not None
    assert shown.focused.index == 2
    fewer = replace(shown, snapshot=scene.machine(2))
    assert fewer.focused is not None
    assert fewer.focused.index == 0
    assert focused_on(MonitorState(), 1).focused is None


def test_a_held_picture_keeps_its_snapshot() -> None:
    shown = state(2, paused=True)
    assert seen(shown, scene.machine(1), Published()) is shown
    assert seen(replace(shown, paused=False), scene.machine(1), Published()).snapshot == scene.machine(1)


# History


def test_a_column_of_the_chart_and_its_time_are_the_same_both_ways() -> None:
    series = scene.history(300, 1).series(device_key(scene.machine(1).gpus[0]), 60, 300, scene.NOON_S)
    for column in (0, 17, 59):
        time_s = axis_of(series).time_at(column + 6)
        assert axis_of(series).column_at(time_s) == column
    assert [axis_of(series).time_at(x) is None for x in (3, 5, 6, 6 + 59, 6 + 60)] == [True, True, False, False, True]
    end_s = series.start_s + 60 * series.step_s
    assert [axis_of(series).column_at(at_s) for at_s in (series.start_s - 1, end_s - 1, end_s)] == [None, 59, None]


def test_the_chart_is_as_high_as_the_memory_in_use() -> None:
    gpu = scene.gpu(0, [scene.process(4100, 40 * GIB)], unaccounted_bytes=0)
    history = scene.history(0, 1)
    for second in range(1, 120):
        history.add(scene.of([gpu], time_s=scene.NOON_S + second))
    series = history.series(gpu.uuid, 60, 60, scene.NOON_S + 119)
    rows = [text(row)[6:] for row in history_view(gpu, {}, series, 66, 13, None, focused=False)]
    full = [row for row in rows[1:-3] if row == "█" * 60]
    assert len(rows[1:-3]) == 9
    assert len(full) == 4
    assert set(rows[1:-3][4]) == {"▄"}


def test_the_heading_has_the_newest_values_and_at_the_cursor_the_buckets_peaks() -> None:
    history = scene.history(120, 1, probed=True)
    gpu = scene.at(0, 1).gpus[0]
    series = history.series(gpu.uuid, 112, 600, scene.NOON_S)
    now = {Column.USED: 22.3 * GIB, Column.RESERVED: 21 * GIB, Column.ALLOCATED: 20 * GIB, Column.UTILIZATION: 51.0}
    heading = text(history_view(gpu, now, series, 118, 12, None, focused=True)[0])
    assert heading.endswith("█ used  22.30  █ reserved  21.00  █ allocated  20.00  ▄ utilization  51%")
    used, load = series.peaks[Column.USED][-1], series.means[Column.UTILIZATION][-1]
    assert used is not None
    assert load is not None
    heading = text(history_view(gpu, now, series, 140, 12, len(series.peaks[Column.USED]) - 1, focused=True)[0])
    assert f"peak of {series.step_s:.0f}s  █ used  {used / GIB:.2f}  █ reserved" in heading
    assert heading.endswith(f"mean utilization {load:>3.0f}%")


def test_the_areas_of_a_probe_that_ended_keep_their_names() -> None:
    gpu = scene.at(0, 1).gpus[0]
    series = scene.history(120, 1, probed=True).series(gpu.uuid, 112, 600, scene.NOON_S)
    heading = text(history_view(gpu, {Column.USED: GIB}, series, 118, 12, None, focused=True)[0])
    assert heading.endswith("█ used   1.00  █ reserved      –  █ allocated      –  ▄ utilization    –")


def test_what_was_never_read_leaves_a_gap() -> None:
    gpu = scene.gpu(0, [])
    series = scene.history(10, 1).series("another", 60, 300, scene.NOON_S)
    rows = [text(row)[6:] for row in history_view(gpu, {}, series, 66, 10, None, focused=False)]
    assert all(not row.strip() for row in rows[1:-1])
    assert "used      –" in text(history_view(gpu, {}, series, 66, 10, None, focused=False)[0])


# Header and trouble


@pytest.mark.parametrize("beside", [(), (snapshots.gpu(),)])
def test_a_driver_that_starts_is_in_the_header_whatever_is_below(beside: tuple[GpuReading, ...]) -> None:
    problem = "the NVIDIA driver is starting (2 s)"
    unknown = Unknown(problem)
    driver = DriverReading("NVIDIA", unknown, "CUDA", unknown, problem)
    snapshot = snapshots.machine(beside, problem="" if beside else problem, drivers=(driver,))
    drawn = text(header_row(MonitorState(snapshot=snapshot), 80, scene.clock, ()))
    assert drawn.count(problem) == 1


def test_the_header_drops_what_matters_least() -> None:
    shown = state()
    long, short = (text(header_row(shown, columns, scene.clock, ())) for columns in (118, 38))
    assert all(part in long for part in ("gpubox", "driver 550.54.14", "CUDA 12.4", "210/512 GiB", "12:00:00"))
    assert "gpubox" in short
    assert "12:00:00" in short
    assert "PAUSED" in text(header_row(replace(shown, paused=True), 118, scene.clock, ()))
    assert "replay of a.rec" in text(header_row(shown, 118, scene.clock, ("", "replay of a.rec")))


def test_the_alerts_say_how_many_more_there_are() -> None:
    alerts = [
        Alert(Severity.CRITICAL, "a", AlertKind.LOST, "GPU 1 is lost", 0.0),
        *(Alert(Severity.WARNING, str(n), AlertKind.HOT, f"GPU {n}: 88 °C, limit 89 °C", 0.0) for n in range(2, 6)),
    ]
    row = alert_row(alerts, 60)
    assert text(row).startswith("▲ GPU 1 is lost")
    assert "+3 more" in text(row)
    assert [f"GPU {n}: 88 °C" in " ".join(map(text, help_alerts(alerts))) for n in range(2, 6)] == [True] * 4
    assert width(row) <= 60
    assert width(alert_row(alerts, 12)) <= 12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("snapshot", [None, scene.of([]), scene.of([], problem="no NVIDIA driver: install it")])
def test_what_is_wrong_and_the_way_on_fit_everywhere(snapshot: Snapshot | None, size: tuple[int, int]) -> None:
    rows = trouble_rows(snapshot, *size, waited_s=7.0)
    assert len(rows) <= size[1]
    assert all(width(row) <= size[0] for row in rows)
    said = "\n".join(text(row) for row in rows)
    assert "driver" in said


# Readings


@given(st.text(max_size=30), st.integers(0, 30))
def test_fit_gives_exactly_the_width(some: str, cells: int) -> None:
    fitted = fit(some, cells)
    assert cell_len(fitted) == cells
    assert fitted.isprintable()


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0s"), (59, "59s"), (60, "1m"), (3661, "1h01m"), (90000, "1d01h"), (10**8, "1157d")]
)
def test_age(seconds: float, expected: str) -> None:
    assert age(seconds) == expected


def test_short_names() -> None:
    assert short_name("NVIDIA GeForce RTX 4090") == "RTX 4090"
    assert short_name("NVIDIA A100-SXM4-80GB") == "A100-SXM4-80GB"


def test_a_process_that_computes_and_draws() -> None:
    both = GpuProcess(1, ProcessKind.BOTH, 300 * MIB, Unknown("not supported"), scene.host_process(1))
    row = text(table_view(MonitorState(scene.of([scene.gpu(0, [both])])), 118, 5).rows[1])
    assert "C+G" in row
    assert "–" in row
