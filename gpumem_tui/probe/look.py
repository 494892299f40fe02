"""A deep look: one step, from one optimizer step's end to the next, with every allocation written down."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gpumem_tui.memory import Bucket
from gpumem_tui.probe import allocator
from gpumem_tui.probe.compiler import invisible, uncompiled
from gpumem_tui.probe.finding import Finder, FoundTraining
from gpumem_tui.probe.recorders import BetweenSteps, HistoryRecorder, OperatorRecorder
from gpumem_tui.probe.wire import KeptPlace, LookAnswer, LookedDevice
from gpumem_tui.step import Phase
from gpumem_tui.step.phases import PhaseHooks, in_backward, mark_backward
from gpumem_tui.step.sites import SiteFinder
from gpumem_tui.step.walking import gradients_of, memory_of, parameters_of, tensors_in

_LONGEST_S = 600.0
_STEPS = 3
"""The first is the one that is looked at. The end of the third step shows what it and the second leave behind."""
_MOST_FOLLOWED = 200_000
"""Allocations and releases of a step, up to which the steps after it are followed too: reading them takes seconds."""
_MOST_IN_PASSING = 100_000
"""As many of three steps are read in passing, in about half a second."""
_COMPILED = "code compiled by torch.compile would be recompiled to be followed"


class Look:
    """A look at one step, which answers one request.

    Everything that it puts into the process it takes out again when it is over: the recording, hooks on modules and
    optimizers, and a mark in `torch.autograd.backward`.

    Where the optimizer steps inside of backward (`in_backward`), a step ends when backward does, and the recording
    begins with the next forward: modes that are entered inside of backward are undone by autograd as it ends.

    Args:
        optimizer: whose step ends a step; None for none.
        find: gives what is trained, as it is then.
        backward_ended: where the optimizer steps inside of backward, called when backward has ended.

    Attributes:
        is_over: nothing more will be answered.
    """

    def __init__(
        self,
        request: int,
        step: int,
        optimizer: torch.optim.Optimizer | None,
        find: Callable[[], FoundTraining],
        backward_ended: Callable[[], None] | None = None,
    ) -> None:
        self.is_over = False
        self._request = request
        self._step = step + 1
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._find = find
        self._backward_ended = backward_ended
        self._started = time.perf_counter()
        self._step_s = 0.0
        self._recorder: HistoryRecorder | BetweenSteps | None = None
        self._parts: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._answer: LookAnswer | None = None
        self._steps = 0
        self._hooks = PhaseHooks()
        self._first_phase = self._phase = Phase.BATCH
        self._failure = ""
        self._active = self._in_step = self._has_stepped = self._follows_backward = False

    def start(self, roots: list[nn.Module]) -> str:
        """Begin to record; or, with nothing left behind, why that cannot be done."""
        try:
            reason = self._begin(roots)
        except Exception as error:  # noqa: BLE001  any error is reported to whoever asked
            reason = f"{type(error).__name__}: {error}"
        if reason:
            self.stop()
        return reason

    def _begin(self, roots: list[nn.Module]) -> str:
        named = [(name or type(root).__name__, part) for root in roots for name, part in nn.Module.named_modules(root)]
        names = {id(part): name for name, part in named}
        self._parts = [(name, weakref.ref(part)) for name, part in named]
        compiled = _has_compiled_code(part for _, part in named)
        follows = bool(roots) and not compiled
        if allocator.is_running():
            devices = allocator.devices_in_use(self._find().holdings())
            self._recorder = HistoryRecorder(names, devices, follows or compiled, follows)
        elif compiled:
            why = f"{_COMPILED}; shown is what was found as the step ended"
            self._recorder = BetweenSteps(dict.fromkeys(("peak", "phases", "kept"), why))
        else:
            self._recorder = self._operators(roots, follows)
        if not follows:
            reason = _COMPILED if compiled else "no module holds what is trained"
            more = f"{reason}; backward is the only known phase" if compiled else reason
            for what, why in (("module", reason), ("phases", more)):
                self._recorder.unavailable.setdefault(what, why)
        if compiled:
            self._first_phase = Phase.FORWARD  # with the batch, from which it cannot be told
        if self._backward_ended is not None and isinstance(self._recorder, OperatorRecorder):
            self._hooks.callback(register_module_forward_pre_hook(self._record_from_forward(set(names))).remove)
            self._follow_backward()
            return ""
        reason = self._record(set(names) if follows else set())
        if not reason and (compiled or self._backward_ended is not None):
            self._follow_backward()
        return reason

    def _operators(self, roots: list[nn.Module], follows: bool) -> OperatorRecorder:
        sites = SiteFinder()
        for root in roots:
            sites.name_modules(root)
        self._hooks.enter_context(sites.watching())
        return OperatorRecorder(sites, follows)

    def _record(self, parts: Container[int]) -> str:
        """Begin to record; `parts`: the modules whose forward can be followed."""
        assert self._recorder is not None
        self._started = time.perf_counter()
        reason = self._recorder.start()
        if reason:
            return reason
        self._active = True
        self._enter(self._first_phase)
        if self._recorder.records:
            self._tag()
        if parts:
            self._follow_phases(parts)
        return ""

    def _record_from_forward(self, parts: set[int]) -> Callable[..., None]:
        """Make a hook that begins to record with the first forward."""

        def begin(module: nn.Module, arguments: Any) -> None:
            begun = self._active or self._failure or self.is_over
            if not begun and not in_backward():
                try:
                    self._failure = self._record(parts)
                except Exception as error:  # noqa: BLE001  any error is reported to whoever asked
                    self._failure = f"{type(error).__name__}: {error}"
                self._enter(Phase.FORWARD, arguments if id(module) in parts else ())

        return begin

    def optimizer_stepped(self) -> None:
        """Take note that an optimizer's step has ended, which need not end the step of training."""
        self._in_step, self._has_stepped = False, True
        if in_backward() and self._first_phase is Phase.BATCH:
            self._enter(Phase.BACKWARD)

    def ends_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this optimizer's step ends the looked one; or it can no longer end as it should."""
        return self._optimizer() is optimizer or bool(self._problem())

    def step_ended(self, step: int) -> LookAnswer | None:
        """End a step. Return what the first was, after the last also what each leaves behind, else None."""
        self._steps += 1
        self._in_step = self._has_stepped = False
        if self._steps == 1:
            self._step, self._step_s = step, time.perf_counter() - self._started
        try:
            return self._after_step()
        except Exception as error:  # noqa: BLE001  any error is reported to whoever asked
            return self.abandon(f"{type(error).__name__}: {error}")

    def _after_step(self) -> LookAnswer | None:
        problem, recorder = self._problem(), self._recorder
        if problem or recorder is None or not self._active:
            return self.abandon(problem or "no module's forward came before backward")
        self._tag()
        recorder.end_step()
        self.is_over = self._steps == _STEPS or not recorder.records
        if self._answer is None:
            self._answer = self._document(recorder.result(), dict(recorder.unavailable))
            if recorder.events > _MOST_FOLLOWED:
                return self.abandon(f"two more steps of {recorder.events:,} allocations and releases are too much")
        if self.is_over:
            kept = recorder.kept()
            self._answer = replace(self._answer, kept=None if kept is None else tuple(kept))
            self.disarm()
        else:
            self._enter(self._first_phase)
        return self._answer if self.is_over or self._steps == 1 else None

    def kept_so_far(self) -> tuple[KeptPlace, ...]:
        """Return what each whole step so far has left behind, where nothing else is looked at."""
        return ()

    def abandon(self, reason: str) -> LookAnswer:
        """Stop, and say that nothing more was seen: nothing at all, or not what steps leave behind."""
        self.is_over = True
        self.stop()
        if self._answer is not None:
            return replace(self._answer, unavailable={**self._answer.unavailable, "kept": reason})
        return self._document([], {"look": reason})

    def stop(self) -> bool:
        """Leave the process as it was. Return whether that could be done; if not, try again later."""
        self._active = False
        self._hooks.close()
        return self._recorder is None or self._recorder.stop()

    def disarm(self) -> None:
        """Do nothing any more. The hooks stay in place, without effect: a forked child may do no more than that."""
        self._active = False
        if self._recorder is not None:
            self._recorder.active = False

    def _problem(self) -> str:
        if self._optimizer() is None:
            return "the optimizer went before its next step"
        if time.perf_counter() - self._started > _LONGEST_S:
            return f"no step ended within {_LONGEST_S:.0f} s"
        return self._failure

    def _document(self, devices: list[LookedDevice], unavailable: dict[str, str]) -> LookAnswer:
        return LookAnswer(
            request=self._request,
            step=self._step,
            wall_ns=time.time_ns(),
            step_s=self._step_s,
            method=self._recorder.method if self._recorder is not None and devices else "",
            devices=tuple(devices),
            kept=None,
            unavailable=unavailable,
        )

    def _tag(self) -> None:
        if self._recorder is not None:
            trained = self._find()
            self._recorder.tag(Bucket.PARAMETERS, trained.parameters)
            self._recorder.tag(Bucket.GRADIENTS, trained.gradients)
            self._recorder.tag(Bucket.OPTIMIZER, trained.optimizer)
            self._recorder.tag(Bucket.PARAMETERS, [*trained.more_parameters, *trained.buffers])
            self._recorder.own((name, tensor) for name, tensor in self._owned(trained) if _is_whole(tensor))

    def _owned(self, trained: FoundTraining) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what each module holds itself, with the gradients and the optimizer state of its parameters."""
        for name, ref in self._parts:
            module = ref()
            if module is None:
                continue
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield name, parameter
                    if parameter.is_leaf and parameter.grad is not None:
                        yield name, parameter.grad
                    for tensor in trained.state.get(id(parameter), ()):
                        yield name, tensor
            for buffer in module._buffers.values():
                if buffer is not None:
                    yield name, buffer

    # Where the step is

    def _follow_phases(self, parts: Container[int]) -> None:
        """Tell the recorder each phase: forward at the first module, backward and the optimizer as they are called."""

        def optimizer_begins(optimizer: torch.optim.Optimizer) -> None:
            inside = in_backward()
            self._in_step = not inside
            self._enter(Phase.OPTIMIZER, gradients=gradients_of(parameters_of(optimizer)) if inside else ())

        self._hooks.on_forward(parts, lambda: self._phase, lambda _, arguments: self._enter(Phase.FORWARD, arguments))
        self._hooks.on_optimizer(optimizer_begins)
        self._follow_backward()

    def _follow_backward(self) -> None:
        """Tell when backward begins and ends; a second time does nothing."""
        if self._follows_backward:
            return
        self._follows_backward = True

        def begins() -> None:
            self._enter(Phase.BACKWARD)

        def starts(arguments: Any) -> None:
            self._tell(lambda recorder: recorder.backward_begins(arguments))

        def ended() -> None:
            self._tell(HistoryRecorder.backward_ended)
            if self._first_phase is Phase.FORWARD:
                self._enter(Phase.FORWARD)
            elif self._in_step:  # in the closure of an optimizer that steps by calling it
                self._enter(Phase.OPTIMIZER)
            if self._backward_ended is not None and self._has_stepped:
                self._backward_ended()

        self._hooks.callback(mark_backward(uncompiled(begins), uncompiled(ended), invisible, uncompiled(starts)))

    def _enter(self, phase: Phase, batch: Any = (), gradients: Iterable[torch.Tensor] = ()) -> None:
        """Begin a phase, with this batch, and with these gradients, which may be gone before the step ends.

        An error here ends the look, not the step: arguments can be anything.
        """
        if not self._active or self._recorder is None:
            return
        self._phase = phase
        try:
            self._recorder.enter(phase)
            self._recorder.tag(Bucket.GRADIENTS, gradients)
            self._recorder.tag(Bucket.BATCH_DATA, (tensor for tensor in tensors_in(batch) if tensor.grad_fn is None))
        except Exception as error:  # noqa: BLE001  any error is reported to whoever asked
            self._fail(error)

    def _tell(self, what: Callable[[HistoryRecorder], None]) -> None:
        """Tell a recorder that reads the allocator's history of backward."""
        if self._active and isinstance(self._recorder, HistoryRecorder):
            try:
                what(self._recorder)
            except Exception as error:  # noqa: BLE001  any error is reported to whoever asked
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self.disarm()


