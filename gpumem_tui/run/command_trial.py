"""A trial of a command, within the process that trains: simulate a GPU or use the real one, and follow the program."""

from __future__ import annotations

import atexit
import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import torch

from gpumem_tui.launchers import ranks_here
from gpumem_tui.memory import format_bytes
from gpumem_tui.run.cuda_recorder import (
    CudaMemory,
    CudaRecorder,
    OutOfMemoryError,
    cap_reserved,
    free_bytes_on,
    history_of,
    is_out_of_memory,
    measured,
    sampled,
)
from gpumem_tui.run.events import (
    ChildEvent,
    Failed,
    Outcome,
    Ready,
    Request,
    Sample,
    TraceDone,
    TraceRequest,
    TrialDone,
    TrialRequest,
)
from gpumem_tui.run.later import Later, NotReached
from gpumem_tui.run.lengths import InputLengths
from gpumem_tui.run.neighbours import Neighbours
from gpumem_tui.run.one_rank import follow_launchers, local_gpus, ranks
from gpumem_tui.run.program import Program
from gpumem_tui.run.session import CONCLUDE_SIGNAL
from gpumem_tui.simulator.allocator.profile import Profile, profile_for, said_of
from gpumem_tui.text import flush_output
from gpumem_tui.workload.errors import is_users, one_line, typed

if TYPE_CHECKING:
    from types import FrameType

    from gpumem_tui.causes import Note
    from gpumem_tui.run.changes import Changes
    from gpumem_tui.run.session import Reporter
    from gpumem_tui.simulator.allocator.timeline import Timeline
    from gpumem_tui.simulator.device.gpu import SimulatedGpu
    from gpumem_tui.step.run import MemorySample


def take_part(reporter: Reporter) -> None:
    """Make this process, which has just imported torch, part of the trial that `reporter` belongs to."""
    request = reporter.request
    version = request.workload.as_torch or torch.__version__
    ranks = ranks_here(os.environ).world_size or 1
    profile = profile_for(version, request.gpu).using(request.gpu, (ranks,) if ranks > 1 else ())
    reporter.report(Ready.of(version, profile))
    if request.simulated:
        _Simulated(reporter, request, profile).start()
    elif torch.cuda.device_count():  # `is_available` would keep forked children from using CUDA (its docstring)
        assert isinstance(request, TrialRequest)
        _Real(reporter, request, profile).start()
    else:
        reporter.conclude(Failed("device", f"torch {torch.__version__} of {sys.executable} finds no CUDA device"))
        os._exit(1)


