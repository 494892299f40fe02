"""The Monitor driven by keys and mouse, on snapshots made by hand."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from textual.containers import VerticalScroll
from textual.events import MouseScrollDown
from textual.pilot import Pilot
from textual.screen import ModalScreen
from textual.widgets import Input

from gpumem_tui.errors import OptionError
from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.alerts import Alert, Alerts
from gpumem_tui.monitor.history import History
from gpumem_tui.monitor.notify import Notifier
from gpumem_tui.monitor.snapshot import HostProcess, Snapshot
from gpumem_tui.settings import Notify, Settings
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.dialogs import DetailsScreen, PagesScreen, QuestionScreen, Report
from gpumem_tui.tui.kit.help import HelpScreen
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.main_screen import KeyBar, MainScreen
from gpumem_tui.tui.monitor.gpus import GpuPanel
from gpumem_tui.tui.monitor.history import HistoryChart
from gpumem_tui.tui.monitor.processes import ProcessTable
from gpumem_tui.tui.monitor.screen import MonitorScreen
from gpumem_tui.tui.monitor.state import SortBy
from tests.monitor.scripted import Scripted
from tests.scenes import monitor as scene
from tests.scenes.monitor import shown
from tests.scenes.pictures import until
from tests.scenes.reading import text_of

SIZE = (120, 40)


def sorted_by(screen: MonitorScreen) -> SortBy:
    return screen.state.sort


def source_of(app: GpuMemApp) -> Scripted:
    source = scene.screen_of(app).feed.source
    assert isinstance(source, Scripted)
    return source


async def seen(pilot: Pilot[int], snapshot: Snapshot) -> None:
    """The next snapshot comes and is drawn."""
    assert isinstance(pilot.app, GpuMemApp)
    source_of(pilot.app).show(snapshot)
    await until(pilot, lambda: scene.screen_of(pilot.app).state.snapshot is snapshot)


@contextmanager
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], HostProcess]]:
    """A real process to end, as the sampler would describe it."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    try:
        started_s = psutil.Process(process.pid).create_time()
        yield process, replace(scene.host_process(process.pid), start_time_s=started_s, name="python")
    finally:
        process.kill()
        process.wait()


def machine_of(host: HostProcess) -> Snapshot:
    used = replace(scene.process(host.pid, 5 * GIB), host=host)
    return scene.of([scene.gpu(0, [used])], time_s=time.time())


async def test_sort_reverse_and_headings() -> None:
    app = scene.app(scene.machine(2))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        assert "▾GPU MEM" in shown(pilot, ProcessTable)
        await pilot.press("s")
        assert sorted_by(screen) is SortBy.GPU
        assert "▴GPU" in shown(pilot, ProcessTable)
        await pilot.press("r")
        assert "▾GPU" in shown(pilot, ProcessTable)
        await pilot.press("less_than_sign")
        assert (screen.state.sort, screen.state.reverse) == (SortBy.MEMORY, False)
        table = screen.query_one(ProcessTable)
        heading = text_of(table).splitlines()[0]
        left = table.content_region.x - table.region.x
        after = left + heading.index("CPU%") + len("CPU%")  # a heading is at the right end of its column
        for x, order in ((after - 1, SortBy.CPU), (after, SortBy.HOST_MEMORY), (after - 7, SortBy.CPU)):
            await pilot.click(ProcessTable, offset=(x, 0))
            assert sorted_by(screen) is order


async def test_filter_by_typing_and_back() -> None:
    app = scene.app(scene.machine(8))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("slash", *"grace")
        assert "8 of 24 processes: matching “grace”" in shown(pilot, ProcessTable)
        assert "ada " not in shown(pilot, ProcessTable)
        await pilot.press("enter")
        assert "matching “grace”" in shown(pilot, ProcessTable), "the filter stays when it is entered"
        await pilot.press("escape")
        assert "matching" not in shown(pilot, ProcessTable)
        await pilot.press("slash")
        await pilot.pause()
        assert app.screen.query_one(Input).value == ""


