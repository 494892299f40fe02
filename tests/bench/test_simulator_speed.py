"""How fast the simulator is. Prints its times, asserts none of them: `pytest -m bench -s -n 0 tests/bench`."""

from __future__ import annotations

import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model, gpus
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import MIB
from gpumem_tui.run.events import TraceDone
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.predicting import predict
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.blocks import Block
from gpumem_tui.simulator.allocator.caching import CachingAllocator
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.replay import replay
from gpumem_tui.workload.spec import WorkloadSpec

pytestmark = pytest.mark.bench


def _median_s(function: Callable[[], object], runs: int = 5) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _traced(model: str) -> tuple[TraceDone, float]:
    gpu = find_gpu("a100-80gb")
    workload = WorkloadSpec(Recipe(), shape=find_model(model))
    started = time.perf_counter()
    traced = predict(SearchConfig(workload, Device(gpu, simulated=True)), batch_size=8).prediction.traced
    assert isinstance(traced, Traced)
    return traced.done, time.perf_counter() - started


_SCRIPT = """
import sys
import torch

batch_size = int(sys.argv[1])
layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 12).cuda()
adam = torch.optim.AdamW(model.parameters())
for step in range(3):
    for _ in range(8):
        model(torch.randn(batch_size, 512, 768).cuda()).sum().backward()
    adam.step()
    adam.zero_grad()
"""


@pytest.mark.parametrize(("command", "size"), [("predict", "8"), ("search", "{batch}")])
def test_command(command: str, size: str, tmp_path: Path) -> None:
    """From the start of the program to its end, with all that it starts."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    words = [sys.executable, "-m", "gpumem_tui", command, "--json", "--gpu", "sim:a100-40gb"]

    def run() -> None:
        subprocess.run(
            [*words, "--", sys.executable, "train.py", size],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            env=_ENVIRONMENT,
        )

    print(f"\n{command} of a command: {_median_s(run, runs=3):.2f} s")


_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.parametrize("model", ["gpt2", "llama-3-8b"])
def test_trace_and_replay(model: str) -> None:
    done, seconds = _traced(model)
    host = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"\n{model}: traced {seconds:.2f} s, peak host memory {host:,.0f} MiB")
    affine = done.trace
    print(
        f"{model}: {len(affine.at_none.events):,} events, replay {_median_s(lambda: replay(affine.at(8))) * 1e3:.1f} ms"
    )
    finder, by_memory = BatchFinder(affine), sorted(gpu.cuda_total_bytes for gpu in gpus().values())
    largest: list[int] = []
    whole = _median_s(lambda: largest.extend(map(finder.largest, by_memory)), runs=1)
    assert largest == sorted(largest), "more memory takes no fewer samples"
    assert largest[-1] > 0
    print(f"{model}: largest batch on each of {len(gpus())} GPUs {whole:.2f} s")


def test_allocator_events_per_second() -> None:
    """A mix like training's: many sizes, about 2,000 live blocks."""
    choose = random.Random(0)
    sizes = [choose.choice((512, 4096, 100_000, 3 * MIB, 12 * MIB, 40 * MIB)) for _ in range(64)]
    allocator = CachingAllocator(1 << 50)
    live: list[Block] = []
    events = 1_000_000
    started = time.perf_counter()
    for index in range(events):
        if len(live) > 2000 or (live and index % 2):
            allocator.free(live.pop(index * 7 % len(live)))
        else:
            live.append(allocator.malloc(sizes[index % 64]))
    print(f"\nallocator: {events:,} events in {time.perf_counter() - started:.2f} s")
    assert allocator.stats.allocated_bytes == sum(block.size_bytes for block in live)
