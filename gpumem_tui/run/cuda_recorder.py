"""A run's memory, on a real GPU by the allocator's own history, and the errors that mean it ran out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from gpumem_tui.errors import in_one_line, named
from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.run.events import Outcome, Sample, TrialDone
from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.allocator.settings import memory_fraction
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.step import Phase, RunStage
from gpumem_tui.step.cuda_history import COUNTED, HistoryNote, HistoryNotes, in_order, made_at
from gpumem_tui.step.run import MemorySample, Recorder
from gpumem_tui.step.walking import holding_memory, tensors_in

_MAX_ENTRIES = 2_000_000


class HistoryIncomplete(Exception):
    """The allocator's history does not cover the whole run; the message gives the reason."""


class MemoryRecorder(Recorder, Protocol):
    """A simulated GPU, or a real one's allocator history."""

    def finish(self, failed: bool = False) -> Timeline:
        """Stop recording. Returns the run; if it failed, up to where memory ran out."""


def history_of(recorder: MemoryRecorder, *, failed: bool) -> tuple[Timeline | None, str]:
    """Return what a run allocated and released, or None and the reason why that is not known."""
    try:
        return recorder.finish(failed), ""
    except Exception as error:  # noqa: BLE001  any error: the other figures remain
        return None, in_one_line(error) or named(error)


def measured(
    outcome: Outcome, recorded: tuple[Timeline | None, str], peaks: tuple[int, int], context_bytes: int
) -> TrialDone:
    """Return a trial's outcome as far as its memory tells it; what else there is, the caller puts in.

    Args:
        recorded: as `history_of` returns it.
        peaks: the highest allocated and reserved bytes.
        context_bytes: what the process holds on the device outside its allocator.
    """
    timeline, unknown = recorded
    allocated, reserved = peaks
    return TrialDone(
        batch_size=0,
        outcome=outcome,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_used_bytes=reserved + context_bytes,
        buckets=None if timeline is None else timeline.breakdown_after(timeline.peak_event(), allocated).as_json(),
        buckets_unknown=unknown,
        seconds=0.0,
        steps=0,
    )


def sampled(sample: MemorySample) -> Sample:
    """Return the event of a phase's begin."""
    buckets = {bucket.value: size_bytes for bucket, size_bytes in sample.buckets.items()}
    return Sample(sample.step, sample.phase.value, sample.allocated_bytes, sample.reserved_bytes, buckets)


def cap_reserved(device: torch.device, limit_bytes: int | None) -> None:
    """Have the allocator reserve so much at most; None for no cap."""
    if limit_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_fraction(limit_bytes, total), device)


def free_bytes_on(memory: Any, device: torch.device, context_bytes: int) -> int:
    """Return what is left on a device, by the allocator's books once CUDA answers no more after a failure.

    Args:
        memory: the device module, as `torch.cuda`.
        context_bytes: what the process holds on the device outside its allocator.
    """
    try:
        free, _ = memory.mem_get_info(device)
    except RuntimeError:
        total = memory.get_device_properties(device).total_memory
        return max(0, int(total) - int(memory.memory_reserved(device)) - context_bytes)
    return int(free)


class CudaRecorder:
    """Records on one CUDA device; the counterpart of `SimulatedGpu`'s `mark`, `tag` and `finish`.

    Nothing here synchronizes or allocates on the device.

    Args:
        device: None for the first one that has an allocation: of several, a program may choose any.
        profile: of the torch and the GPU; None where cuBLAS's workspaces need not be told from other memory.
    """

    def __init__(self, device: torch.device | None, profile: Profile | None = None) -> None:
        self._history = HistoryNotes(device)
        self._workspaces = () if profile is None else workspaces_of(profile)
        self._unavailable = ""
        try:
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=_MAX_ENTRIES, device=device
            )
        except RuntimeError as error:  # cudaMallocAsync and allocators of the program's own keep none
            self._unavailable = in_one_line(error)

    @property
    def device(self) -> int | torch.device | None:
        """Return the device that is recorded; None until one has had an allocation."""
        return self._history.device

    def mark(self, step: int, phase: Phase, stage: RunStage | None = None) -> None:  # noqa: ARG002
        """Note that the run is in `phase` of `step` from here on; trials do not tell stages."""
        self._history.add(phase=phase, step=step)

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor], part: str = "") -> None:  # noqa: ARG002
        """State which bucket these tensors are; tensors elsewhere are ignored, and so are parts."""
        held = [one for tensor in tensors for one in holding_memory(tensor) if one.is_cuda]
        self._history.add(bucket=bucket, addresses=(one.untyped_storage().data_ptr() for one in held))

    def take_inputs(self, values: Any) -> None:
        """Take what a program calls its model with for its data, but for what another module has made."""
        made = (tensor for tensor in tensors_in(values) if tensor.grad_fn is None and not tensor.requires_grad)
        self.tag(Bucket.BATCH_DATA, made)

    def number_of(self, tensor: torch.Tensor) -> int | None:  # noqa: ARG002
        """Return None: it is not known before the history is read."""
        return None

    def name_modules(self, model: torch.nn.Module) -> None:
        """Do nothing: the allocator's history knows frames, not modules."""

    def finish(self, failed: bool = False) -> Timeline:
        """Stop recording and merge history and notes; if the run failed, up to where memory ran out.

        Raises:
            HistoryIncomplete: there were more events than the history holds, or the program has meddled with it.
        """
        if self._unavailable:
            raise HistoryIncomplete(self._unavailable)
        least = self._history.position
        snapshot = torch.cuda.memory._snapshot()
        most = self._history.position
        torch.cuda.memory._record_memory_history(None)
        device = self._history.device
        traces = snapshot["device_traces"]
        history = [] if device is None else traces[device if isinstance(device, int) else device.index or 0]
        if len(history) >= _MAX_ENTRIES:
            raise HistoryIncomplete(f"more than {_MAX_ENTRIES:,} allocator events")
        events = sum(entry["action"] in COUNTED for entry in history)
        if not least <= events <= most:
            raise HistoryIncomplete(
                f"the allocator counts {least:,} allocations and releases, and its history has {events:,}: the program "
                "calls _record_memory_history or reset_accumulated_memory_stats itself"
            )
        return merge(history, self._history.notes, failed).with_workspaces(self._workspaces)


