"""The probe: wakes at the end of an optimizer's step, twice a second at most, and publishes what there is."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpumem_tui.host_memory import resident_bytes
from gpumem_tui.memory import Bucket
from gpumem_tui.probe import allocator, trackers, wire
from gpumem_tui.probe.compiler import invisible, uncompiled
from gpumem_tui.probe.files import WireError, read_private, write_document
from gpumem_tui.probe.finding import Finder, Holdings, describe_models, describe_optimizers, describe_untrained
from gpumem_tui.probe.oom import BlackBox, LastState
from gpumem_tui.probe.ring import Ring
from gpumem_tui.probe.rising import Rising
from gpumem_tui.probe.stages import RunStages
from gpumem_tui.probe.stall import Watchdog
from gpumem_tui.probe.steps import StepCount
from gpumem_tui.probe.wire import (
    MAX_REQUEST_BYTES,
    LookAnswer,
    PostMortem,
    Stall,
    Trained,
    UncaughtError,
    decode_request,
    encode_document,
)
from gpumem_tui.step.walking import parameters_in, parameters_of

if TYPE_CHECKING:
    from gpumem_tui.probe.look import Look

INTERVAL_S = 0.5
SAMPLE_SHARE = 1 / 400
"""Samples take at most this share of the training's time: where one takes long, they become rarer."""
MOST_PAUSE_S, MOST_WAITING_PAUSE_S = 30.0, 5.0
"""However long one computes, or waits: on a busy machine that is no time which the training would have had."""
COUNT_SHARE = 1 / 2000
"""Writing the step counter takes at most this share: it is written after every step of 0.1 s and more."""
SCAN_SHARE = 1 / 1000
SCAN_ALLOWANCE_S = 0.25
"""Putting modules in order takes at most this share of the time since the first, and this much beyond it: a program
that makes some now and then has them found at the next sample, one that makes some in each step is not held up."""
MOST_FAILURES = 5
AGAIN_S = 60.0
"""After so long a probe that has switched itself off tries again."""
KEPT_SAMPLES = 32

_T = TypeVar("_T")
_log = logging.getLogger("gpumem_tui")


