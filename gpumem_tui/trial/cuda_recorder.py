"""The timeline of a run on a real GPU, from the allocator's own history."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpumem_tui.errors import in_one_line, named
from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.timeline import Timeline, TimelineRecorder
from gpumem_tui.step import Phase, Site
from gpumem_tui.step.run import Recorder
from gpumem_tui.step.sites import calling_line_of, in_checkpoint, in_order
from gpumem_tui.step.workload import local

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


@dataclass(frozen=True)
class RunNote:
    """Something the run said after so many allocations and releases: a phase begins, or addresses are a bucket's."""

    position: int
    phase: tuple[int, Phase] | None = None
    bucket: Bucket | None = None
    addresses: tuple[int, ...] = ()


class CudaRecorder:
    """Records on one CUDA device; the counterpart of `SimulatedGpu`'s `mark`, `tag` and `finish`.

    The allocator counts what it did, and each note carries that count: so notes find their place in the history when
    the run is over. Nothing here synchronizes or allocates on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._notes: list[RunNote] = []
        self._start = 0
        self._start = self._position()
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=_MAX_ENTRIES, device=device
        )

    def mark(self, step: int, phase: Phase) -> None:
        """From here on the run is in `phase` of `step`."""
        self._notes.append(RunNote(self._position(), phase=(step, phase)))

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> None:
        """State which bucket these tensors are; tensors elsewhere are ignored."""
        addresses = tuple(local(tensor).untyped_storage().data_ptr() for tensor in tensors if tensor.is_cuda)
        self._notes.append(RunNote(self._position(), bucket=bucket, addresses=addresses))

    def name_modules(self, model: torch.nn.Module) -> None:
        """The allocator's history knows frames, not modules."""

    def _position(self) -> int:
        """Allocations and releases since recording began."""
        stats = torch.cuda.memory_stats(self._device)
        return int(stats["allocation.all.allocated"]) + int(stats["allocation.all.freed"]) - self._start

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
        return merge(history, self._notes, failed)


def merge(history: Iterable[dict[str, Any]], notes: Iterable[RunNote], failed: bool = False) -> Timeline:
    """Replay history entries with the notes at their places."""
    recorder = TimelineRecorder()
    live: dict[int, int] = {}
    phase = Phase.BUILD
    for entry in in_order(history, notes):
        if isinstance(entry, RunNote):
            if entry.phase is not None:
                recorder.mark(*entry.phase)
                phase = entry.phase[1]
            for address in entry.addresses:
                if address in live and entry.bucket is not None:
                    recorder.tag(live[address], entry.bucket)
        elif entry["action"] == "oom":
            recorder.cut()
        elif entry["action"] == "alloc":
            repeated = phase is Phase.BACKWARD and in_checkpoint(entry.get("frames", ()))
            site = Site(source=calling_line_of(entry.get("frames", ())))
            live[entry["addr"]] = recorder.allocate(entry["size"], recomputed=repeated, site=site)
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            recorder.release(live.pop(entry["addr"]))
    return recorder.finish(failed)
