"""A step on a GPU from what its allocator writes down; the entries have the form of `torch.cuda.memory._snapshot`."""

from __future__ import annotations

from typing import Any

import torch

from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.probe.history import listed_as_kept
from gpumem_tui.probe.recorders import Segments, step_history
from gpumem_tui.probe.wire import KeptPlace
from gpumem_tui.step import Phase
from gpumem_tui.step.cuda_history import HistoryNote, HistoryNotes

WEIGHT, STATE, SMALL, LARGE = 0, 4096, 1 << 20, 1 << 30
SEGMENTS = [
    {
        "address": 0,
        "blocks": [
            {"address": WEIGHT, "size": 4096, "state": "active_allocated"},
            {"address": STATE, "size": 8192, "state": "active_allocated"},
            {"address": 12288, "size": 4096, "state": "active_allocated"},
            {"address": 16384, "size": 2 * MIB - 16384, "state": "inactive"},
        ],
    },
    {"address": LARGE, "blocks": [{"address": LARGE, "size": 20 * MIB, "state": "inactive"}]},
]
TRAIN = {"filename": "/home/user/train.py", "line": 30, "name": "step"}
MODEL = {"filename": "/home/user/model.py", "line": 12, "name": "forward"}
LINEAR = {"filename": "/env/torch/nn/modules/linear.py", "line": 125, "name": "forward"}
CHECKPOINT = {"filename": "/env/torch/utils/checkpoint.py", "line": 1, "name": "f"}


def made(address: int, size: int, time_us: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size, "time_us": time_us, "frames": list(frames)}


def gone(address: int, size: int, time_us: int) -> list[dict[str, Any]]:
    names = ("free_requested", "free_completed")
    return [{"action": name, "addr": address, "size": size, "time_us": time_us, "frames": []} for name in names]


