"""The timeline of a run on a real GPU, from a history as CUDA's allocator writes it."""

from __future__ import annotations

from typing import Any

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket
from gpumem_tui.run.cuda_recorder import merge
from gpumem_tui.simulator.allocator.replay import replay
from gpumem_tui.simulator.allocator.timeline import Mark, Timeline
from gpumem_tui.step import Phase
from gpumem_tui.step.cuda_history import HistoryNote

CHECKPOINT = {"filename": "/env/lib/python3.11/site-packages/torch/utils/checkpoint.py", "line": 1, "name": "f"}
MODEL = {"filename": "/home/user/model.py", "line": 12, "name": "forward"}


def entry(action: str, address: int, size: int, time_us: int, *frames: dict[str, Any]) -> dict[str, Any]:
    """One entry of `torch.cuda.memory._snapshot()["device_traces"]`."""
    return {"action": action, "addr": address, "size": size, "time_us": time_us, "stream": 0, "frames": list(frames)}


def made(address: int, size: int, time_us: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return entry("alloc", address, size, time_us, *frames)


def gone(address: int, size: int, time_us: int) -> list[dict[str, Any]]:
    return [entry("free_requested", address, size, time_us), entry("free_completed", address, size, time_us)]


def buckets(timeline: Timeline) -> list[Bucket]:
    return [ALLOCATED_BUCKETS[index] for index in timeline.buckets]


def test_a_step_is_told_by_its_notes() -> None:
    history = [
        entry("segment_alloc", 0x1000, 2 << 20, 10),
        made(0x1000, 400, 11),
        made(0x2000, 1000, 21),
        made(0x3000, 600, 31, MODEL),
        made(0x4000, 700, 32, MODEL),
        *gone(0x4000, 700, 33),
        made(0x5000, 400, 41),
        *gone(0x3000, 600, 42),
        made(0x6000, 800, 51),
        *gone(0x5000, 400, 60),
        *gone(0x2000, 1000, 61),
    ]
    notes = [
        HistoryNote(0, phase=Phase.BUILD, step=0),
        HistoryNote(1, bucket=Bucket.PARAMETERS, addresses=(0x1000, 0xDEAD)),
        HistoryNote(1, phase=Phase.BATCH, step=1),
        HistoryNote(2, bucket=Bucket.BATCH_DATA, addresses=(0x2000,)),
        HistoryNote(2, phase=Phase.FORWARD, step=1),
        HistoryNote(5, phase=Phase.BACKWARD, step=1),
        HistoryNote(7, phase=Phase.OPTIMIZER, step=1),
        HistoryNote(7, bucket=Bucket.GRADIENTS, addresses=(0x5000,)),
        HistoryNote(8, bucket=Bucket.OPTIMIZER, addresses=(0x6000,)),
    ]
    timeline = merge(history, notes)
    assert timeline.events == (1, 2, 3, 4, -4, 5, -3, 6, -5, -2)
    assert timeline.sizes == (400, 1000, 600, 700, 400, 800)
    assert buckets(timeline) == [
        Bucket.PARAMETERS,
        Bucket.BATCH_DATA,
        Bucket.ACTIVATIONS,
        Bucket.TEMPORARY,
        Bucket.GRADIENTS,
        Bucket.OPTIMIZER,
    ]
    assert timeline.marks == (
        Mark(0, 0, Phase.BUILD),
        Mark(1, 1, Phase.BATCH),
        Mark(2, 1, Phase.FORWARD),
        Mark(5, 1, Phase.BACKWARD),
        Mark(7, 1, Phase.OPTIMIZER),
    )
    assert replay(timeline).peak_allocated_bytes == 512 + 1024 + 1024 + 1024


def test_a_note_follows_the_allocations_that_it_counted() -> None:
    timeline = merge([made(0x1000, 400, 10)], [HistoryNote(1, bucket=Bucket.PARAMETERS, addresses=(0x1000,))])
    assert buckets(timeline) == [Bucket.PARAMETERS]


def test_an_address_used_again_is_another_allocation() -> None:
    history = [made(0x1000, 400, 10), *gone(0x1000, 400, 20), made(0x1000, 900, 30)]
    notes = [
        HistoryNote(1, bucket=Bucket.BATCH_DATA, addresses=(0x1000,)),
        HistoryNote(3, bucket=Bucket.OPTIMIZER, addresses=(0x1000,)),
    ]
    timeline = merge(history, notes)
    assert timeline.sizes == (400, 900)
    assert buckets(timeline) == [Bucket.BATCH_DATA, Bucket.OPTIMIZER]


def test_a_forward_repeated_in_backward_makes_activations() -> None:
    history = [
        made(0x1000, 512, 10, MODEL, CHECKPOINT),
        *gone(0x1000, 512, 11),
        made(0x2000, 512, 20, MODEL, CHECKPOINT),
        made(0x3000, 512, 21, MODEL),
        *gone(0x2000, 512, 22),
        *gone(0x3000, 512, 23),
    ]
    notes = [HistoryNote(0, phase=Phase.FORWARD, step=1), HistoryNote(2, phase=Phase.BACKWARD, step=1)]
    assert buckets(merge(history, notes)) == [Bucket.TEMPORARY, Bucket.ACTIVATIONS, Bucket.TEMPORARY]


def test_the_run_ends_where_memory_was_out() -> None:
    history = [
        made(0x1000, 512, 10),
        entry("oom", 0, 1 << 40, 20),
        *gone(0x1000, 512, 21),
        made(0x2000, 512, 22),
    ]
    timeline = merge(history, [HistoryNote(0, phase=Phase.FORWARD, step=1)], failed=True)
    assert timeline.events == (1,)
    assert buckets(timeline)[0] is Bucket.ACTIVATIONS


def test_what_was_there_before_the_recording_is_passed_over() -> None:
    timeline = merge([*gone(0x1000, 512, 10), made(0x2000, 512, 11)], [])
    assert timeline.events == (1,)
    assert timeline.sizes == (512,)


def test_gradients_of_a_reentrant_checkpoints_own_backward_are_no_activations() -> None:
    engine = {"filename": "/env/lib/python3.11/site-packages/torch/autograd/graph.py", "line": 1, "name": "f"}
    history = [made(0x1000, 512, 10, engine, CHECKPOINT), *gone(0x1000, 512, 11)]
    assert buckets(merge(history, [HistoryNote(0, phase=Phase.BACKWARD, step=1)])) == [Bucket.TEMPORARY]


def test_an_out_of_memory_that_the_run_survives_cuts_nothing() -> None:
    history = [made(0x1000, 512, 10), entry("oom", 0, 1 << 40, 20), made(0x2000, 512, 22)]
    assert merge(history, [HistoryNote(0, phase=Phase.FORWARD, step=1)]).events == (1, 2)


def test_what_a_module_has_made_is_no_data_though_another_one_takes_it() -> None:
    called = {
        "filename": "/env/lib/python3.11/site-packages/torch/nn/modules/module.py",
        "line": 1,
        "name": "_call_impl",
    }
    history = [made(0x1000, 512, 10, MODEL, called), made(0x2000, 512, 11, MODEL), *gone(0x1000, 512, 12)]
    notes = [
        HistoryNote(0, phase=Phase.FORWARD, step=1),
        HistoryNote(2, bucket=Bucket.BATCH_DATA, addresses=(0x1000, 0x2000)),
        HistoryNote(2, phase=Phase.BACKWARD, step=1),
    ]
    assert buckets(merge(history, notes)) == [Bucket.ACTIVATIONS, Bucket.BATCH_DATA]


def test_what_is_made_before_a_step_and_held_in_it_is_data() -> None:
    """Labels, which no module takes; not what is kept for good, nor what is gone before forward."""
    history = [made(0x1000, 512, 10), made(0x2000, 512, 11), made(0x3000, 512, 12), *gone(0x3000, 512, 13)]
    history += [*gone(0x1000, 512, 14), made(0x4000, 512, 15)]
    notes = [
        HistoryNote(0, phase=Phase.BATCH, step=1),
        HistoryNote(4, phase=Phase.FORWARD, step=1),
        HistoryNote(5, phase=Phase.BATCH, step=2),
        HistoryNote(6, phase=Phase.FORWARD, step=2),
    ]
    kinds = [Bucket.BATCH_DATA, Bucket.OTHER, Bucket.TEMPORARY, Bucket.BATCH_DATA]
    assert buckets(merge(history, notes)) == kinds
