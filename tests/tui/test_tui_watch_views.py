"""The views of watched processes: every size, every state, without a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.cells import cell_len

from gpumem_tui.memory import GIB, MIB, Bucket, Unknown, format_bytes
from gpumem_tui.probe.wire import KeptPlace, StagePeak
from gpumem_tui.tui.kit.chart import Band, area_rows, stacked
from gpumem_tui.tui.kit.figures import age_text, seconds
from gpumem_tui.tui.monitor.entries import Entry, charted, count, entries, entry_of
from gpumem_tui.tui.monitor.gpus import probed_card, shares
from gpumem_tui.tui.monitor.processes import table_view
from gpumem_tui.tui.monitor.reports import details_rows, ranks_rows
from gpumem_tui.tui.monitor.state import MonitorState, parts_of
from gpumem_tui.tui.process.history import ProcessChart, process_history_rows
from gpumem_tui.tui.process.look import place_page, step_page
from gpumem_tui.tui.process.probed import ended_rows, post_mortem_rows, probed_rows
from gpumem_tui.watch.growth import Growth
from gpumem_tui.watch.published import Job, Published, WatchedProcess, job_of
from gpumem_tui.watch.records import ProbeSample, ProcessState, RefusedFile
from gpumem_tui.watch.report import probe_json
from tests.scenes import monitor as scene
from tests.scenes import watch as watch_scene
from tests.watch.rings import RECORD

Row = list[tuple[str, str]]
WIDTHS = [40, 74, 114, 180]


def text(rows: list[Row] | tuple[Row, ...]) -> str:
    return "\n".join("".join(part for part, _ in row) for row in rows)


def widest(rows: list[Row] | tuple[Row, ...]) -> int:
    return max(sum(cell_len(part) for part, _ in row) for row in rows)


def state(snapshot: object = None, published: Published | None = None) -> MonitorState:
    shown, said = watch_scene.training()
    return MonitorState(snapshot=snapshot or shown, published=published or said)  # type: ignore[arg-type]


def cpu_state(*processes: WatchedProcess) -> MonitorState:
    return MonitorState(snapshot=scene.of([]), published=watch_scene.published(*processes))


def probed_entry(shown: MonitorState) -> Entry:
    return next(entry for entry in entries(shown) if entry.watched is not None)


# The ledger


def test_the_parts_of_a_process_sum_to_what_it_holds() -> None:
    for at_peak in (False, True):
        shown = structs.replace(state(), at_peak=at_peak)
        gpu = shown.gpus[0]
        sizes = {share.label: share.size_bytes for share in shares(gpu, shown.parts)}
        own = {label: size for label, size in sizes.items() if label.startswith("4100 ")}
        assert sum(size for size in own.values() if isinstance(size, int)) == 16 * GIB
        assert own["4100 CUDA context"] == GIB
        assert ("4100 activations" in own) == at_peak
        assert sum(size for size in sizes.values() if isinstance(size, int)) == scene.TOTAL_BYTES


def test_a_peak_beyond_what_is_reserved_now_is_drawn_as_now() -> None:
    given_back = ProbeSample(watch_scene.record(reserved_bytes=3 * GIB))
    assert parts_of(given_back, at_peak=True) == parts_of(given_back, at_peak=False)


def test_figures_that_do_not_add_up_divide_nothing() -> None:
    assert parts_of(ProbeSample(watch_scene.record(reserved_bytes=GIB)), at_peak=False) is None
    assert parts_of(ProbeSample(watch_scene.on_cpu()), at_peak=False) is None
    shown = state(
        published=watch_scene.published(
            watch_scene.watched(4100, (watch_scene.record(reserved_bytes=17 * GIB), state().gpus[0].uuid))
        )
    )
    assert "4100 python" in {share.label for share in shares(shown.gpus[0], shown.parts)}, "17 GiB of its 16"


@given(
    held=st.lists(st.integers(-1, 5 * GIB), min_size=3, max_size=3),
    allocated=st.integers(-1, 20 * GIB),
    reserved=st.integers(-1, 20 * GIB),
    at_peak=st.booleans(),
)
def test_parts_never_exceed_what_is_reserved(held: list[int], allocated: int, reserved: int, at_peak: bool) -> None:
    sizes = dict(zip(("parameters_bytes", "gradients_bytes", "optimizer_bytes"), held, strict=True))
    sample = ProbeSample(watch_scene.record(allocated_bytes=allocated, reserved_bytes=reserved, **sizes))
    parts = parts_of(sample, at_peak=at_peak)
    assert parts is None or parts.reserved_bytes == reserved


# The table


def test_the_row_says_step_pace_peak_and_retries() -> None:
    shown = state()
    rows = text(table_view(shown, 118, 10).rows)
    assert all(title in rows for title in ("PEAK", "STEP", "STEP TIME", "RETRIES"))
    [row] = [line for line in rows.splitlines() if "4100" in line]
    assert all(word in row for word in ("14.00", "12,340", "250 ms"))
    plain = structs.replace(shown, published=Published())
    assert "RETRIES" not in text(table_view(plain, 118, 10).rows), "only where a probe reports"


@pytest.mark.parametrize("width", [38, 78, 118, 198])
def test_the_table_keeps_its_width_with_probes(width: int) -> None:
    assert widest(table_view(state(), width, 10).rows) <= width


def test_what_is_not_read_is_told_below_the_table() -> None:
    refused = tuple(RefusedFile(f"/tmp/{n}.ring", f"{n}.ring belongs to user 7") for n in (1, 2))
    shown = state(published=Published((), refused))
    assert "not read: 1.ring belongs to user 7 (+1 more)" in text(table_view(shown, 118, 10).rows)


def test_a_process_that_no_longer_steps_stands_out() -> None:
    shown = state()
    silent = watch_scene.watched(
        4100, (watch_scene.record(), shown.gpus[0].uuid), problem="no step has finished for 42 s"
    )
    stuck = structs.replace(shown, published=watch_scene.published(silent))
    rows = table_view(stuck, 118, 10).rows
    assert any("12,340" in part and style == "bold $warning" for part, style in rows[1])
    assert "no step has finished for 42 s" in details(stuck)


def test_training_in_host_memory_is_listed_without_any_gpu() -> None:
    shown = cpu_state(watch_scene.watched(4100, (watch_scene.on_cpu(), "")), watch_scene.watched(4101))
    assert count(shown) == 2
    rows = text(table_view(shown, 118, 10).rows)
    assert "cpu" in rows
    assert "340" in rows
    assert charted(shown) is shown.published.processes[0]


def test_a_process_that_the_driver_does_not_list_is_listed_all_the_same() -> None:
    gpu = scene.gpu(0, [])
    shown = MonitorState(
        snapshot=scene.of([gpu]),
        published=watch_scene.published(watch_scene.watched(4100, (watch_scene.record(), gpu.uuid))),
    )
    [entry] = entries(shown)
    assert entry.gpu is gpu
    assert entry.process.used_bytes == Unknown("the driver does not list it")


def test_one_that_memory_ran_out_under_is_first_for_half_an_hour() -> None:
    shown, said = watch_scene.training()
    ended = watch_scene.out_of_memory(shown.gpus[0].uuid)
    early = state(published=Published((*said.processes, ended)))
    first = entries(early)[0]
    assert first.watched is ended
    assert first.has_ended
    row = text(table_view(early, 118, 10).rows).splitlines()[1]
    assert "✗ out of memory · 3m ago, 4.00 GiB asked for: python train.py" in row
    later = structs.replace(early, snapshot=structs.replace(shown, time_s=scene.NOON_S + 1800))
    assert not any(entry.has_ended for entry in entries(later))


@pytest.mark.parametrize(
    ("end", "phrase", "mark", "is_first"),
    [
        (ProcessState.FAILED, "failed with exit code 1: ValueError: bad shape at train.py:3", "✗", True),
        (ProcessState.KILLED, "killed (SIGKILL)", "✗", True),
        (ProcessState.CRASHED, "crashed: segmentation fault (SIGSEGV)", "✗", True),
        (ProcessState.ENDED, "finished (exit code 0)", "✓", False),
        (ProcessState.INTERRUPTED, "interrupted by Ctrl-C", "✓", False),
    ],
)
def test_whoever_has_ended_stays_listed_with_how(end: ProcessState, phrase: str, mark: str, is_first: bool) -> None:
    """The bad ends stand above the living for two minutes, the good ones below."""
    _, said = watch_scene.training()
    listed = state(published=Published((*said.processes, watch_scene.ended(state=end, phrase=phrase))))
    order = [entry.process.pid for entry in entries(listed)]
    assert (order.index(4105) == 0) is is_first
    assert (order[-1] == 4105) is not is_first
    assert f"{mark} {phrase} · 1m ago, step 12,340: " in text(table_view(listed, 160, 10).rows)
    assert listed.snapshot is not None
    later = structs.replace(listed, snapshot=structs.replace(listed.snapshot, time_s=listed.snapshot.time_s + 90))
    assert entries(later)[-1].process.pid == 4105


def test_the_end_of_another_users_process_names_its_owner() -> None:
    ours = watch_scene.ended(state=ProcessState.KILLED, phrase="killed (SIGKILL)")
    theirs = structs.replace(ours, process=replace(ours.process, uid=65534))
    listed = state(published=Published((theirs,)))
    assert "✗ killed (SIGKILL) of user nobody · 1m ago, step 12,340: " in text(table_view(listed, 160, 10).rows)


def test_only_the_last_that_ended_take_room() -> None:
    shown, said = watch_scene.training()
    many = [watch_scene.ended(5000 + number) for number in range(20)]
    listed = [entry for entry in entries(state(published=Published((*said.processes, *many)))) if entry.has_ended]
    assert len(listed) == 8
    assert shown.gpus


def test_what_is_told_of_one_that_ended() -> None:
    one = watch_scene.ended(resident_bytes=3 * GIB, limit_bytes=4 * GIB, limit_owner="its control group")
    said = text(ended_rows(one, 100, scene.NOON_S))
    assert "✗ failed with exit code 1, 60 s ago" in said
    assert "host memory: 3.00 GiB resident, limit 4.00 GiB (its control group)" in said
    assert "cpu, last sample of its training (the last step seen was 12,340; a few may have followed)" in said
    assert "optimizer state" in said
    never = watch_scene.watched(4106, state=ProcessState.VANISHED)
    assert "no step has finished" in text(ended_rows(never, 100, scene.NOON_S))


def test_keys_are_all_different() -> None:
    shown, said = watch_scene.training()
    more = (watch_scene.out_of_memory(shown.gpus[0].uuid), watch_scene.watched(4100, (watch_scene.on_cpu(), "")))
    keys = [entry.key for entry in entries(state(published=Published((*said.processes, *more))))]
    assert len(keys) == len(set(keys)) == 4


def test_a_process_keeps_its_key_when_its_first_step_ends() -> None:
    [before] = entries(cpu_state(watch_scene.watched(4100)))
    [after] = entries(cpu_state(watch_scene.watched(4100, (watch_scene.on_cpu(), ""))))
    assert before.key == after.key
    several = watch_scene.watched(4100, (watch_scene.record(), "GPU-a"), (watch_scene.record(device=1), "GPU-b"))
    keys = [entry.key for entry in entries(cpu_state(several))]
    assert len(set(keys)) == 2
    assert keys[0] == before.key


def test_the_filter_finds_by_rank_and_place() -> None:
    one = watch_scene.watched(4100, (watch_scene.on_cpu(), ""), rank=3, world_size=4)
    for words in ("rank 3", "cpu", "train.py"):
        assert count(cpu_state(one)) == len(entries(structs.replace(cpu_state(one), filter=words)))
    assert entries(structs.replace(cpu_state(one), filter="rank grace")) == []


# Details


def details(shown: MonitorState) -> str:
    return text(details_rows(shown, probed_entry(shown)))


def test_details_show_now_the_peak_and_the_prediction_side_by_side() -> None:
    said = details(state())
    assert "started by gpumem-tui run, torch 2.13.0; 0.4 s old" in said
    assert "15.00 GiB reserved by the allocator, 1.00 GiB CUDA context" in said
    [activations] = [line for line in said.splitlines() if line.startswith("▚▚")]
    assert activations.split() == ["▚▚", "activations", "12.15", "GiB"]
    [parameters] = [line for line in said.splitlines() if line.startswith("██")]
    assert parameters.split() == ["██", "parameters", *["0.46", "GiB"] * 3, "0%"]
    assert "Predicted as gpt2, fp32, adamw." in said
    assert "about 9 samples of a batch" in said


def test_details_say_why_there_is_no_prediction() -> None:
    one = watch_scene.watched(4100, (watch_scene.on_cpu(), ""), expected=Unknown("MyNet is of no family"))
    said = details(cpu_state(one))
    assert "No prediction: MyNet is of no family" in said
    assert "predicted" not in said
    assert "at the peak" not in said, "host memory has no allocator that would know"
    assert "= found" in said


def test_details_of_several_devices_compare_nothing() -> None:
    shown = state()
    second = watch_scene.record(device=1)
    one = watch_scene.watched(4100, (watch_scene.record(), shown.gpus[0].uuid), (second, "GPU-other"))
    said = details(structs.replace(shown, published=watch_scene.published(one)))
    assert "it trains on several devices" in said.lower()
    assert "predicted   " not in said


def test_details_without_a_probe_say_so() -> None:
    shown = state()
    entry = entry_of(shown, entries(shown)[1].key)
    assert entry is not None
    assert "none: the driver lists only its total" in text(details_rows(shown, entry))


@pytest.mark.parametrize(
    ("reading", "said"),
    [(0.25, "250 ms"), (0.0123, "12.3 ms"), (0.9999, "1 s"), (12.34, "12.3 s"), (5000.0, "5,000 s")],
)
def test_durations_are_short(reading: float, said: str) -> None:
    assert seconds(reading) == said
    assert seconds(Unknown("no step")) == "–"


def test_ages() -> None:
    assert (age_text(0.44), age_text(74.0), age_text(Unknown("no step"))) == ("0.4 s old", "74 s old", "no step")


# Ranks


def job() -> Job:
    _, published = watch_scene.ranks()
    found = job_of(published, published.processes[0])
    assert found is not None
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_ranks_fit_and_the_worst_is_marked(width: int) -> None:
    rows = ranks_rows(job(), lambda placed: "GPU 0", width)
    [worst, note] = [line for line in text(rows).splitlines() if "▲" in line]
    assert worst.split()[1] == "5"
    assert note == "▲ rank 5 holds the most: it runs out first"
    if width >= 74:
        assert widest(rows) <= width
        assert "8 of 16 ranks do not publish here" in text(rows)


def test_the_spread_of_a_figure() -> None:
    lines = text(ranks_rows(job(), lambda placed: "GPU 0", 180)).splitlines()
    [spread] = [line for line in lines if line.startswith("spread")]
    assert spread.split() == ["spread", "0", "0", "0", "1.02", "0", "0", "0", "1.02"]


# History


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("height", [5, 9, 24])
def test_the_history_fills_its_place(width: int, height: int) -> None:
    _, said = watch_scene.training()
    rows = process_history_rows(ProcessChart.of(said.processes[0], scene.NOON_S), width, height)
    assert len(rows) == height
    assert widest(rows) <= width


def test_the_history_is_over_steps_too() -> None:
    _, said = watch_scene.training()
    rows = process_history_rows(ProcessChart.of(said.processes[0], scene.NOON_S), 114, 20)
    lines = text(rows).splitlines()
    assert "step 12,340" in lines[0]
    assert "reserved  15.00" in lines[0]
    assert lines[-2].rstrip().endswith("now")
    assert lines[-1].rstrip().endswith("12,340")
    assert lines[-1].split()[0] == "step"


def test_the_history_of_one_that_has_ended_ends_there() -> None:
    chart = ProcessChart.of(watch_scene.ended(), scene.NOON_S)
    lines = text(process_history_rows(chart, 114, 20)).splitlines()
    assert "its last 10m · step 12,340" in lines[0]
    assert lines[-2].rstrip().endswith("end")
    later = ProcessChart.of(watch_scene.ended(), scene.NOON_S + 3600)
    assert process_history_rows(later, 114, 20) == process_history_rows(chart, 114, 20)


def test_samples_that_stay_away_leave_a_gap() -> None:
    """As those of a process that was stopped by SIGSTOP and went on."""
    _, said = watch_scene.training()
    chart = ProcessChart.of(said.processes[0], scene.NOON_S)
    times = [(sample.record.wall_ns / 1e9 - scene.NOON_S, sample) for sample in chart.samples]
    stopped = structs.replace(chart, samples=[sample for time_s, sample in times if not -300 < time_s < -200])
    axis = stopped.axis(114)
    assert axis is not None
    bottom = text(process_history_rows(stopped, 114, 20)).splitlines()[-3]
    drawn = {ago: bottom[8 + (axis.column_at(scene.NOON_S + ago) or 0)] for ago in (-400, -320, -250, -215, -150)}
    assert [ago for ago, cell in drawn.items() if cell == " "] == [-250, -215]


def test_the_cursor_on_a_processs_history() -> None:
    _, said = watch_scene.training()
    chart = ProcessChart.of(said.processes[0], scene.NOON_S)
    axis = chart.axis(114)
    assert axis is not None
    rows = process_history_rows(chart, 114, 20, scene.NOON_S - 450, focused=True)
    lines = text(rows).splitlines()
    column = axis.column_at(scene.NOON_S - 450)
    assert column is not None
    assert "peak   9.00" in lines[0]
    assert "step 10,5" in lines[0]
    assert lines[-2][8 + column] == "▲"
    assert axis.time_at(8 + column) == pytest.approx(scene.NOON_S - 450, abs=axis.step_s)
    assert axis.time_at(3) is None
    assert axis.column_at(scene.NOON_S - 700) is None
    assert process_history_rows(chart, 114, 20, scene.NOON_S - 700) == process_history_rows(chart, 114, 20)


def test_before_its_first_step_there_is_no_history() -> None:
    rows = process_history_rows(ProcessChart.of(watch_scene.watched(4100), scene.NOON_S), 80, 10)
    assert "no step has finished yet" in text(rows)
    assert "no step has finished yet" in text(probed_card(watch_scene.watched(4100), 80, 4))


@given(sizes=st.lists(st.integers(0, 100), min_size=1, max_size=4), rows=st.integers(1, 20))
def test_a_column_is_as_high_as_its_sizes(sizes: list[int], rows: int) -> None:
    band = Band("x", "$primary")
    stack = stacked([(size, band) for size in sorted(sizes)], 100, rows)
    drawn = area_rows([stack], rows, "100")
    assert len(drawn) == rows
    filled = sum(line[-1][0] != " " for line in drawn)
    assert filled == -(-stack[-1][0] // 8)


# A look, a post-mortem


@pytest.mark.parametrize("width", WIDTHS)
def test_a_look_fits_and_its_places_sum_to_the_peak(width: int) -> None:
    look = watch_scene.look()
    for rows in (step_page(look, width), place_page(look, "module", width), place_page(look, "source", width)):
        if width >= 74:
            assert widest(rows) <= width
    assert sum(one.bytes for one in look.devices[0].held) == look.devices[0].peak_bytes
    shares_said = [
        float(line.split()[2].removesuffix("%"))
        for line in text(place_page(look, "module", 180)).splitlines()
        if line.strip()[:1].isdigit()
    ]
    assert abs(sum(shares_said) - 100) < 1


def test_a_look_names_phases_and_the_peak() -> None:
    said = text(step_page(watch_scene.look(), 114))
    assert all(phase in said for phase in ("forward", "backward", "optimizer"))
    assert "▲ peak" in said
    assert "recorded by the allocator history" in said


def test_what_a_look_lacks_is_told() -> None:
    empty = replace(watch_scene.look(), devices=(), method="", unavailable={"look": "code compiled by torch.compile"})
    assert text(step_page(empty, 80)) == "no look: code compiled by torch.compile"
    [device] = watch_scene.look().devices
    unplaced = replace(device, held=tuple(replace(held, module="") for held in device.held))
    said = text(place_page(replace(watch_scene.look(), devices=(unplaced,)), "module", 80))
    assert "No figures by module." in said


def test_state_that_the_step_made_itself_is_not_drawn_as_standing() -> None:
    [device] = watch_scene.look().devices
    first = replace(device, timeline=((0.0, 0), *device.timeline[1:]))
    assert "█ optimizer state" not in text(step_page(replace(watch_scene.look(), devices=(first,)), 114))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_post_mortem_fits_and_sums_to_the_device(width: int) -> None:
    case = watch_scene.out_of_memory().case
    assert case is not None
    rows = post_mortem_rows(case, width, scene.NOON_S)
    if width >= 74:
        assert widest(rows) <= width
    said = text(post_mortem_rows(case, 114, scene.NOON_S))
    assert "ran out of memory in step 12, 3 min ago" in said
    assert "the failed request: 4.00 GiB on cuda:0 at train.py:34, 1.00 GiB was free" in said
    assert "expandable_segments:True" in said
    shares_said = [
        float(line.split("%")[0].split()[-1]) for line in said.splitlines() if "%  " in line and "GiB" in line
    ]
    assert abs(sum(shares_said) - 100) < 1
    assert "Changes that would have made it fit" in said


def test_a_post_mortem_without_a_device_or_a_prediction() -> None:
    ended = watch_scene.out_of_memory(
        device=None, device_total_bytes=None, device_free_bytes=None, allocated_bytes=None
    )
    assert ended.case is not None
    said = text(post_mortem_rows(replace(ended.case, expected=Unknown("no family")), 80, scene.NOON_S))
    assert "No prediction to compare with: no family" in said
    assert "activations, batch data and the rest: no allocator figures" in said
    assert "= device" not in said


def test_what_is_not_known_of_the_device_is_drawn_as_not_known() -> None:
    ended = watch_scene.out_of_memory(allocated_bytes=None, reserved_bytes=None)
    assert ended.case is not None
    said = text(post_mortem_rows(ended.case, 114, scene.NOON_S))
    assert "not known 77.15" in said, "80 less 1 free and 1.85 that was found"


def test_the_chart_is_of_a_process_that_goes_on() -> None:
    ended, running = watch_scene.out_of_memory(), watch_scene.watched(4101, (watch_scene.on_cpu(), ""))
    assert charted(cpu_state(ended, running)) is running
    assert charted(cpu_state(ended)) is ended


def test_bytes_of_host_memory_in_a_card() -> None:
    said = text(probed_card(watch_scene.watched(4100, (watch_scene.on_cpu(), "")), 118, 4))
    assert said.startswith("host memory PID 4100")
    assert "3.0 MiB" in said
    assert ProbeSample(watch_scene.on_cpu()).buckets[Bucket.OPTIMIZER] == 6 * MIB


def test_a_look_says_what_every_step_leaves_behind() -> None:
    look = watch_scene.look()
    waiting = text(step_page(look, 100))
    assert "shows after two more steps" in waiting
    leak = replace(look, kept=(KeptPlace(0, "aten.add", "loss", "train.py:31", 3 * MIB, 2),))
    said = text(step_page(leak, 100))
    assert "Left behind by every step, and not released two steps later" in said
    assert "3.0 MiB  train.py:31, in loss, aten.add" in said
    assert "Every step releases what it makes." in text(step_page(replace(look, kept=()), 100))
    assert "two more steps" not in text(step_page(replace(look, unavailable={"kept": "too many events"}), 100))


def test_the_details_of_one_with_a_limit_of_its_own_say_what_is_left() -> None:
    _, said = watch_scene.training()
    watched = said.processes[0]
    record = watched.placed[0].sample.record
    limited = ProbeSample(replace(record, limit_bytes=record.reserved_bytes + 3 * GIB))
    limit = format_bytes(limited.record.limit_bytes)
    assert f"limits itself to {limit}, 3.00 GiB left" in text(probed_rows(watched, limited))
    assert "limits itself" not in text(probed_rows(watched, watched.placed[0].sample))


def test_the_post_mortem_of_one_that_kept_something_begins_with_that() -> None:
    fixed = RECORD.parameters_bytes + RECORD.gradients_bytes + RECORD.optimizer_bytes
    samples = [replace(RECORD, step=1 + n, allocated_bytes=fixed + n * GIB).as_json() for n in range(6)]
    kept = KeptPlace(0, "", "", "train.py:11", GIB, 1)
    ended = watch_scene.out_of_memory(samples=tuple(samples), kept=(kept,))
    assert ended.case is not None
    said = text(post_mortem_rows(ended.case, 114, scene.NOON_S))
    assert said.splitlines()[2] == "memory grew 1.00 GiB a step, made at train.py:11 and never released: fix that first"
    assert "Changes that would only have delayed it" in said
    assert "kept by the last 10 steps" in said


def test_the_details_have_a_bar_for_each_stage_of_the_run() -> None:
    _, said = watch_scene.training()
    watched = said.processes[0]
    peaks = (
        StagePeak(0, "train", 7, 4 * GIB, 8 * GIB, {}),
        StagePeak(0, "evaluate", 8, 8 * GIB, 8 * GIB, {}),
        StagePeak(1, "save", 8, 9 * GIB, 9 * GIB, {}),
    )
    trains = structs.replace(watched, process=replace(watched.process, stages=peaks[:1]))
    assert "peak of each stage" not in text(probed_rows(trains, watched.placed[0].sample))
    evaluates = structs.replace(watched, process=replace(watched.process, stages=peaks))
    rows = text(probed_rows(evaluates, watched.placed[0].sample)).splitlines()
    (train,) = (row for row in rows if row.startswith("   train "))
    (evaluate,) = (row for row in rows if row.startswith("   evaluate "))
    assert train == f"   train       {'█' * 14}{'░' * 14} 4.00 GiB or more, at most 8.00 GiB"
    assert evaluate == f"   evaluate    {'█' * 28} 8.00 GiB  highest"
    assert not any("save" in row for row in rows)  # of another GPU
    (line,) = (one for one in probe_json(evaluates.process, watched.placed[0].sample)["stages"] if one["highest"])  # type: ignore[attr-defined]
    assert (line["stage"], line["least_bytes"], line["most_bytes"]) == ("evaluate", 8 * GIB, 8 * GIB)


def test_the_details_of_one_that_grows_say_so() -> None:
    _, said = watch_scene.training()
    grown = structs.replace(said.processes[0], growth=(Growth(0, 3.5 * GIB / 3600, 300, 7600),))
    rows = text(probed_rows(grown, grown.placed[0].sample))
    assert "cuda:0 after each step grows by 3.50 GiB an hour, full in 2.1 h" in rows
    assert "a look at it (l) names what every step leaves behind" in rows
    assert "grows" not in text(probed_rows(said.processes[0], said.processes[0].placed[0].sample))
