"""A memory snapshot on the screen, without torch: files made by hand, and one written from a trace."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.snapshots.analysis import analyse
from gpumem_tui.snapshots.comparison import compare
from gpumem_tui.snapshots.read import read_snapshot
from gpumem_tui.snapshots.recording import record, snapshot
from gpumem_tui.step import Phase, Site
from gpumem_tui.tui.app import GpuMemApp
from gpumem_tui.tui.snapshot.comparison import ComparisonScreen
from gpumem_tui.tui.snapshot.screen import SnapshotScreen
from tests.scenes.search import noon
from tests.snapshots.files import written

LAYERS = 12


def training(growth: int = 0) -> Timeline:
    """Three steps of a network; `growth` MiB more of activations a layer from step to step."""
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    for layer in range(LAYERS):
        site = Site("aten._to_copy", f"blocks.{layer}", "train.py:8", "<module>")
        recorder.allocate(28 * MIB, site=site, bucket=Bucket.PARAMETERS)
    for step in range(1, 4):
        recorder.mark(step, Phase.FORWARD)
        each = (45 + growth * step) * MIB
        activations = [_take(recorder, layer, each) for layer in range(LAYERS)]
        recorder.mark(step, Phase.BACKWARD)
        gradients = []
        for layer, activation in enumerate(reversed(activations)):
            scratch = recorder.allocate(60 * MIB, site=_site(LAYERS - layer, "mm"), bucket=Bucket.TEMPORARY)
            gradients.append(recorder.allocate(28 * MIB, site=_site(layer, "mm"), bucket=Bucket.GRADIENTS))
            recorder.release(scratch)
            recorder.release(activation)
        recorder.mark(step, Phase.OPTIMIZER)
        for _ in range(LAYERS if step == 1 else 0):
            site = Site("aten.zeros_like", "", "train.py:21", "<module>")
            recorder.allocate(56 * MIB, site=site, bucket=Bucket.OPTIMIZER)
        for gradient in gradients:
            recorder.release(gradient)
    return recorder.finish()


def _site(layer: int, operator: str) -> Site:
    return Site(f"aten.{operator}", f"blocks.{layer}", f"model.py:{20 + layer % 3}", "forward")


def _take(recorder: TimelineRecorder, layer: int, size_bytes: int) -> int:
    return recorder.allocate(size_bytes, site=_site(layer, "gelu"), bucket=Bucket.ACTIVATIONS)


def fits() -> dict[str, Any]:
    """A run that fits."""
    return snapshot(record(training()))


def out_of_memory() -> dict[str, Any]:
    """One whose third step is too large for 2 GiB."""
    return snapshot(record(training(growth=12), 2048 * MIB))


def comparison_app(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> GpuMemApp:
    """The program on two snapshots."""
    taken = []
    for name, body in (("before.pickle", before), ("after.pickle", after)):
        found = read_snapshot(written(folder, body, name))
        taken.append((found, [analyse(found, device) for device in found.devices]))
    compared = compare(taken[0], taken[1])
    screen = partial(ComparisonScreen, taken[0][0], taken[1][0], compared, clock=noon)
    return GpuMemApp({"snapshot": screen}, "snapshot")


def snapshot_app(folder: Path, body: dict[str, Any]) -> GpuMemApp:
    """The program on a snapshot."""
    found = read_snapshot(written(folder, body))
    analyses = [analyse(found, device) for device in found.devices]
    return GpuMemApp({"snapshot": lambda: SnapshotScreen(found, analyses, clock=noon)}, "snapshot")