async def test_the_cursor_opens_the_details_which_stay_live() -> None:
    app = scene.app(scene.machine(1))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("enter")
        assert not isinstance(app.screen, ModalScreen), "nothing is chosen yet"
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, DetailsScreen))
        before = app.export_screenshot()
        first = scene.machine(1).gpus[0]
        grown = replace(scene.process(4100, 31 * GIB), sm_percent=99)
        await seen(pilot, scene.of([scene.gpu(first.index, [grown])]))
        await until(pilot, lambda: app.export_screenshot() != before)
        await pilot.press("escape")
        assert not isinstance(app.screen, ModalScreen)


async def test_details_of_a_process_that_is_gone_say_so() -> None:
    app = scene.app(scene.machine(1))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, DetailsScreen))
        box = app.screen.query_one(VerticalScroll)
        assert "kill" in str(box.border_subtitle)
        await seen(pilot, scene.of([scene.gpu(0, [])]))
        await until(pilot, lambda: "no longer listed" in str(box.border_title))
        assert "kill" not in str(box.border_subtitle)
        await pilot.press("K")
        assert isinstance(app.screen, DetailsScreen), "there is nobody to ask about"
        await seen(pilot, scene.machine(1))
        await until(pilot, lambda: box.border_title == "Process")


@pytest.mark.parametrize("key", ["question_mark", "h", "f1"])
async def test_help_comes_by_the_keys_that_others_have_for_it(key: str) -> None:
    app = scene.app(scene.machine(1))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down", key)
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))


async def test_brackets_in_names_are_no_markup() -> None:
    app = scene.app(scene.machine(1))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        scene.screen_of(app).notify("pid 7 (train data=[/data/a]) asked to end")
        await until(pilot, lambda: "[/data/a]" in app.export_screenshot())
        title = "PID 7 (train data=[/data/a] [bold])"
        await app.push_screen(PagesScreen(Report(title, {"": lambda width: [[("one", "")]]})))
        await until(pilot, lambda: "[bold])" in app.export_screenshot())


async def test_terminate_asks_and_ends_that_process() -> None:
    with sleeper() as (process, host):
        app = scene.app(machine_of(host))
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("down", "T")
            await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
            question = app.screen.query_one("#about").render()
            assert str(host.pid) in str(question)
            assert host.user in str(question)
            assert host.command in str(question)
            await pilot.press("n")
            assert process.poll() is None, "no means no"
            await pilot.press("T", "enter")
            assert process.poll() is None, "enter on what is chosen beforehand leaves it alone"
            await pilot.press("T", "y")
            await until(pilot, lambda: process.poll() is not None)
            await until(pilot, lambda: any("asked to end" in note.message for note in app._notifications))


async def test_a_pid_that_is_another_process_now_is_not_killed() -> None:
    with sleeper() as (process, host):
        app = scene.app(machine_of(replace(host, start_time_s=host.start_time_s - 3600)))
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("down", "K", "y")
            await until(pilot, lambda: any("another process now" in note.message for note in app._notifications))
            assert process.poll() is None


async def test_read_only_never_offers_to_end_a_process() -> None:
    app = scene.app(scene.machine(1), read_only=True)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down", "K")
        assert not isinstance(app.screen, ModalScreen)
        assert "kill" not in shown(pilot, KeyBar)
        await pilot.press("enter", "K")
        assert isinstance(app.screen, DetailsScreen)


async def test_an_unmatched_pid_cannot_be_ended() -> None:
    unmatched = replace(scene.process(9, 5 * GIB), host=Unknown("pid 9 is of another namespace"))
    app = scene.app(scene.of([scene.gpu(0, [unmatched])]))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down", "K")
        assert not isinstance(app.screen, ModalScreen)


async def test_focus_by_key_and_mouse_and_only_that_gpu() -> None:
    app = scene.app(scene.machine(8))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        await pilot.press("g", "g")
        assert screen.state.focused is not None
        assert screen.state.focused.index == 2
        assert "GPU 2 · last" in shown(pilot, HistoryChart)
        await pilot.press("f")
        assert "3 of 24 processes: on GPU 2" in shown(pilot, ProcessTable)
        await pilot.click(GpuPanel, offset=(5, 6))
        assert screen.state.focused.index == 5
        await pilot.press("G")
        assert screen.state.focused.index == 4


