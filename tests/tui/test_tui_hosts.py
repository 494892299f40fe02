"""The screen of hosts: connections to stand-ins for ssh, drawn by the real screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs
from textual.pilot import Pilot

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.alerts import Alert, AlertKind, Severity
from gpumem_tui.monitor.snapshot import DeviceState, HostProcess, UnlistedProcess
from gpumem_tui.monitor.wire import HostReport, ReportReader, ReportWriter
from gpumem_tui.remote.connection import Fleet
from gpumem_tui.remote.hosts import parse_host
from gpumem_tui.remote.report import only_mine, status_json
from gpumem_tui.remote.ssh import NotSignalled
from gpumem_tui.remote.status import HostPhase, HostStatus, jobs
from gpumem_tui.settings import Settings
from gpumem_tui.tui.app import SCREENS, GpuMemApp
from gpumem_tui.tui.hosts.one import HostMonitor
from gpumem_tui.tui.hosts.order import HOST_LETTERS, PROCESS_LETTERS, HostOrder, HostsSort
from gpumem_tui.tui.hosts.rows import (
    HostsState,
    chosen_rows,
    hosts_header,
    hosts_heading,
    hosts_rows,
    listed_processes,
    processes_rows,
)
from gpumem_tui.tui.hosts.screen import HostsScreen
from gpumem_tui.tui.kit.dialogs import PagesScreen, QuestionScreen
from gpumem_tui.tui.kit.figures import ListRow, said, span_width
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.main_screen import MainScreen, ScreenName
from gpumem_tui.tui.kit.row_list import RowList
from tests.monitor.snapshots import gpu, machine, memory, printed, process
from tests.remote.standins import UNKNOWN_KEY, Ssh, reading
from tests.scenes.pictures import until
from tests.scenes.reading import text_of

# Drawing


def live(name: str, *gpus: int, probes: dict[tuple[str, int], dict[str, object]] | None = None) -> HostStatus:
    """A host that answers, with GPUs that use so many GiB."""
    snapshot = machine([gpu(index, used_bytes=used * GIB) for index, used in enumerate(gpus)])
    report = HostReport.of(snapshot, (), probes or {})
    return HostStatus(parse_host(name), HostPhase.LIVE, report, received_s=100.0)


def away(status: HostStatus, problem: str) -> HostStatus:
    return replace(status, phase=HostPhase.AWAY, problem=problem, retry_s=130.0)


STATE = HostsState((live("a", 10, 70), live("b", 40), away(live("c", 20), "silent for 20 s")), now_s=100.5)


def lines(state: HostsState, width: int = 78) -> list[str]:
    return said(hosts_rows(state)(width, ""))


def test_a_line_a_host_with_its_sum() -> None:
    a, b, c = lines(STATE, 98)
    assert a.split()[:6] == ["▸", "a", "0", "of", "2", "80.0/160.0"]
    assert "78.8" in a
    assert b.split()[2:6] == ["0", "of", "1", "40.0/80.0"]
    assert said(hosts_rows(STATE)(60, ""))[0].split()[:4] == ["▸", "a", "2", "80.0/160.0"]
    assert "silent for 20 s · again in 29s" in c
    header = "".join(text for text, _ in hosts_header(STATE, 118, []))
    assert "3 hosts · 2 live · 1 away · 3 GPUs · 120.0/240.0 GiB used, 118.2 free" in header


def test_a_host_that_is_away_stays_with_its_age() -> None:
    state = structs.replace(STATE, now_s=100.0 + 300)
    assert " 5m " in lines(state)[2]


def test_a_host_that_stands_still_is_not_ok() -> None:
    state = HostsState((replace(live("a", 10), interval_s=1.0),), now_s=111.3)
    assert "no answer for 11 s" in lines(state, 98)[0]
    assert "ok" not in lines(state, 98)[0]
    header = "".join(text for text, _ in hosts_header(state, 118, []))
    assert "0 live · 1 not answering" in header
    assert lines(structs.replace(state, now_s=103.0), 98)[0].split()[-1] == "ok"


def test_a_host_that_accepts_and_says_nothing_shows_for_how_long() -> None:
    silent = HostStatus(parse_host("x"), began_s=100.0)
    assert lines(HostsState((silent,), 102.0))[0].split() == ["x", "connecting"]
    assert lines(HostsState((silent,), 112.0))[0].split() == ["x", "connecting", "for", "12s"]


def test_a_gpu_that_does_not_say_makes_the_sum_a_lower_bound() -> None:
    lost = Unknown("GPU is lost")
    gone = gpu(1, state=DeviceState.LOST, state_reason="GPU is lost", memory=lost, ledger=lost, processes=lost)
    report = HostReport.of(machine([gpu(0), gone]))
    state = HostsState((HostStatus(parse_host("a"), HostPhase.LIVE, report, 100.0),), 100.0, frozenset({"a"}))
    host, _, second = lines(state)
    assert "≥10.0/80.0" in host
    assert "lost: GPU is lost" in second
    assert "≥" not in second


def test_a_host_that_has_never_answered_says_why_and_has_no_figures() -> None:
    status = away(HostStatus(parse_host("x")), "its host key is not known: `ssh x` once shows it and asks")
    (line,) = lines(HostsState((status,), 100.0), 100)
    assert "host key is not known: `ssh x` once shows it and asks · again in 30s" in line
    assert "–" not in line
    row = chosen_rows(HostsState((status,), 100.0), "x", 40)
    assert "host key is not known" in "".join(text for text, _ in row[0])


def on_cpu(name: str) -> HostStatus:
    """A host on which a rank trains on the CPU, and one on a GPU that its container's driver does not show."""
    known = process(7, 0).host
    unlisted = (UnlistedProcess(7, "cpu", known), UnlistedProcess(8, "cuda:0", known, "GPU-00000000"))
    snapshot = structs.replace(machine([gpu(0, processes=())]), unlisted=unlisted)
    said = {("cpu", 7): {"rank": 1, "world_size": 2, "step": 50}, ("GPU-00000000", 8): {"rank": 0, "world_size": 2}}
    return HostStatus(parse_host(name), HostPhase.LIVE, HostReport.of(snapshot, (), said), received_s=100.0)