class BlockLook(Look):
    """A look at a block of code, from `start` to `ended`, as a cell of a notebook, on the current CUDA device.

    Its modules and optimizers may be made within it.
    """

    def __init__(self) -> None:
        self._finder = Finder()
        super().__init__(0, 0, None, self._found)

    def _found(self) -> FoundTraining:
        self._finder.scan()
        return self._finder.trained()

    def _begin(self, roots: list[nn.Module]) -> str:  # noqa: ARG002
        compiled = _has_compiled_code(())
        self._recorder = HistoryRecorder({}, [torch.cuda.current_device()], True, not compiled)
        if compiled:
            self._recorder.unavailable.update(module=_COMPILED, phases=f"{_COMPILED}; backward is the only known phase")
            self._first_phase = Phase.FORWARD
        reason = self._record(() if compiled else _EveryModule())
        if compiled and not reason:
            self._follow_backward()
        return reason

    def ended(self) -> LookAnswer:
        """End the look, and return what the block took."""
        found = self.step_ended(0)
        self.stop()
        assert found is not None, "the first step is answered"
        return found

    def _problem(self) -> str:
        return self._failure


class _EveryModule(Container[int]):
    """The `id` of each module, also of those that are not made yet."""

    def __contains__(self, _module: object) -> bool:
        return True