async def test_only_mine_and_everybodys_again() -> None:
    app = scene.app(scene.machine(2))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("m")
        assert "0 of 6 processes: of yours · m for all" in shown(pilot, ProcessTable)
        assert "MINE ONLY" in text_of(scene.screen_of(app).query_one("#header", Lines))
        await pilot.press("m")
        assert "MINE ONLY" not in text_of(scene.screen_of(app).query_one("#header", Lines))


async def test_pause_holds_the_picture_and_catches_up() -> None:
    app = scene.app(scene.machine(2))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        await pilot.press("space")
        held = screen.state.snapshot
        later = scene.machine(3, time_s=scene.NOON_S + 5)
        source_of(app).show(later)
        await until(pilot, lambda: screen.feed.latest is later)
        assert screen.state.snapshot is held
        assert "PAUSED" in text_of(screen.query_one("#header", Lines))
        await pilot.press("space")
        assert screen.state.snapshot is later


async def test_a_recording_that_ends_says_so() -> None:
    app = scene.app(scene.machine(2), notice="recording a.rec")
    async with app.run_test(size=SIZE) as pilot:
        header = scene.screen_of(app).query_one("#header", Lines)
        assert "recording a.rec" in text_of(header)
        source_of(app).end("end of recording")
        await until(pilot, lambda: "end of recording · recording a.rec" in text_of(header))


class Counting(Alerts):
    """Counts the snapshots that are taken in."""

    taken = 0

    def update(self, *arguments: Any) -> tuple[Alert, ...]:
        self.taken += 1
        return super().update(*arguments)


async def test_a_flood_of_snapshots_is_drawn_up_to_the_last_but_not_one_by_one() -> None:
    alerts = Counting()
    app = scene.app(scene.machine(1), alerts=alerts)
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        taken, began_s = alerts.taken, time.monotonic()
        for second in range(200):
            last = scene.machine(1, time_s=scene.NOON_S + second)
            source_of(app).show(last)
            await asyncio.sleep(0)
        await until(pilot, lambda: screen.state.snapshot is last)
        assert alerts.taken - taken <= 2 + (time.monotonic() - began_s) / 0.05


async def test_the_chart_is_read_with_arrows_and_mouse() -> None:
    app = scene.app(scene.at(0, 1), history=scene.history(300, 1))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("tab", "left", "left")
        assert "▲" in shown(pilot, HistoryChart)
        await pilot.press("escape")
        assert "▲" not in shown(pilot, HistoryChart)
        await pilot.hover(HistoryChart, offset=(60, 5))
        assert "▲" in shown(pilot, HistoryChart)
        assert "11:5" in shown(pilot, HistoryChart).splitlines()[0], "the time at the cursor"
        await pilot.hover(ProcessTable, offset=(1, 1))
        assert "▲" not in shown(pilot, HistoryChart)
        assert "last 11m12s" in shown(pilot, HistoryChart)
        await pilot.press("right_square_bracket")
        assert "last 1h" in shown(pilot, HistoryChart)


async def test_alerts_stand_in_the_header_and_ring_once(monkeypatch: pytest.MonkeyPatch) -> None:
    app = scene.app(scene.machine(2), settings=Settings(bell=True))
    rung: list[None] = []
    monkeypatch.setattr(app, "bell", lambda: rung.append(None))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        quiet = scene.machine(2)
        for second in (1, 2):
            gone = scene.of([quiet.gpus[0], scene.lost(quiet.gpus[1])], time_s=scene.NOON_S + second)
            await seen(pilot, gone)
        assert "▲ GPU 1" in text_of(screen.query_one("#alerts", Lines))
        assert len(rung) == 1
        await pilot.resize_terminal(60, 12)
        await until(pilot, lambda: "▲ GPU 1" in text_of(screen.query_one("#header", Lines)))