TRACE = [
    made(16384, 1000, 1_100_000, TRAIN),  # the batch
    made(LARGE, 19 * MIB + MIB // 2, 1_200_000, LINEAR, MODEL),  # half a MiB is left, too little to split off
    made(17408, 2000, 1_300_000, LINEAR, MODEL),
    *gone(17408, 2000, 1_400_000),
    made(17408, 4096, 1_500_000),  # the gradient, made by autograd's own thread
    *gone(LARGE, 19 * MIB + MIB // 2, 1_600_000),
    made(21504, 512, 1_700_000, TRAIN),
    *gone(21504, 512, 1_800_000),
]
NOTES = [
    HistoryNote(0, bucket=Bucket.PARAMETERS, addresses=(WEIGHT, 0xDEAD)),
    HistoryNote(0, bucket=Bucket.OPTIMIZER, addresses=(STATE,)),
    HistoryNote(1, phase=Phase.FORWARD),
    HistoryNote(1, module="blocks.0"),
    HistoryNote(1, module="blocks.0.mlp"),
    HistoryNote(4, module=""),
    HistoryNote(4, phase=Phase.BACKWARD),
    HistoryNote(6, phase=Phase.OPTIMIZER),
    HistoryNote(8, bucket=Bucket.GRADIENTS, addresses=(17408,)),
]


def test_the_peak_is_exact_and_every_block_has_its_place() -> None:
    history = step_history(Segments(SEGMENTS, {}), TRACE, NOTES, started_us=1_000_000)
    device = history.result(0, "GPU-0")
    assert device.buckets == {
        "parameters": 4096,
        "optimizer": 8192,
        "other": 4096,
        "batch_data": 1024,
        "activations": 20 * MIB,
        "gradients": 4096,
    }
    assert device.peak_bytes == sum(device.buckets.values())
    assert device.peak_s == 0.5
    (activation,) = [row for row in device.held if row.bucket == "activations"]
    assert (activation.module, activation.source, activation.allocations) == ("blocks.0.mlp", "model.py:12", 1)
    assert device.phases == ((0.0, "batch"), (0.1, "forward"), (0.4, "backward"), (0.6, "optimizer"))
    assert history.live_bytes() == 4096 + 8192 + 4096 + 1024 + 4096


def test_without_phases_the_remainder_is_activations() -> None:
    """As in a compiled model, which must not be given hooks."""
    notes = [note for note in NOTES if note.phase is None and note.module is None]
    device = step_history(Segments(SEGMENTS, {}), TRACE, notes, phases_known=False).result(0, "")
    assert device.buckets["activations"] == 20 * MIB
    assert device.buckets["other"] == 4096 + 1024
    assert device.phases == ()


def test_compiled_code_has_the_line_that_calls_it_and_backward_is_told_apart() -> None:
    """Its own file is one that torch.compile wrote, which nobody can read."""
    written = {"filename": "/tmp/torchinductor_user/ab/cabc.py", "line": 77, "name": "call"}
    trace = [
        made(16384, 1000, 1, written, MODEL, TRAIN),
        made(20480, 512, 2, written, MODEL, TRAIN),
        *gone(20480, 512, 3),
        *gone(16384, 1000, 5),
    ]
    notes = [
        HistoryNote(0, phase=Phase.FORWARD),
        HistoryNote(3, phase=Phase.BACKWARD),
        HistoryNote(4, phase=Phase.FORWARD),
    ]
    device = step_history(Segments(SEGMENTS, {}), trace, notes).result(0, "")
    assert (device.buckets["activations"], device.buckets["temporary"]) == (1024, 512)
    assert {row.source for row in device.held if not row.before_step} == {"model.py:12"}


def test_a_forward_repeated_in_backward_makes_activations() -> None:
    trace = [made(16384, 5 * 512, 1, LINEAR, MODEL, CHECKPOINT), *gone(16384, 5 * 512, 2)]
    notes = [HistoryNote(0, phase=Phase.FORWARD), HistoryNote(0, phase=Phase.BACKWARD)]
    device = step_history(Segments(SEGMENTS, {}), trace, notes).result(0, "")
    assert device.buckets["activations"] == 5 * 512


def test_what_no_module_made_is_its_owners() -> None:
    """A gradient is made by autograd's own thread, and parameters were there before."""
    owners = ((WEIGHT, "blocks.0.mlp"), (17408, "blocks.0.mlp"), (0xDEAD, "gone"))
    trace = [made(16384, 1000, 1, TRAIN), made(17408, 4096, 2)]
    notes = [*NOTES[:2], HistoryNote(2, bucket=Bucket.GRADIENTS, addresses=(17408,)), HistoryNote(2, owners=owners)]
    history = step_history(Segments(SEGMENTS, {}), trace, notes)
    rows = history.result(0, "").held
    found = {(row.bucket, row.module, row.before_step) for row in rows}
    assert ("parameters", "blocks.0.mlp", True) in found
    assert ("gradients", "blocks.0.mlp", False) in found
    assert ("optimizer", "", True) in found


def test_much_is_listed_in_short() -> None:
    trace: list[dict[str, Any]] = []
    for index in range(3000):
        frame = {"filename": "/home/user/model.py", "line": index, "name": "f"}
        trace.append(made(16384 + 512 * index, 512, index, frame))
    device = step_history(Segments(SEGMENTS, {}), trace, []).result(0, "")
    assert len(device.held) < 2010
    assert sum(row.bytes for row in device.held) == device.peak_bytes == 16384 + 1_536_000
    assert len(device.timeline) <= 402
    assert max(live for _, live in device.timeline) == device.peak_bytes


def test_what_every_step_keeps() -> None:
    """A loss with its graph: the same line each time. Not a buffer made once, nor a batch that the next replaces."""
    other = {"filename": "/home/user/train.py", "line": 40, "name": "step"}
    trace: list[dict[str, Any]] = [made(16384, 512, 1, other)]
    notes = [*NOTES[:2]]
    events = 1
    for step in range(3):
        trace += [made(1 << 40 | step << 20, 2048, 2, TRAIN), made(2 << 40 | step << 20, 1024, 3, MODEL)]
        trace += [made(3 << 40 | step << 20, 4096, 3)]
        events += 3
        notes += [
            HistoryNote(events, bucket=Bucket.GRADIENTS, addresses=(3 << 40 | step << 20,)),
            HistoryNote(events, module=""),
        ]
        if step:
            trace += gone(2 << 40 | step - 1 << 20, 1024, 4)
            events += 1
        notes.append(HistoryNote(events, step_ends=True))
    history = step_history(Segments(SEGMENTS, {}), trace, notes)
    (row,) = listed_as_kept(0, history.kept())
    assert row == KeptPlace(device=0, operator="", module="", source="train.py:30", bytes=2048, allocations=1)


def test_before_cuda_is_initialized_there_are_no_events() -> None:
    """Trials begin right there: PyTorch's own answer is asked here, which has no figures by then."""
    notes = HistoryNotes(torch.device("cuda", 0))
    notes.add(phase=Phase.BUILD)
    assert [note.position for note in notes.notes] == [0]
