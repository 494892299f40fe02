"""How far a command's run has come, as it is reported while it continues."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest

from gpumem_tui.run.events import Sample
from gpumem_tui.run.micro_batches import HowFar, MicroBatches
from gpumem_tui.search.words import how_far


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _step(pace: MicroBatches, clock: _Clock, micro_batches: int, each_s: float) -> list[HowFar]:
    """Run a step; return where it was as each micro-batch began."""
    found = []
    for _ in range(micro_batches):
        pace.begin_micro_batch()
        found.append(pace.now())
        clock.now_s += each_s
    pace.end_step()
    return found


def test_the_first_step_tells_how_many_micro_batches_the_next_ones_have() -> None:
    clock = _Clock()
    pace = MicroBatches(3, clock)
    first, second = _step(pace, clock, 4, 10.0), _step(pace, clock, 4, 10.0)
    assert [(one.micro_batch, one.micro_batches, one.left_s) for one in first] == [(n, 0, None) for n in (1, 2, 3, 4)]
    assert second[0] == HowFar(1, 4, 40.0, 80.0)
    assert second[3] == HowFar(4, 4, 70.0, 50.0)


def test_what_is_answered_from_memory_makes_the_rest_shorter() -> None:
    clock = _Clock()
    pace = MicroBatches(3, clock)
    _step(pace, clock, 8, 10.0)
    assert _step(pace, clock, 8, 1.0)[7].left_s == pytest.approx(9.0)


@pytest.mark.parametrize("place", ["a variable", "args", "self.args"])
def test_what_the_program_says_of_its_micro_batches_is_known_in_the_first_step(place: str) -> None:
    def train(self: object = None, args: object = None, gradient_accumulation_steps: object = None) -> list[HowFar]:
        clock = _Clock()
        return _step(MicroBatches(1, clock), clock, 3, 2.0)

    said = SimpleNamespace(gradient_accumulation_steps=32)
    found = {
        "a variable": lambda: train(gradient_accumulation_steps=32),
        "args": lambda: train(args=said),
        "self.args": lambda: train(self=SimpleNamespace(args=said)),
    }[place]()
    assert [one.micro_batches for one in found] == [32, 32, 32]
    assert found[2].left_s == pytest.approx(60.0)


def test_looking_at_a_programs_variables_keeps_none_of_them() -> None:
    class Batch:
        """The replacements of a step."""

    batch = Batch()
    first = weakref.ref(batch)
    MicroBatches(3).begin_micro_batch()
    batch = Batch()
    assert first() is None
    assert isinstance(batch, Batch)


def test_a_step_that_has_more_than_was_said_is_counted_alone() -> None:
    gradient_accumulation_steps = 2
    clock = _Clock()
    found = _step(MicroBatches(1, clock), clock, 3, 2.0)
    assert [one.micro_batches for one in found] == [gradient_accumulation_steps, 2, 0]


def test_the_words() -> None:
    sample = Sample(0, "backward", 0, 0, {}, HowFar(3, 32, 12.4, 90.2))
    assert how_far(sample) == "step 1 backward, micro-batch 3 of 32, 12 s, about 90 s left"
    assert how_far(Sample(2, "forward", 0, 0, {})) == "step 2 forward"
    assert how_far(Sample(0, "forward", 0, 0, {}, HowFar(2, 0, 5.0))) == "step 1 forward, micro-batch 2, 5 s"
    assert how_far(Sample(1, "forward", 0, 0, {}, HowFar(1, 1, 0.5, 0.2))) == "step 2 forward"