async def test_a_command_that_cannot_tell_of_an_alert_is_a_line_and_the_screen_goes_on(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hangs = ("sh", "-c", f"echo $$ > {pid}; exec sleep 1000")
    app = scene.app(scene.machine(2), notifier=Notifier(Notify(command=hangs, timeout_s=0.5)))
    async with app.run_test(size=SIZE) as pilot:
        screen, quiet = scene.screen_of(app), scene.machine(2)
        gone = scene.of([quiet.gpus[0], scene.lost(quiet.gpus[1])], time_s=scene.NOON_S + 1)
        await seen(pilot, gone)
        await until(pilot, pid.exists)
        assert "▲ GPU 1" in text_of(screen.query_one("#alerts", Lines)), "while the command hangs"
        await until(pilot, lambda: "sh was killed after 0.5 s" in screen.telling)
        await seen(pilot, replace(gone, time_s=scene.NOON_S + 2))
        assert "notify: sh was killed after 0.5 s" in text_of(screen.query_one("#header", Lines))


async def test_stale_and_lost_gpus_stay_where_they_are() -> None:
    whole = scene.machine(8)
    gpus = [*whole.gpus[:2], scene.stale(whole.gpus[2]), scene.lost(whole.gpus[3]), *whole.gpus[4:]]
    app = scene.app(scene.of(gpus))
    async with app.run_test(size=(80, 24)) as pilot:
        lines = shown(pilot, GpuPanel).splitlines()
        assert "stale 4 s" in lines[3]
        assert "lost: it does not answer" in lines[4]
        assert lines[5].lstrip().startswith("4 ")


@pytest.mark.parametrize("problem", ["", "no permission to use the NVIDIA driver: see who may open /dev/nvidiactl"])
async def test_without_a_gpu_it_says_why_and_goes_on_when_one_comes(problem: str) -> None:
    app = scene.app(scene.of([], problem=problem))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        said = " ".join(text_of(screen.query_one("#trouble", Lines)).split())
        assert (problem or "The driver lists no GPU") in said
        await pilot.press("down", "K", "s", "g", "slash", "v", "enter")
        await seen(pilot, scene.machine(1))
        assert "A100" in shown(pilot, GpuPanel)
        assert not screen.has_class("-troubled")


async def test_before_the_first_snapshot_it_says_so() -> None:
    app = scene.app(None)
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        assert "Asking the GPU driver" in text_of(screen.query_one("#trouble", Lines))
        await until(pilot, lambda: "has not answered for" in text_of(screen.query_one("#trouble", Lines)))
        await seen(pilot, scene.machine(1))
        assert "A100" in shown(pilot, GpuPanel)


async def test_resizing_at_any_moment() -> None:
    app = scene.app(scene.machine(16), history=scene.history(30, 1))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        for size in [(80, 24), (39, 7), (200, 60), (40, 10), (1, 1), (300, 100), (40, 8), (120, 40)]:
            await pilot.resize_terminal(*size)
            await pilot.pause()
            tiny = size[0] < 40 or size[1] < 8
            assert screen.has_class("-tiny") == tiny
        assert "GPU MEM" in shown(pilot, ProcessTable)


async def test_history_takes_the_table_s_place_where_there_is_room_for_one() -> None:
    app = scene.app(scene.machine(8))
    async with app.run_test(size=(80, 24)) as pilot:
        screen = scene.screen_of(app)
        assert "v history" in shown(pilot, KeyBar)
        await pilot.press("v")
        assert screen.query_one(HistoryChart).display
        assert not screen.query_one(ProcessTable).display
        await pilot.press("v")
        assert screen.query_one(ProcessTable).display


async def test_the_keys_can_be_clicked() -> None:
    app = scene.app(scene.machine(2))
    async with app.run_test(size=SIZE) as pilot:
        bar = scene.screen_of(app).query_one(KeyBar)
        first = bar.content_region.x - bar.region.x + text_of(bar).index("? help")
        for x in (first, first + len("? help") - 1):
            await pilot.click(KeyBar, offset=(x, 0))
            await until(pilot, lambda: isinstance(app.screen, HelpScreen))
            await pilot.press("escape")
        for x in (first - 1, first + len("? help")):
            await pilot.click(KeyBar, offset=(x, 0))
            assert app.screen is scene.screen_of(app)


async def test_the_wheel_and_clicks_move_the_cursor() -> None:
    app = scene.app(scene.machine(8))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        await pilot.click(ProcessTable, offset=(20, 2))
        chosen = screen.state.cursor
        assert chosen == screen.query_one(ProcessTable).view.order[1]
        await pilot._post_mouse_events([MouseScrollDown], ProcessTable, (5, 5))
        assert screen.state.cursor == screen.query_one(ProcessTable).view.order[4]
        await pilot.click(ProcessTable, offset=(20, 2), times=2)
        await until(pilot, lambda: isinstance(app.screen, DetailsScreen))


async def test_the_palette_saves_a_picture_where_the_program_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = scene.app(scene.machine(1))
    monkeypatch.chdir(tmp_path)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("ctrl+p", *"screensh")
        await until(pilot, lambda: "working directory" in app.export_screenshot().replace("&#160;", " "))
        await pilot.press("enter")
        await until(pilot, lambda: any(tmp_path.iterdir()))
        [picture] = tmp_path.iterdir()
        await until(pilot, lambda: any(picture.name in note.message for note in app._notifications))
        assert "A100" in picture.read_text()
        assert "working" not in picture.read_text(), "the palette is not in it"
        monkeypatch.chdir("/proc")
        app._save_picture()
        await until(pilot, lambda: any("no picture can be written here" in note.message for note in app._notifications))


async def test_the_palette_is_not_for_a_terminal_of_a_few_lines() -> None:
    app = scene.app(scene.machine(1))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        await pilot.press("ctrl+p")
        assert app.screen is not screen
        await pilot.resize_terminal(40, 3)
        await until(pilot, lambda: app.screen is screen)
        await pilot.press("ctrl+p", "pagedown")
        assert app.screen is screen


@pytest.mark.parametrize("keys", [[], ["question_mark"], ["down", "enter"], ["down", "T"], ["slash"], ["ctrl+p"]])
async def test_ctrl_c_leaves_from_everywhere(keys: list[str]) -> None:
    app = scene.app(scene.machine(1))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(*keys, "ctrl+c")
        await pilot.pause()
    assert app.return_value == 0


@pytest.mark.parametrize(("key", "row"), [("down", 0), ("home", 0), ("up", -1), ("end", -1), ("pagedown", 9)])
async def test_the_first_key_goes_where_it_says(key: str, row: int) -> None:
    app = scene.app(scene.of([scene.gpu(0, [scene.process(4100 + n, GIB) for n in range(20)])]))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        await pilot.press(key)
        assert screen.state.cursor == screen.query_one(ProcessTable).view.order[row]


async def test_leaving_stops_the_source() -> None:
    app = scene.app(scene.machine(1))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("q")
        await pilot.pause()
    assert source_of(app).stopped
    assert app.return_value == 0


# Between screens


def _monitor() -> MainScreen:
    return MonitorScreen(Scripted(scene.machine(1)), history=History(), clock=scene.clock)


async def test_a_screen_that_takes_long_to_make_holds_up_nothing() -> None:
    released = threading.Event()

    def slow() -> MainScreen:
        released.wait(30)
        return MainScreen()

    app = GpuMemApp({"monitor": _monitor, "search": slow}, "monitor")
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        await pilot.press("2")
        await pilot.press("s")
        assert screen.state.sort is SortBy.GPU, "keys are answered meanwhile"
        assert app.screen is screen
        released.set()
        await until(pilot, lambda: app.screen is not screen)
        await pilot.press("1")
        await until(pilot, lambda: app.screen is screen)


async def test_a_screen_that_never_comes_does_not_keep_the_program() -> None:
    app = GpuMemApp({"monitor": _monitor, "search": partial(time.sleep, 3600)}, "monitor")  # type: ignore[dict-item]
    began = time.monotonic()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("2", "q")
    assert time.monotonic() - began < 30


async def test_a_screen_that_cannot_be_made_says_why() -> None:
    def broken() -> MainScreen:
        raise OptionError("PYTORCH_CUDA_ALLOC_CONF: unknown key 'x'")

    app = GpuMemApp({"monitor": _monitor, "search": broken}, "monitor")
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: any("unknown key" in note.message for note in app._notifications))


async def test_a_theme_that_is_not_there_is_told() -> None:
    app = scene.app(scene.machine(1), theme="gpumen")
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: any("gpumen" in note.message for note in app._notifications))
        assert app.theme == "gpumem"


@pytest.mark.parametrize("theme", ["gpumem", "gpumem-light", "gpumem-contrast", "nord", "ansi-light"])
async def test_every_theme_can_draw_it(theme: str) -> None:
    app = scene.app(scene.at(0, 8), theme=theme, history=scene.history(30, 1, probed=True))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down")
        assert app.theme == theme
        assert "GPU MEM" in app.export_screenshot().replace("&#160;", " ")
