"""Makes the pictures of this folder from the real screens: `python screenshots/make.py`.

The searches and plans are real ones on a simulated GPU; the Monitor's machines are those of tests/scenes/monitor
and watch_scene. The browser's is a real server on the fake NVML, in a headless Chromium, and needs a C compiler.
`python screenshots/make.py hosts plan-curves` makes those two alone. Plan's of Llama 3 8B take a minute each: every
combination of techniques that may be the cheapest is traced.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.alerts import Alerts
from gpumem_tui.monitor.snapshot import HostProcess
from gpumem_tui.monitor.wire import HostReport, ReportWriter
from gpumem_tui.options.workload import WorkloadOptions, simulated_device
from gpumem_tui.plan.command import CommandRuns
from gpumem_tui.plan.plan import Plan
from gpumem_tui.recording.player import Player
from gpumem_tui.recording.recording import GpuRecorder, GpuRecording
from gpumem_tui.remote.connection import Fleet
from gpumem_tui.remote.hosts import parse_host
from gpumem_tui.remote.status import HostPhase
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.predicting import predict
from gpumem_tui.settings import Settings
from gpumem_tui.snapshots.analysis import analyse
from gpumem_tui.snapshots.read import read_snapshot
from gpumem_tui.snapshots.recording import write_snapshot
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.hosts.screen import HostsScreen
from gpumem_tui.tui.kit.figures import said
from gpumem_tui.tui.kit.row_list import RowList
from gpumem_tui.tui.monitor.screen import MonitorScreen
from gpumem_tui.tui.plan.planned import of_command, of_model
from gpumem_tui.tui.plan.screen import PlanScreen
from gpumem_tui.tui.search.screen import SearchScreen
from gpumem_tui.tui.search.state import SearchState, Stage
from gpumem_tui.tui.snapshot.screen import SnapshotScreen

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from browser_picture import browser_picture  # noqa: E402  next to this file

from tests.monitor import snapshots  # noqa: E402  from the root of the repository, which is no package
from tests.remote.standins import Ssh  # noqa: E402
from tests.scenes import monitor as monitor_scene  # noqa: E402
from tests.scenes import watch as watch_scene  # noqa: E402
from tests.scenes.pictures import stands_still, until  # noqa: E402

SIZE = (120, 40)
_TEXT_COLUMNS = 110
TRAIN = """
    import argparse

    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()


    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.projections = nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(width, width)])
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            parts = self.projections[0](self.norms[0](x)).chunk(3, dim=-1)
            query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.projections[1](mixed.transpose(1, 2).flatten(2))
            return x + self.mlp(self.norms[1](x))


    class GPT(nn.Module):
        def __init__(self, vocabulary=50257, context=1024, width=768, depth=12, heads=12):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)), nn.LayerNorm(width))
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens):
            places = torch.arange(tokens.shape[1], device=tokens.device)
            return self.head(self.blocks(self.tokens(tokens) + self.positions(places)))


    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT().to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters on {torch.cuda.get_device_name()}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for step in range(600_000):
        tokens = torch.randint(50257, (arguments.batch_size, 1025)).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.4f}")
"""
"""A typical user's script: nothing in it knows of this program."""
CLOCK = datetime(2026, 1, 1, 12, 0)
_COMMAND_BATCH = 24


def _ended(state: SearchState) -> bool:
    return state.verdict is not None


def _well_under_way(state: SearchState) -> bool:
    """Some trials are done and one is in the middle of a step."""
    running = state.running
    return (
        state.stage is Stage.RUNNING and len(state.trials) >= 6 and running is not None and running.sample is not None
    )


@contextmanager
def _project() -> Iterator[None]:
    """In a folder with the script, where `python` is this interpreter."""
    before, path = Path.cwd(), os.environ["PATH"]
    with TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(textwrap.dedent(TRAIN))
        os.chdir(folder)
        os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), path))
        try:
            yield
        finally:
            os.chdir(before)
            os.environ["PATH"] = path


