"""A running training process as a plan."""

from __future__ import annotations

from gpumem_tui.catalog.loader import DEFAULT_GPU, find_gpu
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import Bucket, Unknown
from gpumem_tui.monitor.devices import RealGpu
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import GpuReading
from gpumem_tui.plan.plan import Plan
from gpumem_tui.watch.published import WatchedProcess
from gpumem_tui.watch.records import ProbeSample


def plan_of(watched: WatchedProcess, sample: ProbeSample | None, gpu: GpuReading | None) -> Reading[Plan]:
    """Return a running training process as a plan on the GPU that it runs on, or why it is missing.

    Its batch is as many samples as the activations at the peak hold by the formula, at least one.

    Args:
        gpu: the GPU that it trains on; for None the one that is planned for by default.
    """
    expected = watched.expected
    if isinstance(expected, Unknown):
        return expected
    kind = find_gpu(DEFAULT_GPU) if gpu is None else _planned_gpu(gpu)
    if isinstance(kind, Unknown):
        return kind
    activation_bytes = Unknown("no step") if sample is None else sample.peak_buckets[Bucket.ACTIVATIONS]
    samples = 1 if isinstance(activation_bytes, Unknown) else expected.samples_held(activation_bytes)
    return Plan(expected.shape, expected.recipe, kind, batch_size=max(1, samples))


def _planned_gpu(gpu: GpuReading) -> Reading[Gpu]:
    """Return a GPU as plans know it, or why it cannot be known; what others use of it is left out."""
    if isinstance(gpu.memory, Unknown):
        return gpu.memory
    if isinstance(gpu.compute_capability, Unknown):
        return gpu.compute_capability
    return RealGpu.of(gpu.index, gpu, gpu.memory, gpu.compute_capability).describe()
