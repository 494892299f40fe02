"""This project's recorded runs (`python -m tests.gpu.record`): placed as the GPU did, and traced as it was asked.

Each is traced here by the installed torch as the recorded one. In every phase of the second step it must ask for the
same sizes, each as often, and as much at once, but for what the operators of `_MAY_DIFFER` ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import Timeline
from tests.gpu.history import unpack
from tests.gpu.placement import check
from tests.published.measurements import DEFAULT_RECORDINGS, RecordedRun, load_recordings

_RUNS = [run for run in load_recordings(DEFAULT_RECORDINGS) if isinstance(run, RecordedRun) and run.history]

_STEPS = 2

_MAY_DIFFER = {
    "aten.convolution": "cuDNN's workspace, known for the layers that were recorded",
    "aten.convolution_backward": "that network, what it copies to another layout, and the sum of a bias' gradient",
    "aten.native_batch_norm": "cuDNN's reserve",
    "aten.native_batch_norm_backward": "cuDNN's reserve",
}
"""Operators whose sizes may differ, and why. A run that has none of them must agree in all."""
_LONG = (
    "bert-base-b8-amp-bf16-adafactor-recompute-full", "resnet-50-b16-amp-fp16-sgd-momentum",
    "llama-tiny-b4-fp32-sgd-recompute-full", "llama-tiny-b4-amp-fp16-adafactor", "llama-tiny-b4-amp-bf16-adamw",
    "gpt2-tiny-b8-bf16-adafactor", "vit-b-16-b8-fp32-sgd-momentum", "resnet-50-b16-fp32-adamw-recompute-full",
    "gpt2-tiny-b8-amp-bf16-adamw-recompute-full", "gpt2-tiny-b8-amp-fp16-adamw-attention-math",
    "gpt2-tiny-b8-amp-bf16-adamw", "gpt2-tiny-b8-fp32-adamw-recompute-full",
    "gpt2-tiny-b8-amp-bf16-adamw-attention-efficient", "bert-base-512-b4-fp32-adamw", "gpt2-4-layers-b4-amp-bf16-adamw",
    "llama-tiny-b16-bf16-adamw-recompute-selective", "llama-tiny-b4-fp32-adamw-attention-math",
)  # fmt: skip
"""Each takes more than 2.5 s, and a shorter one has its network, precision and attention too."""
_MOST_OF_ONE = 3
"""Recorded allocations for each that such an operator is traced with: it may copy, take a workspace, and sum."""


def _asked(timeline: Timeline) -> Iterator[tuple[str, int, str]]:
    """Yield the phase, the size and the operator of every allocation of step 2."""
    marks = {mark.event: mark for mark in timeline.marks}
    phase = ""
    for event, number in enumerate(timeline.events):
        if event in marks:
            phase = marks[event].phase.value if marks[event].step == _STEPS else ""
        if number > 0 and phase:
            site = timeline.site_table[timeline.sites[number - 1]] if timeline.sites else None
            yield phase, timeline.sizes[number - 1], site.operator if site is not None else ""


def _traced(run: RecordedRun) -> tuple[list[tuple[str, int, str]], int]:
    """Return what the simulated GPU is asked for, by the recorded torch's rules, and the most that it is at once."""
    from gpumem_tui.simulator.allocator.profile import profile_for
    from gpumem_tui.simulator.device.gpu import SimulatedGpu
    from tests.in_process import trained, workload_of

    gpu = run.machine.gpu
    simulated = SimulatedGpu(gpu, profile_for(run.machine.torch, gpu))
    with trained(workload_of(run.workload), run.batch_size, _STEPS, simulated, run.workload.recipe):
        return list(_asked(simulated.finish())), simulated.allocator.stats.peak_requested_bytes


@pytest.mark.parametrize("run", _RUNS, ids=lambda run: run.id)
def test_every_block_lies_where_the_gpu_put_it(run: RecordedRun) -> None:
    placed = check(unpack(run.history), AllocatorSettings.parse(run.machine.facts.get("alloc_conf", "")))
    for figure in ("requested_bytes", "allocated_bytes", "reserved_bytes"):
        assert getattr(placed, figure) == max(getattr(phase, figure) for phase in run.real.phases)
    assert placed.segments > 0


@pytest.mark.parametrize(
    "run", [pytest.param(run, id=run.id, marks=[pytest.mark.slow] if run.id in _LONG else []) for run in _RUNS]
)
def test_a_step_asks_for_what_the_gpus_step_asked_for(run: RecordedRun) -> None:
    recorded = Counter((phase, size) for phase, size, _ in _asked(unpack(run.history).timeline))
    asked, highest_bytes = _traced(run)
    traced = Counter((phase, size) for phase, size, _ in asked)
    assert sum(recorded.values()) > 20
    if not any(operator in _MAY_DIFFER for *_, operator in asked):
        assert traced == recorded
        assert highest_bytes == max(phase.requested_bytes for phase in run.real.phases if phase.step <= _STEPS)
        return
    others = Counter((phase, size) for phase, size, operator in asked if operator not in _MAY_DIFFER)
    differing = sum(traced.values()) - sum(others.values())
    assert others - recorded == Counter(), "asked for by operators that must not differ"
    assert sum((recorded - others).values()) <= _MOST_OF_ONE * differing