def test_what_trains_on_no_gpus_list_has_a_row_and_a_place_in_its_job() -> None:
    state = HostsState((on_cpu("a"),), 100.0, sort=HostsSort.RANK)
    listed = listed_processes(state)
    job, first, second = said(processes_rows(state, listed)(118, ""))
    assert "2 of 2 ranks on 1 host" in job
    assert first.split()[:4] == ["a", "0", "8", "alice"]
    assert second.split()[:7] == ["a", "cpu", "7", "alice", "–", "1/2", "50"]
    assert [each.process.pid for each in listed_processes(structs.replace(state, filter="cpu"))] == [7]


@pytest.mark.parametrize("width", [58, 78, 118, 200])
def test_nothing_is_wider_than_the_list(width: int) -> None:
    state = structs.replace(STATE, opened=frozenset({"a", "b", "c"}))
    listed = listed_processes(state)
    drawn = [*hosts_rows(state)(width, ""), *processes_rows(state, listed)(width, "")]
    assert max(span_width(list(row.spans)) for row in drawn) <= width
    assert span_width(hosts_heading(state, width)) <= width


def test_processes_of_all_hosts_in_one_order() -> None:
    assert [each.host_name for each in listed_processes(STATE)] == ["a", "b", "c", "a"]
    by_host = structs.replace(STATE, sort=HostsSort.HOST)
    assert [each.host_name for each in listed_processes(by_host)] == ["a", "a", "b", "c"]
    assert [each.host_name for each in listed_processes(structs.replace(by_host, reverse=True))] == ["c", "b", "a", "a"]
    assert [each.host_name for each in listed_processes(structs.replace(STATE, only="b"))] == ["b"]
    matching = listed_processes(structs.replace(STATE, filter="gpu1 train.py"))
    assert [(each.host_name, each.place) for each in matching] == [("a", "1")]


