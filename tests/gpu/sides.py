"""One configuration on one device: the real GPU, the simulated one, or a rehearsal of the real one without a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.importing import Uncollected
from gpumem_tui.memory import Bucket
from gpumem_tui.run.cuda_recorder import CudaRecorder, HistoryIncomplete, MemoryRecorder
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.step import Phase, RunStage
from gpumem_tui.workload.errors import located
from tests.gpu.forks import Write
from tests.gpu.history import History, HistoryError, pack, pack_timeline
from tests.gpu.matrix import STEPS, Configuration
from tests.gpu.nvml import device_memory, own_bytes
from tests.in_process import as_cuda, followed, workload_of
from tests.published.measurements import PhasePeaks, Side

_FIRST = torch.device("cuda", 0)
Entries = Callable[[], Iterable[Mapping[str, Any]]]
"""Yields the allocator's history entries so far, of one device."""


class Sided(msgspec.Struct, frozen=True):
    """A side, with its packed history; the side gives the reason if missing."""

    side: Side
    history: str = ""


@dataclass
class _Meter:
    """A recorder that also reads the allocator's peaks at the end of each phase, and starts them anew."""

    recorder: MemoryRecorder
    phases: list[PhasePeaks] = field(default_factory=list)
    _phase: tuple[int, Phase] | None = None

    def mark(self, step: int, phase: Phase, stage: RunStage | None = None) -> None:
        self.close()
        self._phase = (step, phase)
        self.recorder.mark(step, phase)

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor], part: str = "") -> None:
        self.recorder.tag(bucket, tensors)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        return self.recorder.number_of(tensor)

    def name_modules(self, model: torch.nn.Module) -> None:
        self.recorder.name_modules(model)

    def finish(self, failed: bool = False) -> Timeline:
        return self.recorder.finish(failed)

    def close(self) -> None:
        """The phase that runs ends here."""
        memory: Any = torch.cuda
        if self._phase is not None:
            stats = memory.memory_stats(_FIRST)
            requested, allocated, reserved = (
                stats[f"{name}_bytes.all.peak"] for name in ("requested", "allocated", "reserved")
            )
            step, phase = self._phase
            self.phases.append(PhasePeaks(step, phase.value, requested, allocated, reserved))
            self._phase = None
        memory.reset_peak_memory_stats(_FIRST)


def real(configuration: Configuration, write: Write) -> None:
    """Run on ``cuda:0``. Call in a process that has not touched CUDA."""
    torch.cuda.init()
    torch.zeros(1, device=_FIRST)
    torch.cuda.empty_cache()
    context_bytes = _beside_allocator(_FIRST)
    recorder = CudaRecorder(_FIRST)

    def entries() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = torch.cuda.memory._snapshot(_FIRST)["device_traces"][0]
        return found

    sided = _run(configuration, recorder, context_bytes, write, entries)
    nvml = device_memory()
    side = msgspec.structs.replace(
        sided.side,
        nvml=nvml if isinstance(nvml, dict) else {},
        unavailable={**sided.side.unavailable, **({"nvml": nvml} if isinstance(nvml, str) else {})},
    )
    write(msgspec.json.encode(msgspec.structs.replace(sided, side=side)))


def simulated(configuration: Configuration, gpu: Gpu, write: Write) -> None:
    """Run on the simulated GPU. Call in a process of its own, which sees no real one from then on."""
    hide_gpus()
    from gpumem_tui.simulator.device.gpu import SimulatedGpu

    profile = profile_for(torch.__version__, gpu)
    simulated_gpu = SimulatedGpu(gpu, profile, on_backward_error=lambda error: write(failed(located(error))))
    with as_cuda(simulated_gpu):
        write(msgspec.json.encode(_run(configuration, simulated_gpu, profile.context_bytes, write)))


def rehearsed(configuration: Configuration, gpu: Gpu, write: Write) -> None:
    """The counterpart of `real`, on the simulated GPU with an allocator that keeps a history such as CUDA's."""
    from gpumem_tui.simulator.device.gpu import SimulatedGpu
    from tests.gpu.placement import HistoryKeepingAllocator

    profile = profile_for(torch.__version__, gpu)
    allocator = HistoryKeepingAllocator(gpu.cuda_total_bytes - profile.context_bytes)
    simulated_gpu = SimulatedGpu(gpu, profile, allocator=allocator)
    with as_cuda(simulated_gpu):
        sided = _run(configuration, simulated_gpu, profile.context_bytes, write, lambda: allocator.entries)
    write(msgspec.json.encode(sided))


def hide_gpus() -> None:
    """Keep this process from ever holding a CUDA context: the real side measures what is on the GPU next to it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def failed(why: str) -> bytes:
    """The result of a run that left none."""
    return msgspec.json.encode(Sided(Side(error=why)))


def _run(
    configuration: Configuration,
    recorder: MemoryRecorder,
    context_bytes: int,
    write: Write,
    entries: Entries | None = None,
) -> Sided:
    """Run the steps; what raises is the side's error. `entries`: with them placement is part of the history.

    The figures are written before the history is taken apart, so that they are there even if that fails.
    """
    memory: Any = torch.cuda
    meter = _Meter(recorder)
    error = ""
    started = time.perf_counter()
    made = None  # kept until the figures are read: it holds the model
    try:
        with Uncollected():
            made = followed(workload_of(configuration.workload), configuration.batch_size, STEPS, meter)
    except Exception as raised:  # noqa: BLE001  any error: it is what this configuration does here
        error = located(raised)
    seconds = time.perf_counter() - started
    meter.close()
    side = Side(
        error=error,
        phases=tuple(meter.phases),
        alloc_retries=memory.memory_stats(_FIRST).get("num_alloc_retries", 0),
        context_bytes=context_bytes,
        context_end_bytes=_beside_allocator(_FIRST),
        unavailable=dict.fromkeys(("buckets", "history"), "the run's process ended before it was read"),
        seconds=seconds,
    )
    write(msgspec.json.encode(Sided(side)))
    history, buckets, unavailable = _composition(meter, entries)
    del made
    return Sided(msgspec.structs.replace(side, buckets=buckets, unavailable=unavailable), history)


def _composition(meter: _Meter, entries: Entries | None) -> tuple[str, dict[str, int] | None, dict[str, str]]:
    """The packed history, the buckets at the peak, and why either is missing."""
    found = list(entries()) if entries is not None else []  # before `finish`, which stops the recording
    try:
        timeline = meter.finish()
    except HistoryIncomplete as error:
        return "", None, {"buckets": str(error), "history": str(error)}
    peak_bytes = max((phase.allocated_bytes for phase in meter.phases), default=0)
    buckets = timeline.breakdown_after(timeline.peak_event(), peak_bytes).as_json()
    try:
        return (pack_timeline(timeline) if entries is None else pack(History.of(found, timeline))), buckets, {}
    except HistoryError as error:
        return "", buckets, {"history": str(error)}


def _beside_allocator(device: torch.device) -> int:
    """The memory of this process outside its allocator, in bytes: by NVML, which tells it from others on the GPU.

    Without NVML, and on the simulated GPU, what is used of the whole device counts as this process's.
    """
    memory: Any = torch.cuda
    reserved: int = memory.memory_reserved(device)
    own = own_bytes() if device.type == "cuda" else ""
    if isinstance(own, int):
        return own - reserved
    free_bytes, total_bytes = memory.mem_get_info(device)
    return int(total_bytes - free_bytes - reserved)


def allocator_options() -> str:
    """The user's settings of CUDA's allocator, empty for none."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
