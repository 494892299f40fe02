"""The buckets of a sample: they sum to what the allocator reports, and nothing unknown is a zero."""

from __future__ import annotations

import math
from dataclasses import replace

from gpumem_tui.memory import Bucket, Unknown
from gpumem_tui.watch.records import NO_ALLOCATOR, NOT_SEEN, PEAK_CAME_EARLIER, ProbeSample
from tests.watch.rings import GIB, ON_CPU, RECORD


def test_between_steps_the_rest_is_other() -> None:
    sample = ProbeSample(RECORD)
    assert sample.buckets == {
        Bucket.PARAMETERS: 4 * GIB,
        Bucket.GRADIENTS: 4 * GIB,
        Bucket.OPTIMIZER: 8 * GIB,
        Bucket.BATCH_DATA: NOT_SEEN,
        Bucket.OTHER: GIB,
    }
    assert sum(value for value in sample.buckets.values() if isinstance(value, int)) == sample.allocated_bytes


def test_at_the_peak_the_rest_is_activations() -> None:
    sample = ProbeSample(replace(RECORD, batch_bytes=GIB))
    assert sample.peak_buckets[Bucket.BATCH_DATA] == GIB
    assert sample.peak_buckets[Bucket.ACTIVATIONS] == 13 * GIB
    assert sum(value for value in sample.peak_buckets.values() if isinstance(value, int)) == sample.peak_allocated_bytes


def test_a_peak_below_what_is_held_now_has_no_composition() -> None:
    sample = ProbeSample(replace(RECORD, peak_allocated_bytes=GIB))
    assert sample.peak_buckets[Bucket.ACTIVATIONS] == PEAK_CAME_EARLIER


def test_host_memory_has_no_allocator_figures() -> None:
    sample = ProbeSample(ON_CPU)
    assert sample.device == "cpu"
    assert sample.buckets[Bucket.PARAMETERS] == 4 * GIB
    unknown = (sample.allocated_bytes, sample.reserved_bytes, sample.retries, sample.ooms, sample.inactive_split_bytes)
    assert set(unknown) == {NO_ALLOCATOR}
    assert sample.buckets[Bucket.OTHER] == sample.peak_buckets[Bucket.ACTIVATIONS] == NO_ALLOCATOR


def test_a_figure_that_the_probe_does_not_have() -> None:
    sample = ProbeSample(replace(RECORD, retries=-1, optimizer_bytes=-1, step_s=math.nan))
    assert isinstance(sample.retries, Unknown)
    assert isinstance(sample.buckets[Bucket.OPTIMIZER], Unknown)
    assert sample.step_s == Unknown("no step timed yet")