def test_what_is_unknown_comes_last() -> None:
    hidden = process(7, Unknown("not permitted"))
    report = HostReport.of(machine([gpu(0, memory=memory(GIB), processes=(hidden, process(8, GIB)))]))
    state = HostsState((HostStatus(parse_host("a"), HostPhase.LIVE, report, 100.0),), 100.0)
    assert [each.process.pid for each in listed_processes(state)] == [8, 7]


def rank(number: int, step: int, peak_gib: int) -> dict[str, object]:
    return {"rank": number, "world_size": 2, "step": step, "peak_allocated_bytes": peak_gib * GIB}


def test_ranks_of_a_job_stand_together_across_hosts() -> None:
    one = live("a", 10, 20, probes={(gpu(0).uuid, 4000): rank(1, 41, 8)})
    other = live("b", 40, probes={(gpu(0).uuid, 4000): rank(0, 42, 39)})
    state = HostsState((one, other), 100.0, sort=HostsSort.RANK)
    listed = listed_processes(state)
    assert [(each.host_name, each.count("rank")) for each in listed] == [("b", 0), ("a", 1), ("a", None)]
    job, first, second, _ = said(processes_rows(state, listed)(118, ""))
    assert "2 of 2 ranks on 2 hosts · fullest rank 0: 39.00 GiB, spread 31.00" in job
    assert "lags" not in job, "a step apart is the step that is under way"
    assert "0/2" in first
    assert "39.00" in first
    assert "1/2" in second
    assert "41" in second


def test_the_rank_that_lags_and_those_that_are_not_seen() -> None:
    slow = live("a", 10, probes={(gpu(0).uuid, 4000): {**rank(1, 30, 8), "world_size": 4}})
    fast = live("b", 40, probes={(gpu(0).uuid, 4000): {**rank(0, 42, 8), "world_size": 4}})
    state = HostsState((slow, fast), 100.0, sort=HostsSort.RANK)
    job, *_ = said(processes_rows(state, listed_processes(state))(118, ""))
    assert "2 of 4 ranks on 2 hosts" in job
    assert "rank 1 lags 12 steps" in job


def rank_at(number: int, received_s: float, step_s: float, since_s: float, stopped_s: float = math.inf) -> HostStatus:
    """The host of a rank whose steps all take as long, read then, its counter written so long before."""
    counted_s = min(received_s - since_s, stopped_s)
    said = {
        "newest_step": int(counted_s / step_s), "newest_step_age_s": received_s - counted_s, "step_s": step_s,
        "rank": number, "world_size": 2, "job": "night", "step": 1,
    }  # fmt: skip
    return replace(live(f"h{number}", 10, probes={(gpu(0).uuid, 4000): said}), received_s=received_s)


def told(*hosts: HostStatus) -> str:
    [job] = jobs(listed_processes(HostsState(hosts, 0.0))).values()
    return job.silence or ("" if job.behind is None else f"{job.behind[0].count('rank')} {job.behind[1]}")


@pytest.mark.parametrize("step_s", [0.016, 0.4, 20.0])
def test_ranks_in_lockstep_never_lag_however_they_are_read(step_s: float) -> None:
    for second in range(100, 700):
        one = rank_at(0, second, step_s, 0.01)
        assert told(one, rank_at(1, second - 0.5, step_s, 0.5)) == ""
        assert told(one, rank_at(1, second - 60, step_s, 0.1)) == "", "a host that is read once a minute"


def test_ranks_that_all_stop_do_not_lag() -> None:
    """An early reading of one host counts nothing against it."""
    for second in range(200, 300):
        hosts = [rank_at(0, second, 0.016, 0.0, 200.0), rank_at(1, second - 0.9, 0.016, 0.5, 200.0)]
        assert told(*hosts) in ("", f"no rank has finished a step for {second - 0.9 - 200:.0f} s")
    assert told(*hosts) == "no rank has finished a step for 98 s"