class _Trial:
    """The part that both kinds of trials share: following the program, and reporting the outcome."""

    def __init__(self, reporter: Reporter, request: Request, profile: Profile) -> None:
        self.reporter = reporter
        self.request = request
        self.profile = profile
        self.started = time.perf_counter()
        self.program: Program
        self.notes: list[Note] = []
        self.simulated_gpu: SimulatedGpu | None = None
        self.is_cut = False
        """Whether a program that trains nothing was ended before its end."""

        self._latest: Sample | None = None
        self._has_ended = False

    def follow(self, recorder: Any, memory: Any) -> Program:
        """Have the program followed from its `start` on."""
        self.program = Program(
            recorder, memory, self.request.steps, self.sampled, self.done, self.reporter.wait_while_paused
        )
        workload = self.request.workload
        self.program.lengths = InputLengths(
            workload.longest, can_lengthen=self.request.simulated, are_noted=workload.command is not None
        )
        self.program.later = Later(workload.through, resumes=workload.resume)
        self.reporter.steps = lambda: self.program.steps
        self.reporter.on_end = self._ended_early
        self.reporter.on_error = self.failed
        return self.program

    def name_what_lives(self) -> None:
        """Name what no phase has told of; a model of the catalog has fixed parts."""
        workload = self.request.workload
        self.program.name_what_lives(in_parts=workload.command is not None or workload.shape is None)

    def conclude_when_asked(self) -> None:
        """Have a signal end the run with the steps that were made. To be called in the main thread."""
        with suppress(ValueError):  # torch was imported in another thread
            signal.signal(CONCLUDE_SIGNAL, self._asked_to_conclude)

    def sampled(self, sample: MemorySample) -> None:
        """Report the memory as a phase begins."""
        self._latest = sampled(sample)
        self._tell()

    def _tell(self, graph: int = 0) -> None:
        if self._latest is not None and not self.reporter.is_concluded:
            progress = replace(self.program.micro_batches.now(), graph=graph, ooms=self.program.tries.times)
            self.reporter.report(replace(self._latest, progress=progress))

    def done(self) -> None:
        """Report, as all steps were made, and end the program as its own exit would."""
        self.reporter.conclude(self.outcome())
        self.reporter.has_all_steps = True
        self.program.stop()
        raise SystemExit(0)

    def _ended_early(self) -> None:
        """Report a program that ends by itself: fewer steps than wanted are better than none.

        One without any step infers, embeds or evaluates, or is no more than a part of the command (see `Child`).
        """
        if self.reporter.is_concluded:
            return
        self._has_ended = True
        made, wanted = self.program.steps, self.request.steps
        too_few = "" if made else self.program.samples.too_few()
        if too_few:
            self.reporter.conclude(Failed("workload", too_few))
        elif made and made < wanted:
            self.notes.append(f"the command ended by itself after {made} of {wanted} optimizer steps")
        elif not made and self.program.peaks()[0]:
            self.notes.append(f"the command ended by itself without an optimizer step: {self.program.without_steps()}")
        elif not made:
            return
        self.reporter.conclude(self.outcome())

    def failed(self, detail: str, error: BaseException) -> None:  # noqa: ARG002  the words are enough here
        """Report the program's own steps where it cannot take longer inputs after them, or fails as it evaluates."""
        awaits = self.program.later.after is not None
        if not self.reporter.is_concluded and (awaits or self.program.lengths.tries_longer(self.program.steps)):
            where = "after its steps" if awaits else "at that length"
            self.notes.append(f"the program ends {where}, so what it took until then counts alone: {detail}")
            self.reporter.conclude(self.outcome())
        if not self.program.steps and (too_few := self.program.samples.too_few()):
            self.reporter.conclude(Failed("workload", f"{too_few} ({detail})"))

    def _asked_to_conclude(self, _number: int, frame: FrameType | None) -> None:
        """Report the steps that were made, and end: what runs now has not come to another one in time."""
        if self.reporter.is_concluded:
            return
        if not self.reporter.steps() and not self.program.trains_nothing():
            self.reporter.on_end = lambda: None  # whoever asked knows that nothing came in time
            os._exit(1)
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        place = f"; it is at {os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""
        steps, wanted = self.program.steps, self.request.steps
        made = f"this is of {steps} step{'' if steps == 1 else 's'}, not {wanted}: no other came in time"
        if not steps:
            made = f"no optimizer step came in time: {self.program.without_steps()}, up to there"
            self.is_cut = True
        if steps >= wanted:
            made = "the run ends here, as the time was up"
        self.notes.append(f"{made}{place} (--timeout waits longer)")
        self.reporter.conclude(self.outcome())
        flush_output()
        os._exit(0)

    def outcome(self) -> ChildEvent:
        """Return the result of a run that fits."""
        raise AssertionError("said by the two kinds")

    def all_notes(self, timeline: Timeline | None) -> tuple[Note, ...]:
        """Return what else is to be known of the result, a line each.

        Args:
            timeline: of a run that fits; None if missing.
        """
        from gpumem_tui.run.keepers import kept_checkpoint, leaks_in

        kept = () if timeline is None else (*leaks_in(timeline, self.simulated_gpu), *kept_checkpoint(timeline))
        return (*kept, *self.program.notes(), *self.notes)

    def trial_done(self, outcome: Outcome, recorded: tuple[Timeline | None, str], detail: str = "") -> TrialDone:
        """Return a trial's outcome, with the figures up to now."""
        from gpumem_tui.simulator.allocator.sized import sized

        timeline = recorded[0]
        notes = self.all_notes(timeline if outcome == "fit" else None)
        if timeline is not None:
            notes = tuple(sized(notes, timeline, timeline.peak_event()))
        return replace(
            measured(outcome, recorded, self.program.peaks(), self.profile.context_bytes),
            batch_size=self.request.batch_size or 0,
            seconds=time.perf_counter() - self.started,
            steps=self.program.steps,
            step_seconds=tuple(self.program.step_seconds),
            alloc_retries=self.program.memory.memory_stats().get("num_alloc_retries", 0),
            detail=detail,
            notes=notes,
        )


