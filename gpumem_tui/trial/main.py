"""The child process: runs a real training step on a GPU, real or simulated, and reports what its memory did.

Standard library and torch only: it may run in a user's own interpreter. Everything it says goes to one pipe as the
events of `events`; what the user's code prints goes wherever the parent sent stdout and stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from io import RawIOBase
from typing import TYPE_CHECKING, Any, NoReturn

from gpumem_tui.importing import after_import
from gpumem_tui.output_lines import flush_output
from gpumem_tui.simulator.growth import growth_line
from gpumem_tui.simulator.profile import Profile, newer_than_checked, profile_for, too_old
from gpumem_tui.simulator.uncompiled import exclude_nothing, leave_compiler_unloaded, stay_eager
from gpumem_tui.trial.events import (
    ChildEvent,
    Failed,
    Outcome,
    Ready,
    Sample,
    TraceDone,
    TraceRequest,
    TrialDone,
    TrialRequest,
    decode_request,
    encode,
)

if TYPE_CHECKING:
    import torch

    from gpumem_tui.simulator.deep import DeepTracer
    from gpumem_tui.simulator.shaped import AssumedRows
    from gpumem_tui.simulator.tracing import Tracer
    from gpumem_tui.step.run import MemorySample
    from gpumem_tui.step.workload import Workload
    from gpumem_tui.trial.cuda_recorder import MemoryRecorder
    from gpumem_tui.workload.spec import WorkloadSpec

Report = Callable[[ChildEvent], None]
_MOST_FILES = 1 << 16


def main(events_fd: int, lifeline_fd: int) -> NoReturn:
    """Read one request from standard input, do it, report to `events_fd`, and leave. Leaves, too, when the parent dies,
    which the end of `lifeline_fd` tells, and takes along whatever was started here.

    The process ends without the interpreter's teardown: a thread that user code left running would hold it up forever,
    and what libraries do then is of no interest to the outcome.
    """
    _guard(lifeline_fd)
    code = 1
    try:
        _serve(events_fd)
        code = 0
    except BaseException:  # noqa: BLE001  the last line of what is printed becomes the parent's message
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def _serve(events_fd: int) -> None:
    _die_with_parent()
    os.set_inheritable(events_fd, False)  # what user code starts must not speak on this pipe
    pipe = os.fdopen(events_fd, "wb")
    commands = _take_stdin()
    request = decode_request(commands.readline())
    may_run = _follow_commands(commands)

    def report(event: ChildEvent) -> None:
        pipe.write(encode(event))
        pipe.flush()

    if request.simulated:
        after_import("torch._compile", exclude_nothing)
    try:
        import torch
    except ImportError as error:
        remedy = "install torch there, or give --python the interpreter of the environment you train in"
        report(Failed("torch", f"{sys.executable} cannot import torch ({error}): {remedy}"))
        return
    profile = profile_for(torch.__version__, request.gpu)
    report(Ready.of(torch.__version__, profile))
    if request.simulated and (reason := too_old(torch.__version__)):
        report(Failed("torch", f"torch {torch.__version__} of {sys.executable} {reason}"))
        return
    from gpumem_tui.simulator.untraceable import Untraceable
    from gpumem_tui.step.workload import WorkloadError

    try:
        if request.simulated:
            from gpumem_tui.simulator.device import register
            from gpumem_tui.simulator.shaped import AssumedRows

            leave_compiler_unloaded(torch)
            register()
            newer = newer_than_checked(torch.__version__)
            notes: dict[str, None] = {newer: None} if newer else {}
            rows = AssumedRows(request.workload.assumed_rows, notes)
            stay_eager(notes.setdefault)
            if isinstance(request, TraceRequest):
                done = trace(request, profile, report, rows)
            else:
                done = _simulated_trial(request, profile, report, may_run, rows)
            report(replace(done, notes=(*notes, *done.notes)) if isinstance(done, (TraceDone, TrialDone)) else done)
        elif isinstance(request, TraceRequest) or not torch.cuda.is_available():
            report(Failed("device", f"torch {torch.__version__} of {sys.executable} finds no CUDA device"))
        else:
            report(_cuda_trial(request, request.workload.load(), profile, report, may_run))
    except WorkloadError as error:
        report(Failed("workload", str(error)))
    except Untraceable as error:
        report(Failed("trace", str(error)))


# Commands from the parent, and its end


def _take_stdin() -> RawIOBase:
    """The parent's commands, out of the reach of user code and of what it starts: for them stdin is empty."""
    commands = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return os.fdopen(commands, "rb", buffering=0)  # a thread waits here until the end; it must hold no lock