def test_after_a_halt_no_rank_lags_as_it_is_in_the_mean_of_one_alone() -> None:
    said = {"world_size": 2, "job": "night", "step": 1}
    gone_on = {**said, "rank": 0, "newest_step": 1003, "newest_step_age_s": 0.3, "step_s": 20.0}
    about_to = {**said, "rank": 1, "newest_step": 1002, "newest_step_age_s": 9.0, "step_s": 0.11}
    for one, other in ((gone_on, about_to), ({**gone_on, "newest_step": 1002}, {**about_to, "newest_step": 1003})):
        hosts = [live(name, 10, probes={(gpu(0).uuid, 4000): each}) for name, each in (("a", one), ("b", other))]
        assert told(*hosts) == ""


def test_the_rank_that_stopped_is_named_and_of_all_the_first() -> None:
    going = rank_at(0, 210.0, 0.1, 0.0)
    assert told(going, rank_at(1, 210.0, 0.1, 0.0, 204.0)) == "1 50"  # beyond the second that a counter may be old
    assert told(going, rank_at(1, 210.0, 0.1, 0.0, 180.0)) == "rank 1 has finished no step for 30 s"
    stopped = rank_at(0, 250.0, 0.1, 0.0, 181.05), rank_at(1, 250.0, 0.1, 0.0, 180.0)
    assert told(*stopped) == "rank 1 stopped first, after step 1,800, 70 s ago"


def test_where_ranks_stand_tells_the_first_of_those_in_lockstep() -> None:
    at = {"phase": "forward", "collective": None, "source": "model.py:10", "function": "forward", "busy": False}
    waiting = {"collective": "all_reduce", "source": "train.py:30", "function": "<module>", "busy": False}
    hosts = []
    for number, stopped_at in enumerate((waiting, at, waiting)):
        said = {**rank(number, 9, 8), "newest_step": 9, "newest_step_age_s": 40.0, "stopped_at": stopped_at}
        hosts.append(live(f"h{number}", 10, probes={(gpu(0).uuid, 4000): {**said, "world_size": 3}}))
    assert told(*hosts) == (
        "rank 1 stopped first, after step 9, 40 s ago, in forward at model.py:10 (forward), idle; "
        "ranks 0, 2 wait in all_reduce at train.py:30"
    )


def test_two_jobs_of_one_command_are_told_apart_by_the_name_that_their_launcher_gives() -> None:
    one = live("a", 10, probes={(gpu(0).uuid, 4000): {**rank(0, 41, 8), "job": "slurm 1"}})
    other = live("b", 40, probes={(gpu(0).uuid, 4000): {**rank(0, 42, 39), "job": "slurm 2"}})
    state = HostsState((one, other), 100.0, sort=HostsSort.RANK)
    found = jobs(listed_processes(state))
    assert [key[1] for key in found] == ["slurm 1", "slurm 2"]
    assert all(len(job.ranks) == 1 and "train.py" in job.command for job in found.values())
    lines = said(processes_rows(state, listed_processes(state))(118, ""))
    assert ["slurm 1" in line for line in lines[::2]] == [True, False]
    assert ["slurm 2" in line for line in lines[::2]] == [False, True]


# Sorted and filtered

IDLE = gpu(0, memory=memory(0), processes=(), utilization_percent=0, name="NVIDIA H100")


def lab() -> HostsState:
    """Three hosts: one of two GPUs of which one is free, a busy one with an alert, one that is away."""
    owner = process(7, GIB).host
    assert isinstance(owner, HostProcess)
    of_bob = structs.replace(process(7, 30 * GIB), host=structs.replace(owner, user="bob", command="vllm serve"))
    busy = gpu(1, used_bytes=30 * GIB, processes=(of_bob,), utilization_percent=40)
    alert = Alert(Severity.WARNING, "GPU-0", AlertKind.NEAR_FULL, "GPU 0 is almost full", 0.0)
    full = gpu(0, used_bytes=79 * GIB, utilization_percent=100)
    reports = {"a": HostReport.of(machine([IDLE, busy])), "b": HostReport.of(machine([full]), (alert,))}
    hosts = [HostStatus(parse_host(name), HostPhase.LIVE, each, 100.0) for name, each in reports.items()]
    return HostsState((*hosts, away(HostStatus(parse_host("c")), "silent")), now_s=100.0)


