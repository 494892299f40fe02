"""The lines of a search on its predictions, and on the wanted global batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.search import report
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.step import Phase
from gpumem_tui.workload.spec import WorkloadSpec
from tests.search.traces import CONTEXT_BYTES, traced
from tests.search.trials import A100

GPT2 = SearchConfig(WorkloadSpec(Recipe(), shape=find_model("gpt2")), A100)


def said(config: SearchConfig, batch_size: int) -> str:
    steps = report.wanted_accumulation(config, batch_size)
    assert steps is not None
    return report.accumulation_line(config.workload, steps)


@pytest.mark.parametrize(
    ("target", "found", "line"),
    [
        (256, 8, "32 accumulation steps of batch 8 make a global batch of 256 sequences, 262,144 tokens"),
        (8, 8, "1 accumulation step of batch 8 makes a global batch of 8 sequences, 8,192 tokens"),
        (64, 48, "2 accumulation steps of batch 48 make a global batch of 96 sequences, 98,304 tokens"
                 "; batch 32 would make exactly 64"),
        (10, 48, "1 accumulation step of batch 48 makes a global batch of 48 sequences, 49,152 tokens"
                 "; batch 10 would make exactly 10"),
        (97, 48, "3 accumulation steps of batch 48 make a global batch of 144 sequences, 147,456 tokens"
                 "; 97 cannot be split evenly"),
    ],
)  # fmt: skip
def test_how_the_wanted_batch_is_reached(target: int, found: int, line: str) -> None:
    assert said(replace(GPT2, target_batch=target), found) == line


def test_every_gpu_takes_its_part() -> None:
    eight = replace(GPT2, workload=WorkloadSpec(Recipe(gpus=8), shape=find_model("resnet-50")), target_batch=256)
    assert said(eight, 4) == "8 accumulation steps of batch 4 on 8 GPUs make a global batch of 256"
    assert said(replace(eight, target_batch=3), 4).endswith("; 3 cannot be split evenly")


def test_without_a_wish_or_a_batch_nothing_is_said() -> None:
    assert report.wanted_accumulation(GPT2, 8) is None
    assert report.wanted_accumulation(replace(GPT2, target_batch=64), 0) is None


def _state_among_activations(batch_size: int) -> Timeline:
    """75 MiB of state lie in a block that the next step lacks, until a smaller one, of 10 MiB a sample, holds them."""
    recorder = TimelineRecorder()
    recorder.mark(1, Phase.FORWARD)
    large = recorder.allocate(40 * MIB * batch_size, bucket=Bucket.ACTIVATIONS)
    small = recorder.allocate(10 * MIB * batch_size, bucket=Bucket.ACTIVATIONS)
    recorder.release(large)
    recorder.release(small)
    recorder.allocate(75 * MIB, bucket=Bucket.OPTIMIZER)
    recorder.mark(2, Phase.FORWARD)
    recorder.release(recorder.allocate(40 * MIB * batch_size, bucket=Bucket.ACTIVATIONS))
    return recorder.finish()


def test_smaller_sizes_that_do_not_fit_are_named() -> None:
    trace = AffineTrace.fit((4, _state_among_activations(4)), (9, _state_among_activations(9)))

    def within(capacity_bytes: int) -> Traced:
        gpu = find_gpu("t4-16gb")
        return traced(trace, replace(gpu, cuda_total_bytes=CONTEXT_BYTES + capacity_bytes))

    found = within(420 * MIB)
    assert found.expected_batch_size == 8
    line = "by trace 6, 7 do not fit although 8 does: the allocator's pieces differ by size"
    assert report.uneven_line(found) == line
    assert report.uneven_line(within(340 * MIB)) == ""
