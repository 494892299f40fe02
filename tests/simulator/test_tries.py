"""A run without what it tried and had no memory for."""

from __future__ import annotations

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket
from gpumem_tui.simulator.allocator.timeline import TimelineRecorder
from gpumem_tui.simulator.allocator.tries import settled
from gpumem_tui.step import Phase


class _Run:
    """Records a run; allocations are named by their sizes."""

    def __init__(self) -> None:
        self.recorder = TimelineRecorder()
        self._numbers: dict[int, int] = {}

    def make(self, *sizes: int, bucket: Bucket | None = None) -> None:
        for size in sizes:
            self._numbers[size] = self.recorder.allocate(size, bucket=bucket)

    def release(self, *sizes: int) -> None:
        for size in sizes:
            self.recorder.release(self._numbers[size])

    def run_out(self, step: int = 1) -> None:
        self.recorder.cut()
        self.recorder.mark(step, Phase.BATCH)

    def settled(self, *, whole: tuple[int, ...] = ()) -> list[int]:
        """Sizes as they are made, and below zero as they are released."""
        found = settled(self.recorder.finish(), self.recorder.tries, whole)
        return [found.sizes[event - 1] if event > 0 else -found.sizes[-event - 1] for event in found.events]


def test_what_was_live_as_memory_ran_out_and_then_released_was_not_made() -> None:
    run = _Run()
    run.recorder.mark(0, Phase.BUILD)
    run.make(1, bucket=Bucket.PARAMETERS)
    run.make(2)
    run.release(2)  # before the try
    run.make(10, 11)
    run.recorder.mark(1, Phase.FORWARD)
    run.make(12, 13, 14)
    run.release(13)  # within it
    run.run_out()
    run.release(12, 11, 10)
    run.make(20)
    run.release(20, 14)  # 14 outlived the try
    assert run.settled() == [1, 2, -2, 14, 20, -20, -14]
    found = settled(run.recorder.finish(), run.recorder.tries)
    assert [(mark.event, mark.phase) for mark in found.marks] == [(0, Phase.BUILD), (4, Phase.BATCH)]
    assert found.emptied == (4,), "the allocator had given its cache back"


def test_a_step_before_stays_whatever_of_it_is_released() -> None:
    run = _Run()
    run.recorder.mark(1, Phase.FORWARD)
    run.make(5, bucket=Bucket.GRADIENTS)
    run.recorder.mark(2, Phase.BATCH)
    run.make(10)
    run.run_out(2)
    run.release(5, 10)
    run.make(20)
    assert run.settled() == [5, -5, 20]


def test_steps_of_a_batch_that_was_given_up_are_left_out_with_it() -> None:
    run = _Run()
    run.make(1, bucket=Bucket.PARAMETERS)
    run.make(10)
    run.recorder.mark(1, Phase.FORWARD)
    run.make(11)
    run.release(11, 10)
    run.make(2, bucket=Bucket.OPTIMIZER)
    run.recorder.mark(2, Phase.BATCH)
    run.make(12)
    run.run_out(2)
    run.release(12)
    run.make(20)
    assert run.settled() == [1, 10, 11, -11, -10, 2, 20]
    assert run.settled(whole=(0,)) == [1, 2, 20]


def test_a_model_that_is_given_up_takes_its_steps_with_it() -> None:
    run = _Run()
    run.make(1, bucket=Bucket.PARAMETERS)
    run.make(3)
    run.release(3)
    run.recorder.mark(2, Phase.BATCH)
    run.make(10)
    run.run_out(2)
    run.release(10, 1)
    run.make(4, bucket=Bucket.PARAMETERS)
    assert run.settled() == [4]
    assert ALLOCATED_BUCKETS[settled(run.recorder.finish(), run.recorder.tries).buckets[0]] is Bucket.PARAMETERS


def test_a_request_that_is_too_large_by_itself_leaves_all_as_it_was() -> None:
    run = _Run()
    run.make(1, 2)
    run.run_out()
    run.make(3)
    assert run.settled() == [1, 2, 3]