def as_lines(state: HostsState) -> HostsState:
    """The same as it comes over ssh."""
    told = [
        status if status.report is None
        else replace(status, report=ReportReader().read(ReportWriter().line(status.report).encode()))
        for status in state.statuses
    ]  # fmt: skip
    return structs.replace(state, statuses=tuple(told))


def names(state: HostsState) -> str:
    return "".join(status.host.name for status in state.listed)


@pytest.mark.parametrize("told", [lab(), as_lines(lab())], ids=["recorded", "live"])
@pytest.mark.parametrize(
    ("order", "expected", "reversed_"),
    [
        (HostOrder.NAMED, "abc", "cba"),
        (HostOrder.FREE, "abc", "bac"),
        (HostOrder.USE, "bac", "abc"),
        (HostOrder.ALERT, "cba", "abc"),
        (HostOrder.USER, "bac", "abc"),
        (HostOrder.MODEL, "bac", "abc"),
    ],
)
def test_hosts_are_sorted_by_each_column_and_what_is_unknown_is_last(
    told: HostsState, order: HostOrder, expected: str, reversed_: str
) -> None:
    state = structs.replace(told, order=order)
    assert names(state) == expected
    assert names(structs.replace(state, order_reverse=True)) == reversed_
    (heading, _), *_ = hosts_heading(state, 120)
    assert (f"▾{order.value}" in heading or f"▴{order.value}" in heading) == (order is not HostOrder.NAMED)


@pytest.mark.parametrize("told", [lab(), as_lines(lab())], ids=["recorded", "live"])
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("free", "a"), ("free>=2", ""), ("free<1", "b"), ("free>=60GiB", "a"), ("free>", "abc"), ("use<50", "a"),
        ("use>=50%", "b"), ("alert", "bc"), ("user=bob", "a"), ("user:BOB use<90", "a"), ("user=nobody", ""),
        ("model=h100", "a"), ("h100", "a"), ("vllm", "a"), ("b", "ab"), ("train.py model=h100", ""), ("free>=x", ""),
    ],
)  # fmt: skip
def test_hosts_are_filtered_by_what_is_free_in_use_the_matter_by_user_and_model(
    told: HostsState, typed: str, expected: str
) -> None:
    state = structs.replace(told, filter=typed)
    assert names(state) == expected
    header = "".join(text for text, _ in hosts_header(state, 118, []))
    assert f"3 hosts · {len(expected)} shown" in header
    assert {each.host_name for each in listed_processes(state)} <= set(expected)


def test_how_many_gpus_are_free_and_which_is_seen_but_not_of_a_host_that_is_away() -> None:
    state = structs.replace(lab(), opened=frozenset("a"))
    host, idle, busy, full, _ = lines(state, 118)
    assert ("1 of 2" in host, " free " in idle, " free " in busy, "0 of 1" in full) == (True, True, False, True)
    gone = structs.replace(state, statuses=tuple(away(each, "silent") for each in state.statuses))
    assert " free " not in lines(gone, 118)[1]
    assert [names(structs.replace(gone, filter=typed)) for typed in ("free", "free>=1GiB", "model=h100")] == [
        "",
        "",
        "a",
    ]


def test_a_user_is_whose_processes_are_listed_and_a_condition_that_says_nothing_is_named() -> None:
    state = structs.replace(lab(), filter="user=bob")
    assert [each.user for each in listed_processes(state)] == ["bob"]
    (row,) = said(hosts_rows(structs.replace(state, filter="free>=x"))(100, ""))
    assert row.strip().startswith("free>=x: free GPUs are meant")
    (row,) = said(hosts_rows(structs.replace(state, filter="model=zz"))(100, ""))
    assert "no host matches “model=zz”" in row


