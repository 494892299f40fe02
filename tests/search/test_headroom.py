"""Which batch leaves the headroom free, by trial and by trace."""

from __future__ import annotations

import math
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
    """As in `predict` and `plan`: the largest that fits in the rest of the memory, its cache given back."""
    room, trace = Room(A100, limit_bytes), replace(TRACED, allowed_bytes=limit_bytes)
    wanted = math.ceil(share * room.total_bytes)
    last = largest_that_ran()
    found = with_headroom(room, share, trace, [last], last.batch_size)
    assert found is not None
    assert found.known_by == "trace"
    assert found.free_bytes >= wanted
    assert trace.fits_leaving(found.batch_size, wanted)
    assert not trace.fits_leaving(found.batch_size + 1, wanted)


def test_the_largest_that_leaves_it_is_known_by_its_own_trial() -> None:
    found = with_headroom(WHOLE, 0.1, TRACED, [ran(9, 40 * GIB)], 9)
    assert found == WithHeadroom(0.1, 9, A100.cuda_total_bytes - 40 * GIB - CONTEXT_BYTES, "trial")
    assert headroom_line(found, WHOLE.total_bytes) == "batch 9 keeps 10 % free (38.73 GiB left in its trial)"


def test_more_than_the_share_is_not_called_the_share() -> None:
    """Where sizes are not known the batch keeps the share with them at their most, and leaves more as expected."""
    found, tried = (WithHeadroom(0.1, 1917, 7 * GIB, known_by) for known_by in ("trace", "trial"))
    line = "batch 1,917 keeps 10 % free (7.00 GiB if unknown sizes are as expected)"
    assert headroom_line(found, 12 * GIB) == line
    assert headroom_line(tried, 12 * GIB).endswith("free (7.00 GiB left in its trial)")


def test_without_a_trace_for_every_size_the_trials_answer() -> None:
    results = [ran(4, 30 * GIB), ran(8, 60 * GIB), ran(12, 78 * GIB), replace(ran(13, 10 * GIB), outcome="oom")]
    one_size = replace(TRACED, done=replace(TRACED.done, only_at=12, not_affine="grows unevenly"))
    for trace in (UNKNOWN, one_size):
        found = with_headroom(WHOLE, 0.1, trace, results, 12)
        assert found is not None
        assert (found.batch_size, found.known_by) == (8, "trial")
    assert with_headroom(WHOLE, 0.1, UNKNOWN, results[2:], 12) is None


def test_a_headroom_that_one_sample_does_not_leave() -> None:
    last = largest_that_ran()
    found = with_headroom(WHOLE, 0.98, TRACED, [last], last.batch_size)
    assert found is not None
    assert headroom_line(found, WHOLE.total_bytes) == "no batch keeps 98 % free"


def test_without_a_headroom_or_a_batch_there_is_nothing_to_say() -> None:
    assert with_headroom(WHOLE, 0.0, TRACED, [ran(9, 40 * GIB)], 9) is None
    assert with_headroom(WHOLE, 0.1, TRACED, [], 0) is None