def _guard(lifeline_fd: int) -> None:
    """Fork a process that ends all of this process group when the parent is gone, SIGKILL included.

    The kernel's parent-death signal reaches this process only, not data loaders and others that user code started. The
    guard itself is ended with the group.
    """
    if os.fork():
        os.close(lifeline_fd)
        return
    os.closerange(0, lifeline_fd)
    os.closerange(lifeline_fd + 1, _MOST_FILES)
    os.read(lifeline_fd, 1)
    os.killpg(0, signal.SIGKILL)


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, SIGKILL included (Linux only)."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _follow_commands(commands: RawIOBase) -> threading.Event:
    """Follow ``pause`` and ``resume`` lines; at the end of the stream, when the parent is gone, leave at once."""
    may_run = threading.Event()
    may_run.set()

    def listen() -> None:
        for line in iter(commands.readline, b""):
            (may_run.clear if line.strip() == b"pause" else may_run.set)()
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    return may_run


# Trials


def _simulated_trial(
    request: TrialRequest, profile: Profile, report: Report, may_run: threading.Event, rows: AssumedRows
) -> ChildEvent:
    from gpumem_tui.simulator.cuda import device_for
    from gpumem_tui.simulator.device import SimulatedGpu
    from gpumem_tui.simulator.world import world_of

    gpu = SimulatedGpu(
        request.gpu, profile, request.limit_bytes, on_backward_error=_leaving(report), assumed_rows=rows,
        notes=rows.used,
    )  # fmt: skip
    user_code = request.workload.file is not None
    with world_of(request.workload.recipe), device_for(gpu, user_code=user_code) as device:
        return _trial(request, request.workload.load(), device, gpu, profile, report, may_run)


def _cuda_trial(
    request: TrialRequest, workload: Workload, profile: Profile, report: Report, may_run: threading.Event
) -> ChildEvent:
    import torch

    from gpumem_tui.simulator.settings import memory_fraction
    from gpumem_tui.trial.cuda_recorder import CudaRecorder
    from gpumem_tui.workload.errors import one_line

    device = torch.device("cuda", 0)
    try:
        torch.cuda.init()
        if request.limit_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(memory_fraction(request.limit_bytes, total), device)
        torch.zeros(1, device=device)
        recorder = CudaRecorder(device)
    except RuntimeError as error:
        return Failed("device", f"{request.gpu.title} cannot be used: {one_line(error)}")
    torch.cuda.empty_cache()
    profile = profile.with_context(_context_bytes(request, device), "measured before the first step")
    done = _trial(request, workload, device, recorder, profile, report, may_run)
    if not isinstance(done, TrialDone) or done.outcome == "error":
        return done
    # Kernels and libraries are loaded as they are first used, so the context has grown.
    grown = max(profile.context_bytes, _context_bytes(request, device))
    return replace(done, device_used_bytes=done.peak_reserved_bytes + grown)


