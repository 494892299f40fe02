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
from dataclasses import dataclass, replace
from io import RawIOBase
from typing import TYPE_CHECKING, Any, NoReturn

from gpumem_tui.importing import after_import
from gpumem_tui.run.events import (
    ChildEvent,
    Failed,
    Outcome,
    Ready,
    TraceDone,
    TraceRequest,
    TrialDone,
    TrialRequest,
    decode_request,
    encode,
)
from gpumem_tui.simulator.allocator.contexts import CUBLAS
from gpumem_tui.simulator.allocator.profile import Profile, profile_for, said_of, too_old
from gpumem_tui.simulator.allocator.timeline import growth_line
from gpumem_tui.simulator.fast.uncompiled import exclude_nothing, leave_compiler_unloaded
from gpumem_tui.text import flush_output

if TYPE_CHECKING:
    import torch

    from gpumem_tui.run.cuda_recorder import MemoryRecorder
    from gpumem_tui.simulator.device.shapes import AssumedRows
    from gpumem_tui.simulator.fast.tracing import DeepTracer, Tracer
    from gpumem_tui.step.workload import Workload
    from gpumem_tui.workload.spec import WorkloadSpec

Report = Callable[[ChildEvent], None]
_MOST_FILES = 1 << 16


def main(events_fd: int, lifeline_fd: int) -> NoReturn:
    """Read one request from standard input, do it, report to `events_fd`, and leave.

    It leaves, too, when the parent dies, which the end of `lifeline_fd` tells, and takes along whatever was started
    here. The process ends without the interpreter's teardown: a thread that user code left running would hold it up
    forever, and what libraries do then is of no interest to the outcome.
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
    version = request.workload.as_torch or torch.__version__
    ranks = request.workload.recipe.ranks
    groups = (ranks,) if ranks > 1 else ()
    libraries = None if request.workload.shape is None else (CUBLAS,)  # the catalog's networks all multiply matrices
    profile = profile_for(version, request.gpu).using(request.gpu, groups, libraries)
    report(Ready.of(version, profile))
    if request.simulated and (reason := too_old(torch.__version__)):
        report(Failed("torch", f"torch {torch.__version__} of {sys.executable} {reason}"))
        return
    from gpumem_tui.simulator.device.shapes import Untraceable
    from gpumem_tui.step.workload import WorkloadError

    try:
        if request.simulated:
            from gpumem_tui.simulator.compiled.following import follow_compiler
            from gpumem_tui.simulator.device.gpu import register
            from gpumem_tui.simulator.device.shapes import AssumedRows

            leave_compiler_unloaded(torch)
            register()
            notes = dict.fromkeys(said_of(request.workload.as_torch, torch.__version__, request.gpu))
            rows = AssumedRows(request.workload.assumed_rows, notes)
            compiler = follow_compiler(notes)
            if isinstance(request, TraceRequest):
                done = trace(request, profile, report, rows)
            else:
                done = _Trial(request, profile, report, may_run).on_simulated_gpu(rows)
            unsure = compiler.unsure(request.workload.as_torch, request.gpu)
            if isinstance(done, TraceDone):
                done = replace(done, **unsure)
            elif isinstance(done, TrialDone):
                done = replace(done, is_estimate=unsure["is_estimate"])
            report(replace(done, notes=(*notes, *done.notes)) if isinstance(done, (TraceDone, TrialDone)) else done)
        elif isinstance(request, TraceRequest) or not torch.cuda.is_available():
            report(Failed("device", f"torch {torch.__version__} of {sys.executable} finds no CUDA device"))
        else:
            report(_Trial(request, profile, report, may_run).on_real_gpu(request.workload.load()))
    except WorkloadError as error:
        report(Failed("workload", str(error)))
    except Untraceable as error:
        report(Failed("trace", str(error)))


# Commands from the parent, and its end


def _take_stdin() -> RawIOBase:
    """Take the parent's commands out of the reach of user code and of what it starts: for them stdin is empty."""
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