async def _picture(
    name: str, options: WorkloadOptions, config: SearchConfig, when: Callable[[SearchState], bool]
) -> None:
    screen = SearchScreen(config, options, autostart=True, clock=lambda: CLOCK)
    app = GpuMemApp({"search": lambda: screen}, "search")
    async with app.run_test(size=SIZE) as pilot:
        while not when(screen.state):
            await pilot.pause(0.1)
        await pilot.pause(1.5)
        _write(name, app.export_screenshot(title="gpumem-tui"))
        await screen.end()


async def _plan_picture(name: str, plan: Plan, *keys: str, row: str = "") -> None:
    """A plan with its trace, after some keys, with the pane's cursor on a row.

    Between keys until the cheapest combination, where it is shown, is one that a trace confirms.
    """
    screen = PlanScreen(of_model(plan), clock=lambda: CLOCK)
    app = GpuMemApp({"plan": lambda: screen}, "plan")
    async with app.run_test(size=SIZE) as pilot:
        for key in ("", *keys):
            await pilot.press(*([key] if key else []))
            pane = screen.query_one("#pane", RowList)
            while not screen.settled or _is_tracing(said(pane.rows)):
                await pilot.pause(0.1)
        screen.query_one("#pane", RowList).move_to(row)
        await pilot.pause(0.5)
        _write(name, app.export_screenshot(title="gpumem-tui"))
        await screen.end()


def _is_tracing(lines: Sequence[str]) -> bool:
    """Whether no traced combination of techniques fits so far, and traces are on their way."""
    return any("… tracing" in line for line in lines) and not any("traced: fits" in line for line in lines)


async def _monitor_picture(name: str, gpus: int, *keys: str) -> None:
    """A machine at noon, with the quarter of an hour before it."""
    before = monitor_scene.history(900, gpus)
    await _monitor_shot(name, monitor_scene.app(monitor_scene.at(0, gpus), history=before), *keys)


async def _watched_picture(name: str, *keys: str) -> None:
    """A machine on which a training process publishes."""
    snapshot, published = watch_scene.training()
    before = monitor_scene.history(600, 1, probed=True)
    await _monitor_shot(name, monitor_scene.app(snapshot, probes=watch_scene.Said(published), history=before), *keys)


async def _monitor_shot(name: str, app: GpuMemApp, *keys: str) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await stands_still(pilot)
        await pilot.press(*keys)
        await stands_still(pilot)
        _write(name, app.export_screenshot(title="gpumem-tui"))


async def _hosts_picture(name: str) -> None:
    """Four hosts: two on which a job of eight ranks trains, one with a full GPU, one that is not reached."""
    with TemporaryDirectory() as folder:
        ssh = Ssh(Path(folder))
        for number, host in enumerate(("node01", "node02")):
            ssh.writes(host, [_line(_reading_of_ranks(number))])
        full = monitor_scene.gpu(0, [monitor_scene.process(4100, 79 * GIB)])
        lab = snapshots.machine([full])
        ssh.writes("ada@lab", [_line(HostReport.of(lab, Alerts().update(lab)))])
        ssh.host("attic", "echo 'ssh: connect to host attic port 22: No route to host' >&2; exit 255")
        hosts = [parse_host(host) for host in ("node01", "node02", "ada@lab:2222", "attic")]
        fleet = Fleet(hosts, ssh.options)
        fleet.start()
        app = GpuMemApp({"monitor": lambda: HostsScreen(fleet, Settings())}, "monitor")
        with patch("gpumem_tui.tui.hosts.screen.clock", lambda _: "12:00:00"):
            async with app.run_test(size=SIZE) as pilot:
                screen = app.main_screen("monitor")
                assert isinstance(screen, HostsScreen)
                await until(
                    pilot, lambda: not any(each.phase is HostPhase.CONNECTING for each in screen.state.statuses)
                )
                await pilot.press("x", "tab", "s", "s", "tab")
                await until(pilot, lambda: "lags" in app.export_screenshot())
                _write(name, app.export_screenshot(title="gpumem-tui"))


def _line(report: HostReport) -> bytes:
    """The first line that a host prints."""
    return ReportWriter().line(report).encode()