def _context_bytes(request: TrialRequest, device: torch.device) -> int:
    """What this process holds on the device beside its allocator's segments."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device) - request.others_bytes)


def _trial(
    request: TrialRequest,
    workload: Workload,
    device: torch.device,
    recorder: MemoryRecorder,
    profile: Profile,
    report: Report,
    may_run: threading.Event,
) -> ChildEvent:
    import torch

    from gpumem_tui.simulator.untraceable import Untraceable
    from gpumem_tui.step.run import StepRun
    from gpumem_tui.step.workload import WorkloadError
    from gpumem_tui.trial.classify import is_out_of_memory
    from gpumem_tui.trial.cuda_recorder import history_of
    from gpumem_tui.workload.errors import located, one_line

    memory: Any = torch.get_device_module(device)
    memory.reset_peak_memory_stats(device)
    started = time.perf_counter()

    def sampled(sample: MemorySample) -> None:
        buckets = {bucket.value: size_bytes for bucket, size_bytes in sample.buckets.items()}
        report(Sample(sample.step, sample.phase.value, sample.allocated_bytes, sample.reserved_bytes, buckets))

    run = StepRun(workload, request.batch_size, device, recorder, sampled)
    outcome: Outcome = "fit"
    detail = ""
    try:
        run.run(request.steps, may_run)
    except (WorkloadError, Untraceable):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever user code raises is this trial's outcome
        free = _free_bytes(memory, device, profile)
        outcome = "oom" if is_out_of_memory(error, free) else "error"
        detail = one_line(error) if outcome == "oom" else located(error)
        run.tag_gradients()
    seconds = time.perf_counter() - started
    peak, reserved = memory.max_memory_allocated(device), memory.max_memory_reserved(device)
    timeline, unknown = history_of(recorder, failed=outcome != "fit")
    return TrialDone(
        batch_size=request.batch_size,
        outcome=outcome,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        device_used_bytes=reserved + profile.context_bytes,
        buckets=None if timeline is None else timeline.breakdown_after(timeline.peak_event(), peak).as_json(),
        buckets_unknown=unknown,
        seconds=seconds,
        steps=len(run.step_seconds),
        step_seconds=() if request.simulated else tuple(run.step_seconds),
        alloc_retries=memory.memory_stats(device).get("num_alloc_retries", 0),
        detail=detail,
        growing=growth_line(timeline) if timeline is not None and outcome == "fit" else "",
    )


def _free_bytes(memory: Any, device: torch.device, profile: Profile) -> int:
    """What is left on the device; after a failed launch CUDA answers no more, but the allocator's books are here."""
    try:
        free, _ = memory.mem_get_info(device)
    except RuntimeError:
        total = memory.get_device_properties(device).total_memory
        return max(0, int(total) - int(memory.memory_reserved(device)) - profile.context_bytes)
    return int(free)


# Traces


def trace(request: TraceRequest, profile: Profile, report: Report, rows: AssumedRows | None = None) -> ChildEvent:
    """The affine trace of a workload; where there is none, the trace at the size asked for, or why there is none.

    Raises:
        WorkloadError: the step itself fails.
        Untraceable: it does what cannot be followed without values.
    """
    from gpumem_tui.simulator.replay import CHECKED_BATCH_SIZE, AffineTrace, NotAffine
    from gpumem_tui.simulator.scratch import assumption

    started = time.perf_counter()
    tracer = _tracer(request, profile, report, rows)
    only_at, not_affine = 0, ""
    try:
        if request.not_affine:
            raise NotAffine(request.not_affine)
        found = tracer.affine()
        if request.batch_size == 1:
            found = tracer.with_single(found)
    except NotAffine as error:
        if request.batch_size is None:
            return Failed("trace", str(error), tracer.peaks(error.sizes))
        only_at, not_affine = request.batch_size, str(error)
        found = AffineTrace.constant(tracer.at(only_at))
    reasons = tuple((operator, times, assumption(operator)) for operator, times in sorted(tracer.assumed.items()))
    growing = growth_line(found.at(only_at or CHECKED_BATCH_SIZE))
    notes = (growing,) if growing else ()
    done = TraceDone.of(found, time.perf_counter() - started, reasons, only_at, not_affine, notes)
    return replace(done, traced_layers=tracer.traced_layers)


def _tracer(request: TraceRequest, profile: Profile, report: Report, rows: AssumedRows | None) -> Tracer | DeepTracer:
    """What traces a workload: a deep network of the catalog from shallow ones like it."""
    from gpumem_tui.simulator.deep import DeepTracer, shallow_layers
    from gpumem_tui.simulator.shaped import AssumedRows
    from gpumem_tui.simulator.tracing import Tracer

    assumed_rows = rows or AssumedRows()

    def tracer_of(workload: WorkloadSpec) -> Tracer:
        return Tracer(
            workload.load, workload.recipe, request.gpu, profile, request.steps, _leaving(report),
            user_code=workload.file is not None, assumed_rows=assumed_rows,
        )  # fmt: skip

    shape = request.workload.shape
    if shape is None or not (shallow := shallow_layers(shape, request.workload.recipe)):
        return tracer_of(request.workload)
    return DeepTracer(
        lambda layers: tracer_of(replace(request.workload, shape=replace(shape, layers=layers))), shape.layers, shallow
    )


def _leaving(report: Report) -> Callable[[Exception], None]:
    """Say what went wrong in backward while there is still a process to say it."""
    from gpumem_tui.simulator.untraceable import Untraceable
    from gpumem_tui.workload.errors import located

    def leave(error: Exception) -> None:
        report(Failed("trace", str(error) if isinstance(error, Untraceable) else located(error)))
        os._exit(0)

    return leave