@pytest.mark.parametrize("told", [lab(), as_lines(lab())], ids=["recorded", "live"])
def test_only_mine_on_hosts_by_the_name_of_the_login(told: HostsState) -> None:
    hosts = tuple(replace(each, host=parse_host(f"bob@{each.host.name}")) for each in told.statuses)
    state = structs.replace(told, statuses=hosts, mine=True)
    assert [each.user for each in listed_processes(state)] == ["bob"]
    assert listed_processes(structs.replace(told, mine=True)) == [], "nobody here is called so"
    assert "mine only" in "".join(text for text, _ in hosts_header(state, 118, []))
    bodies = [printed(status_json(only_mine(status))) for status in hosts[:2]]
    assert [[each["user"] for each in body["users"]] for body in bodies] == [["bob"], []]


def test_load_of_hosts_has_the_colours_of_the_monitor() -> None:
    light, moderate, heavy = (replace(live(name, gib)) for name, gib in (("a", 5), ("b", 40), ("c", 75)))
    state = HostsState((light, moderate, heavy, away(live("d", 75), "silent")), 100.0, frozenset("c"))
    rows = hosts_rows(state)(120, "")

    def style(row: ListRow, part: str) -> str:
        return next(style for text, style in row.spans if part in text)

    colours = ["bold $load-light", "bold $load-moderate", "bold $load-heavy"]
    assert [style(row, "/80.0") for row in rows[:3]] == colours
    assert style(rows[3], "/80.0") == "bold $load-heavy"  # the GPU below its host
    assert [style(row, "97%") for row in rows[:3]] == ["$load-heavy"] * 3
    assert [style(row, "█") for row in rows[:3]] == ["$load-heavy"] * 3  # of what it is loaded with most
    assert not any("$load" in style for _, style in rows[4].spans)


def test_a_full_gpu_has_a_full_bar_though_the_driver_keeps_some() -> None:
    full = structs.replace(memory(0), used_bytes=memory(0).free_bytes, free_bytes=0)
    status = HostStatus(parse_host("a"), HostPhase.LIVE, HostReport.of(machine([gpu(0, memory=full)])), 100.0)
    (line,) = said(hosts_rows(HostsState((status,), 100.0))(120, ""))
    assert "█" * 16 in line
    assert "░" not in line


@pytest.mark.parametrize(("letter", "order"), HOST_LETTERS.items())
async def test_o_then_a_letter_sorts_hosts(fleet: Fleet, letter: str, order: HostOrder) -> None:
    async with app(fleet).run_test(size=(120, 40)) as pilot:
        await answered(pilot)
        screen = screen_of(pilot)
        reverse = screen.state.order is order
        for expected in (reverse, not reverse):
            await pilot.press("o", letter)
            await until(pilot, partial(_is_sorted, screen, order, expected))


def _is_sorted(screen: HostsScreen, order: HostOrder, reverse: bool) -> bool:
    return screen.is_current and (screen.state.order, screen.state.order_reverse) == (order, reverse)


@pytest.mark.parametrize(("letter", "order"), PROCESS_LETTERS.items())
async def test_o_then_a_letter_sorts_the_processes_that_have_the_cursor(
    fleet: Fleet, letter: str, order: HostsSort
) -> None:
    async with app(fleet).run_test(size=(120, 40)) as pilot:
        await answered(pilot)
        screen = screen_of(pilot)
        await pilot.press("tab", "o", letter)
        await until(pilot, lambda: screen.is_current and screen.state.sort is order)
        assert screen.state.order is HostOrder.NAMED


def test_each_column_of_hosts_has_a_letter() -> None:
    assert set(HOST_LETTERS.values()) == set(HostOrder)
    assert set(PROCESS_LETTERS.values()) == set(HostsSort)