def _reading_of_ranks(number: int) -> HostReport:
    """A host with four ranks of a job, as its probes say: one is fuller than the others, one is behind."""
    command = "torchrun --nnodes 2 --nproc-per-node 4 finetune.py"
    gpus, listed = [], {}
    for index in range(4):
        rank = number * 4 + index
        process = monitor_scene.process(21_000 + rank, (68 if rank == 5 else 61) * GIB)
        assert isinstance(process.host, HostProcess)
        same = replace(process.host, user="grace", command=command, start_time_s=snapshots.START_S - 7200)
        gpu = monitor_scene.gpu(index, [replace(process, host=same, sm_percent=88 + rank % 5)])
        gpus.append(snapshots.changed(gpu, utilization_percent=96 + rank % 3))
        peak_bytes = (66 if rank == 5 else 59) * GIB
        step = 4195 if rank == 2 else 4210
        listed[gpu.uuid, process.pid] = {
            "rank": rank, "world_size": 8, "step": step, "peak_allocated_bytes": peak_bytes,
        }  # fmt: skip
    return HostReport.of(snapshots.machine(gpus), said=listed)


def _write(name: str, svg: str) -> None:
    """Rich names the classes of every picture at random; fixed names keep a remade picture equal to the last one."""
    (FOLDER / f"{name}.svg").write_text(re.sub(r"terminal-\d+", f"terminal-{name}", svg))


_PLAYED_S, _FILLS_FROM_S, _SHOWN_S = 3600, 1500, 2500


async def _replay_picture(name: str) -> None:
    """The alerts of a recording of two GPUs, of which one fills up and gets hot; the cursor is on the last of them."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    with TemporaryDirectory() as folder:
        path = Path(folder, "night")
        recorder, alerts = GpuRecorder(path), Alerts()
        for second in range(0, _PLAYED_S, 5):
            held = min(79.0, 41 + max(0, second - _FILLS_FROM_S) / 30)
            gpus = [
                monitor_scene.gpu(index, [monitor_scene.process(4100 + index, int(size * GIB))])
                for index, size in enumerate((held, 22.0))
            ]
            gpus[1] = snapshots.changed(gpus[1], temperature_c=96 if 600 <= second < 900 else 61)
            snapshot = snapshots.machine(gpus, after_s=second)
            recorder.add(snapshot, alerts.update(snapshot))
        recorder.close()
        replay = Player(GpuRecording(path))
        replay.hold(True)
        replay.start()
        replay.index.wait()
        replay.seek(snapshots.START_S + _SHOWN_S)

        def screen() -> MonitorScreen:
            return MonitorScreen(replay, read_only=True, replay=replay, past=replay.past_snapshots)

        app = GpuMemApp({"monitor": screen}, "monitor")
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: replay.now_s >= snapshots.START_S + _SHOWN_S - 5)
            await stands_still(pilot)
            await pilot.press("a")
            await until(pilot, lambda: app.screen.is_modal)
            await stands_still(pilot)
            _write(name, app.export_screenshot(title="gpumem-tui"))
        replay.stop()


async def _snapshot_picture(name: str, config: SearchConfig, batch_size: int) -> None:
    """The memory snapshot of a command that runs out of memory."""
    traced = predict(config, batch_size=batch_size).prediction.traced
    assert not isinstance(traced, Unknown)
    path = Path("snapshot.pickle")
    write_snapshot(traced.recorded(batch_size), path)
    found = read_snapshot(path)
    screen = SnapshotScreen(found, [analyse(found, 0)], clock=lambda: CLOCK)
    app = GpuMemApp({"snapshot": lambda: screen}, "snapshot")
    async with app.run_test(size=SIZE) as pilot:
        await stands_still(pilot)
        await pilot.press("l")
        await stands_still(pilot)
        _write(name, app.export_screenshot(title="gpumem-tui"))


async def _command_plan_picture(name: str, config: SearchConfig, batch_size: int) -> None:
    """The plan of a command whose what-ifs have all been run."""
    runs = of_command(CommandRuns(config, batch_size), lambda gpu: f"gpumem-tui plan --gpu sim:{gpu.name}")
    screen = PlanScreen(runs, clock=lambda: CLOCK)
    app = GpuMemApp({"plan": lambda: screen}, "plan")
    async with app.run_test(size=SIZE) as pilot:
        while not screen.settled:
            await pilot.pause(0.1)
        await pilot.pause(0.5)
        _write(name, app.export_screenshot(title="gpumem-tui"))


async def _predicted(name: str) -> None:
    """The output of `predict` on a command."""
    words = ("predict", "--gpu", "sim:h100-80gb", "--", "python", "train.py", "--batch-size", "32")
    with _project():
        done = subprocess.run(
            [sys.executable, "-m", "gpumem_tui", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL, text=True, check=True,
        )  # fmt: skip
    console = Console(record=True, width=_TEXT_COLUMNS, file=io.StringIO())
    console.print(Text(f"$ gpumem-tui {' '.join(words)}\n{done.stdout.rstrip()}"))
    _write(name, console.export_svg(title="gpumem-tui"))


def _search(name: str, options: WorkloadOptions, gpu: str) -> Awaitable[None]:
    """A search that has ended."""
    return _picture(name, options, SearchConfig(options.spec(), simulated_device(gpu)), _ended)


async def _search_running(name: str) -> None:
    """By the ramp, in the middle of it."""
    mixed = WorkloadOptions(precision="amp-bf16")
    config = SearchConfig(mixed.spec(), simulated_device("a100-80gb"), strategy="ramp")
    await _picture(name, mixed, config, _well_under_way)


async def _search_command(name: str) -> None:
    """A user's own command."""
    with _project():
        own = WorkloadOptions(command=("python", "train.py", "--batch-size", "{batch}"))
        await _search(name, own, "h100-80gb")


