"""A trial of a command, within the process that trains: simulate a GPU or use the real one, and follow the program."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gpumem_tui.command.program import Program
from gpumem_tui.simulator.growth import growth_line
from gpumem_tui.simulator.profile import Profile, newer_than_checked, profile_for, too_old
from gpumem_tui.trial.events import (
    ChildEvent,
    Failed,
    Ready,
    Request,
    Sample,
    TraceDone,
    TraceRequest,
    TrialDone,
    TrialRequest,
    decode_request,
)

if TYPE_CHECKING:
    from gpumem_tui.command.changes import Changes
    from gpumem_tui.command.link import Link
    from gpumem_tui.simulator.timeline import Timeline
    from gpumem_tui.step.run import MemorySample


def take_part(link: Link) -> None:
    """Make this process, which has just imported torch, part of the trial that `link` belongs to."""
    request = decode_request(link.request())
    if request.simulated and (reason := too_old(torch.__version__)):
        link.conclude(Failed("torch", f"torch {torch.__version__} of {sys.executable} {reason}"))
        os._exit(1)
    profile = profile_for(torch.__version__, request.gpu)
    link.report(Ready.of(torch.__version__, profile))
    if request.simulated:
        _Simulated(link, request, profile).start()
    elif torch.cuda.is_available():
        assert isinstance(request, TrialRequest)
        _Real(link, request, profile).start()
    else:
        link.conclude(Failed("device", f"torch {torch.__version__} of {sys.executable} finds no CUDA device"))
        os._exit(1)


class _Trial:
    """What both kinds share: following the program, and saying how it went."""

    def __init__(self, link: Link, request: Request, profile: Profile) -> None:
        self.link = link
        self.request = request
        self.profile = profile
        self.started = time.perf_counter()
        self.program: Program
        self.notes: list[str] = []

    def follow(self, recorder: Any, memory: Any) -> None:
        """Follow the program from now on."""
        self.program = Program(
            recorder, memory, self.request.steps, self.sampled, self.done, self.link.wait_while_paused
        )
        self.program.start()
        self.link.steps = lambda: self.program.steps
        self.link.on_end = self._ended_early

    def sampled(self, sample: MemorySample) -> None:
        """A phase begins."""
        if not self.link.is_concluded:
            buckets = {bucket.value: size_bytes for bucket, size_bytes in sample.buckets.items()}
            event = Sample(sample.step, sample.phase.value, sample.allocated_bytes, sample.reserved_bytes, buckets)
            self.link.report(event)

    def done(self) -> None:
        """All steps were made: report, and end the program as its own exit would."""
        self.link.conclude(self.outcome())
        self.link.has_all_steps = True
        self.program.stop()
        raise SystemExit(0)

    def _ended_early(self) -> None:
        """The program ends by itself; fewer steps than wanted are better than none."""
        if self.program.steps and not self.link.is_concluded:
            made, wanted = self.program.steps, self.request.steps
            self.notes.append(f"the command ended by itself after {made} of {wanted} optimizer steps")
            self.link.conclude(self.outcome())

    def outcome(self) -> ChildEvent:
        """The result of a run that fits."""
        raise AssertionError("said by the two kinds")

    def all_notes(self) -> tuple[str, ...]:
        """What is to be known of the result."""
        return (*self.program.notes(), *self.notes)

    def trial_done(self, outcome: str, timeline: Timeline | None, unknown: str, detail: str = "") -> TrialDone:
        """A trial's outcome, with the figures up to now."""
        peak, reserved = self.program.peaks()
        buckets = None if timeline is None else timeline.breakdown_after(timeline.peak_event(), peak).as_json()
        return TrialDone(
            batch_size=getattr(self.request, "batch_size", 0) or 0,
            outcome=outcome,  # type: ignore[arg-type]
            peak_allocated_bytes=peak,
            peak_reserved_bytes=reserved,
            device_used_bytes=reserved + self.profile.context_bytes,
            buckets=buckets,
            buckets_unknown=unknown,
            seconds=time.perf_counter() - self.started,
            steps=self.program.steps,
            step_seconds=tuple(self.program.step_seconds),
            alloc_retries=self.program.memory.memory_stats().get("num_alloc_retries", 0),
            detail=detail,
            notes=self.all_notes(),
            growing=growth_line(timeline) if timeline is not None and outcome == "fit" else "",
        )


