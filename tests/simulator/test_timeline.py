"""Which bucket an allocation is in, as only the whole run can tell."""

from __future__ import annotations

import torch
from torch import nn

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket
from gpumem_tui.simulator.timeline import TimelineRecorder
from gpumem_tui.step import Phase
from gpumem_tui.workload.phases import watch_phases


def _buckets(recorder: TimelineRecorder, failed: bool = False) -> list[Bucket]:
    return [ALLOCATED_BUCKETS[index] for index in recorder.finish(failed).buckets]


def test_what_a_forward_leaves_to_the_next_forward_is_an_activation() -> None:
    recorder = TimelineRecorder()
    recorder.mark(1, Phase.FORWARD)
    scratch, logits = recorder.allocate(512), recorder.allocate(512)
    recorder.release(scratch)
    recorder.mark(1, Phase.BACKWARD)
    recorder.mark(1, Phase.FORWARD)
    recorder.allocate(512)
    recorder.release(logits)
    assert _buckets(recorder)[:2] == [Bucket.TEMPORARY, Bucket.ACTIVATIONS]


def test_a_run_that_survives_an_out_of_memory_counts_to_its_end() -> None:
    recorder = TimelineRecorder()
    recorder.allocate(512)
    recorder.cut()
    recorder.allocate(512)
    assert recorder.finish().events == (1, 2)
    assert recorder.finish(failed=True).events == (1,)


def test_forward_begins_with_the_first_part_that_is_called() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phases: list[Phase] = []
    with watch_phases(model, phases.append, lambda: None):
        model.forward(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
    assert phases == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.FORWARD, Phase.BACKWARD]
