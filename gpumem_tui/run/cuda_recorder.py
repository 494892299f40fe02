"""What a run's memory comes to; of a real GPU by the allocator's own history, and which errors mean that it ran out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from gpumem_tui.errors import in_one_line, named
from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.run.events import Outcome, Sample, TrialDone
from gpumem_tui.simulator.allocator.settings import memory_fraction
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder, growth_line
from gpumem_tui.step import Phase
from gpumem_tui.step.cuda_history import HistoryNote, HistoryNotes, in_order, made_at
from gpumem_tui.step.run import MemorySample, Recorder
from gpumem_tui.step.walking import holding_memory

_MAX_ENTRIES = 2_000_000


class HistoryIncomplete(Exception):
    """The allocator's history does not cover the whole run; the message says why."""


class MemoryRecorder(Recorder, Protocol):
    """A simulated GPU, or a real one's allocator history."""

    def finish(self, failed: bool = False) -> Timeline:
        """Stop recording. Returns the run; if it failed, up to where memory ran out."""


def history_of(recorder: MemoryRecorder, *, failed: bool) -> tuple[Timeline | None, str]:
    """Return what a run allocated and released, or None and the reason why that is not known."""
    try:
        return recorder.finish(failed), ""
    except (HistoryIncomplete, RuntimeError) as error:
        return None, in_one_line(error) or named(error)


def measured(
    outcome: Outcome, recorded: tuple[Timeline | None, str], peaks: tuple[int, int], context_bytes: int
) -> TrialDone:
    """Return a trial's outcome as far as its memory tells it; what else there is, the caller puts in.

    Args:
        recorded: as `history_of` returns it.
        peaks: the highest allocated and reserved bytes.
        context_bytes: what the process holds on the device beside its allocator.
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
        growing=growth_line(timeline) if timeline is not None and outcome == "fit" else "",
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


def context_bytes_on(device: torch.device | None, others_bytes: int) -> int:
    """Return what this process holds beside its allocator's segments, on a device of which others hold so much."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device) - others_bytes)


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
        """Note that the run is in `phase` of `step` from here on."""
        self._history.add(phase=phase, step=step)

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor], part: str = "") -> None:  # noqa: ARG002
        """State which bucket these tensors are; tensors elsewhere are ignored, and so are parts."""
        held = [one for tensor in tensors for one in holding_memory(tensor) if one.is_cuda]
        self._history.add(bucket=bucket, addresses=(one.untyped_storage().data_ptr() for one in held))

    def name_modules(self, model: torch.nn.Module) -> None:
        """Do nothing: the allocator's history knows frames, not modules."""

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


# Which errors mean that the memory ran out

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
"""What cuBLAS, cuDNN and the launcher report when there is no room left for a handle, a workspace or a stack. Believed
only when the device is nearly full."""

NEARLY_FULL_BYTES = 512 * MIB


def is_out_of_memory(error: BaseException, free_bytes: int) -> bool:
    """Return whether `error`, raised with `free_bytes` left on the device, means that the step does not fit."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if _OUT_OF_MEMORY.search(text):
        return True
    return free_bytes < NEARLY_FULL_BYTES and _CAN_MEAN_FULL.search(text) is not None