class _Simulated(_Trial):
    """On a GPU that is not there, as rank 0 of however many there are."""

    def start(self) -> None:
        from gpumem_tui.command.launchers import follow_launchers, local_gpus, ranks
        from gpumem_tui.command.libraries import follow_libraries
        from gpumem_tui.command.nvml import SimulatedNvml
        from gpumem_tui.simulator.cuda import presented_as_cuda
        from gpumem_tui.simulator.device import SimulatedGpu, backend, simulate
        from gpumem_tui.simulator.repeats import Repeats
        from gpumem_tui.simulator.shaped import AssumedRows
        from gpumem_tui.simulator.uncompiled import leave_compiler_unloaded

        leave_compiler_unloaded(torch)
        limit_bytes = self.request.limit_bytes if isinstance(self.request, TrialRequest) else None
        self.rows = AssumedRows(self.request.workload.assumed_rows)
        self.gpu = SimulatedGpu(
            self.request.gpu, self.profile, limit_bytes, unlimited=isinstance(self.request, TraceRequest),
            on_backward_error=self._failed_in_backward, on_out_of_memory=self._out_of_memory,
            assumed_rows=self.rows,
        )  # fmt: skip
        gpus = self.request.workload.recipe.gpus
        stack = ExitStack()
        stack.enter_context(simulate(self.gpu))
        stack.enter_context(presented_as_cuda(self.gpu, local_gpus(gpus)))
        atexit.register(_quietly(stack.close))
        follow_launchers(ranks(gpus))
        self.follow(self.gpu, torch.cuda)
        stack.enter_context(Repeats(self.gpu, self.program.called).watching())
        atexit.register(self._ended_early)  # while the GPU still is: what is registered last is called first
        follow_libraries(self.program)
        SimulatedNvml(backend, self.profile.context_bytes).follow()
        self.changes: Changes | None = None
        if isinstance(self.request, TraceRequest) and self.request.change:
            from gpumem_tui.command.changes import Changes

            self.changes = Changes(self.request.change, self.request.gpu)
            self.changes.start()

    def all_notes(self) -> tuple[str, ...]:
        newer = newer_than_checked(torch.__version__)
        return (*((newer,) if newer else ()), *super().all_notes(), *self.rows.used, *self.gpu.notes)

    def outcome(self) -> ChildEvent:
        from gpumem_tui.simulator.replay import AffineTrace
        from gpumem_tui.simulator.scratch import assumption

        self.program.name_what_lives()
        gc.disable()  # the program is over, and a trace is a million objects without a cycle
        timeline = self.gpu.finish()
        if not self.program.peaks()[0]:
            return Failed("workload", self.program.empty())
        if isinstance(self.request, TrialRequest):
            return self.trial_done("fit", timeline, "")
        assumed: Counter[str] = self.gpu.mode.assumed
        reasons = tuple((operator, times, assumption(operator)) for operator, times in sorted(assumed.items()))
        seconds = time.perf_counter() - self.started
        size = self.request.batch_size or 0
        notes = tuple(line for line in (*self.all_notes(), growth_line(timeline)) if line)
        done = TraceDone.of(AffineTrace.constant(timeline), seconds, reasons, size, "", notes)
        done = replace(done, rows_asked_for=self.gpu.mode.rows_asked_for, parameters=self.program.parameters())
        if self.changes is None:
            return done
        return replace(done, changes=self.changes.found(), is_sharded=self.changes.is_sharded)

    def _out_of_memory(self, message: str) -> None:
        """Nothing the program does about it changes what was found: this batch does not fit."""
        self.program.name_what_lives()
        self.link.conclude(self.trial_done("oom", self.gpu.finish(failed=True), "", message))

    def _failed_in_backward(self, error: Exception) -> None:
        from gpumem_tui.command.errors import described
        from gpumem_tui.output_lines import flush_output

        self.link.failed(described(error))
        flush_output()
        os._exit(1)


class _Real(_Trial):
    """On the GPU itself, under a cap, with the allocator's own history."""

    def start(self) -> None:
        from gpumem_tui.trial.cuda_recorder import CudaRecorder

        assert isinstance(self.request, TrialRequest)
        self.limit_bytes = self.request.limit_bytes
        self.recorder: CudaRecorder | None = None
        cuda: Any = torch.cuda

        def initialized() -> None:
            """CUDA has just been initialized, by the program: launchers and data loaders never do."""
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0) % torch.cuda.device_count())
            self._cap(device)
            self.recorder = CudaRecorder(device)
            self.follow(self.recorder, torch.cuda)
            internals: Any = torch._C
            internals._cuda_attach_out_of_memory_observer(self._out_of_memory)

        cuda._lazy_call(initialized)

    def _cap(self, device: torch.device) -> None:
        from gpumem_tui.simulator.settings import memory_fraction

        if self.limit_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(memory_fraction(self.limit_bytes, total), device)

    def outcome(self) -> ChildEvent:
        self.program.name_what_lives()
        if not self.program.peaks()[0]:
            return Failed("workload", self.program.empty())
        timeline, unknown = self._timeline(failed=False)
        return self._with_context(self.trial_done("fit", timeline, unknown))

    def _timeline(self, *, failed: bool) -> tuple[Timeline | None, str]:
        from gpumem_tui.trial.cuda_recorder import history_of

        assert self.recorder is not None
        return history_of(self.recorder, failed=failed)

    def _with_context(self, done: TrialDone) -> TrialDone:
        """The device's use as CUDA says it: context and libraries as they are, less what others hold."""
        assert isinstance(self.request, TrialRequest)
        free, total = torch.cuda.mem_get_info()
        context = max(0, total - free - torch.cuda.memory_reserved() - self.request.others_bytes)
        return replace(done, device_used_bytes=done.peak_reserved_bytes + context)

    def _out_of_memory(self, device: int, requested: int, device_total: int, device_free: int) -> None:
        from gpumem_tui.simulator.device import requested_text

        timeline, unknown = self._timeline(failed=True)
        said = f"CUDA out of memory. Tried to allocate {requested_text(requested)}; {requested_text(device_free)} free"
        self.link.conclude(self.trial_done("oom", timeline, unknown, said))


def _quietly(call: Callable[[], None]) -> Callable[[], None]:
    """Ignore errors while the interpreter shuts down."""

    def called() -> None:
        with suppress(Exception):
            call()

    return called
