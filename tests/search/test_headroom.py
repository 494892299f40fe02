"""Which batch leaves the headroom free: before the trials and after them, by trace and by trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB, MIB, Bucket, Range, Unknown
from gpumem_tui.plan.answers import TracedAnswer
from gpumem_tui.run.events import TrialDone
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.prediction import Prediction, Traced
from gpumem_tui.search.report import headroom_line
from gpumem_tui.search.strategy import Sizes
from gpumem_tui.search.verdict import WithHeadroom, with_headroom
from gpumem_tui.simulator.allocator.replay import AffineTrace, NotAffine, replay
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.step import Phase
from gpumem_tui.workload.spec import WorkloadSpec
from tests.plan.plans import GPT2
from tests.search.traces import CONTEXT_BYTES, convolving, traced, training

A100 = find_gpu("a100-80gb")


def timeline(batch_size: int) -> Timeline:
    return training({Bucket.PARAMETERS: 512 * MIB, Bucket.ACTIVATIONS: 1200 * MIB * batch_size}, layers=12)


def caching(batch_size: int) -> Timeline:
    """A step whose last request finds none of ten freed blocks large enough: as much lies in the cache as is live."""
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    recorder.allocate(512 * MIB, bucket=Bucket.PARAMETERS)
    recorder.mark(1, Phase.FORWARD)
    for number in [recorder.allocate(64 * MIB * batch_size, bucket=Bucket.ACTIVATIONS) for _ in range(10)]:
        recorder.release(number)
    recorder.release(recorder.allocate(640 * MIB * batch_size, bucket=Bucket.TEMPORARY))
    return recorder.finish()


TRACED = traced(AffineTrace.fit((2, timeline(2)), (3, timeline(3))), A100)
CACHING = traced(AffineTrace.fit((2, caching(2)), (3, caching(3))), A100)
EVERY = Sizes()
UNKNOWN = Unknown("the step cannot be traced")
ALONE = replace(TRACED, done=replace(TRACED.done, only_at=12, not_affine="grows unevenly"))


def config(share: float = 0.1, limit_bytes: int | None = None, *, simulated: bool = False) -> SearchConfig:
    device = Device(A100, simulated=simulated)
    return SearchConfig(WorkloadSpec(Recipe(), file="train.py"), device, headroom=share, limit_bytes=limit_bytes)


def prediction(searched: SearchConfig, found: Traced | Unknown) -> Prediction:
    capped = replace(found, allowed_bytes=searched.limit_bytes) if isinstance(found, Traced) else found
    return Prediction(searched.formula, capped)


def after(
    searched: SearchConfig, found: Traced | Unknown, results: Sequence[TrialDone], largest: int, taken: Sizes = EVERY
) -> WithHeadroom | None:
    return with_headroom(searched, prediction(searched, found), results, largest, taken)


def ran(batch_size: int, reserved_bytes: int) -> TrialDone:
    return TrialDone(
        batch_size, "fit", reserved_bytes, reserved_bytes, reserved_bytes + CONTEXT_BYTES, None, "", 1.0, 3
    )


def simulated(found: Traced, batch_size: int) -> TrialDone:
    return ran(batch_size, found.at(batch_size).peak_reserved_bytes)


def largest_of(found: Traced) -> int:
    largest = found.expected_batch_size
    assert isinstance(largest, int)
    return largest


# Before the trials and after them


@pytest.mark.parametrize("found", [TRACED, CACHING])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.35, 0.9])
@pytest.mark.parametrize("limit_bytes", [None, 40 * GIB])
def test_a_simulated_search_says_before_its_trials_what_it_says_after_them(
    found: Traced, share: float, limit_bytes: int | None
) -> None:
    searched = config(share, limit_bytes, simulated=True)
    before = prediction(searched, found)
    assert isinstance(before.traced, Traced)
    largest = largest_of(before.traced)
    said = after(searched, found, [simulated(before.traced, size) for size in range(1, largest + 1)], largest)
    assert said is not None
    assert (said.batch_size, said.known_by) == (before.with_headroom, "trace")

    def left(size: int) -> int:
        reserved = replay(found.trace.at(size)).peak_reserved_bytes
        whole = A100.cuda_total_bytes - CONTEXT_BYTES - reserved
        return whole if limit_bytes is None else min(whole, limit_bytes - reserved)

    wanted = share * (limit_bytes or A100.total_bytes)
    assert left(said.batch_size) == said.free_bytes >= wanted > left(said.batch_size + 1)


_SIZES = st.fixed_dictionaries(
    {
        Bucket.PARAMETERS: st.integers(1, 2000),
        Bucket.ACTIVATIONS: st.integers(1, 900),
        Bucket.TEMPORARY: st.integers(1, 900),
        Bucket.GRADIENTS: st.integers(1, 2000),
    }
)
_GROW = (Bucket.ACTIVATIONS, Bucket.TEMPORARY)


@given(
    sizes=_SIZES,
    layers=st.integers(1, 7),
    interleaved=st.booleans(),
    share=st.sampled_from((0.01, 0.1, 0.3)),
    unsure_mib=st.integers(0, 300),
    threshold=st.sampled_from((0.0, 0.6)),
)
def test_what_is_predicted_to_leave_it_leaves_it_when_it_is_run(
    sizes: dict[Bucket, int], layers: int, interleaved: bool, share: float, unsure_mib: int, threshold: float
) -> None:
    def step(batch: int) -> Timeline:
        mib = {bucket: size * MIB * (batch if bucket in _GROW else 1) for bucket, size in sizes.items()}
        return training(mib, layers=layers, interleaved=interleaved)

    try:
        found = traced(AffineTrace.fit((2, step(2)), (3, step(3))), A100)
    except NotAffine:
        return
    context = Range(CONTEXT_BYTES - unsure_mib * MIB, CONTEXT_BYTES + unsure_mib * MIB)
    settings = AllocatorSettings(garbage_collection_threshold=threshold)
    found = replace(found, ready=replace(found.ready, context_range=context), settings=settings)
    searched = config(share, simulated=True)
    before = prediction(searched, found)
    size = before.with_headroom
    assert isinstance(size, int)
    planned = TracedAnswer(replace(GPT2, batch_size=max(1, size), headroom=share), found)
    assert planned.max_batch_size == size
    largest = largest_of(found)
    said = after(searched, found, [simulated(found, one) for one in {1, size, largest} - {0}], largest)
    assert said is not None
    assert (said.batch_size, planned.fits) == (size, size > 0)
    wanted = before.formula.headroom_bytes
    if size:
        capacity = A100.cuda_total_bytes - context.high_bytes
        run = replay(found.trace.at(size), capacity, settings)
        assert run.fits
        assert capacity - run.peak_reserved_bytes >= said.free_bytes >= wanted
        assert planned.free_range.low_bytes == said.free_bytes


def test_cache_that_is_given_back_only_when_memory_is_short_counts_as_used() -> None:
    leaving = prediction(config(), CACHING).with_headroom
    assert isinstance(leaving, int)
    in_nine_tenths = CACHING.capacity_bytes - A100.total_bytes // 10
    assert CACHING.fits(2 * leaving - 1, A100.total_bytes // 10)
    plan = replace(GPT2, headroom=0.1)
    answers = [
        TracedAnswer(replace(plan, batch_size=size), CACHING) for size in (leaving, leaving + 1, 2 * leaving + 2)
    ]
    assert [one.keeps_headroom for one in answers] == [True, False, False]
    assert [one.frees_cache for one in answers] == [False, True, False]
    assert 2 * 640 * MIB * leaving + 512 * MIB <= in_nine_tenths < 2 * 640 * MIB * (leaving + 1) + 512 * MIB
    collecting = replace(CACHING, settings=AllocatorSettings(garbage_collection_threshold=0.6))
    kept = collecting.max_batch_size_leaving(A100.total_bytes // 10)
    assert isinstance(kept, int)
    assert kept > leaving, "it is given back before memory is short"


def test_workspaces_that_may_be_tried_are_not_left_free() -> None:
    for tried_bytes in (0, 32 * MIB):
        found = traced(AffineTrace.fit(*((size, convolving(size, tried_bytes)) for size in (2, 3))), A100)
        size = prediction(config(), found).with_headroom
        assert isinstance(size, int)
        wanted = A100.total_bytes / 10
        assert found.free_range(size).low_bytes >= wanted > found.free_range(size + 1).low_bytes
        assert found.free_range(size).high_bytes > wanted + size * 64 * MIB


# Measured and predicted


def test_the_largest_that_leaves_it_is_known_by_its_own_trial() -> None:
    found = after(config(), TRACED, [ran(9, 40 * GIB)], 9)
    assert found == WithHeadroom(0.1, 9, A100.cuda_total_bytes - 40 * GIB - CONTEXT_BYTES, "trial")
    assert headroom_line(found) == "batch 9 leaves the headroom of 10 % free, too: 38.73 GiB, as it ran"


def test_what_was_measured_counts_more_than_what_the_trace_says_of_it() -> None:
    predicted = prediction(config(), TRACED).with_headroom
    assert isinstance(predicted, int)
    short, enough, last = 73 * GIB, 70 * GIB, ran(largest_of(TRACED), 78 * GIB)
    for results, said in (
        ([last], (predicted, "trace")),
        ([last, ran(predicted - 9, enough)], (predicted, "trace")),
        ([last, ran(predicted, short)], (predicted - 1, "trace")),
        ([last, ran(predicted, short), ran(predicted - 1, enough)], (predicted - 1, "trial")),
        ([last, ran(predicted + 2, enough)], (predicted + 2, "trial")),
    ):
        found = after(config(), TRACED, results, last.batch_size)
        assert found is not None
        assert (found.batch_size, found.known_by) == said


def test_of_sizes_that_the_step_takes_alone() -> None:
    found = after(config(), TRACED, [ran(66, 78 * GIB)], 66, Sizes(8))
    assert found is not None
    assert (found.batch_size, found.known_by) == (56, "trace")
    assert headroom_line(found).endswith(f"at least {found.free_bytes / GIB:.2f} GiB, by trace")


@pytest.mark.parametrize("is_simulated", [False, True])
def test_without_a_trace_for_every_size_the_trials_answer(is_simulated: bool) -> None:
    searched = config(simulated=is_simulated)
    results = [ran(4, 30 * GIB), ran(8, 60 * GIB), ran(12, 78 * GIB), replace(ran(13, 10 * GIB), outcome="oom")]
    for trace in (UNKNOWN, ALONE):
        found = after(searched, trace, results, 12)
        assert found is not None
        assert (found.batch_size, found.known_by) == (8, "trial")
    assert after(searched, UNKNOWN, results[2:], 12) is None


def test_a_headroom_that_one_sample_does_not_leave() -> None:
    found = after(config(0.98), TRACED, [simulated(TRACED, 67)], 67)
    assert found is not None
    assert headroom_line(found) == "no batch leaves the headroom of 98 % free, by trace"


def test_without_a_headroom_or_a_batch_there_is_nothing_to_say() -> None:
    assert after(config(0.0), TRACED, [ran(9, 40 * GIB)], 9) is None
    assert after(config(), TRACED, [], 0) is None
    assert prediction(config(0.0), TRACED).with_headroom == TRACED.max_batch_size


def test_a_batch_that_was_traced_alone_is_held_to_the_headroom_too() -> None:
    for share, kept in ((0.1, True), (0.9, False)):
        assert TracedAnswer(replace(GPT2, batch_size=12, headroom=share), ALONE).keeps_headroom is kept
