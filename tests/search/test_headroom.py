"""Which batch leaves the headroom free, by trial and by trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import GIB, MIB, Bucket, Unknown
from gpumem_tui.run.events import TrialDone
from gpumem_tui.search.config import Room
from gpumem_tui.search.report import headroom_line
from gpumem_tui.search.verdict import WithHeadroom, with_headroom
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.timeline import Timeline
from tests.search.traces import CONTEXT_BYTES, traced, training

A100 = find_gpu("a100-80gb")
WHOLE = Room(A100, None)


def timeline(batch_size: int) -> Timeline:
    return training({Bucket.PARAMETERS: 512 * MIB, Bucket.ACTIVATIONS: 1200 * MIB * batch_size}, layers=12)


TRACED = traced(AffineTrace.fit((2, timeline(2)), (3, timeline(3))), A100)
UNKNOWN = Unknown("the step cannot be traced")


def ran(batch_size: int, reserved_bytes: int) -> TrialDone:
    return TrialDone(
        batch_size, "fit", reserved_bytes, reserved_bytes, reserved_bytes + CONTEXT_BYTES, None, "", 1.0, 3
    )


def largest_that_ran() -> TrialDone:
    largest = TRACED.max_batch_size
    assert isinstance(largest, int)
    return ran(largest, TRACED.at(largest).peak_reserved_bytes)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.35, 0.9])
@pytest.mark.parametrize("limit_bytes", [None, 40 * GIB])
def test_the_trace_answers_for_sizes_that_no_trial_ran(share: float, limit_bytes: int | None) -> None:
    room = Room(A100, limit_bytes)
    last = largest_that_ran()
    found = with_headroom(room, share, TRACED, [last], last.batch_size)
    assert found is not None

    def left(size: int) -> int:
        reserved = TRACED.at(size).peak_reserved_bytes
        whole = A100.cuda_total_bytes - CONTEXT_BYTES - reserved
        return whole if limit_bytes is None else min(whole, limit_bytes - reserved)

    wanted = share * (limit_bytes or A100.total_bytes)
    assert found.known_by == "trace"
    assert left(found.batch_size) == found.free_bytes >= wanted > left(found.batch_size + 1)


def test_the_largest_that_leaves_it_is_known_by_its_own_trial() -> None:
    found = with_headroom(WHOLE, 0.1, TRACED, [ran(9, 40 * GIB)], 9)
    assert found == WithHeadroom(0.1, 9, A100.cuda_total_bytes - 40 * GIB - CONTEXT_BYTES, "trial")
    assert headroom_line(found) == "batch 9 leaves the headroom of 10 % free, too: 38.73 GiB, as it ran"


def test_without_a_trace_for_every_size_the_trials_answer() -> None:
    results = [ran(4, 30 * GIB), ran(8, 60 * GIB), ran(12, 78 * GIB), replace(ran(13, 10 * GIB), outcome="oom")]
    for trace in (UNKNOWN, replace(TRACED, done=replace(TRACED.done, only_at=12, not_affine="grows unevenly"))):
        found = with_headroom(WHOLE, 0.1, trace, results, 12)
        assert found is not None
        assert (found.batch_size, found.known_by) == (8, "trial")
    assert with_headroom(WHOLE, 0.1, UNKNOWN, results[2:], 12) is None


def test_a_headroom_that_one_sample_does_not_leave() -> None:
    last = largest_that_ran()
    found = with_headroom(WHOLE, 0.98, TRACED, [last], last.batch_size)
    assert found is not None
    assert headroom_line(found) == "no batch leaves the headroom of 98 % free, by trace"


def test_without_a_headroom_or_a_batch_there_is_nothing_to_say() -> None:
    assert with_headroom(WHOLE, 0.0, TRACED, [ran(9, 40 * GIB)], 9) is None
    assert with_headroom(WHOLE, 0.1, TRACED, [], 0) is None
