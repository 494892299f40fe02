"""The timeline of a run on a real GPU, from the allocator's own history."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from gpumem_tui.errors import in_one_line, named
from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.timeline import Timeline, TimelineRecorder
from gpumem_tui.step import Phase
from gpumem_tui.step.cuda_history import HistoryNote, HistoryNotes, in_order, made_at
from gpumem_tui.step.run import Recorder
from gpumem_tui.step.walking import holding_memory

_MAX_ENTRIES = 2_000_000


class HistoryIncomplete(Exception):
    """The allocator's history does not cover the whole run; the message says why."""


class MemoryRecorder(Recorder, Protocol):
    """A simulated GPU, or a real one's allocator history."""

    def finish(self, failed: bool = False) -> Timeline: ...


def history_of(recorder: MemoryRecorder, *, failed: bool) -> tuple[Timeline | None, str]:
    """What a run allocated and released, or None and the reason why that is not known."""
    try:
        return recorder.finish(failed), ""
    except (HistoryIncomplete, RuntimeError) as error:
        return None, in_one_line(error) or named(error)


class CudaRecorder:
    """Records on one CUDA device; the counterpart of `SimulatedGpu`'s `mark`, `tag` and `finish`.

    Nothing here synchronizes or allocates on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._history = HistoryNotes(device)
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=_MAX_ENTRIES, device=device
        )

    def mark(self, step: int, phase: Phase) -> None:
        """From here on the run is in `phase` of `step`."""
        self._history.add(phase=phase, step=step)

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> None:
        """State which bucket these tensors are; tensors elsewhere are ignored."""
        held = [part for tensor in tensors for part in holding_memory(tensor) if part.is_cuda]
        self._history.add(bucket=bucket, addresses=(part.untyped_storage().data_ptr() for part in held))

    def name_modules(self, model: torch.nn.Module) -> None:
        """The allocator's history knows frames, not modules."""

    def finish(self, failed: bool = False) -> Timeline:
        """Stop recording and merge history and notes; if the run failed, up to where memory ran out.

        Raises:
            HistoryIncomplete: there were more events than the history holds.
        """
        snapshot = torch.cuda.memory._snapshot(self._device)
        torch.cuda.memory._record_memory_history(None, device=self._device)
        history = snapshot["device_traces"][self._device.index or 0]
        if len(history) >= _MAX_ENTRIES:
            raise HistoryIncomplete(f"more than {_MAX_ENTRIES:,} allocator events")
        return merge(history, self._history.notes, failed)


def merge(history: Iterable[dict[str, Any]], notes: Iterable[HistoryNote], failed: bool = False) -> Timeline:
    """Replay history entries with the notes at their places."""
    recorder = TimelineRecorder()
    live: dict[int, int] = {}
    phase = Phase.BUILD
    for entry in in_order(history, notes):
        if isinstance(entry, HistoryNote):
            if entry.phase is not None:
                recorder.mark(entry.step, entry.phase)
                phase = entry.phase
            for number, bucket in entry.tagged(live):
                recorder.tag(number, bucket)
        elif entry["action"] == "oom":
            recorder.cut()
        elif entry["action"] == "alloc":
            site, repeated = made_at(entry, phase)
            live[entry["addr"]] = recorder.allocate(entry["size"], recomputed=repeated, site=site)
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            recorder.release(live.pop(entry["addr"]))
    return recorder.finish(failed)