class Probe:
    """Lives in the training process. Never waits, never raises into the program.

    All that happens, happens in the hook that torch calls after an optimizer's step, at the program's exit and when
    memory runs out; a sleeping thread reports where the program is once steps have stopped. After
    `MOST_FAILURES` failures in a row the probe switches itself off, and tries again every `AGAIN_S`. A forked child
    publishes for itself, once it steps an optimizer; those that load data never do.

    Args:
        entry: as `wire.Process.entry`.
        late: whether modules may have been made before.
    """

    def __init__(self, entry: str, late: bool = True) -> None:
        self._entry = entry
        self._late = late
        self._steps = StepCount()
        self._finder = Finder()
        self._ring: Ring | None = None
        self._look: Look | None = None
        self._queued_in = -1
        self._black_box = BlackBox(self._look_around, self._publish_out_of_memory, self._publish_error, self._guarded)
        self._watchdog = Watchdog(self._steps, lambda stall: self._guarded(lambda: self._publish_stall(stall)))
        self._samples: deque[wire.Record] = deque(maxlen=KEPT_SAMPLES)
        self._rising = Rising()
        self._stages = RunStages(lambda: self._steps.steps, self._held, self._trains, self._guarded)
        self._kept: tuple[wire.KeptPlace, ...] = ()
        self._lock = threading.Lock()
        self._due = self._sample_due = self._count_due = 0.0
        self._is_busy = False
        self._scanned_since = time.monotonic()
        self._scan_s = 0.0
        self._last: tuple[float, int] | None = None
        self._control = (0, 0)
        self._answered = 0
        self._failures = 0
        self._is_off = False
        self._errors = 0
        self._dropped = 0
        self._is_child = False
        self._pid = os.getpid()

    def install(self) -> None:
        """Begin to watch. Needs torch, and none of CUDA."""
        steps, monotonic = self._steps, time.monotonic
        boundary = uncompiled(self._boundary)

        def after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            key = id(optimizer)
            if key == steps.current:
                steps.run += 1
            elif not steps.fire(key):
                boundary(optimizer)
                return
            if monotonic() >= self._due:
                boundary(optimizer)

        self._finder.follow(self._late)
        register_optimizer_step_post_hook(invisible(after_step))
        self._black_box.arm()
        os.register_at_fork(after_in_child=self._begin_in_child)
        atexit.register(self._end)

    # Called by torch, the interpreter and the allocator

    def _boundary(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what is due after an optimizer's step, or get to know a new optimizer."""
        if self._is_off:
            self._guarded(lambda: self._try_again(optimizer), though_off=True)
        else:
            self._guarded(lambda: self._at_boundary(optimizer))

    def _end(self) -> None:
        """Publish the last sample as the interpreter exits."""
        self._watchdog.end()
        self._guarded(self._publish_end, though_off=True)
        self._due = math.inf

    def _begin_in_child(self) -> None:
        """Start over in a forked child: what has been published is the parent's, and so are the files and a look."""
        self._lock = threading.Lock()  # another thread of the parent's may have held the other one
        self._pid, self._is_child = os.getpid(), True
        self._ring, self._last, self._control, self._answered = None, None, (0, 0), 0
        self._samples.clear()
        trackers.forget()
        self._stages.forget()
        self._rising, self._kept = Rising(), ()
        self._failures = self._errors = self._dropped = 0
        self._queued_in = -1
        if self._look is not None:
            self._look.disarm()
            self._look = None
        self._due = self._sample_due = self._count_due = 0.0

    def _guarded(self, work: Callable[[], _T], though_off: bool = False) -> _T | None:
        """Do something, of which no failure reaches the program; skip it if another thread is at it, or in a child."""
        skipped = (self._is_off and not though_off) or os.getpid() != self._pid
        if skipped or not self._lock.acquire(blocking=False):
            return None
        try:
            return work()
        except Exception as error:  # noqa: BLE001  any error: the training continues; it is counted and published
            self._errors += 1
            self._failures += 1
            if self._failures >= MOST_FAILURES and not self._is_off:
                with suppress(Exception):  # such as of the program's own handlers of log messages
                    self._switch_off(f"{type(error).__name__}: {error}")
            return None
        finally:
            self._lock.release()

    def _switch_off(self, reason: str) -> None:
        self._is_off = True
        self._due = time.monotonic() + AGAIN_S
        self._finder.leave()
        if self._look is not None:
            self._look.disarm()
            with suppress(Exception):  # what failed before may fail here as well, and it has just been told
                self._look.stop()
        if self._ring is not None:
            with suppress(OSError, WireError):
                self._ring.switch_off(reason)
        _log.warning("gpumem-tui stops watching this process: %s", reason)

    def _try_again(self, optimizer: torch.optim.Optimizer) -> None:
        """Come back after a while, if a sample can be taken and published."""
        if time.monotonic() < self._due:
            return
        if not self._steps.knows(optimizer):
            self._register(optimizer)
        self._steps.recheck(optimizer)
        if not self._steps.is_whole(optimizer) or torch._C._current_graph_task_id() != -1:
            return
        try:
            self._sample()
            self._open_ring().switch_off("")
            self._finder.follow(late=True)
            self._look, self._is_off = None, False
        finally:
            if self._is_off:
                self._due = time.monotonic() + AGAIN_S

    # Sampling

    def _at_boundary(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._steps.knows(optimizer):
            self._register(optimizer)
        if time.monotonic() < self._due:
            return
        self._steps.recheck(optimizer)
        self._count()
        if not self._steps.is_whole(optimizer) or (self._look is None and time.monotonic() < self._sample_due):
            return
        backward = torch._C._current_graph_task_id()
        if self._look is not None:
            self._look.optimizer_stepped()
            if backward == -1 or self._look.is_over:
                self._end_look(self._look, optimizer)
        elif backward == -1:
            self._sample()
            self._follow_commands(optimizer)
            self._follow_rise(optimizer)
        elif backward != self._queued_in:
            self._queued_in = backward
            self._queue_after_backward(optimizer)

    def _queue_after_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Sample when backward has ended: the optimizer steps inside of it, as others may after it."""
        stepped = weakref.ref(optimizer)

        def at_end() -> None:
            optimizer = stepped()
            if optimizer is not None and self._look is None:
                self._sample()
                self._follow_commands(optimizer, in_backward=True)

        callback = uncompiled(lambda: self._guarded(at_end))
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _register(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps.register(optimizer)
        self._finder.register(optimizer)
        weakref.finalize(optimizer, self._steps.forget, id(optimizer)).atexit = False

    def _publish_end(self) -> None:
        if self._look is not None and not self._look.is_over:
            self._answer(self._look.abandon("the program ended before the step did"))
        if self._ring is not None:
            try:
                if not self._is_off:
                    self._sample(phase="")
            finally:
                self._ring.end()

    def _count(self) -> None:
        """Publish how many steps there are and when the next sample is due, so seldom that it takes next to nothing."""
        started = time.monotonic()
        if self._ring is None or started < self._count_due:
            return
        due_ns = time.monotonic_ns() + max(0, round((self._sample_due - started) * 1e9))
        self._ring.count(wire.Heartbeat(self._steps.steps, time.monotonic_ns(), due_ns, self._is_busy))
        now = time.monotonic()
        self._count_due = now + min((now - started) / COUNT_SHARE, MOST_WAITING_PAUSE_S)
        if self._look is None:
            self._due = min(self._count_due, self._sample_due)

    def _sample(self, phase: str = "optimizer") -> None:
        started, computed = time.monotonic(), time.thread_time()
        self._black_box.watch_allocator()
        try:
            ring = self._open_ring()
            with torch._C.DisableTorchFunction():  # the program's own modes need not see what is read here
                if self._finder.stale and self._may_scan(started, phase):
                    self._scan(ring)
                started, computed = (
                    time.monotonic(),
                    time.thread_time(),
                )  # the ring and the scan are no part of what a sample takes
                records = self._records(started, phase)
            self._samples.extend(records)
            if phase:
                self._stages.at_boundary()
            ring.append(records)
            stages = self._publish_stages(ring)
            if phase and trackers.write(records, stages):  # as the program ends, its trackers may have ended
                started, computed = time.monotonic(), time.thread_time()  # no part of it: connections, imports, threads
            self._watchdog.follow()
            self._failures = 0
        except OSError:
            self._dropped += 1
            raise
        finally:
            self._pause(time.monotonic() - started, time.thread_time() - computed)
        self._count_due = 0.0
        self._count()

    def _held(self) -> dict[int, dict[str, int]]:
        """Return what is held of each device by the newest sample, by bucket."""
        newest = self._samples[-1].monotonic_ns if self._samples else 0
        return {
            one.device: {
                Bucket.PARAMETERS.value: one.parameters_bytes,
                Bucket.GRADIENTS.value: one.gradients_bytes,
                Bucket.OPTIMIZER.value: one.optimizer_bytes,
            }
            for one in self._samples
            if one.monotonic_ns == newest
        }

    def _trains(self, module: torch.nn.Module) -> bool:
        """Return whether one of the optimizers that have stepped trains a part of the module."""
        trained = {id(one) for optimizer in self._finder.optimizers for one in parameters_of(optimizer)}
        return any(id(one) in trained for one in parameters_in(module))

    def _publish_stages(self, ring: Ring) -> tuple[wire.StagePeak, ...]:
        is_news, peaks = self._stages.is_news, self._stages.peaks()
        if is_news:
            write_document(ring.files.stages, encode_document(wire.Stages(peaks)))
        return peaks

    def _pause(self, passed_s: float, computed_s: float) -> None:
        """Set when the next sample is due, after one that took so long, of which so much was its own computing."""
        computing_s = min(computed_s / SAMPLE_SHARE, MOST_PAUSE_S)
        waiting_s = min(passed_s / SAMPLE_SHARE, MOST_WAITING_PAUSE_S)
        self._is_busy = waiting_s > INTERVAL_S and passed_s > 2 * computed_s
        self._sample_due = self._due = time.monotonic() + max(INTERVAL_S, computing_s, waiting_s)

    def _scan(self, ring: Ring) -> None:
        """Find the modules, and publish what is trained."""
        started = time.monotonic()
        self._finder.update()
        self._publish_model(ring)
        self._scan_s += time.monotonic() - started

    def _may_scan(self, now: float, phase: str) -> bool:
        """Return whether there is time for a scan of all tensors; as the program ends (no phase) there is."""
        return not phase or self._scan_s <= SCAN_ALLOWANCE_S + SCAN_SHARE * (now - self._scanned_since)

    def _publish_model(self, ring: Ring) -> None:
        document = Trained(
            step=self._steps.steps,
            wall_ns=time.time_ns(),
            models=tuple(describe_models(self._finder.roots)),
            optimizers=tuple(describe_optimizers(self._finder.optimizers)),
            untrained=tuple(describe_untrained(self._finder.untrained, self._finder.roots)),
            complete=self._finder.complete,
        )
        write_document(ring.files.model, encode_document(document))

    def _records(self, now: float, phase: str) -> list[wire.Record]:
        """Return one record for each device in use; the allocator's figures for those that have one."""
        holdings = self._finder.trained().holdings()
        steps = self._steps.steps
        before, self._last = self._last, (now, steps)
        step_s = (now - before[0]) / (steps - before[1]) if before and steps > before[1] else math.nan
        wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
        cuda = allocator.devices_in_use(holdings)
        host_bytes = resident_bytes()
        return [
            wire.Record(
                sequence=0,
                step=steps,
                wall_ns=wall_ns,
                monotonic_ns=monotonic_ns,
                step_s=step_s,
                phase=phase,
                device=device,
                device_uuid=allocator.device_uuid(device) if device in cuda else "",
                has_allocator=device in cuda,
                batch_bytes=-1,
                **asdict(holdings.get(device, Holdings())),
                **(allocator.figures(device) if device in cuda else allocator.UNKNOWN),
                dropped=self._dropped,
                errors=self._errors,
                host_bytes=-1 if host_bytes is None else host_bytes,
                limit_bytes=(allocator.limit_bytes(device) if device in cuda else None) or -1,
            )
            for device in sorted({*holdings, *cuda} or {wire.CPU})  # an empty result is published too
        ]

    # When memory runs out

    def _publish_out_of_memory(self, document: PostMortem) -> None:
        write_document(self._open_ring().files.oom, encode_document(document))

    def _publish_error(self, error: str, message: str, source: str) -> None:
        if self._ring is not None:  # else it never trained, and nobody would look for it
            document = UncaughtError(
                step=self._steps.steps, wall_ns=time.time_ns(), error=error, message=message, source=source
            )
            write_document(self._ring.files.error, encode_document(document))

    def _publish_stall(self, stall: Stall) -> None:
        if self._ring is not None:
            write_document(self._ring.files.stall, encode_document(stall))

    def _look_around(self) -> LastState:
        if self._finder.stale:
            self._finder.update()
        if self._look is not None and not self._look.is_over:
            with suppress(Exception):  # the rest is reported anyway
                self._kept = self._look.kept_so_far() or self._kept
        return LastState(self._steps.steps, self._finder.trained().holdings(), list(self._samples), self._kept)

    def _open_ring(self) -> Ring:
        if self._ring is None:
            self._ring = Ring(self._entry)
            processes = sys.modules.get("multiprocessing.util")
            if self._is_child and processes is not None:  # its children end without the interpreter's own exit
                processes.Finalize(None, self._end, exitpriority=0)
        return self._ring

    # A viewer's requests

    def _follow_commands(self, optimizer: torch.optim.Optimizer, in_backward: bool = False) -> None:
        """Do what a viewer asks for, if that is new."""
        path = self._open_ring().files.control
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return
        control = (found.st_ino, found.st_mtime_ns)
        if control == self._control:
            return
        self._control = control
        request = decode_request(read_private(path, MAX_REQUEST_BYTES, (os.getuid(), 0)))
        files = self._open_ring().files
        if request.kind != "look" or (request.number <= self._answered and files.look.exists()):
            return  # without an answer next to it, requests are numbered from the beginning again
        self._answered = request.number
        self._start_look(request.number, optimizer, in_backward)

    def _start_look(self, request: int, optimizer: torch.optim.Optimizer, in_backward: bool) -> None:
        """Begin to record the next step, with every module that exists by now."""
        from gpumem_tui.probe.look import Look  # not before it is asked for

        ring = self._open_ring()
        with torch._C.DisableTorchFunction():
            self._finder.scan()
            self._publish_model(ring)
        ended = (lambda: self._guarded(lambda: self._end_look(look, optimizer=None))) if in_backward else None
        look = Look(request, self._steps.steps, optimizer, self._finder.trained, ended)
        reason = look.start(self._finder.roots)
        if reason:
            self._answer(look.abandon(reason))
        else:
            self._look = look
            self._due = 0.0  # every step's end is looked at, until the one that ends the look
            ring.looking(request)

    def _end_look(self, look: Look, optimizer: torch.optim.Optimizer | None) -> None:
        """End the look's step if this optimizer's step ends it; None: that of an optimizer within backward does."""
        if not look.is_over:
            if optimizer is not None and not look.ends_with(optimizer):
                return
            with torch._C.DisableTorchFunction():
                document = look.step_ended(self._steps.steps)
            if document is not None:
                self._answer(document)
            if not look.is_over:
                return
        self._look = None if look.stop() else look
        self._due = self._sample_due = time.monotonic() + INTERVAL_S

    def _follow_rise(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what the next steps leave behind, where memory rises from step to step and nobody looks already."""
        if self._look is not None or not allocator.is_running():
            return
        newest = self._samples[-1].monotonic_ns
        records = [one for one in self._samples if one.monotonic_ns == newest and one.has_allocator]
        self._look = self._rising.look(records, optimizer, self._finder.trained)
        if self._look is not None:
            self._due = 0.0

    def _answer(self, document: LookAnswer) -> None:
        self._kept = self._kept if document.kept is None else document.kept
        if document.request == wire.UNASKED:
            return
        ring = self._open_ring()
        write_document(ring.files.look, encode_document(document))
        ring.looking(0)
