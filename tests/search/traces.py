"""Traces made by hand: training steps whose sizes a test sets, as a tracing child would have told them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.run.events import Ready, TraceDone
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.step import Phase

CONTEXT_BYTES = 426 * MIB
PROFILE = "torch 2.13 sm_80"
NO_SETTING = AllocatorSettings.parse("backend:cudaMallocAsync")
"""With these no setting of the allocator is offered; all else is as by default."""


def training(sizes: Mapping[Bucket, int], *, layers: int, steps: int = 3, interleaved: bool = False) -> Timeline:
    """A model that is built and trained.

    Args:
        sizes: bytes of each bucket, but for those that this step has none of; optimizer state from the first step on.
        layers: equal allocations that the activations consist of.
        interleaved: backward makes the gradients layer by layer as it frees the activations, after the temporary
            bytes are gone; otherwise all of them while everything is still there.
    """
    recorder = TimelineRecorder()

    def one(bucket: Bucket, parts: int = 1) -> list[int]:
        """One of so many equal parts of a bucket; nothing where there is no such bucket."""
        return [recorder.allocate(sizes[bucket] // parts, bucket=bucket)] if bucket in sizes else []

    def release(numbers: list[int]) -> None:
        for number in numbers:
            recorder.release(number)

    recorder.mark(0, Phase.BUILD)
    one(Bucket.PARAMETERS)
    for step in range(1, steps + 1):
        recorder.mark(step, Phase.BATCH)
        batch = one(Bucket.BATCH_DATA)
        recorder.mark(step, Phase.FORWARD)
        activations = [number for _ in range(layers) for number in one(Bucket.ACTIVATIONS, layers)]
        recorder.mark(step, Phase.BACKWARD)
        temporary = one(Bucket.TEMPORARY)
        if interleaved:
            release(temporary)
            gradients = []
            for number in activations:
                gradients += one(Bucket.GRADIENTS, layers)
                recorder.release(number)
        else:
            gradients = one(Bucket.GRADIENTS)
            release(temporary + activations)
        recorder.mark(step, Phase.OPTIMIZER)
        if step == 1:
            one(Bucket.OPTIMIZER)
        release(gradients + batch)
    return recorder.finish()


def lengths(*sizes_mib: int, layers: int = 12, keeps: int = 0, stream: int = 0) -> Timeline:
    """Steps whose tensors have one size a step: each layer keeps two, and half of one is released at once.

    Args:
        keeps: bytes that every step leaves behind.
    """
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    recorder.allocate(200 * MIB, bucket=Bucket.PARAMETERS)
    for step, size in enumerate(sizes_mib, 1):
        recorder.mark(step, Phase.FORWARD)
        kept = []
        for _ in range(layers):
            kept.append(recorder.allocate(size * MIB, stream=stream))
            scratch = recorder.allocate(size * MIB // 2, stream=stream)
            kept.append(recorder.allocate(3 * size * MIB, stream=stream))
            recorder.release(scratch)
        if keeps:
            recorder.allocate(keeps)
        recorder.mark(step, Phase.BACKWARD)
        for number in reversed(kept):
            recorder.release(number)
    return recorder.finish()


def traced(trace: AffineTrace, gpu: Gpu) -> Traced:
    """The part of a trace on a GPU that a search keeps."""
    ready = Ready("2.13.0", PROFILE, CONTEXT_BYTES, "measured")
    return Traced(ready, TraceDone(trace, 2.5), replace(gpu, reserves=()))
