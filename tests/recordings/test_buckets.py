"""The buckets of a run on a real GPU at its peak, next to those of the simulated step."""

from __future__ import annotations

import pytest

from gpumem_tui.memory import ALLOCATED_BUCKETS, KIB, MIB, Bucket
from gpumem_tui.run.cuda_recorder import workspaces_of
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.timeline import Timeline
from tests.gpu.history import unpack, unpack_timeline
from tests.published.measurements import DEFAULT_RECORDINGS, RecordedRun, load_recordings

RUNS = [run for run in load_recordings(DEFAULT_RECORDINGS) if isinstance(run, RecordedRun) and run.history]
_ROUNDING_BYTES = 16 * KIB
"""The difference of operators that make a small tensor more or less, which are listed elsewhere."""

_OF_CUBLASLT_BYTES = 2 * MIB
"""Its workspace of a thread, which the recorded simulation did not take."""

_MAY_DIFFER = dict.fromkeys((Bucket.ACTIVATIONS, Bucket.TEMPORARY), _ROUNDING_BYTES + _OF_CUBLASLT_BYTES)


def at_peak(timeline: Timeline) -> dict[str, int]:
    event = timeline.peak_event()
    return timeline.breakdowns_after({event: 0})[event].as_json()


def test_there_are_recordings() -> None:
    assert len(RUNS) > 40


@pytest.mark.parametrize("run", [run for run in RUNS if not run.id.startswith("resnet")], ids=lambda run: run.id)
def test_every_bucket_is_what_a_trace_says(run: RecordedRun) -> None:
    """Not of convolutions: cuDNN's workspaces move the peak to another moment."""
    sizes = workspaces_of(profile_for(run.machine.torch, run.machine.gpu))
    recorded = at_peak(unpack(run.history).timeline.with_workspaces(sizes))
    simulated = at_peak(unpack_timeline(run.simulated_history))
    differences = {one: recorded.get(one.value, 0) - simulated.get(one.value, 0) for one in ALLOCATED_BUCKETS}
    assert {one: size for one, size in differences.items() if abs(size) > _MAY_DIFFER.get(one, _ROUNDING_BYTES)} == {}