class _Simulated(_Trial):
    """On a GPU that is not there, as one rank, the first if no other is asked for, of however many there are."""

    _message = ""
    """PyTorch's, of the last time that memory ran out."""

    def start(self) -> None:
        from gpumem_tui.run.checkpoints import Checkpoints
        from gpumem_tui.run.libraries import answer_nvml, follow_libraries
        from gpumem_tui.simulator.compiled.following import follow_compiler
        from gpumem_tui.simulator.cuda.presented import presented_as_cuda
        from gpumem_tui.simulator.device.gpu import SimulatedGpu, backend, simulate
        from gpumem_tui.simulator.device.shapes import AssumedRows
        from gpumem_tui.simulator.fast.repeats import Repeats
        from gpumem_tui.simulator.fast.uncompiled import leave_compiler_unloaded
        from gpumem_tui.simulator.standins.register import offered

        gc.freeze()  # what was imported stays, and need not be looked at each time that cycles are looked for
        leave_compiler_unloaded(torch)
        random.seed(0)  # traces are compared with each other
        torch.default_generator.manual_seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        end = self.request.end if isinstance(self.request, TraceRequest) else "most"
        self.rows = AssumedRows(self.request.workload.assumed_rows, end)
        self.gpu = self.simulated_gpu = SimulatedGpu(
            self.request.gpu, self.profile, self.request.limit_bytes, isinstance(self.request, TraceRequest),
            self.request.ooms if isinstance(self.request, TraceRequest) else None,
            on_backward_error=self._failed_in_backward, on_out_of_memory=self._out_of_memory,
            assumed_rows=self.rows,
        )  # fmt: skip
        gpus, rank = self.request.workload.recipe.gpus, self.request.workload.rank
        stack = ExitStack()
        stack.enter_context(simulate(self.gpu))
        stack.enter_context(presented_as_cuda(self.gpu, local_gpus(gpus), rank))
        stack.enter_context(offered())
        atexit.register(_quietly(stack.close))
        world = ranks(gpus)
        follow_launchers(world, rank)
        self.follow(self.gpu, torch.cuda).start()
        self.gpu.whole_tries = self.program.tries.whole
        self.conclude_when_asked()
        self.gpu.mode.transfers.arriving = self.program.lengths.arriving
        if world > gpus:
            self.program.note(f"rank {rank} of {world}: a launcher within the command starts the others")
        stack.enter_context(Repeats(self.gpu, self.program.called, self.program.calls_ahead).watching())
        atexit.register(self._ended_early)  # while the GPU still is: what is registered last is called first
        takes_batch = self.request.workload.takes_batch  # of whose sizes two run at a time
        self.compiler = follow_compiler(self.gpu.notes, self._tell, alone=not takes_batch)
        follow_libraries(self.program)
        self.program.follow_stages()
        self.checkpoints = Checkpoints(self.gpu.sites.calling_line)
        self.checkpoints.follow()
        answer_nvml(backend, self.profile.context_bytes)
        self.changes: Changes | None = None
        if isinstance(self.request, TraceRequest) and self.request.change:
            from gpumem_tui.run.changes import Changes

            self.changes = Changes(self.request.change, self.request.gpu, self.compiler, self.checkpoints, self.program)
            self.changes.start()

    def trial_done(self, outcome: Outcome, recorded: tuple[Timeline | None, str], detail: str = "") -> TrialDone:
        done, unsure = super().trial_done(outcome, recorded, detail), self._unsure()
        seconds = done.step_seconds if self.request.workload.command is not None else ()
        return replace(done, is_estimate=unsure["is_estimate"], step_seconds=seconds)

    def _unsure(self) -> dict[str, Any]:
        found = self.compiler.unsure(self.request.workload.as_torch, self.request.gpu)
        return {**found, "is_estimate": found["is_estimate"] or self.is_cut}

    def all_notes(self, timeline: Timeline | None) -> tuple[Note, ...]:
        known = said_of(self.request.workload.as_torch, torch.__version__, self.request.gpu)
        roots = self.program.roots
        gradients = self.program.gradients.causes(roots, self.checkpoints.without_gradient)
        causes = *gradients, *self.checkpoints.causes(roots), *self.gpu.causes()
        return (*known, *super().all_notes(timeline), *causes, *self.rows.notes, *self.gpu.notes)

    def outcome(self) -> ChildEvent:
        from gpumem_tui.simulator.allocator.replay import AffineTrace
        from gpumem_tui.simulator.device.gpu import backend
        from gpumem_tui.simulator.device.scratch import assumptions

        self.name_what_lives()
        gc.disable()  # the program is over, and a trace is a million objects without a cycle
        timeline = self.gpu.finish_folded(is_exact=not self.request.workload.takes_batch)
        timeline = timeline if self.program.steps else timeline.forward_only()
        if not self.program.peaks()[0]:
            return Failed("workload", self.program.empty())
        rank = self.request.workload.rank
        if rank >= max(backend.ranks, ranks_here(os.environ).world_size or 1):
            return Failed("options", f"--rank {rank}: the command is one process; start it by its launcher")
        self._follow_context()
        if isinstance(self.request, TrialRequest):
            return self.trial_done("fit", (timeline, ""))
        assumed: Counter[str] = self.gpu.mode.assumed
        reasons = assumptions(assumed, self.request.gpu)
        seconds = time.perf_counter() - self.started
        size = self.request.batch_size or 0
        ran_out = self.program.tries.result()
        if ran_out is not None:
            reserved_bytes = self.gpu.allocator.stats.reserved_bytes
            ran_out = replace(ran_out, reserved_bytes=reserved_bytes, survived=not self.gpu.is_endless)
        done = TraceDone(AffineTrace.constant(timeline), seconds, reasons, size, notes=self.all_notes(timeline))
        done = replace(
            done, ran_out=ran_out, rows_asked_for=self.gpu.mode.rows_asked_for, steps=self.program.steps,
            not_reached=self._not_reached(), fed_by=self.program.samples.fed_by(),
            without=tuple(dict.fromkeys(self.program.without)),
            parameters=0 if self.request.workload.command is None else self.program.parameters(),
            allocator=self.gpu.allocator.settings.text, assumptions=tuple(self.rows.taken.values()), **self._unsure(),
        )  # fmt: skip
        if self.changes is None:
            return done
        made = self.changes
        return replace(done, changes=made.found(), written=made.written, is_sharded=made.is_sharded)

    def _not_reached(self) -> tuple[NotReached, ...] | None:
        """Return what of a user's command is not in the trace; None of what has nothing but its steps."""
        workload = self.request.workload
        if workload.command is None or workload.hugging_face is not None or not self.program.steps:
            return None
        return self.program.later.not_reached(has_ended=self._has_ended)

    def _follow_context(self) -> None:
        """Take and report what the device has outside the allocator, by the libraries and groups that were used."""
        profile = self._with_other_ranks(self.gpu.profile)
        if profile != self.profile:
            self.profile = profile
            self.reporter.report(Ready.of(self.request.workload.as_torch or torch.__version__, self.profile))

    def _with_other_ranks(self, profile: Profile) -> Profile:
        """Add what the other ranks put on GPU 0, where this rank shows that they do, if that is this rank's GPU."""
        from gpumem_tui.simulator.cuda.placing import placing

        made, place, is_loaded = placing.found()
        if not made:
            return profile
        others, held_bytes = placing.ranks - 1, self.gpu.recorder.held_bytes(made)
        remedy = "torch.cuda.set_device(local_rank) before the first CUDA call"
        if is_loaded:
            remedy = "torch.load(…, map_location=device)"
        what = f"a CUDA context and {format_bytes(held_bytes)} of tensors"
        is_first = self.request.workload.rank % placing.ranks == 0
        counted = "counted here" if is_first else "counted on the rank of GPU 0"
        self.gpu.notes[f"{place}: each of {others} other ranks opens {what} on GPU 0, {counted}; remedy: {remedy}"] = (
            None
        )
        return profile.with_others(others, held_bytes) if is_first else profile

    def _out_of_memory(self, message: str) -> None:
        """Report that a trial's batch does not fit: nothing the program does about it changes that.

        A program that looks for a larger batch by itself continues, as does each that is traced: it may catch the
        error.
        """
        self._message = message
        tried = self.program.size_now(self.gpu.memory.rows)
        if isinstance(self.request, TrialRequest) and tried <= self.request.batch_size:
            self._does_not_fit()
        else:
            self.program.ran_out(tried, self.gpu.sites.place(), self.gpu.memory.has_lost)

    def _does_not_fit(self) -> None:
        self._follow_context()
        self.name_what_lives()
        self.reporter.does_not_fit = True
        self.reporter.conclude(self.trial_done("oom", (self.gpu.finish(failed=True), ""), self._message))

    def _died(self, detail: str) -> None:
        """Report a program that ends as memory has run out."""
        if isinstance(self.request, TrialRequest):
            self._does_not_fit()
        else:
            self.reporter.runs_again = True
            self.reporter.conclude(Failed("memory", detail, self.program.tries.times))

    def _ended_early(self) -> None:
        if not self.reporter.is_concluded and not self.program.tries.is_settled:
            self._died(f"the command ended as it had run out of memory: {self._message}")
        super()._ended_early()

    def failed(self, detail: str, error: BaseException) -> None:
        """Report what cannot be followed, of a workload that others than a trace answer for."""
        from gpumem_tui.run.out_of_memory import is_out_of_memory
        from gpumem_tui.simulator.device.shapes import Untraceable

        tries = self.program.tries
        if tries.times and (not tries.is_settled or is_out_of_memory(error)):
            self._died(detail)
        super().failed(detail, error)
        if isinstance(error, Untraceable) and self.request.workload.command is None:
            self.reporter.conclude(Failed("trace", detail))
        elif not isinstance(error, Untraceable) and (words := self.rows.read_before(error)):
            self.reporter.conclude(Failed("workload", f"{detail}; it {words}"))
        elif self.rows.taken and not isinstance(error, Untraceable) and not self.reporter.is_concluded:
            self.reporter.conclude(Failed("workload", f"{detail}; the trace {self.rows.most_words}"))

    def _failed_in_backward(self, error: Exception) -> None:
        from gpumem_tui.workload.errors import described

        self.reporter.failed(described(error), error)
        flush_output()
        os._exit(1)


