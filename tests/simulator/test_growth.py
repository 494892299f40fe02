"""Growth of each step, found in a run's timeline."""

from __future__ import annotations

import pytest

from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.simulator.allocator.growing import KeptBySteps, growth, kept_from
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.step import Phase, Site

LOSS = Site("aten.add", "head", "train.py:9")
BUFFER = Site("aten.zeros", "", "train.py:3")


def run(kept_bytes: tuple[int, ...], *, bucket: Bucket | None = None, once_bytes: int = 0) -> Timeline:
    """Steps that each keep so much, and in the second one a buffer that stays."""
    recorder = TimelineRecorder()
    for step, size_bytes in enumerate(kept_bytes, 1):
        recorder.mark(step, Phase.BATCH)
        recorder.mark(step, Phase.FORWARD)
        released = recorder.allocate(8 * MIB, site=LOSS)
        if size_bytes:
            recorder.allocate(size_bytes, site=LOSS, bucket=bucket)
        if once_bytes and step == 2:
            recorder.allocate(once_bytes, site=BUFFER)
        recorder.mark(step, Phase.BACKWARD)
        recorder.release(released)
    return recorder.finish()


def prefetched() -> Timeline:
    """Steps that each load the batch of the next, and release their own as that is begun."""
    recorder = TimelineRecorder()
    batches = [recorder.allocate(8 * MIB, site=BUFFER)]
    for step in (1, 2, 3):
        recorder.mark(step, Phase.FORWARD)
        batches.append(recorder.allocate(8 * MIB, site=BUFFER))
        if step > 1:
            recorder.release(batches[step - 2])
    return recorder.finish()


def larger_each_time() -> Timeline:
    """Steps whose batch is larger than the last, which is released as the next has taken its name."""
    recorder = TimelineRecorder()
    last = recorder.allocate(8 * MIB, site=BUFFER)
    for step in (1, 2, 3, 4):
        recorder.mark(step, Phase.FORWARD)
        batch = recorder.allocate((8 + step) * MIB, site=BUFFER)
        recorder.release(last)
        last = batch
    return recorder.finish()


def test_what_every_step_keeps_is_told_with_its_place() -> None:
    grown = growth(run((3 * MIB,) * 3))
    assert grown == KeptBySteps(3 * MIB, LOSS)
    assert grown.place == "train.py:9 in head"


def test_what_keeps_is_looked_for_in_what_an_earlier_step_has_left() -> None:
    """The last step's own is held by variables that the next one would take."""
    assert kept_from(run((3 * MIB,) * 4), LOSS) == [4, 6]
    assert kept_from(run((3 * MIB,) * 4), BUFFER) == []


@pytest.mark.parametrize(
    "timeline",
    [
        run((0, 0, 0)),
        run((512, 512, 512)),
        run((8 * MIB, 0, 0)),
        run((0, 0, 0), once_bytes=8 * MIB),
        run((8 * MIB, 8 * MIB)),
        run((8 * MIB,) * 3, bucket=Bucket.OPTIMIZER),
        TimelineRecorder().finish(),
        prefetched(),
        larger_each_time(),
    ],
    ids=[
        "nothing",
        "losses",
        "what the first step makes",
        "a buffer made once",
        "too few steps",
        "state",
        "empty",
        "a batch loaded ahead",
        "larger each time",
    ],
)
def test_what_does_not_grow(timeline: Timeline) -> None:
    assert growth(timeline) is None