async def test_sorting_is_of_the_list_with_the_cursor(fleet: Fleet) -> None:
    async with app(fleet).run_test(size=(120, 40)) as pilot:
        await answered(pilot)
        screen = screen_of(pilot)
        await pilot.press("s", "r")
        assert (screen.state.order, screen.state.order_reverse) == (HostOrder.FREE, True)
        assert (screen.state.sort, screen.state.reverse) == (HostsSort.MEMORY, False)
        await pilot.press("tab", "s", "r", "m")
        assert (screen.state.sort, screen.state.reverse) == (HostsSort.HOST, True)
        assert screen.state.order is HostOrder.FREE
        assert "no process yours, m for everybody's, on a GPU" in shown(pilot, "#hosts-processes")
        assert "enter opens its Monitor" in shown(pilot, "#hosts-processes")


def test_users_and_models_have_columns_where_there_is_room() -> None:
    wide, narrow = (hosts_heading(lab(), width)[0][0] for width in (160, 100))
    assert "MODEL" in wide
    assert "USERS" in wide
    assert "MODEL" not in narrow
    assert "bob" in said(hosts_rows(lab())(160, ""))[0]
    by_user = structs.replace(lab(), order=HostOrder.USER)
    assert "▴USERS" in hosts_heading(by_user, 78)[0][0]
    assert "bob" in lines(by_user, 78)[1]


# Activities


@pytest.fixture
def ssh(tmp_path: Path) -> Ssh:
    made = Ssh(tmp_path)
    made.prints("a", [reading(2)])
    made.prints("b", [reading(1)])
    made.host("c", f"echo '{UNKNOWN_KEY}' >&2; exit 255")
    return made


@pytest.fixture
def fleet(ssh: Ssh) -> Iterator[Fleet]:
    fleet = Fleet([parse_host(name) for name in ("a", "b", "c")], ssh.options)
    fleet.start()
    yield fleet
    fleet.stop()


def app(fleet: Fleet, *, allow_signals: bool = False, **others: Callable[[], MainScreen]) -> GpuMemApp:
    screens: dict[ScreenName, Callable[[], MainScreen]] = {
        "monitor": lambda: HostsScreen(fleet, Settings(), allow_signals=allow_signals)
    }
    screens |= {name: others[name] for name in SCREENS if name in others}
    return GpuMemApp(screens, "monitor")


def screen_of(pilot: Pilot[int]) -> HostsScreen:
    screen = pilot.app.screen_stack[0]
    assert isinstance(screen, HostsScreen)
    return screen


def shown(pilot: Pilot[int], name: str) -> str:
    return "\n".join(said(screen_of(pilot).query_one(name, RowList).rows))


async def answered(pilot: Pilot[int]) -> None:
    """Wait until each host has said what it will say."""
    await until(pilot, lambda: "not known" in shown(pilot, "#hosts"))
    await until(pilot, lambda: len(listed_processes(screen_of(pilot).state)) == 3)


async def test_into_a_hosts_monitor_and_back(fleet: Fleet) -> None:
    async with app(fleet).run_test(size=(80, 24)) as pilot:
        await answered(pilot)
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, HostMonitor))
        monitor = pilot.app.screen
        assert isinstance(monitor, HostMonitor)
        await until(pilot, lambda: len(monitor.state.gpus) == 1)
        assert monitor.read_only
        await pilot.press("escape")
        await until(pilot, lambda: pilot.app.screen is screen_of(pilot))
        await pilot.press("enter")  # the connection continues after its Monitor was left
        await until(pilot, lambda: isinstance(pilot.app.screen, HostMonitor))
        assert fleet.connections["b"].status.phase is HostPhase.LIVE


