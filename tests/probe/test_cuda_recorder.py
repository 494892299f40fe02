"""The probe's readings of CUDA in a process that uses it, and in one that does not: `tests.cuda_standin` is below."""

from __future__ import annotations

from typing import Any

import torch

from gpumem_tui.memory import MIB
from gpumem_tui.probe import allocator
from gpumem_tui.probe.oom import BlackBox, LastState
from gpumem_tui.probe.recorders import HistoryRecorder
from gpumem_tui.step import Phase
from tests.cuda_standin import Card, Machine, cuda_played
from tests.probe.looks import as_written

SECOND = "GPU-00000000-0000-0000-0000-0000000000b1"


def test_before_cuda_is_in_use_nothing_is_known_and_nothing_begins() -> None:
    with cuda_played():
        assert allocator.devices_in_use({0}) == []
        assert allocator.figures(0) == allocator.UNKNOWN
        assert not torch.cuda.is_initialized()


def test_a_step_on_the_second_gpu_is_its_own() -> None:
    with cuda_played(Machine([Card(), Card(SECOND)])) as cuda:
        cuda.allocate(3 * MIB, device=1)
        cuda.allocate(5 * MIB, device=0)
        cuda.allocate(5 * MIB, device=0)
        torch.cuda.set_device(1)
        assert allocator.devices_in_use({0, 1}) == [0, 1]
        recorder = HistoryRecorder({}, [0, 1], True, False)
        assert recorder.start() == ""
        recorder.enter(Phase.FORWARD)
        block = cuda.allocate(7 * MIB)
        recorder.enter(Phase.BACKWARD)
        cuda.allocators[1].free(block)
        recorder.end_step()
        first, second = recorder.result()
        recorder.stop()
        assert not cuda.most_entries
    assert recorder.unavailable == {}
    assert (first.device_uuid, first.buckets) == (Card().uuid, {"other": 10 * MIB})
    assert (second.device_uuid, second.buckets) == (SECOND, {"other": 3 * MIB, "activations": 7 * MIB})


def test_a_program_that_records_itself_is_left_alone() -> None:
    with cuda_played() as cuda:
        cuda.allocate(512)
        torch.cuda.memory._record_memory_history(max_entries=10)
        reason = HistoryRecorder({}, [0], True, False).start()
        assert (reason, cuda.most_entries) == ("the program records the allocator's history itself", 10)


def test_memory_that_runs_out_on_another_gpu_is_written_down_as_its() -> None:
    written: list[dict[str, Any]] = []
    box = BlackBox(
        lambda: LastState(1, {}, []), lambda found: written.append(as_written(found)), lambda *_: None, lambda do: do()
    )
    with cuda_played(Machine([Card(), Card(SECOND)])) as cuda:
        box.watch_allocator()
        assert not torch.cuda.is_initialized()
        cuda.allocate(512)
        cuda.try_workspace(1 << 50)
        assert [(one["device"], one["fatal"]) for one in written] == [(0, False)]
        box._last_at = 0.0
        try:
            cuda.allocate(1 << 50, device=1)
        except torch.OutOfMemoryError as error:
            box.process_failed(error, None)
    assert [(one["device"], one["device_uuid"]) for one in written[1:]] == [(1, SECOND)] * 2
    assert (written[-1]["fatal"], written[-1]["requested_bytes"], written[-1]["ooms"]) == (True, 1 << 50, 1)


def test_an_allocator_of_the_programs_own_begins_as_ever() -> None:
    box = BlackBox(lambda: LastState(1, {}, []), lambda _: None, lambda *_: None, lambda do: do())
    with cuda_played(Machine(backend="cudaMallocAsync")) as cuda:
        box.watch_allocator()
        cuda.allocate(512)
        assert cuda.observers == []
