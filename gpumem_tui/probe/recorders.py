"""The three ways to record a step for a deep look, by what is there to listen to.

On a CPU the operators that run, on CUDA devices what the caching allocator writes down; of code that cannot be followed
only the tensors that are found as the step ends.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from gpumem_tui.memory import Bucket
from gpumem_tui.probe import allocator
from gpumem_tui.probe.history import StepHistory, listed_as_kept
from gpumem_tui.probe.lines import ForwardLines
from gpumem_tui.probe.wire import CPU, KeptPlace, LookedDevice
from gpumem_tui.step import Phase, Site
from gpumem_tui.step.cuda_history import HistoryNote, HistoryNotes, in_order, made_at
from gpumem_tui.step.phases import in_backward
from gpumem_tui.step.sites import RunningModules, SiteFinder
from gpumem_tui.step.walking import host_memory_of, memory_of, tensors_in

# In host memory

_MOST_EVENTS = 1_000_000


class _StorageRef(weakref.ref):  # type: ignore[type-arg]  # generic to the type checker only, before Python 3.9.1
    """A weak reference to a storage that knows the allocation's number and, when it is gone, the storage's key."""

    __slots__ = ("key", "number")
    key: int
    number: int


class BetweenSteps:
    """Records nothing of what happens, and knows the tensors that are there between two steps.

    Attributes:
        method: what a document calls this way of recording.
        records: whether it sees what happens within a step.
        active: whether it records; it can be switched off at any moment.
        unavailable: what it cannot tell, with the reason.
    """

    method = "tensors found after the step"
    records = False

    def __init__(self, unavailable: dict[str, str], phases_known: bool = False) -> None:
        super().__init__()
        self.unavailable = unavailable
        self._history = StepHistory(phases_known)
        self._live: dict[int, _StorageRef] = {}
        self._started = time.perf_counter()
        self.active = False

    def start(self) -> str:
        """Begin; or return the reason why that would get into the program's way."""
        return ""

    def stop(self) -> bool:
        """Record no more. Return whether nothing is left behind."""
        return True

    @property
    def events(self) -> int:
        """Allocations and releases so far."""
        return self._history.events

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self._history.enter(phase, self._now())

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> None:
        """Record the bucket of these tensors. One not seen before was there before the step."""
        for tensor in tensors:
            for storage in host_memory_of(tensor):
                self._history.tag(self._know(storage), bucket)

    def own(self, owned: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record each tensor's owning module. Unknown tensors count as allocated before the step."""
        for module, tensor in owned:
            for storage in host_memory_of(tensor):
                self._history.own(self._know(storage), module)

    def end_step(self) -> None:
        """End the step; the next may be recorded too."""
        self._history.end_step()

    def result(self) -> list[LookedDevice]:
        """Return what we know about the step that has just ended.

        Raises:
            Exception: what went wrong while recording; the program did not notice.
        """
        return [self._history.result(CPU, "")]

    def kept(self) -> list[KeptPlace] | None:
        """Return what each of the steps left behind, asked at the end of the last; None if that is not known.

        Raises:
            Exception: as `result`.
        """
        return None

    def _know(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage's allocation; one not seen before was there before the step."""
        if storage._cdata not in self._live:
            self._follow(storage, self._history.existing(storage.nbytes()))
        return self._live[storage._cdata].number

    def _follow(self, storage: torch.UntypedStorage, number: int) -> None:
        reference = _StorageRef(storage, self._released)
        reference.key, reference.number = storage._cdata, number
        self._live[storage._cdata] = reference

    def _released(self, reference: _StorageRef) -> None:
        if self._live.get(reference.key) is reference:
            del self._live[reference.key]
            if self.active:
                self._history.release(reference.number, self._now())

    def _now(self) -> float:
        return time.perf_counter() - self._started


class OperatorRecorder(BetweenSteps, TorchDispatchMode):
    """Follows every tensor that an operator makes in this thread, until its storage goes."""

    method = "operators"
    records = True

    def __init__(self, sites: SiteFinder, phases_known: bool) -> None:
        counted = "those of model and optimizer, and those made while it looks; what else was there before is not seen"
        reason = f"host memory has no caching allocator; counted are tensors: {counted}"
        super().__init__({"allocator": reason}, phases_known)
        self._sites = sites
        self._entered = False
        self._failed: Exception | None = None

    def start(self) -> str:
        """Begin; or return the reason why that would get into the program's way."""
        if torch._C._len_torch_dispatch_stack():
            return "the program has a dispatch mode of its own active"
        self._started = time.perf_counter()
        self.active = self._entered = True
        self.__enter__()  # type: ignore[no-untyped-call]
        return ""

    def stop(self) -> bool:
        """Record no more, and leave. Return whether that could be done.

        Modes are a stack: below a mode that the program entered since, or from another thread, this one must wait; and
        inside of backward too, after which autograd restores the stack that was there before.
        """
        self.active = False
        if self._entered and not in_backward() and _get_current_dispatch_mode() is self:
            self._entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return not self._entered

    def result(self) -> list[LookedDevice]:
        """Return what was recorded of the step that has just ended."""
        if self._failed is not None:
            raise self._failed
        return super().result()

    def kept(self) -> list[KeptPlace]:
        """Return what each of the steps left behind."""
        if self._failed is not None:
            raise self._failed
        return listed_as_kept(CPU, self._history.kept())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.active:
            self._try(lambda: self._see_arguments((args, kwargs)))
        result = func(*args, **kwargs)
        if self.active:
            self._try(lambda: self._see_results(func, result))
        return result

    def _try(self, record: Callable[[], None]) -> None:
        try:
            record()
        except Exception as error:  # noqa: BLE001  the program's operator must not fail for it; `result` raises it
            self._failed, self.active = error, False

    def _see_arguments(self, arguments: Any) -> None:
        for tensor in tensors_in(arguments):
            for storage in host_memory_of(tensor):
                self._know(storage)

    def _see_results(self, func: Any, result: Any) -> None:
        site: Site | None = None
        for tensor in tensors_in(result):
            for storage in host_memory_of(tensor):
                if storage.nbytes() and storage._cdata not in self._live:
                    site = site or self._sites.site(f"aten.{func._opname}")
                    self._follow(storage, self._allocated(storage.nbytes(), site))

    def _allocated(self, size_bytes: int, site: Site) -> int:
        if self._history.events >= _MOST_EVENTS:
            raise RuntimeError(f"the step has more than {_MOST_EVENTS:,} allocations and releases")
        return self._history.allocate(size_bytes, self._now(), site, in_backward() and torch.is_grad_enabled())


# On CUDA devices

_GRANULE_BYTES = 512
_SMALL_REQUEST_BYTES = 1 << 20


class Segments:
    """The free blocks of one device by address, kept up with the allocator's events.

    Args:
        segments: ``segments`` of `torch.cuda.memory._snapshot()`, those of the device.
        settings: its ``allocator_settings``; versions that lack them have the defaults here.

    Attributes:
        live: blocks in use, bytes by address.
    """

    def __init__(self, segments: Iterable[dict[str, Any]], settings: dict[str, Any]) -> None:
        self._expandable = bool(settings.get("expandable_segments", False))
        largest = int(settings.get("max_split_size", -1) or -1)
        self._max_split_bytes = largest if largest > 0 else 1 << 62
        self._starts: set[int] = set()
        self._free: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self.live: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        for segment in segments:
            self._starts.add(segment["address"])
            address = segment["address"]
            for block in segment["blocks"]:
                address = block.get("address", address)
                if block["state"] == "active_allocated":
                    self.live[address] = block["size"]
                elif block["state"] == "inactive":
                    self._insert(address, block["size"])
                else:
                    self._waiting[address] = block["size"]
                address += block["size"]

    def segment_made(self, address: int, size_bytes: int) -> None:
        """Add memory that the driver gave: a new segment, or more of an expandable one."""
        if self._expandable:
            self._merge(address, size_bytes)
        else:
            self._starts.add(address)
            self._insert(address, size_bytes)

    def segment_gone(self, address: int, size_bytes: int) -> None:
        """Take away free memory that went back to the driver."""
        self._starts.discard(address)
        for start, size in list(self._free.items()):
            if start <= address < start + size:
                self._remove(start)
                if start < address:
                    self._insert(start, address - start)
                if address + size_bytes < start + size:
                    self._insert(address + size_bytes, start + size - address - size_bytes)

    def take(self, address: int, requested_bytes: int) -> int:
        """Take the block that the allocator gave at `address`; return its size, the smallest if it is not known."""
        size = max(1, -(-requested_bytes // _GRANULE_BYTES)) * _GRANULE_BYTES
        found = self._free.get(address)
        if found is not None and found >= size:
            self._remove(address)
            rest = found - size
            if self._splits(size, rest):
                self._insert(address + size, rest)
            else:
                size = found
        self.live[address] = size
        return size

    def release(self, address: int) -> None:
        """Release a block that the program no longer uses: from here on it does not count as allocated."""
        if address in self.live:
            self._waiting[address] = self.live.pop(address)

    def reuse(self, address: int) -> None:
        """Free a block for reuse: the streams are done with it as well."""
        if address in self._waiting:
            self._merge(address, self._waiting.pop(address))

    def _splits(self, size: int, rest: int) -> bool:
        if self._expandable or size <= _SMALL_REQUEST_BYTES:
            return rest >= _GRANULE_BYTES
        return size < self._max_split_bytes and rest > _SMALL_REQUEST_BYTES

    def _merge(self, address: int, size: int) -> None:
        """Insert a free block as one with its free neighbours in the segment."""
        after = address + size
        if after in self._free and after not in self._starts:
            size += self._remove(after)
        if address in self._ends and address not in self._starts:
            address = self._ends[address]
            size += self._remove(address)
        self._insert(address, size)

    def _insert(self, address: int, size: int) -> None:
        self._free[address] = size
        self._ends[address + size] = address

    def _remove(self, address: int) -> int:
        size = self._free.pop(address)
        del self._ends[address + size]
        return size


class HistoryRecorder:
    """Has the allocator write down every event, and notes next to it where the step is.

    Nothing here synchronizes or allocates on a device. The hooks that follow modules are left out for compiled code,
    which would be compiled anew for them.

    Attributes:
        method, records, active, unavailable, events: as in `BetweenSteps`.
    """

    method = "allocator history"
    records = True

    def __init__(
        self, names: dict[int, str], devices: Iterable[int], phases_known: bool, follows_modules: bool
    ) -> None:
        self.unavailable: dict[str, str] = {}
        self._modules = RunningModules(names, self._module_changed)
        self._lines = ForwardLines(lambda: self._modules.innermost, self._undoes)
        self._undone: dict[int, Site] = {}
        self._devices = list(devices)
        self._phases_known = phases_known
        self._follows_modules = follows_modules
        self._notes: dict[int, HistoryNotes] = {}
        self._before: list[dict[str, Any]] = []
        self._settings: dict[str, Any] = {}
        self._started_us = 0
        self._hooks = ExitStack()
        self._active = self._recording = False

    @property
    def active(self) -> bool:
        """Whether it records."""
        return self._active

    @active.setter
    def active(self, active: bool) -> None:
        self._active = active
        self._lines.active = self._lines.active and active

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
        """Have nothing written down any more. Return whether nothing is left behind; a second call tries that again."""
        self._hooks.close()
        if self._recording:
            self.active = self._recording = False
            torch.cuda.memory._record_memory_history(None)
        return self._lines.stop()

    @property
    def events(self) -> int:
        """Allocations and releases so far, on the device that has most."""
        return max((notes.position for notes in self._notes.values()), default=0)

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        for notes in self._active_notes():
            notes.add(phase=phase)

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> None:
        """Record the bucket of these tensors."""
        for notes, found in self._addresses((tensor, "") for tensor in tensors):
            notes.add(bucket=bucket, addresses=[address for address, _ in found])

    def own(self, owned: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record each tensor's owning module."""
        for notes, found in self._addresses((tensor, module) for module, tensor in owned):
            notes.add(owners=found)

    def _addresses(
        self, tensors: Iterable[tuple[torch.Tensor, str]]
    ) -> Iterator[tuple[HistoryNotes, list[tuple[int, str]]]]:
        """Yield each device's notes with the addresses of the tensors there, and what comes with each tensor."""
        addresses: dict[int, list[tuple[int, str]]] = {}
        for tensor, module in tensors:
            for device, storage in memory_of(tensor):
                addresses.setdefault(device, []).append((storage.data_ptr(), module))
        return ((self._notes[device], found) for device, found in addresses.items() if device in self._notes)

    def end_step(self) -> None:
        """End the step; the next may be recorded too."""
        for notes in self._notes.values():
            notes.add(step_ends=True)

    def result(self) -> list[LookedDevice]:
        """Return what was written down of the step that has just ended."""
        found = []
        for device, history in self._histories():
            missing = allocator.figures(device)["allocated_bytes"] - history.live_bytes()
            if missing:
                self.unavailable["sum"] = f"at the step's end the allocator counts {missing:+,} bytes besides these"
            found.append(history.result(device, allocator.device_uuid(device)))
        return found

    def kept(self) -> list[KeptPlace]:
        """Return what each of the steps left behind; asked at the end of the last.

        Raises:
            RuntimeError: more was written down than there is room for, so the steps' beginning is lost.
        """
        found = [row for device, history in self._histories() for row in listed_as_kept(device, history.kept())]
        if "events" in self.unavailable:
            raise RuntimeError(self.unavailable["events"])
        return sorted(found, key=lambda row: -row.bytes)

    def _histories(self) -> Iterator[tuple[int, StepHistory]]:
        """Yield what was written down by now, by device."""
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
        try:
            for notes in self._active_notes():
                notes.add(module=self._modules.innermost)
        except Exception as error:  # noqa: BLE001  the program's module must not fail for it
            self.unavailable["module"] = f"{type(error).__name__}: {error}"
            return
        if self.active and "line" not in self.unavailable and not in_backward() and (reason := self._lines.start()):
            self.unavailable["line"] = f"{reason}; backward's are not known"

    def backward_begins(self, arguments: Any) -> None:
        """Follow a backward that is called with these arguments, operator by operator."""
        self._undone.clear()
        self._lines.backward_begins(arguments)

    def backward_ended(self) -> None:
        """Follow it no more."""
        self._lines.backward_ended()
        for notes in self._active_notes():
            notes.add(undoes=Site())

    def _undoes(self, site: Site) -> None:
        """Note in autograd's thread, which is the device's, whose backward begins."""
        device = torch.cuda.current_device()
        if self.active and device in self._notes and self._undone.get(device) is not site:
            self._undone[device] = site
            self._notes[device].add(undoes=site)

    def _active_notes(self) -> Iterable[HistoryNotes]:
        return self._notes.values() if self.active else ()


def step_history(
    segments: Segments,
    trace: Iterable[dict[str, Any]],
    notes: Iterable[HistoryNote],
    started_us: int = 0,
    phases_known: bool = True,
) -> StepHistory:
    """Rebuild the step that a device's trace and the notes tell of.

    Args:
        segments: as they were before the step.
        trace: ``device_traces`` of `torch.cuda.memory._snapshot()`, the device's.
        started_us: wall time in microseconds at which the step began.
    """
    history = StepHistory(phases_known)
    numbers = {address: history.existing(size_bytes) for address, size_bytes in segments.live.items()}
    module, undoes = "", Site()
    time_s = 0.0
    for entry in in_order(trace, notes):
        if isinstance(entry, HistoryNote):
            if entry.phase is not None:
                history.enter(entry.phase, time_s)
            module = module if entry.module is None else entry.module
            undoes = undoes if entry.undoes is None else entry.undoes
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
            site, repeated = made_at(entry, history.phase, module, undoes)
            numbers[address] = history.allocate(segments.take(address, entry["size"]), time_s, site, repeated)
        elif action == "free_requested" and address in numbers:
            segments.release(address)
            history.release(numbers.pop(address), time_s)
        elif action == "free_completed":
            segments.reuse(address)
    return history
