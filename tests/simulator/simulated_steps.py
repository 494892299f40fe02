"""Simulated GPUs for tests, and the recording of whole training runs on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket
from gpumem_tui.simulator.allocator.caching import CachingAllocator
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.timeline import Timeline, rounded
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from gpumem_tui.workload.standard import CatalogWorkload
from tests import in_process

GPT2 = find_model("gpt2").overridden(layers=2, hidden=64, heads=4, vocab=512, seq_len=64)
LLAMA = find_model("llama-3.2-1b").overridden(layers=2, hidden=64, heads=4, kv_heads=2, vocab=512, seq_len=64)
RESNET = find_model("resnet-18").overridden(image_size=64)
MLP = find_model("mlp").overridden(hidden=256)

CUBLAS_WORKSPACE_BYTES = 8_519_680
"""The workspace of the first matrix product of the forward (and of the autograd) thread on an A100."""


def simulated_gpu(
    name: str = "a100-80gb",
    limit_bytes: int | None = None,
    unlimited: bool = False,
    allocator: CachingAllocator | None = None,
) -> SimulatedGpu:
    """A GPU of the catalog, under the installed torch's profile."""
    gpu = find_gpu(name)
    return SimulatedGpu(gpu, profile_for(torch.__version__, gpu), limit_bytes, unlimited, allocator=allocator)


@contextmanager
def on(name: str = "a100-80gb", limit_bytes: int | None = None) -> Iterator[tuple[torch.device, Any]]:
    """A simulated device and its `torch.cuda`-like module."""
    with simulate(simulated_gpu(name, limit_bytes)) as device:
        yield device, torch.get_device_module(device)


def trained(
    shape: ModelShape, recipe: Recipe, batch_size: int, steps: int = 2, gpu: SimulatedGpu | None = None
) -> SimulatedGpu:
    """A GPU on which a catalog model was built and trained, followed as a command is."""
    gpu = gpu or simulated_gpu(unlimited=True)
    with in_process.trained(CatalogWorkload(shape, recipe), batch_size, steps, gpu, recipe):
        return gpu


def held(timeline: Timeline, bucket: Bucket) -> tuple[int, int]:
    """The most bytes that lay in a bucket at once, and how many allocations these were."""
    index = ALLOCATED_BUCKETS.index(bucket)
    live = count = 0
    most = (0, 0)
    for number in timeline.events:
        if timeline.buckets[abs(number) - 1] == index:
            sign = 1 if number > 0 else -1
            live, count = live + sign * timeline.sizes[abs(number) - 1], count + sign
            most = max(most, (live, count))
    return most


def most_held(timeline: Timeline) -> int:
    """The most bytes of all buckets at once."""
    live = most = 0
    for number in timeline.events:
        size = rounded(timeline.sizes[abs(number) - 1])
        live += size if number > 0 else -size
        most = max(most, live)
    return most
