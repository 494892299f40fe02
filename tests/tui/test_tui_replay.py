"""A recording on the screen: its keys lead to any moment and to its alerts, on a machine's Monitor and among hosts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from gpumem_tui.memory import GIB
from gpumem_tui.monitor.alerts import Alerts
from gpumem_tui.recording.file import RecordingFile, when
from gpumem_tui.recording.player import Player
from gpumem_tui.recording.recording import GpuRecorder, GpuRecording
from gpumem_tui.settings import Settings
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.hosts.screen import HostsScreen
from gpumem_tui.tui.kit.main_screen import KeyBar
from gpumem_tui.tui.monitor.screen import MonitorScreen
from gpumem_tui.tui.replay.keys import is_begun, moment_of, span
from tests.monitor.snapshots import START_S, gpu, machine
from tests.recording.test_hosts import FULL_FROM, PICTURES
from tests.scenes.reading import text_of
from tests.waiting import DEADLINE_S

SECONDS = 400


@pytest.fixture(scope="module")
def of_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "machine"
    recorder, alerts = GpuRecorder(path), Alerts()
    for number in range(SECONDS):
        snapshot = machine([gpu(0, used_bytes=(79 if number >= 300 else 40) * GIB)], after_s=number)
        recorder.add(snapshot, alerts.update(snapshot))
    recorder.close()
    return path


@pytest.fixture(scope="module")
def of_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "hosts"
    recorder = GpuRecorder(path, of_one_machine=False)
    for picture in PICTURES:
        recorder.add_hosts(picture)
    recorder.close()
    return path


@pytest.fixture
def machine_replay(of_machine: Path) -> Iterator[Player]:
    replay = Player(GpuRecording(of_machine))
    yield replay
    replay.stop()


@pytest.fixture
def hosts_replay(of_hosts: Path) -> Iterator[Player]:
    replay = Player(GpuRecording(RecordingFile(of_hosts)), 1.0, 600.0)
    yield replay
    replay.stop()


@asynccontextmanager
async def playing(app: GpuMemApp, replay: Player, size: tuple[int, int]) -> AsyncIterator[Pilot[int]]:
    """The screen with its recording, held at its beginning."""
    replay.hold(True)
    replay.start()
    replay.index.wait()
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: replay.now_s > 0)
        yield pilot


async def until(pilot: Pilot[int], there: Callable[[], object]) -> None:
    """Let the screen work until something holds."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not there():
        assert time.monotonic() < deadline_s
        await pilot.pause(0.02)


def monitor_of(replay: Player) -> GpuMemApp:
    def make() -> MonitorScreen:
        return MonitorScreen(replay, read_only=True, replay=replay, past=replay.past_snapshots)

    return GpuMemApp({"monitor": make}, "monitor")


def hosts_of(replay: Player) -> GpuMemApp:
    return GpuMemApp({"monitor": lambda: HostsScreen(replay, Settings())}, "monitor")


async def typed(pilot: Pilot[int], text: str) -> None:
    await pilot.press("slash")
    await until(pilot, lambda: pilot.app.screen.query(Input))
    await pilot.press(*text, "enter")


async def test_keys_lead_to_any_moment_of_a_machine_s_recording(machine_replay: Player) -> None:
    replay = machine_replay
    async with playing(monitor_of(replay), replay, (80, 24)) as pilot:
        await pilot.press("right_square_bracket", "right_square_bracket")
        await until(pilot, lambda: replay.now_s >= START_S + 60)
        await pilot.press("right_curly_bracket")
        await until(pilot, lambda: replay.now_s == START_S + SECONDS - 1)
        await pilot.press("left_square_bracket")
        await until(pilot, lambda: replay.now_s == START_S + SECONDS - 61)
        await typed(pilot, when(START_S + 100).split()[1])
        await until(pilot, lambda: replay.now_s == START_S + 100)
        screen = pilot.app.screen
        assert isinstance(screen, MonitorScreen)
        assert "−1 min" in text_of(screen.query_one(KeyBar)), "before the keys that have no room"
        await until(pilot, lambda: screen.feed.latest is not None and screen.feed.latest.time_s == START_S + 100)
        assert screen.feed.alerts == ()
        assert screen.feed.seen_s(screen.feed.latest) > 90, "the chart has what was before"  # type: ignore[arg-type]
        assert screen.state.filter == ""