def _on_24_gb() -> SearchConfig:
    """The command at a batch size that is too large for the card."""
    fixed = WorkloadOptions(command=("python", "train.py", "--batch-size", str(_COMMAND_BATCH)))
    return SearchConfig(fixed.spec(), simulated_device("rtx-4090-24gb"))


async def _plan_command(name: str) -> None:
    with _project():
        await _command_plan_picture(name, _on_24_gb(), _COMMAND_BATCH)


async def _snapshot(name: str) -> None:
    with _project():
        await _snapshot_picture(name, _on_24_gb(), _COMMAND_BATCH)


def _llama_on_four() -> Plan:
    """Llama 3 8B on four cards of 24 GB, which it does not fit."""
    recipe = Recipe("amp-bf16", sharding="zero3", gpus=4)
    return Plan(find_model("llama-3-8b"), recipe, find_gpu("rtx-4090-24gb"), target_batch=64)


def _gpt2_step() -> Plan:
    return Plan(find_model("gpt2"), Recipe("amp-bf16"), find_gpu("a100-80gb"), batch_size=16, target_batch=512)


PICTURES: Mapping[str, Callable[[str], Awaitable[None]]] = {
    "predict": _predicted,
    "monitor-eight-gpus": lambda name: _monitor_picture(name, 8, "down"),
    "monitor-watched": lambda name: _watched_picture(name, "down"),
    "hosts": _hosts_picture,
    "replay": _replay_picture,
    "search-running": _search_running,
    "search-nothing-fits": lambda name: _search(name, WorkloadOptions(model="llama-3-8b"), "rtx-4090-24gb"),
    "search-command": _search_command,
    "plan-command": _plan_command,
    "snapshot": _snapshot,
    "plan-too-large": lambda name: _plan_picture(name, _llama_on_four(), "t"),
    "plan-that-fits": lambda name: _plan_picture(name, _llama_on_four(), "t", "enter", "c"),
    "plan-curves": lambda name: _plan_picture(name, _gpt2_step(), "v", row="memory-over-step"),
    "browser": lambda name: browser_picture(FOLDER / f"{name}.png"),
}


def _main(names: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in PICTURES]:
        sys.exit(f"{', '.join(unknown)}: no such picture; there are {', '.join(PICTURES)}")
    failed = []
    for name in names or PICTURES:
        began_s = time.monotonic()
        try:
            asyncio.run(_made(PICTURES[name](name)))
        except Exception:  # noqa: BLE001 - the others are still made
            failed.append(name)
            traceback.print_exc()
        print(f"{name}: {'failed, ' if name in failed else ''}{time.monotonic() - began_s:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; `python screenshots/make.py {' '.join(failed)}` makes these alone")


async def _made(picture: Awaitable[None]) -> None:
    await picture


if __name__ == "__main__":
    _main(sys.argv[1:])