class KeptLook(Look):
    """Only what each step leaves behind, of a process whose memory rises: nobody has asked for it, and no step waits.

    The allocator writes its history of three steps, and nothing is put into the program.
    """

    def _begin(self, roots: list[nn.Module]) -> str:  # noqa: ARG002
        devices = allocator.devices_in_use(self._find().holdings())
        self._recorder = HistoryRecorder({}, devices, phases_known=False, follows_modules=False)
        return self._record(set())

    def _after_step(self) -> LookAnswer | None:
        problem, recorder = self._problem(), self._recorder
        if problem or recorder is None:
            return self.abandon(problem)
        self._tag()
        recorder.end_step()
        if recorder.events > _MOST_IN_PASSING:
            return self.abandon(f"{recorder.events:,} allocations and releases are too much")
        self.is_over = self._steps == _STEPS
        if not self.is_over:
            return None
        kept = tuple(recorder.kept() or ())
        self.disarm()
        return replace(self._document([], {}), kept=kept)

    def kept_so_far(self) -> tuple[KeptPlace, ...]:
        """Return it in the middle of a step, which ends there.

        Raises:
            Exception: it is not known.
        """
        if not self._active or self._recorder is None:
            return ()
        self._tag()
        self._recorder.end_step()
        return tuple(self._recorder.kept() or ())


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether the memory is this tensor's alone: FSDP1 keeps the tensors of many modules in one flat one."""
    return sum(storage.nbytes() for _, storage in memory_of(tensor)) <= tensor.numel() * tensor.element_size()


def _has_compiled_code(modules: Iterable[nn.Module]) -> bool:
    """Return whether torch.compile has compiled anything here, or is to compile one of these modules.

    A function compiled with `fullgraph` is no frame in its counts, but a graph; and is an error in the program where it
    cannot be compiled, such as below our recorder.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = {} if dynamo is None else dynamo.counters
    if counters.get("frames", {}).get("total") or counters.get("stats", {}).get("unique_graphs"):
        return True
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return any(isinstance(one, wrapper) or getattr(one, "_compiled_call_impl", None) is not None for one in modules)
