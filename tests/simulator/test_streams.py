"""Streams: pools of their own, and memory that another stream uses, in a trace and in its replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import MIB
from gpumem_tui.run.events import TraceDone, decode_event, encode
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.replay import AffineTrace, NotAffine, replay
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.simulator.device.gpu import SimulatedGpu
from gpumem_tui.snapshots.recording import record, snapshot
from gpumem_tui.step import Phase
from tests.in_process import as_cuda

SIZE = 40 * MIB


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    """The GPU as a program on it finds it."""
    shape = find_gpu("a100-80gb")
    simulated = SimulatedGpu(shape, profile_for(torch.__version__, shape))
    with as_cuda(simulated):
        yield simulated


def make() -> torch.Tensor:
    return torch.empty(SIZE, dtype=torch.uint8, device="cuda")


def reserved() -> int:
    """How many tensors' memory the device holds."""
    return torch.cuda.memory_reserved() // SIZE


def test_what_a_stream_frees_serves_no_other(gpu: SimulatedGpu) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        make()
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != side
    make()
    assert reserved() == 2
    with side:
        make()
    torch.cuda.set_stream(side)
    make()
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert reserved() == 2
    assert replay(gpu.finish()).peak_reserved_bytes == 2 * SIZE


def test_there_are_32_streams_of_a_priority(gpu: SimulatedGpu) -> None:
    made = [torch.cuda.Stream() for _ in range(33)]
    assert len(set(made)) == 32
    assert made[32] == made[0]
    assert torch.cuda.Stream(priority=-1) not in made


def waits(how: str) -> None:
    """Ways to wait for what the GPU does."""
    if how == "synchronize":
        torch.cuda.synchronize()
    elif how == "event":
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    elif how == "stream":
        torch.cuda.current_stream().synchronize()
    elif how == "value":
        torch.ones(1, device="cuda").item()
    elif how == "copy":
        torch.ones(1).to("cuda")


@pytest.mark.parametrize("how", ["synchronize", "event", "stream", "value", "copy"])
def test_what_another_stream_uses_serves_again_once_that_was_waited_for(gpu: SimulatedGpu, how: str) -> None:
    side = torch.cuda.Stream()
    used = make()
    used.record_stream(side)
    del used
    stats = torch.cuda.memory_stats()
    assert torch.cuda.memory_allocated() == 0
    assert stats["active_bytes.all.current"] == SIZE
    make()
    assert reserved() == 2
    waits(how)
    kept = [make(), make()]
    assert reserved() == len(kept)
    assert replay(gpu.finish()).peak_reserved_bytes == torch.cuda.max_memory_reserved()


def test_who_waits_for_an_earlier_event_does_not_know_of_it(gpu: SimulatedGpu) -> None:
    event = torch.cuda.Event()
    event.record()
    used = make()
    used.record_stream(torch.cuda.Stream())
    del used
    event.synchronize()
    torch.ones(1).to("cuda", non_blocking=True)
    make()
    assert reserved() == 2


def test_its_own_stream_s_use_is_no_reason_to_wait(gpu: SimulatedGpu) -> None:
    used = make()
    used.record_stream(torch.cuda.current_stream())
    del used
    make()
    assert reserved() == 1


def test_a_program_that_never_waits_is_never_further_ahead_than_launches_are_queued(gpu: SimulatedGpu) -> None:
    side = torch.cuda.Stream()
    for _ in range(8):
        with torch.cuda.stream(side):
            batch = make()
        batch.record_stream(torch.cuda.current_stream())
        del batch
        for _ in range(600):
            torch.empty(1, device="cuda")
    assert reserved() == 2


def test_memory_that_runs_short_waits_for_all_streams(gpu: SimulatedGpu) -> None:
    used = [make(), make()]
    for tensor in used:
        tensor.record_stream(torch.cuda.Stream())
    del used, tensor
    made = [make(), make()]
    assert reserved() == 4
    timeline = gpu.finish()
    assert replay(timeline, len(made) * SIZE).fits
    assert not replay(timeline, len(made) * SIZE - 1).fits


def test_backward_runs_on_the_stream_that_forward_ran_on(gpu: SimulatedGpu) -> None:
    weight = torch.ones(1024, 1024, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        product = torch.ones(1024, 1024, device="cuda") @ weight
    loss = (product * 3).sum()
    gpu.mark(1, Phase.BACKWARD)
    loss.backward()
    timeline = gpu.finish()
    operators = [timeline.site_table[site].operator for site in timeline.sites]
    made = range(sum(number > 0 for number in timeline.events[: timeline.marks[-1].event]), len(timeline.sizes))
    assert {timeline.streams[index] for index in made if operators[index] == "aten.mm"} == {side.stream_id}
    assert {timeline.streams[index] for index in made if operators[index] == "aten.mul"} == {0}


def prefetched(size_bytes: int = SIZE, stream: int = 3) -> Timeline:
    """A run with a batch of another stream, whose memory is used on when the next is taken."""
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    recorder.allocate(SIZE)
    recorder.mark(1, Phase.FORWARD)
    first = recorder.allocate(size_bytes, stream=stream)
    recorder.release_in_use(first)
    recorder.allocate(size_bytes, stream=stream)
    recorder.complete(first)
    recorder.allocate(size_bytes, stream=stream)
    return recorder.finish()


def test_streams_survive_the_affine_form_and_the_wire() -> None:
    fitted = AffineTrace.fit((1, prefetched(MIB)), (2, prefetched(2 * MIB)))
    done = decode_event(encode(TraceDone(fitted, 0.1)))
    assert isinstance(done, TraceDone)
    assert done.trace == fitted
    assert done.trace.at(40) == prefetched(40 * MIB)
    replayed = replay(done.trace.at(40))
    assert replayed.peak_reserved_bytes == 3 * SIZE
    assert replayed.peak_allocated_bytes == 3 * SIZE


def test_runs_on_other_streams_are_other_runs() -> None:
    with pytest.raises(NotAffine, match="allocates differently"):
        AffineTrace.fit((1, prefetched(MIB)), (2, prefetched(2 * MIB, stream=4)))


def test_a_snapshot_has_streams_and_what_waits_for_them() -> None:
    recorder = TimelineRecorder()
    recorder.mark(1, Phase.FORWARD)
    recorder.allocate(SIZE)
    recorder.release_in_use(recorder.allocate(SIZE, stream=3))
    used = recorder.allocate(SIZE, stream=3)
    recorder.release_in_use(used)
    recorder.complete(used)
    recorder.allocate(SIZE)
    body: dict[str, Any] = snapshot(record(recorder.finish()))
    actions = [(entry["action"], entry["stream"]) for entry in body["device_traces"][0]]
    assert actions == [
        ("segment_alloc", 0), ("alloc", 0),
        ("segment_alloc", 3), ("alloc", 3), ("free_requested", 3),
        ("segment_alloc", 3), ("alloc", 3), ("free_requested", 3), ("free_completed", 3),
        ("segment_alloc", 0), ("alloc", 0),
    ]  # fmt: skip
    states = {(segment["stream"], segment["blocks"][0]["state"]) for segment in body["segments"]}
    assert states == {(0, "active_allocated"), (3, "active_pending_free"), (3, "inactive")}
    waiting = next(segment for segment in body["segments"] if segment["active_size"] > segment["allocated_size"])
    assert (waiting["allocated_size"], waiting["active_size"], waiting["requested_size"]) == (0, SIZE, SIZE)