def workspaces_of(profile: Profile) -> tuple[int, ...]:
    """Return the bytes of each workspace that a thread takes for its products and keeps."""
    return profile.cublas_workspace_bytes, profile.cublaslt_workspace_bytes * profile.keeps_cublaslt_workspace


class CudaMemory:
    """`torch.cuda`'s functions for the device that is recorded; for the current one until its number has come."""

    def __init__(self, recorder: CudaRecorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch.cuda, name)
        return lambda: function(self._recorder.device)


_MODULE_CALL = "torch/nn/modules/module.py"


def merge(history: Iterable[dict[str, Any]], notes: Iterable[HistoryNote], failed: bool = False) -> Timeline:
    """Replay history entries with the notes at their places.

    Data that a module has made counts as the module's, as on the simulated GPU.
    """
    recorder = TimelineRecorder()
    live: dict[int, int] = {}
    frames: dict[int, Any] = {}
    phase = Phase.BUILD
    for entry in in_order(history, notes):
        if isinstance(entry, HistoryNote):
            if entry.phase is not None:
                recorder.mark(entry.step, entry.phase)
                phase = entry.phase
            for number, bucket in entry.tagged(live):
                if bucket is not Bucket.BATCH_DATA or not _within_module(frames[number]):
                    recorder.tag(number, bucket)
        elif entry["action"] == "oom":
            recorder.cut()
        elif entry["action"] == "alloc":
            site, repeated = made_at(entry, phase)
            number = live[entry["addr"]] = recorder.allocate(entry["size"], recomputed=repeated, site=site)
            frames[number] = entry.get("frames", ())
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            number = live.pop(entry["addr"])
            recorder.release(number)
            del frames[number]
    return recorder.finish(failed)


def _within_module(frames: Iterable[dict[str, Any]]) -> bool:
    return any(frame["filename"].endswith(_MODULE_CALL) for frame in frames)


# Which errors mean that the memory ran out

OutOfMemoryError: type[BaseException] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
"""PyTorch's own, which older versions have in `torch.cuda` only: a search on a real GPU works with these too."""

_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED"
    r"|NCCL.*out of memory",
    re.IGNORECASE,
)
"""Failures that say so themselves."""

_CAN_MEAN_FULL = re.compile(
    r"CUBLAS_STATUS_NOT_INITIALIZED|CUBLAS_STATUS_INTERNAL_ERROR|CUDNN_STATUS_INTERNAL_ERROR"
    r"|CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_EXECUTION_FAILED|Unable to find a valid cuDNN algorithm"
    r"|cuDNN.*no engine|GET was unable to find an engine"
    r"|CUDA error: unspecified launch failure",
    re.IGNORECASE,
)
"""Errors of cuBLAS, cuDNN and the launcher when there is no room left for a handle, a workspace or a stack. Believed
only when the device is nearly full."""

NEARLY_FULL_BYTES = 512 * MIB


def is_out_of_memory(error: BaseException, free_bytes: int) -> bool:
    """Return whether `error`, raised with `free_bytes` left on the device, means that the step does not fit."""
    if isinstance(error, OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if _OUT_OF_MEMORY.search(text):
        return True
    return free_bytes < NEARLY_FULL_BYTES and _CAN_MEAN_FULL.search(text) is not None