@dataclass(frozen=True)
class _Trial:
    """A trial: what is asked for, and the connection to who asked."""

    request: TrialRequest
    profile: Profile
    report: Report
    may_run: threading.Event

    def on_simulated_gpu(self, rows: AssumedRows) -> ChildEvent:
        """Run it on a GPU that is not there."""
        from gpumem_tui.simulator.cuda.presented import device_for
        from gpumem_tui.simulator.cuda.world import world_of
        from gpumem_tui.simulator.device.gpu import SimulatedGpu

        request = self.request
        gpu = SimulatedGpu(
            request.gpu, self.profile, request.limit_bytes, on_backward_error=_leaving(self.report), assumed_rows=rows,
            notes=rows.used,
        )  # fmt: skip
        with world_of(request.workload.recipe), device_for(gpu, user_code=request.workload.takes_cuda) as device:
            return self.run(request.workload.load(), device, gpu)

    def on_real_gpu(self, workload: Workload) -> ChildEvent:
        """Run it on the GPU itself."""
        import torch

        from gpumem_tui.run.cuda_recorder import CudaRecorder, cap_reserved
        from gpumem_tui.run.neighbours import Neighbours
        from gpumem_tui.workload.errors import one_line

        device = torch.device("cuda", 0)
        uuid, *_ = *self.request.gpu_uuids, ""
        neighbours = Neighbours(uuid, self.request.others_bytes, self.profile)
        try:
            torch.cuda.init()
            cap_reserved(device, self.request.limit_bytes)
            torch.zeros(1, device=device)
            recorder = CudaRecorder(device, self.profile)
        except Exception as error:  # noqa: BLE001  calls that were queued may raise anything
            return Failed("device", f"{self.request.gpu.title} cannot be used: {one_line(error)}")
        torch.cuda.empty_cache()
        context_bytes = neighbours.beside_allocator_bytes(device)
        profile = self.profile.with_context(context_bytes, "measured before the first step")
        done = replace(self, profile=profile).run(workload, device, recorder)
        if not isinstance(done, TrialDone) or done.outcome == "error":
            return done
        # Kernels and libraries are loaded as they are first used, so the context has grown.
        grown = max(context_bytes, neighbours.beside_allocator_bytes(device))
        notes = (*done.notes, *filter(None, [neighbours.note]))
        return replace(done, device_used_bytes=done.peak_reserved_bytes + grown, notes=notes)

    def run(self, workload: Workload, device: torch.device, recorder: MemoryRecorder) -> ChildEvent:
        """Run it on a device, and say how it went."""
        import torch

        from gpumem_tui.run.cuda_recorder import free_bytes_on, history_of, is_out_of_memory, measured, sampled
        from gpumem_tui.simulator.device.shapes import Untraceable
        from gpumem_tui.step.run import StepRun
        from gpumem_tui.step.workload import WorkloadError
        from gpumem_tui.workload.errors import located, one_line

        memory: Any = torch.get_device_module(device)
        memory.reset_peak_memory_stats(device)
        started = time.perf_counter()
        request = self.request
        run = StepRun(workload, request.batch_size, device, recorder, lambda sample: self.report(sampled(sample)))
        outcome: Outcome = "fit"
        detail = ""
        try:
            run.run(request.steps, self.may_run)
        except (WorkloadError, Untraceable):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever user code raises is this trial's outcome
            free_bytes = free_bytes_on(memory, device, self.profile.context_bytes)
            outcome = "oom" if is_out_of_memory(error, free_bytes) else "error"
            detail = one_line(error) if outcome == "oom" else located(error)
            run.tag_gradients()
        seconds = time.perf_counter() - started
        peaks = memory.max_memory_allocated(device), memory.max_memory_reserved(device)
        recorded = history_of(recorder, failed=outcome != "fit")
        return replace(
            measured(outcome, recorded, peaks, self.profile.context_bytes),
            batch_size=request.batch_size,
            seconds=seconds,
            steps=len(run.step_seconds),
            step_seconds=() if request.simulated else tuple(run.step_seconds),
            alloc_retries=memory.memory_stats(device).get("num_alloc_retries", 0),
            detail=detail,
        )


# Traces

_COMPILED = "a compiled model is traced at the batch size asked for alone: search finds the largest"


def trace(request: TraceRequest, profile: Profile, report: Report, rows: AssumedRows | None = None) -> ChildEvent:
    """Trace a workload: in affine form, else at the size asked for, or say why there is no trace.

    Raises:
        WorkloadError: the step itself fails.
        Untraceable: it does what cannot be followed without values.
    """
    from gpumem_tui.simulator.allocator.replay import CHECKED_BATCH_SIZE, AffineTrace, NotAffine
    from gpumem_tui.simulator.device.scratch import assumptions

    started = time.perf_counter()
    tracer = _tracer(request, profile, report, rows)
    only_at, not_affine = 0, ""
    try:
        if request.not_affine:
            raise NotAffine(request.not_affine)
        if request.workload.recipe.compile and request.batch_size is not None:
            raise NotAffine(_COMPILED)
        found = tracer.affine()
        if request.batch_size == 1:
            found = tracer.with_single(found)
    except NotAffine as error:
        if request.batch_size is None:
            return Failed("trace", str(error), tracer.peaks(error.sizes))
        only_at, not_affine = request.batch_size, str(error)
        found = AffineTrace.constant(tracer.at(only_at))
    reasons = assumptions(tracer.assumed, request.gpu)
    growing = growth_line(found.at(only_at or CHECKED_BATCH_SIZE))
    notes = (growing,) if growing else ()
    seconds = time.perf_counter() - started
    return TraceDone(found, seconds, reasons, only_at, not_affine, notes, traced_layers=tracer.traced_layers)


def _tracer(request: TraceRequest, profile: Profile, report: Report, rows: AssumedRows | None) -> Tracer | DeepTracer:
    """Return what traces a workload: a deep network of the catalog from shallow ones like it."""
    from gpumem_tui.simulator.device.shapes import AssumedRows
    from gpumem_tui.simulator.fast.tracing import DeepTracer, Tracer, shallow_layers

    assumed_rows = rows or AssumedRows()

    def tracer_of(workload: WorkloadSpec) -> Tracer:
        return Tracer(
            workload.load, workload.recipe, request.gpu, profile, request.steps, _leaving(report),
            user_code=workload.takes_cuda, assumed_rows=assumed_rows,
        )  # fmt: skip

    shape = request.workload.shape
    if shape is None or not (shallow := shallow_layers(shape, request.workload.recipe)):
        return tracer_of(request.workload)
    return DeepTracer(
        lambda layers: tracer_of(replace(request.workload, shape=replace(shape, layers=layers))), shape.layers, shallow
    )


def _leaving(report: Report) -> Callable[[Exception], None]:
    """Say what went wrong in backward while there is still a process to say it."""
    from gpumem_tui.simulator.device.shapes import Untraceable
    from gpumem_tui.workload.errors import located

    def leave(error: Exception) -> None:
        report(Failed("trace", str(error) if isinstance(error, Untraceable) else located(error)))
        os._exit(0)

    return leave