async def test_a_monitor_that_was_left_is_told_nothing_more(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    b = fleet.connections["b"]
    async with app(fleet).run_test(size=(80, 24)) as pilot:
        await answered(pilot)
        monkeypatch.setattr(b, "subscribe", told.append)
        monkeypatch.setattr(b, "unsubscribe", told.remove)
        for _ in range(2):
            await pilot.press("home", "down", "enter")
            await until(pilot, lambda: len(told) == 1)
            await pilot.press("escape")
            await until(pilot, lambda: not told)


async def test_a_host_that_has_not_answered_has_no_monitor_but_a_reason(fleet: Fleet) -> None:
    async with app(fleet).run_test(size=(80, 24)) as pilot:
        await answered(pilot)
        await pilot.press("end", "enter")
        await until(pilot, lambda: any("host key" in note.message for note in pilot.app._notifications))
        assert pilot.app.screen is screen_of(pilot)


async def test_totals_by_user_over_all_hosts(fleet: Fleet) -> None:
    async with app(fleet).run_test(size=(120, 40)) as pilot:
        await answered(pilot)
        await pilot.press("u")
        await until(pilot, lambda: isinstance(pilot.app.screen, PagesScreen))
        page = pilot.app.screen.query_one("#rows", Lines)
        await until(pilot, lambda: "a 0–1 · b 0" in text_of(page))
        assert "alice" in text_of(page)


async def test_gpus_filter_and_one_hosts_processes(fleet: Fleet) -> None:
    async with app(fleet).run_test(size=(120, 40)) as pilot:
        await answered(pilot)
        await pilot.press("x")
        await until(pilot, lambda: "GPU 1" in shown(pilot, "#hosts"))
        await pilot.press("x")
        await until(pilot, lambda: "GPU 1" not in shown(pilot, "#hosts"))
        await pilot.press("f")
        await until(pilot, lambda: len(shown(pilot, "#hosts-processes").splitlines()) == 2)
        await pilot.press("escape", "slash", *"gpu1", "enter")
        await until(pilot, lambda: len(shown(pilot, "#hosts-processes").splitlines()) == 1)
        await pilot.press("escape")
        await until(pilot, lambda: len(shown(pilot, "#hosts-processes").splitlines()) == 3)


def signalled(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The signals for the processes of b, instead of sending them; the second one fails."""
    sent: list[tuple[int, str]] = []

    def signal(process: HostProcess, signal: str) -> None:
        sent.append((process.pid, signal))
        if len(sent) > 1:
            raise NotSignalled("pid 4000 on b is another process by now: not signalled")

    monkeypatch.setattr(fleet.connections["b"], "signal", signal)
    return sent


async def test_processes_are_ended_only_where_that_is_allowed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = signalled(fleet, monkeypatch)
    async with app(fleet).run_test(size=(120, 40)) as pilot:
        await answered(pilot)
        await pilot.press("down", "f", "tab", "K", "y", "enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, HostMonitor))
        await pilot.press("down", "K", "y")
        await pilot.pause()
        assert isinstance(pilot.app.screen, HostMonitor), "no question was asked"
    assert sent == []


async def test_a_process_of_a_host_is_ended_after_a_question(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = signalled(fleet, monkeypatch)
    async with app(fleet, allow_signals=True).run_test(size=(120, 40)) as pilot:
        await answered(pilot)
        await pilot.press("down", "f", "tab", "T")
        await until(pilot, lambda: isinstance(pilot.app.screen, QuestionScreen))
        await pilot.press("n", "T")
        await until(pilot, lambda: isinstance(pilot.app.screen, QuestionScreen))
        assert sent == []
        await pilot.press("y")
        await until(pilot, lambda: sent == [(4000, "TERM")])
        await until(pilot, lambda: any("on b asked to end" in note.message for note in pilot.app._notifications))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, HostMonitor) and bool(pilot.app.screen.state.gpus))
        await pilot.press("down", "K")
        await until(pilot, lambda: isinstance(pilot.app.screen, QuestionScreen))
        await pilot.press("y")
        await until(pilot, lambda: sent[1:] == [(4000, "KILL")])
        await until(pilot, lambda: any("another process by now" in note.message for note in pilot.app._notifications))


async def test_a_tiny_terminal_says_what_it_needs(fleet: Fleet) -> None:
    async with app(fleet).run_test(size=(40, 8)) as pilot:
        await until(pilot, lambda: screen_of(pilot).has_class("-tiny"))
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "not known" in shown(pilot, "#hosts"))
