"""A step on CUDA devices, from what the caching allocator writes down."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from gpumem_tui.memory import Bucket
from gpumem_tui.probe import allocator
from gpumem_tui.probe.documents import KeptPlace, LookedDevice
from gpumem_tui.probe.history import StepHistory, listed_as_kept
from gpumem_tui.probe.segments import Segments
from gpumem_tui.step import Phase
from gpumem_tui.step.cuda_history import HistoryNote, HistoryNotes, in_order, made_at
from gpumem_tui.step.sites import RunningModules
from gpumem_tui.step.walking import memory_of

_MOST_EVENTS = 1_000_000


class HistoryRecorder:
    """Has the allocator write down every event, and notes beside it where the step is.

    Nothing here synchronizes or allocates on a device. The hooks that follow modules are left out for compiled code,
    which would be compiled anew for them.

    Attributes:
        method, active, unavailable, events: as in `operators.OperatorRecorder`.
    """

    method = "allocator history"

    def __init__(
        self, names: dict[int, str], devices: Iterable[int], phases_known: bool, follows_modules: bool
    ) -> None:
        self.unavailable: dict[str, str] = {}
        self._modules = RunningModules(names, self._module_changed)
        self._devices = list(devices)
        self._phases_known = phases_known
        self._follows_modules = follows_modules
        self._notes: dict[int, HistoryNotes] = {}
        self._before: list[dict[str, Any]] = []
        self._settings: dict[str, Any] = {}
        self._started_us = 0
        self._hooks = ExitStack()
        self.active = self._recording = False

    def start(self) -> str:
        """Begin; or the reason why that would get into the program's way."""
        if torch._C._cuda_isHistoryEnabled():
            return "the program records the allocator's history itself"
        snapshot = torch.cuda.memory._snapshot()
        self._before = snapshot["segments"]
        self._settings = snapshot.get("allocator_settings", {})
        self._notes = {device: HistoryNotes(device) for device in self._devices}
        self._started_us = time.time_ns() // 1000
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=_MOST_EVENTS)
        self.active = self._recording = True
        if self._follows_modules:
            self._hooks.enter_context(self._modules.watching())
        return ""

    def stop(self) -> bool:
        """Have nothing written down any more. A second call does nothing."""
        self._hooks.close()
        if self._recording:
            self.active = self._recording = False
            torch.cuda.memory._record_memory_history(None)
        return True

    @property
    def events(self) -> int:
        """Allocations and releases so far, on the device that has most."""
        return max((notes.position for notes in self._notes.values()), default=0)

    def enter(self, phase: Phase) -> None:
        """A phase begins."""
        for notes in self._active_notes():
            notes.add(phase=phase)

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> None:
        """State what these tensors are."""
        addresses: dict[int, list[int]] = {}
        for tensor in tensors:
            for device, storage in memory_of(tensor):
                addresses.setdefault(device, []).append(storage.data_ptr())
        for device, found in addresses.items():
            if device in self._notes:
                self._notes[device].add(bucket=bucket, addresses=found)

    def own(self, owned: Iterable[tuple[str, torch.Tensor]]) -> None:
        """State of which modules these tensors are."""
        owners: dict[int, list[tuple[int, str]]] = {}
        for module, tensor in owned:
            for device, storage in memory_of(tensor):
                owners.setdefault(device, []).append((storage.data_ptr(), module))
        for device, found in owners.items():
            if device in self._notes:
                self._notes[device].add(owners=found)

    def end_step(self) -> None:
        """The step ends; the next may be recorded too."""
        for notes in self._notes.values():
            notes.add(step_ends=True)

    def result(self) -> list[LookedDevice]:
        """What was written down of the step that has just ended."""
        found = []
        for device, history in self._histories():
            missing = allocator.figures(device).allocated_bytes - history.live_bytes()
            if missing:
                self.unavailable["sum"] = f"at the step's end the allocator counts {missing:+,} bytes beside these"
            found.append(history.result(device, allocator.device_uuid(device)))
        return found

    def kept(self) -> list[KeptPlace]:
        """What each of the steps left behind; asked at the end of the last.

        Raises:
            RuntimeError: more was written down than there is room for, so the steps' beginning is lost.
        """
        found = [row for device, history in self._histories() for row in listed_as_kept(device, history.kept())]
        if "events" in self.unavailable:
            raise RuntimeError(self.unavailable["events"])
        return sorted(found, key=lambda row: -row.bytes)

    def _histories(self) -> Iterator[tuple[int, StepHistory]]:
        """What was written down by now, by device."""
        traces = torch.cuda.memory._snapshot()["device_traces"]
        for device in self._devices:
            if len(traces[device]) >= _MOST_EVENTS:
                self.unavailable["events"] = (
                    f"there were more than {_MOST_EVENTS:,} allocator events: the last are shown"
                )
            before = [segment for segment in self._before if segment["device"] == device]
            segments = Segments(before, self._settings)
            yield (
                device,
                step_history(segments, traces[device], self._notes[device].notes, self._started_us, self._phases_known),
            )

    def _module_changed(self) -> None:
        for notes in self._active_notes():
            notes.add(module=self._modules.innermost)

    def _active_notes(self) -> Iterable[HistoryNotes]:
        return self._notes.values() if self.active else ()


def step_history(
    segments: Segments,
    trace: Iterable[dict[str, Any]],
    notes: Iterable[HistoryNote],
    started_us: int = 0,
    phases_known: bool = True,
) -> StepHistory:
    """The step that a device's trace and the notes tell of.

    Args:
        segments: as they were before the step.
        trace: ``device_traces`` of `torch.cuda.memory._snapshot()`, the device's.
        started_us: wall time in microseconds at which the step began.
    """
    history = StepHistory(phases_known)
    numbers = {address: history.existing(size_bytes) for address, size_bytes in segments.live.items()}
    module = ""
    time_s = 0.0
    for entry in in_order(trace, notes):
        if isinstance(entry, HistoryNote):
            if entry.phase is not None:
                history.enter(entry.phase, time_s)
            module = module if entry.module is None else entry.module
            for number, bucket in entry.tagged(numbers):
                history.tag(number, bucket)
            if entry.step_ends:
                history.end_step()
            for address, owner in entry.owners:
                if address in numbers:
                    history.own(numbers[address], owner)
            continue
        action, address = entry["action"], entry.get("addr", 0)
        time_s = max(time_s, (entry.get("time_us", started_us) - started_us) / 1e6)
        if action in ("segment_alloc", "segment_map"):
            segments.segment_made(address, entry["size"])
        elif action in ("segment_free", "segment_unmap"):
            segments.segment_gone(address, entry["size"])
        elif action == "alloc":
            site, repeated = made_at(entry, history.phase, module)
            numbers[address] = history.allocate(segments.take(address, entry["size"]), time_s, site, repeated)
        elif action == "free_requested" and address in numbers:
            segments.release(address)
            history.release(numbers.pop(address), time_s)
        elif action == "free_completed":
            segments.reuse(address)
    return history
