"""Two traces answer for every batch size: the affine form, the replay, and what they say of peaks and capacity."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe, Recompute
from gpumem_tui.memory import ALLOCATED_BUCKETS, GIB, MIB, Bucket, Range
from gpumem_tui.simulator.allocator.caching import CachingAllocator
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.replay import AffineTrace, NotAffine, replay
from gpumem_tui.simulator.allocator.rules import Buffer, Workspace
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import Mark, Timeline, TimelineRecorder
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from gpumem_tui.step import Phase
from tests.pairs import slow_beyond
from tests.simulator.simulated_steps import GPT2, LLAMA, MLP, RESNET, simulated_gpu, trained

RUNS = [
    pytest.param(shape, recipe, id=f"{shape.name} {name}")
    for shape, name, recipe in [
        (GPT2, "fp32", Recipe()),
        (GPT2, "amp-fp16 recompute", Recipe(precision="amp-fp16", recompute="full")),
        (GPT2, "math attention", Recipe(attention="math", optimizer="sgd-momentum")),
        (LLAMA, "amp-bf16", Recipe(precision="amp-bf16")),
        (LLAMA, "bf16 selective", Recipe(precision="bf16", recompute="selective", optimizer="adafactor")),
        (RESNET, "fp32", Recipe(optimizer="sgd")),
        (RESNET, "amp-bf16", Recipe(precision="amp-bf16")),
    ]
]
every_run = pytest.mark.parametrize(("shape", "recipe"), slow_beyond(2, RUNS))


@cache
def run(shape: ModelShape, recipe: Recipe, batch_size: int) -> SimulatedGpu:
    return trained(shape, recipe, batch_size)


@cache
def fitted(shape: ModelShape, recipe: Recipe) -> AffineTrace:
    return AffineTrace.fit((2, run(shape, recipe, 2).finish()), (3, run(shape, recipe, 3).finish()))


# Replay of real training steps


@every_run
def test_the_most_of_each_bucket_is_the_highest_of_every_moment(shape: ModelShape, recipe: Recipe) -> None:
    timeline = run(shape, recipe, 3).finish()
    replayed = replay(timeline)
    first = next(mark.event for mark in timeline.marks if mark.step)
    moments = timeline.breakdowns_after(dict.fromkeys(range(first, len(timeline.events)), 0)).values()
    peaks = replayed.bucket_peaks
    for bucket, peak in peaks.items():
        most = max(moment[bucket] for moment in moments)
        assert peak.size_bytes == most or (bucket is Bucket.OTHER and peak.size_bytes > most)  # by the slack of blocks
        assert peak.size_bytes >= replayed.breakdown[bucket]
        assert peak.mark.step
    assert replayed.bucket_peaks[Bucket.GRADIENTS].mark.phase is Phase.BACKWARD
    assert (
        replayed.bucket_peaks[Bucket.GRADIENTS].size_bytes >= replayed.bucket_peaks[Bucket.PARAMETERS].size_bytes // 2
    )


@every_run
def test_a_replay_is_what_the_allocator_did(shape: ModelShape, recipe: Recipe) -> None:
    gpu = run(shape, recipe, 3)
    replayed = replay(gpu.finish())
    assert replayed.fits
    assert replayed.peak_allocated_bytes == gpu.allocator.stats.peak_allocated_bytes
    assert replayed.peak_reserved_bytes == gpu.allocator.stats.peak_reserved_bytes


@every_run
def test_a_batch_size_that_was_not_traced_is_foretold_to_the_byte(shape: ModelShape, recipe: Recipe) -> None:
    trace = fitted(shape, recipe)
    direct = run(shape, recipe, 7)
    trace.check(7, direct.finish())
    predicted, traced = replay(trace.at(7)), replay(direct.finish())
    assert predicted == traced
    assert predicted.peak_allocated_bytes == direct.allocator.stats.peak_allocated_bytes
    assert predicted.breakdown.as_json() == traced.breakdown.as_json()


@every_run
def test_the_buckets_sum_to_the_peak_in_every_phase(shape: ModelShape, recipe: Recipe) -> None:
    replayed = replay(fitted(shape, recipe).at(5))
    assert replayed.breakdown.total_bytes == replayed.peak_allocated_bytes
    for phase in replayed.phases:
        assert phase.breakdown.total_bytes == phase.peak_allocated_bytes
        assert phase.peak_allocated_bytes <= replayed.peak_allocated_bytes
        assert phase.reserved_bytes <= replayed.peak_reserved_bytes
    assert max(phase.peak_allocated_bytes for phase in replayed.phases) == replayed.peak_allocated_bytes


def test_the_phases_of_a_run_in_order() -> None:
    replayed = replay(run(GPT2, Recipe(), 3).finish())
    steps = [
        (step, phase) for step in (1, 2) for phase in (Phase.BATCH, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    ]
    assert [(peak.step, peak.phase) for peak in replayed.phases] == [(0, Phase.BUILD), *steps]


def test_each_bucket_is_what_its_name_says() -> None:
    shape, recipe = MLP, Recipe()
    replayed = replay(run(shape, recipe, 64).finish())
    weights = (shape.inputs + (shape.layers - 2) * shape.hidden) * shape.hidden + shape.hidden * shape.classes
    at_build, at_optimizer = replayed.phases[0].breakdown, replayed.phases[-1].breakdown
    assert at_build[Bucket.PARAMETERS] >= weights * 4
    assert at_build[Bucket.GRADIENTS] == at_build[Bucket.OPTIMIZER] == at_build[Bucket.ACTIVATIONS] == 0
    assert at_optimizer[Bucket.PARAMETERS] == at_optimizer[Bucket.GRADIENTS] == at_build[Bucket.PARAMETERS]
    assert at_optimizer[Bucket.OPTIMIZER] == 2 * at_build[Bucket.PARAMETERS]
    assert at_optimizer[Bucket.BATCH_DATA] == -(-64 * shape.inputs * 4 // 512) * 512 + 512


def test_recomputed_activations_are_activations_though_made_in_backward() -> None:
    kept, recomputed = (run(GPT2, Recipe(recompute=how), 16).finish() for how in RECOMPUTED)
    assert activations_made_in_backward(kept) == 0
    assert activations_made_in_backward(recomputed) > 0
    after_forward = [
        next(peak.breakdown[Bucket.ACTIVATIONS] for peak in replay(timeline).phases if peak.phase is Phase.FORWARD)
        for timeline in (kept, recomputed)
    ]
    assert after_forward[1] < after_forward[0]


RECOMPUTED: tuple[Recompute, Recompute] = ("none", "full")


def activations_made_in_backward(timeline: Timeline) -> int:
    """How many allocations of the bucket were made while backward ran."""
    wanted = ALLOCATED_BUCKETS.index(Bucket.ACTIVATIONS)
    return sum(
        number > 0 and timeline.buckets[number - 1] == wanted
        for mark, following in pairwise(timeline.marks)
        if mark.phase is Phase.BACKWARD
        for number in timeline.events[mark.event : following.event]
    )


# The affine form


def line(*sizes: int, buckets: tuple[int, ...] | None = None) -> Timeline:
    """Allocations of these sizes, all made and then all released."""
    numbers = tuple(range(1, len(sizes) + 1))
    events = (*numbers, *(-number for number in numbers))
    return Timeline(events, sizes, buckets or (0,) * len(sizes), (Mark(0, 0, Phase.BUILD),))


def test_sizes_are_extended_along_the_line_through_two_runs() -> None:
    trace = AffineTrace.fit((5, line(100, 5000, 80)), (2, line(100, 2000, 50)))
    assert trace.at_none.sizes == (100, 0, 30)
    assert trace.slopes == (0, 1000, 10)
    assert trace.at(7).sizes == (100, 7000, 100)
    trace.check(5, line(100, 5000, 80))


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (line(100, 2049), r"2000 bytes at batch size 2 takes 2049 at 4"),
        (line(100, 1000), r"shrinks as the batch grows: 2,000 bytes at 2, 1,000 at 4"),
        (line(100, 2000, 1), r"allocates differently at batch sizes 2 and 4 \(4 and 6 events\)"),
        (line(100, 2000, buckets=(0, 1)), "allocates differently"),
        (replace(line(100, 2000), marks=()), "allocates differently"),
    ],
    ids=["uneven", "shrinking", "more events", "other buckets", "other marks"],
)
def test_runs_that_differ_in_more_than_even_growth_are_refused(other: Timeline, complaint: str) -> None:
    with pytest.raises(NotAffine, match=complaint):
        AffineTrace.fit((2, line(100, 2000)), (4, other))


def test_a_run_that_leaves_the_line_is_noticed() -> None:
    trace = AffineTrace.fit((2, line(200)), (3, line(300)))
    with pytest.raises(NotAffine, match="batch size 5"):
        trace.check(5, line(513))
    trace.check(5, line(512))  # the same block


@pytest.mark.parametrize("second", [12, 4, 500])
def test_what_grows_within_the_smallest_block_is_the_same_at_every_batch_size(second: int) -> None:
    trace = AffineTrace.fit((16, line(100, 16_000, 8)), (24, line(100, 24_000, second)))
    assert (trace.slopes[0], trace.slopes[1]) == (0, 1000)
    assert replay(trace.at(109)) == replay(line(100, 109_000, 56))


# Capacity


def trace_of(constant_bytes: int, slope_bytes: int) -> AffineTrace:
    return AffineTrace.fit(
        (2, line(constant_bytes, 2 * slope_bytes)),
        (3, line(constant_bytes, 3 * slope_bytes)),
    )


@given(
    constant=st.integers(1, 40 * MIB),
    slope=st.integers(1, 5 * MIB),
    capacity=st.integers(1, GIB),
    expandable=st.booleans(),
    limit=st.none() | st.integers(1, GIB),
)
def test_the_largest_batch_fits_and_the_next_does_not(
    constant: int, slope: int, capacity: int, expandable: bool, limit: int | None
) -> None:
    trace = trace_of(constant, slope)
    settings = AllocatorSettings(expandable_segments=expandable)
    largest = BatchFinder(trace, settings).largest(capacity, limit)
    assert largest == 0 or replay(trace.at(largest), capacity, settings, limit).fits
    assert not replay(trace.at(largest + 1), capacity, settings, limit).fits


@pytest.mark.parametrize("capacity", slow_beyond(1, [512 * MIB, 64 * MIB, 4 * GIB]))
@pytest.mark.parametrize("shape", [GPT2, MLP], ids=lambda shape: shape.name)
def test_the_largest_batch_of_a_model_is_what_the_device_runs(shape: ModelShape, capacity: int) -> None:
    trace = fitted(shape, Recipe())
    largest = BatchFinder(trace).largest(capacity)

    def runs(batch_size: int) -> bool:
        gpu = simulated_gpu(allocator=CachingAllocator(capacity))
        try:
            trained(shape, Recipe(), batch_size, gpu=gpu)
        except torch.OutOfMemoryError:
            return False
        return True

    assert runs(largest)
    assert not runs(largest + 1)


@given(capacity=st.integers(1, 256 * MIB))
@hypothesis_settings(max_examples=25)
def test_a_run_fits_exactly_where_its_reserved_bytes_do(capacity: int) -> None:
    timeline = fitted(MLP, Recipe()).at(8)
    without_limit = replay(timeline)
    limited = replay(timeline, capacity)
    assert limited.peak_reserved_bytes <= capacity
    if capacity >= without_limit.peak_reserved_bytes:
        assert limited == without_limit
    if capacity < without_limit.peak_allocated_bytes:
        assert not limited.fits
        assert limited.peak_allocated_bytes < without_limit.peak_allocated_bytes
        assert limited.breakdown.total_bytes == limited.peak_allocated_bytes


_UNLIMITED = 1 << 62


def _around_a_workspace(workspace: Buffer, chance: random.Random) -> Timeline:
    """A program that makes and releases tensors by chance, and in their midst a workspace that one kernel takes."""
    recorder, live = TimelineRecorder(), list[int]()

    def go() -> None:
        for _ in range(chance.randint(0, 8)):
            if live and chance.random() < 0.5:
                recorder.release(live.pop(chance.randrange(len(live))))
            else:
                most = chance.choice([MIB, 12 * MIB, 100 * MIB])
                live.append(recorder.allocate(chance.randint(1, most), bucket=Bucket.ACTIVATIONS))

    go()
    recorder.release(recorder.allocate(workspace, bucket=Bucket.TEMPORARY))
    go()
    return recorder.finish()


@pytest.mark.parametrize("settings", [AllocatorSettings(), AllocatorSettings(expandable_segments=True)])
def test_whatever_a_workspace_takes_is_within_the_range_of_reserved(settings: AllocatorSettings) -> None:
    """A smaller one than the largest may reserve more: what the largest leaves in the cache serves a tensor later."""
    for seed in range(300):
        most_bytes = random.Random(seed).randint(1, 110 * MIB)
        workspace = Workspace(most=most_bytes).computed("bounded")
        trace = AffineTrace.constant(_around_a_workspace(workspace, random.Random(seed)))
        found = BatchFinder(trace, settings).reserved_range(1, _UNLIMITED, Range(_UNLIMITED, _UNLIMITED))
        for eighths in range(1, 9):
            taken = _around_a_workspace(most_bytes * eighths // 8, random.Random(seed))
            assert replay(taken, settings=settings).peak_reserved_bytes <= found.high_bytes, seed


def test_a_workspace_takes_a_segment_of_its_own_as_far_as_there_is_room() -> None:
    """One of 12 MiB leaves a segment that serves the tensor of 12 MiB; one of 4 MiB takes 20 MiB next to it."""
    workspace = Workspace(most=12 * MIB).computed("bounded")
    recorder = TimelineRecorder()
    recorder.release(recorder.allocate(workspace, bucket=Bucket.TEMPORARY))
    recorder.allocate(12 * MIB, bucket=Bucket.ACTIVATIONS)
    finder = BatchFinder(AffineTrace.constant(recorder.finish()))
    wide, narrow = Range(GIB, GIB), Range(24 * MIB, 24 * MIB)
    assert finder.reserved_range(1, GIB, wide) == Range(12 * MIB, 32 * MIB)
    assert finder.reserved_range(1, 24 * MIB, narrow) == Range(12 * MIB, 24 * MIB)


def test_the_largest_batch_is_zero_where_one_sample_does_not_fit() -> None:
    assert BatchFinder(trace_of(10 * MIB, MIB)).largest(5 * MIB) == 0


def test_a_step_that_does_not_grow_has_no_largest_batch() -> None:
    with pytest.raises(NotAffine, match="no allocation grows"):
        BatchFinder(trace_of(MIB, 0)).largest(GIB)


# Timelines


def test_slack_of_unsplit_blocks_is_other() -> None:
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    number = recorder.allocate(20 * MIB)
    recorder.release(number)
    recorder.allocate(19 * MIB + MIB // 2)
    replayed = replay(recorder.finish())
    assert replayed.breakdown[Bucket.OTHER] == 0
    assert replayed.peak_event == 0
    after = recorder.finish().breakdown_after(2, allocated_bytes=20 * MIB)
    assert after[Bucket.OTHER] == MIB // 2


def test_a_phase_that_only_releases_begins_at_what_it_finds() -> None:
    recorder = TimelineRecorder()
    recorder.mark(1, Phase.FORWARD)
    first, second = recorder.allocate(MIB), recorder.allocate(2 * MIB)
    recorder.mark(1, Phase.BACKWARD)
    recorder.release(second)
    recorder.mark(1, Phase.OPTIMIZER)
    recorder.release(first)
    replayed = replay(recorder.finish())
    assert [phase.peak_allocated_bytes // MIB for phase in replayed.phases] == [3, 3, 1]
    assert {phase.reserved_bytes for phase in replayed.phases} == {replayed.peak_reserved_bytes}


def test_an_empty_run_has_no_peak() -> None:
    empty = TimelineRecorder().finish()
    assert empty.peak_event() == -1
    assert replay(empty).breakdown.total_bytes == 0


def test_allocations_are_named_by_where_they_are_made_and_released() -> None:
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    weight = recorder.allocate(512)
    recorder.tag(weight, Bucket.PARAMETERS)
    recorder.tag(weight, Bucket.GRADIENTS)
    recorder.mark(1, Phase.FORWARD)
    kept, scratch = recorder.allocate(512), recorder.allocate(512)
    recorder.release(scratch)
    recorder.mark(1, Phase.BACKWARD)
    gone, again, stays = recorder.allocate(512), recorder.allocate(512, recomputed=True), recorder.allocate(512)
    for number in (gone, again, kept):
        recorder.release(number)
    timeline = recorder.finish()
    assert [ALLOCATED_BUCKETS[index] for index in timeline.buckets] == [
        Bucket.PARAMETERS,
        Bucket.ACTIVATIONS,
        Bucket.TEMPORARY,
        Bucket.TEMPORARY,
        Bucket.ACTIVATIONS,
        Bucket.OTHER,
    ]
    assert stays in timeline.events


def test_what_is_released_after_an_out_of_memory_does_not_count() -> None:
    recorder = TimelineRecorder()
    recorder.mark(1, Phase.FORWARD)
    number = recorder.allocate(512)
    recorder.cut()
    recorder.release(number)
    timeline = recorder.finish(failed=True)
    assert timeline.events == (number,)
    assert timeline.buckets == (ALLOCATED_BUCKETS.index(Bucket.ACTIVATIONS),)


def test_a_run_that_ends_while_the_model_is_built_holds_parameters() -> None:
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    recorder.allocate(512)
    recorder.cut()
    assert recorder.finish().buckets == (ALLOCATED_BUCKETS.index(Bucket.PARAMETERS),)


# Emptied caches


def _emptying(batch_size: int) -> tuple[Timeline, SimulatedGpu]:
    gpu = simulated_gpu(unlimited=True)
    with simulate(gpu) as device:
        gpu.mark(0, Phase.BUILD)
        for step in (1, 2):
            gpu.mark(step, Phase.FORWARD)
            held = torch.empty(batch_size, 40 * MIB, dtype=torch.uint8, device=device)
            del held
            torch.get_device_module(device).empty_cache()
            held = torch.empty(batch_size, 36 * MIB, dtype=torch.uint8, device=device)
            del held
        timeline = gpu.finish()
    return timeline, gpu


def test_a_replay_empties_the_cache_where_the_program_did() -> None:
    traced = {batch_size: _emptying(batch_size) for batch_size in (2, 3, 5)}
    trace = AffineTrace.fit((2, traced[2][0]), (3, traced[3][0]))
    trace.check(5, traced[5][0])
    timeline, gpu = traced[5]
    replayed = replay(trace.at(5))
    assert replayed.peak_reserved_bytes == gpu.allocator.stats.peak_reserved_bytes == 5 * (36 + 40) * MIB
    assert [phase.reserved_bytes for phase in replayed.phases] == [0, 180 * MIB, 180 * MIB]
    assert replay(replace(timeline, emptied=())).phases[1].reserved_bytes == 200 * MIB


def test_a_trace_that_empties_its_cache_elsewhere_is_another_program() -> None:
    (first, _), (second, _) = _emptying(2), _emptying(3)
    with pytest.raises(NotAffine):
        AffineTrace.fit((2, first), (3, replace(second, emptied=(0,))))


@given(st.data())
def test_the_order_of_releases_between_two_allocations_changes_nothing(data: st.DataObject) -> None:
    recorder, held, ends = TimelineRecorder(), [], [0]
    for step in range(data.draw(st.integers(1, 4))):
        recorder.mark(step, Phase.FORWARD)
        for size in data.draw(st.lists(st.integers(1, 30 * MIB), max_size=8)):
            held.append(recorder.allocate(size))
        ends.append(len(recorder.finish().events))
        for number in data.draw(st.lists(st.sampled_from(held), unique=True)) if held else ():
            held.remove(number)
            recorder.release(number)
        ends.append(len(recorder.finish().events))
    run = recorder.finish()
    parts = [run.events[start:end] for start, end in pairwise(ends)]
    parts[1::2] = [tuple(data.draw(st.permutations(released))) for released in parts[1::2]]
    other = replace(run, events=tuple(chain.from_iterable(parts)))
    assert run.is_alike(other)
    assert replay(other) == replay(run)
    assert AffineTrace.constant(run).holds(1, other)
