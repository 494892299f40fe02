"""Watched processes on the Monitor, driven by keys: looks, attaching, ranks, post-mortems, plans."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs
from textual.app import App
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.screen import ModalScreen

from gpumem_tui.attach.launch import environment
from gpumem_tui.catalog.calibration import load
from gpumem_tui.memory import GIB
from gpumem_tui.monitor.snapshot import GpuReading, Snapshot
from gpumem_tui.plan.plan import Plan
from gpumem_tui.probe.files import write_document
from gpumem_tui.probe.wire import encode_document
from gpumem_tui.settings import Settings
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.kit.dialogs import DetailsScreen, PagesScreen, QuestionScreen, WaitingScreen
from gpumem_tui.tui.kit.lines import Lines
from gpumem_tui.tui.kit.main_screen import KeyBar, MainScreen
from gpumem_tui.tui.monitor.gpus import GpuPanel
from gpumem_tui.tui.monitor.history import HistoryChart
from gpumem_tui.tui.monitor.processes import ProcessTable
from gpumem_tui.tui.monitor.screen import MonitorScreen
from gpumem_tui.watch.collector import Collector
from gpumem_tui.watch.live import LiveProbes
from gpumem_tui.watch.published import Published
from gpumem_tui.watch.reader import Watcher
from tests.attach import loops
from tests.monitor.scripted import Scripted
from tests.scenes import monitor as scene
from tests.scenes import watch as watch_scene
from tests.scenes.monitor import shown
from tests.scenes.pictures import until
from tests.scenes.reading import text_of
from tests.watch.rings import RECORD, RingFile, this_process
from tests.watch.test_report import LOOK

SIZE = (120, 40)


def page(app: App[int]) -> str:
    assert isinstance(app.screen, PagesScreen)
    return text_of(app.screen.query_one("#rows", Lines))


async def opened(pilot: Pilot[int]) -> None:
    """A report is shown."""

    def has_rows() -> bool:
        return isinstance(pilot.app.screen, PagesScreen) and any(
            isinstance(lines, Lines) and lines.rows for lines in pilot.app.screen.query("#rows")
        )

    await until(pilot, has_rows)


def app_of(snapshot: Snapshot, published: Published, **options: Any) -> GpuMemApp:
    return scene.app(snapshot, probes=watch_scene.Said(published), **options)


def probes_of(app: GpuMemApp) -> watch_scene.Said:
    probes = scene.screen_of(app).feed._probes
    assert isinstance(probes, watch_scene.Said)
    return probes


async def says(pilot: Pilot[int], published: Published) -> None:
    """Probes say something new, and it is drawn."""
    assert isinstance(pilot.app, GpuMemApp)
    probes_of(pilot.app).say(published)
    await until(pilot, lambda: scene.screen_of(pilot.app).state.published is published)


# Contents


async def test_the_share_of_a_watched_process_is_divided_live() -> None:
    snapshot, published = watch_scene.training()
    app = app_of(snapshot, published)
    async with app.run_test(size=SIZE) as pilot:
        assert "4100 gradients" in shown(pilot, GpuPanel)
        uuid = snapshot.gpus[0].uuid
        freed = watch_scene.record(gradients_bytes=0, allocated_bytes=2 * GIB)
        await says(pilot, watch_scene.published(watch_scene.watched(4100, (freed, uuid))))
        assert "4100 gradients" not in shown(pilot, GpuPanel), "with no new snapshot"
        assert "4100 activations" not in shown(pilot, GpuPanel)
        await pilot.press("p")
        assert "4100 activations" in shown(pilot, GpuPanel)
        assert "AT PEAK" in text_of(scene.screen_of(app).query_one("#header", Lines))


async def test_a_snapshot_waits_a_moment_for_what_probes_say_beside_it() -> None:
    snapshot, published = watch_scene.training()
    app = app_of(snapshot, published)
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        await until(pilot, lambda: screen.feed.asks)
        probes_of(app).is_reading = True
        later = structs.replace(snapshot, time_s=snapshot.time_s + 1)
        screen.feed.source.show(later)  # type: ignore[attr-defined]
        assert not screen.feed.look()
        assert screen.feed.latest is snapshot
        await until(pilot, lambda: screen.state.snapshot is later)  # but not for ever: a disk may hang
        assert probes_of(app).is_reading


async def test_a_paused_picture_holds_what_probes_say_too() -> None:
    snapshot, published = watch_scene.training()
    app = app_of(snapshot, published)
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        await pilot.press("space")
        later = Published()
        probes_of(app).say(later)
        await until(pilot, lambda: screen.feed.published is later)
        assert screen.state.published is published
        await pilot.press("space")
        assert screen.state.published is later


async def test_the_chart_turns_to_the_process_and_its_history_is_read() -> None:
    snapshot, published = watch_scene.training()
    app = app_of(snapshot, published)
    async with app.run_test(size=SIZE) as pilot:
        assert "GPU 0 · last" in shown(pilot, HistoryChart)
        assert probes_of(app).followed is None
        await pilot.press("down", "h")
        assert "PID 4100 · last" in shown(pilot, HistoryChart)
        assert probes_of(app).followed == published.processes[0].process.key
        await pilot.press("h")
        assert "GPU 0 · last" in shown(pilot, HistoryChart)
        assert probes_of(app).followed is None


async def test_without_a_gpu_training_in_host_memory_is_watched() -> None:
    first = watch_scene.watched(4100, (watch_scene.on_cpu(), ""))
    second = watch_scene.watched(4101, (watch_scene.on_cpu(step=12), ""))
    app = app_of(scene.of([], problem="no NVIDIA driver on this machine"), watch_scene.published(first, second))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        assert not screen.has_class("-troubled")
        assert "host memory PID 4100" in shown(pilot, GpuPanel)
        assert "no NVIDIA driver" in text_of(screen.query_one("#alerts", Lines))
        await pilot.press("down", "down")
        assert "host memory PID 4101" in shown(pilot, GpuPanel)
        assert "step 12" in shown(pilot, HistoryChart)
        await says(pilot, Published())
        assert screen.has_class("-troubled"), "nothing is left to watch"


async def test_details_go_on_and_keys_are_offered_only_where_they_do_something() -> None:
    snapshot, published = watch_scene.training()
    app = app_of(snapshot, published)
    async with app.run_test(size=SIZE) as pilot:
        assert "l look" not in shown(pilot, KeyBar)
        await pilot.press("down")
        assert "l look" in shown(pilot, KeyBar)
        assert "R ranks" not in shown(pilot, KeyBar)
        assert "a attach" not in shown(pilot, KeyBar), "it publishes already"
        await pilot.press("down")
        assert "l look" not in shown(pilot, KeyBar)
        assert "a attach" in shown(pilot, KeyBar)
        await pilot.press("up", "enter")
        await until(pilot, lambda: isinstance(app.screen, DetailsScreen))
        before = app.export_screenshot()
        uuid = snapshot.gpus[0].uuid
        await says(pilot, watch_scene.published(watch_scene.watched(4100, (watch_scene.record(step=99), uuid))))
        await until(pilot, lambda: app.export_screenshot() != before)


async def test_what_a_process_takes_beside_its_allocator_is_kept_once_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    app = app_of(*watch_scene.training())
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, DetailsScreen))
        assert "C keeps its context" in str(app.screen.query_one(VerticalScroll).border_subtitle)
        await pilot.press("C")
        await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
        assert "1.00 GiB of " in str(app.screen.query_one("#about").render())
        await pilot.press("n")
        assert load() == ()
        await pilot.press("C", "y")
        await until(pilot, lambda: any("kept in " in note.message for note in app._notifications))
        (kept,) = load()
        assert (kept.stages, kept.is_learned) == ({"least": GIB, "training": GIB}, True)
        await pilot.press("C")
        await until(pilot, lambda: any("is already this" in note.message for note in app._notifications))
        await pilot.press("down")
        assert scene.screen_of(app).check_action("keep_context", ()) is False, "of one without a probe we know nothing"


async def test_read_only_neither_looks_into_nor_attaches() -> None:
    app = app_of(*watch_scene.training(), read_only=True)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down", "l", "C", "down", "a", "K")
        assert not isinstance(app.screen, ModalScreen)
        assert "attach" not in shown(pilot, KeyBar)


async def test_ranks_side_by_side_and_live() -> None:
    snapshot, published = watch_scene.ranks()
    app = app_of(snapshot, published)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down", "R")
        await opened(pilot)
        assert "rank 5 holds the most" in page(app)
        first = published.processes[0]
        worse = watch_scene.watched(
            4100, (watch_scene.record(peak_allocated_bytes=15 * GIB + 1), snapshot.gpus[0].uuid), rank=0, world_size=16
        )
        assert first.process.key == worse.process.key
        await says(pilot, watch_scene.published(worse, *published.processes[1:]))
        await until(pilot, lambda: "rank 0 holds the most" in page(app))
        await pilot.press("escape")
        assert app.screen is scene.screen_of(app)


async def test_a_plan_is_asked_for_with_what_the_process_trains() -> None:
    wanted: list[MainScreen.Wanted] = []

    class Listening(GpuMemApp):
        def on_main_screen_wanted(self, message: MainScreen.Wanted) -> None:
            wanted.append(message)

    snapshot, published = watch_scene.training()
    monitor = MonitorScreen(Scripted(snapshot), probes=watch_scene.Said(published), clock=scene.clock)
    app = Listening({"monitor": lambda: monitor, "plan": MainScreen}, "monitor")
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down", "o", "o")
        await until(pilot, lambda: bool(wanted))
    plan = wanted[0].what
    assert isinstance(plan, Plan)
    assert wanted[0].screen == "plan"
    assert (plan.shape.name, plan.gpu.title) == ("gpt2", "NVIDIA A100-SXM4-80GB")


# After memory ran out


async def test_one_that_ended_is_alerted_listed_and_opened() -> None:
    snapshot, published = watch_scene.training()
    app = app_of(snapshot, published, settings=Settings(bell=True))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        ended = watch_scene.out_of_memory(snapshot.gpus[0].uuid, wall_ns=round((scene.NOON_S - 1) * 1e9))
        await says(pilot, Published((*published.processes, ended), (), published.figures))
        alerts = text_of(screen.query_one("#alerts", Lines))
        assert "▲ GPU 0: PID 4104" in alerts
        assert "ran out of memory asking for 4.00 GiB at train.py:34" in alerts
        assert "✗ out of memory · 1s ago" in shown(pilot, ProcessTable)
        await pilot.press("down", "K")
        assert not isinstance(app.screen, ModalScreen), "there is nothing left to kill"
        await pilot.press("enter")
        await opened(pilot)
        assert "Changes that would have made it fit" in page(app)


async def test_without_a_driver_an_end_is_told_before_that() -> None:
    ended = watch_scene.out_of_memory(wall_ns=round((scene.NOON_S - 1) * 1e9))
    app = app_of(scene.of([], problem="no NVIDIA driver on this machine"), Published((ended,)))
    async with app.run_test(size=(200, 40)) as pilot:
        alerts = scene.screen_of(app).query_one("#alerts", Lines)
        await until(pilot, lambda: "ran out of memory" in text_of(alerts))
        assert text_of(alerts).index("ran out of memory") < text_of(alerts).index("no NVIDIA driver")


async def test_one_that_failed_is_opened() -> None:
    app = app_of(scene.of([], problem="no NVIDIA driver on this machine"), Published((watch_scene.ended(),)))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "✗ failed with exit code 1" in shown(pilot, ProcessTable))
        await pilot.press("down", "enter")
        await opened(pilot)
        assert "last sample of its training" in page(app)


# Its history


async def test_arrows_look_back_on_a_processs_history() -> None:
    app = app_of(*watch_scene.training())
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        await until(pilot, lambda: bool(screen.state.published.processes))
        await pilot.press("down", "h")
        chart = screen.query_one(HistoryChart)
        chart.focus()
        await until(pilot, lambda: "last 10m · step 12,340" in text_of(chart))
        await pilot.press("left", "left", "shift+left")
        await until(pilot, lambda: "▲" in text_of(chart))
        assert "step 12,0" in text_of(chart)
        await pilot.press("escape")
        await until(pilot, lambda: "▲" not in text_of(chart))


async def test_h_gives_the_history_all_the_place_without_a_gpu() -> None:
    process = watch_scene.watched(4100, (watch_scene.on_cpu(), ""), history=watch_scene.history())
    app = app_of(scene.of([], problem="no NVIDIA driver on this machine"), watch_scene.published(process))
    async with app.run_test(size=SIZE) as pilot:
        screen = scene.screen_of(app)
        await until(pilot, lambda: "4100" in shown(pilot, ProcessTable))
        before = screen.query_one(HistoryChart).region.height
        await pilot.press("h")
        await until(pilot, lambda: screen.query_one(HistoryChart).region.height > before)
        assert screen.query_one(ProcessTable).has_class("-gone")
        await pilot.press("h")
        await until(pilot, lambda: screen.query_one(HistoryChart).region.height == before)


# Looking into a process


def ring_of(folder: Path) -> RingFile:
    """This very process publishes."""
    ring = RingFile(folder, this_process(command=("python", "train.py")))
    ring.sample(replace(RECORD, wall_ns=time.time_ns()))
    return ring


def app_on(folder: Path, gpus: tuple[GpuReading, ...] = ()) -> GpuMemApp:
    published = Collector(Watcher([folder])).collect(gpus)
    return app_of(scene.of(gpus), published)


@contextmanager
def answering(ring: RingFile, **changes: Any) -> Iterator[threading.Event]:
    """A probe that answers the request for a look once it may."""
    may, over = threading.Event(), threading.Event()

    def answer() -> None:
        while not over.wait(0.01):
            if may.is_set() and ring.files.control.exists():
                write_document(ring.files.look, encode_document({**LOOK, "request": 1, **changes}))
                return

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield may
    finally:
        over.set()
        thread.join()


async def test_a_look_is_pending_and_then_shown_page_by_page(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "probes")
    app = app_on(tmp_path / "probes")
    with answering(ring) as may:
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("down", "l")
            await until(pilot, lambda: isinstance(app.screen, WaitingScreen))
            await until(pilot, ring.files.control.exists)
            may.set()
            await opened(pilot)
            assert "parameters" in page(app)
            for key in ("right", "right", "right", "left", "tab"):
                await pilot.press(key)
            assert "parameters" in page(app), "round and round"
            await pilot.press("right")
            names = app.screen.query_one("#names", Lines)
            first = names.content_region.x - names.region.x + text_of(names).index("by source line")
            shown = page(app)
            for x, is_another in ((first - 1, False), (first + len("by source line"), False), (first, True)):
                await pilot.click("#names", offset=(x, 0))
                assert (page(app) != shown) == is_another
            await pilot.press("escape")
            assert app.screen is scene.screen_of(app)


async def test_its_details_lead_to_a_look(tmp_path: Path) -> None:
    ring_of(tmp_path / "probes")
    app = app_on(tmp_path / "probes")
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("down", "enter")
        box = app.screen.query_one(VerticalScroll)
        assert str(box.border_subtitle).startswith("l look · ")
        await pilot.press("l")
        await until(pilot, lambda: isinstance(app.screen, WaitingScreen))
        await pilot.press("escape")


async def test_a_look_can_be_left_off(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "probes")
    app = app_on(tmp_path / "probes")
    with answering(ring) as may:
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("down", "l")
            await until(pilot, lambda: isinstance(app.screen, WaitingScreen))
            await pilot.press("escape")
            assert app.screen is scene.screen_of(app)
            may.set()
            await until(pilot, ring.files.look.exists)
            await pilot.pause(0.3)
            assert app.screen is scene.screen_of(app), "the answer comes to nobody"


async def test_why_there_was_no_look_is_told(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "probes")
    reasons = {"look": "code compiled by torch.compile would be compiled anew"}
    app = app_on(tmp_path / "probes")
    with answering(ring, devices=[], method="", unavailable=reasons) as may:
        may.set()
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("down", "l")
            await opened(pilot)
            assert "no look: code compiled by torch.compile" in page(app)


async def test_a_look_into_a_damaged_answer_stays_with_the_reason(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "probes")
    app = app_on(tmp_path / "probes")
    with answering(ring, devices=3) as may:
        may.set()
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("down", "l")
            await until(pilot, lambda: "is damaged" in app.export_screenshot().replace("&#160;", " "))
            await pilot.press("escape")
            assert app.screen is scene.screen_of(app)


# Attaching


def machine_with(process: subprocess.Popen[str]) -> Snapshot:
    """A GPU on which that process computes."""
    found = psutil.Process(process.pid)
    host = structs.replace(
        scene.host_process(process.pid),
        start_time_s=found.create_time(),
        name="python",
        command=" ".join(found.cmdline()),
    )
    return scene.of([scene.gpu(0, [structs.replace(scene.process(process.pid, 5 * GIB), host=host)])])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="attaching works on x86-64 only")
async def test_attaching_says_what_happens_asks_and_does_it(tmp_path: Path) -> None:
    with loops.running(loops.BUSY, tmp_path / "probes") as program:
        app = app_of(machine_with(program), Published())
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("down", "a")
            await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
            said = app.export_screenshot().replace("&#160;", " ")
            assert "stopped for some milliseconds" in said
            await pilot.press("n")
            assert not any((tmp_path / "probes").glob("*"))
            await pilot.press("a")
            await until(pilot, lambda: isinstance(app.screen, QuestionScreen))
            await pilot.press("y")
            await until(pilot, lambda: any("the probe is in" in note.message for note in app._notifications))
            assert program.poll() is None


async def test_a_refusal_comes_with_its_remedy() -> None:
    program = subprocess.Popen(["sleep", "120"], text=True)
    try:
        snapshot = machine_with(program)
        named = structs.replace(snapshot.gpus[0].processes[0].host, command="python train.py")  # type: ignore[index, type-var]
        process = structs.replace(scene.process(program.pid, GIB), host=named)
        app = app_of(scene.of([scene.gpu(0, [process])]), Published())
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("down", "a")
            await until(pilot, lambda: "is no Python process" in app.export_screenshot().replace("&#160;", " "))
            await pilot.press("escape")
            assert app.screen is scene.screen_of(app)
    finally:
        program.kill()
        program.wait()


# All of it, with a process that trains


TRAINING = """
import time, torch
from torch import nn
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
optimizer = torch.optim.AdamW(net.parameters())
end = time.monotonic() + 120
while time.monotonic() < end:
    loss = net(torch.randn(2048, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
"""
"""The batch is large enough for the peak to be in forward or backward, not among the optimizer's temporaries."""


@pytest.mark.slow
async def test_a_real_training_process_from_its_first_step_to_a_look(tmp_path: Path) -> None:
    folder = tmp_path / "probes"
    env = environment({**os.environ, "GPUMEM_TUI_DIR": str(folder), "OMP_NUM_THREADS": "1"})
    probes = LiveProbes([folder])
    probes.start()
    source = Scripted(scene.of([], time_s=time.time()))
    app = GpuMemApp({"monitor": lambda: MonitorScreen(source, probes=probes, clock=scene.clock)}, "monitor")
    program = subprocess.Popen([sys.executable, "-c", TRAINING], env=env)
    try:
        async with app.run_test(size=SIZE) as pilot:

            def published() -> bool:
                source.show(scene.of([], time_s=time.time()))
                return str(program.pid) in shown(pilot, ProcessTable)

            await until(pilot, published)
            await pilot.press("down", "l")
            await opened(pilot)
            said = page(app)
            values = 64 * 128 + 128 + 128 * 8 + 8
            assert f"{4 * values / 1024:.1f} KiB" in said, "parameters, to a tenth of a KiB"
            assert "activations" in said
            await pilot.press("escape")
            program.kill()
            program.wait()

            def gone() -> bool:
                source.show(scene.of([], time_s=time.time()))
                return "✗ killed" in shown(pilot, ProcessTable)

            await until(pilot, gone)
    finally:
        program.kill()
        program.wait()