class _Real(_Trial):
    """On the GPU itself, under a cap, with the allocator's own history."""

    request: TrialRequest
    recorder: CudaRecorder
    _refused = ""

    def start(self) -> None:
        self._pid = os.getpid()
        self._is_capped = False
        uuids, rank = self.request.gpu_uuids, ranks_here(os.environ).local_rank or 0
        uuid = uuids[rank % len(uuids)] if uuids else ""
        self.neighbours = Neighbours(uuid, self.request.others_bytes, self.profile)
        self.conclude_when_asked()
        cuda: Any = torch.cuda
        cuda._lazy_call(self._initialized)

    def _initialized(self) -> None:
        """Begin once CUDA has been initialized, by the program: launchers and data loaders never do.

        PyTorch calls this within that initialization, and would raise what is raised here into the program.
        """
        if os.getpid() != self._pid:
            return
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001  any error: it is no error of the program's
            self._end(Failed("device", f"{self.request.gpu.title} cannot be used: {typed(error)}"))

    def _begin(self) -> None:
        device = self._device()
        uuid = _uuid_of(device or torch.device("cuda", 0))
        if uuid and self.request.gpu_uuids and uuid not in self.request.gpu_uuids:
            self._end(Failed("device", f"the command uses {uuid}: have it leave CUDA_VISIBLE_DEVICES as it finds it"))
        self.recorder = CudaRecorder(device, self.profile)
        program = self.follow(self.recorder, CudaMemory(self.recorder))
        program.inputs = self.recorder.take_inputs
        internals: Any = torch._C
        program.resets = (
            (internals, "_cuda_resetPeakMemoryStats"),
            (internals, "_accelerator_resetPeakStats"),  # since torch 2.9
        )
        program.start()
        self._cap()
        with suppress(RuntimeError):  # cudaMallocAsync, and allocators of the program's own, tell nobody
            internals._cuda_attach_out_of_memory_observer(self._allocation_failed)
        _when_made(OutOfMemoryError, self._out_of_memory)

    def _device(self) -> torch.device | None:
        """Return the device that this process trains on; None where it alone knows which of several."""
        rank, devices = ranks_here(os.environ).local_rank, torch.cuda.device_count()
        return None if rank is None and devices > 1 else torch.device("cuda", (rank or 0) % devices)

    def _cap(self) -> None:
        if not self._is_capped and self.recorder.device is not None:
            self._is_capped = True
            cap_reserved(self._used(), self.request.limit_bytes)

    def _used(self) -> torch.device:
        device = self.recorder.device
        return torch.device("cuda", device or 0) if not isinstance(device, torch.device) else device

    def sampled(self, sample: MemorySample) -> None:
        self._cap()
        super().sampled(sample)

    def outcome(self) -> ChildEvent:
        self.name_what_lives()
        if not self.program.peaks()[0]:
            return Failed("workload", self.program.empty())
        return self.trial_done("fit", history_of(self.recorder, failed=False))

    def trial_done(self, outcome: Outcome, recorded: tuple[Timeline | None, str], detail: str = "") -> TrialDone:
        beside_bytes = self.neighbours.beside_allocator_bytes(self._used())
        if self.neighbours.note:
            self.notes.append(self.neighbours.note)
        done = super().trial_done(outcome, recorded, detail)
        return replace(done, device_used_bytes=done.peak_reserved_bytes + beside_bytes)

    def failed(self, detail: str, error: BaseException) -> None:
        """Report an error of which the memory is the cause, though CUDA or a library raised it."""
        with suppress(Exception):  # a broken device answers nothing; the program's own error is reported anyway
            free_bytes = free_bytes_on(torch.cuda, self._used(), self.profile.context_bytes)
            if not self.reporter.is_concluded and is_out_of_memory(error, free_bytes):
                self._out_of_memory(error)
        super().failed(detail, error)

    def _allocation_failed(self, _device: int, requested: int, _device_total: int, device_free: int) -> None:
        """Note a request that the allocator refuses; cuDNN's trials of algorithms continue without."""
        from gpumem_tui.simulator.device.gpu import size_text

        wanted, free = size_text(requested), size_text(device_free)
        self._refused = f"CUDA out of memory. Tried to allocate {wanted}; {free} free"

    def _out_of_memory(self, error: BaseException) -> None:
        """Report that this batch does not fit, once the program knows it: nothing it does about it changes that."""
        if self.reporter.is_concluded or os.getpid() != self._pid:
            return
        try:
            self.name_what_lives()
            recorded = history_of(self.recorder, failed=True)
            self.reporter.conclude(self.trial_done("oom", recorded, self._refused or one_line(error)))
        except Exception as ours:  # noqa: BLE001  it must not take the place of the program's own
            self.reporter.conclude(Failed("device", f"out of memory, and the cause is unknown: {typed(ours)}"))

    def _end(self, failure: Failed) -> None:
        self.reporter.conclude(failure)
        flush_output()
        os._exit(1)


def _uuid_of(device: torch.device) -> str:
    """Return ``GPU-…`` as NVML writes it; empty where PyTorch has none, or NVML another, as of AMD's and of MIG's."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if torch.version.hip or "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return ""
    try:
        return f"GPU-{UUID(str(found))}"
    except ValueError:
        return ""


def _when_made(kind: type[BaseException], call: Callable[[BaseException], None]) -> None:
    """Have a function called with each error of a kind as it is made, before any program can catch it.

    PyTorch's C++ makes `torch.OutOfMemoryError` where it leaves for Python, and not where it is caught before: a
    convolution continues with an algorithm of cuDNN that takes less (aten/src/ATen/native/cudnn/Conv_v8.cpp).
    """
    changed: Any = kind
    initialize = changed.__init__

    def made(error: BaseException, *args: Any) -> None:
        initialize(error, *args)
        call(error)

    changed.__init__ = made


def _quietly(call: Callable[[], None]) -> Callable[[], None]:
    """Ignore errors while the interpreter shuts down."""

    def called() -> None:
        with suppress(Exception):
            call()

    return called