async def test_what_cannot_be_a_time_is_said(machine_replay: Player) -> None:
    async with playing(monitor_of(machine_replay), machine_replay, (80, 24)) as pilot:
        await typed(pilot, "99:99")
        await until(pilot, lambda: any("99:99 is no time" in each.message for each in pilot.app._notifications))
        screen = pilot.app.screen
        assert isinstance(screen, MonitorScreen)
        assert (screen.state.filter, machine_replay.jumps) == ("", 0)


async def test_a_filter_is_still_a_filter(machine_replay: Player) -> None:
    async with playing(monitor_of(machine_replay), machine_replay, (80, 24)) as pilot:
        await typed(pilot, "alice")
        screen = pilot.app.screen
        assert isinstance(screen, MonitorScreen)
        assert screen.state.filter == "alice"
        assert machine_replay.jumps == 0


async def test_its_alerts_are_listed_and_lead_to_their_moment(hosts_replay: Player) -> None:
    replay = hosts_replay
    async with playing(hosts_of(replay), replay, (120, 40)) as pilot:
        await pilot.press("a")
        await until(pilot, lambda: pilot.app.screen.query(OptionList))
        await pilot.press(*"rank 3")
        listed = pilot.app.screen.query_one(OptionList)
        await until(pilot, lambda: listed.option_count == 1)
        assert when(START_S + FULL_FROM) in str(listed.get_option_at_index(0).prompt)
        await pilot.press("enter")
        await until(pilot, lambda: replay.now_s == START_S + FULL_FROM)


async def test_a_host_s_monitor_follows_and_steers_the_same_recording(hosts_replay: Player) -> None:
    replay = hosts_replay
    async with playing(hosts_of(replay), replay, (120, 40)) as pilot:
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, MonitorScreen))
        screen = pilot.app.screen
        assert isinstance(screen, MonitorScreen)
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: screen.feed.latest is not None and screen.feed.latest.time_s == START_S + 60)
        await pilot.press("escape")
        await until(pilot, lambda: pilot.app.screen is not screen)
        assert replay.now_s == START_S + 60


async def test_space_holds_it_and_lets_it_go_on(machine_replay: Player) -> None:
    replay = machine_replay
    async with playing(monitor_of(replay), replay, (80, 24)) as pilot:
        await pilot.press("space")
        await until(pilot, lambda: not replay.is_held and replay.now_s > START_S)
        await pilot.press("space")
        await until(pilot, lambda: replay.is_held)


async def test_what_is_now_has_no_such_keys(of_machine: Path) -> None:
    replay = Player(GpuRecording(of_machine))
    replay.hold(True)
    replay.start()
    app = GpuMemApp({"monitor": lambda: MonitorScreen(replay, read_only=True)}, "monitor")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: replay.now_s > 0)
        assert "alerts" not in text_of(app.screen.query_one(KeyBar))
        await pilot.press("a", "right_curly_bracket")
        assert replay.jumps == 0
        assert isinstance(app.screen, MonitorScreen)
    replay.stop()


NIGHT = time.mktime((2026, 11, 21, 22, 0, 0, 0, 0, -1))
MORNING = NIGHT + 8 * 3600


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("23:15", NIGHT + 4500),
        ("03:12", NIGHT + 5 * 3600 + 720),
        ("03:12:30", NIGHT + 5 * 3600 + 750),
        ("2026-11-22 03:12", NIGHT + 5 * 3600 + 720),
        ("2026-11-22T3:12", NIGHT + 5 * 3600 + 720),
        ("21:00", NIGHT - 3600),
        ("25:00", None),
        ("2026-13-01 03:12", None),
        ("python", None),
        ("4000", None),
    ],
)
def test_a_moment_as_it_is_typed(text: str, expected: float | None) -> None:
    assert moment_of(text, NIGHT, MORNING) == expected


def test_what_may_become_a_moment_is_no_filter_yet() -> None:
    assert all(map(is_begun, ("0:", "03:1", "2026-", "2026-11-22 03:12")))
    assert not any(map(is_begun, ("gpu3", "4000", "a:b", "")))
    assert span(NIGHT, MORNING) == "11-21 22:00–11-22 06:00"
    assert span(NIGHT, NIGHT + 600) == "11-21 22:00–22:10"
