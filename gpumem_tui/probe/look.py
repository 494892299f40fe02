"""A deep look: one step, from one optimizer step's end to the next, with every allocation written down."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpumem_tui.memory import Bucket
from gpumem_tui.probe import allocator
from gpumem_tui.probe.cuda_history import HistoryRecorder
from gpumem_tui.probe.documents import LookDocument, LookedDevice
from gpumem_tui.probe.finding import Trained
from gpumem_tui.probe.operators import OperatorRecorder
from gpumem_tui.probe.tensors import memory_of, tensors_in
from gpumem_tui.sites import SiteFinder
from gpumem_tui.step import Phase

_LONGEST_S = 600.0
_COMPILED = "code compiled by torch.compile would be compiled anew to be followed"


class Look:
    """One look, which answers one request.

    Everything that it puts into the process it takes out again when the step ends: the recording, hooks on modules and
    optimizers, and a mark in `torch.autograd.backward`.
    """

    def __init__(self, request: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        self._request = request
        self._step = step + 1
        self._optimizer = weakref.ref(optimizer)
        self._started = time.perf_counter()
        self._step_s = 0.0
        self._recorder: HistoryRecorder | OperatorRecorder | None = None
        self._parts: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._undo = ExitStack()
        self._phase = Phase.BATCH
        self._failure = ""
        self._active = False

    def start(self, roots: list[nn.Module], trained: Trained) -> str:
        """Begin to record; or, with nothing left behind, why that cannot be done."""
        try:
            reason = self._begin(roots, trained)
        except Exception as error:  # noqa: BLE001  whatever it is, who asked is told
            reason = f"{type(error).__name__}: {error}"
        if reason:
            self.stop()
        return reason

    def _begin(self, roots: list[nn.Module], trained: Trained) -> str:
        named = [(name or type(root).__name__, part) for root in roots for name, part in root.named_modules()]
        names = {id(part): name for name, part in named}
        self._parts = [(name, weakref.ref(part)) for name, part in named]
        compiled = _has_compiled_code(part for root in roots for part in root.modules())
        follows = bool(roots) and not compiled
        if allocator.is_running():
            devices = allocator.devices_in_use(trained.holdings())
            recorder: HistoryRecorder | OperatorRecorder = HistoryRecorder(names, devices, follows)
        elif compiled:
            return _COMPILED
        else:
            sites = SiteFinder()
            for root in roots:
                sites.name_modules(root)
            recorder = OperatorRecorder(sites, follows)
            self._undo.enter_context(sites.watching())
        self._recorder = recorder
        self._started = time.perf_counter()
        reason = recorder.start()
        if reason:
            return reason
        self._active = True
        self._tag(trained)
        if follows:
            self._follow_phases(set(names))
        else:
            reason = _COMPILED if compiled else "no module holds what is trained"
            recorder.unavailable.update({"phases": reason, "module": reason})
        return ""

    def ends_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer's step ends the looked one; or it can no longer end as it should."""
        return self._optimizer() is optimizer or bool(self._problem())

    def finish(self, step: int, trained: Trained) -> LookDocument:
        """The step has ended: stop, and say what it was."""
        problem = self._problem()
        self.disarm()
        self._step, self._step_s = step, time.perf_counter() - self._started
        try:
            self._tag(trained)
            self.stop()
            if problem or self._recorder is None:
                return self._document([], {"look": problem})
            return self._document(self._recorder.result(), self._recorder.unavailable)
        except Exception as error:  # noqa: BLE001  whatever it is, who asked is told
            return self.abandon(f"{type(error).__name__}: {error}")

    def abandon(self, reason: str) -> LookDocument:
        """Stop, and say that nothing was seen."""
        self.stop()
        return self._document([], {"look": reason})

    def stop(self) -> bool:
        """Leave the process as it was; whether that could be done, else try again later."""
        self._active = False
        self._undo.close()
        return self._recorder is None or self._recorder.stop()

    def disarm(self) -> None:
        """See and do nothing any more. What was put in place stays, without effect: all that a forked child may do."""
        self._active = False
        if self._recorder is not None:
            self._recorder.active = False

    def _problem(self) -> str:
        if self._optimizer() is None:
            return "the optimizer went before its next step"
        if time.perf_counter() - self._started > _LONGEST_S:
            return f"no step ended within {_LONGEST_S:.0f} s"
        return self._failure

    def _document(self, devices: list[LookedDevice], unavailable: dict[str, str]) -> LookDocument:
        return LookDocument(
            request=self._request,
            step=self._step,
            wall_ns=time.time_ns(),
            step_s=self._step_s,
            method=self._recorder.method if self._recorder is not None and devices else "",
            devices=devices,
            kept=None,
            unavailable=unavailable,
        )

    def _tag(self, trained: Trained) -> None:
        if self._recorder is not None:
            self._recorder.tag(Bucket.PARAMETERS, trained.parameters)
            self._recorder.tag(Bucket.GRADIENTS, trained.gradients)
            self._recorder.tag(Bucket.OPTIMIZER, trained.optimizer)
            self._recorder.tag(Bucket.PARAMETERS, [*trained.more_parameters, *trained.buffers])
            self._recorder.own((name, tensor) for name, tensor in self._owned(trained) if _is_whole(tensor))

    def _owned(self, trained: Trained) -> Iterator[tuple[str, torch.Tensor]]:
        """What each module holds itself, with the gradients and the optimizer state of its parameters."""
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

    def _follow_phases(self, parts: set[int]) -> None:
        """Tell the recorder each phase: forward at the first module, backward and the optimizer as they are called."""

        def enter_module(module: nn.Module, arguments: Any) -> None:
            starts = self._phase is not Phase.FORWARD and torch._C._current_graph_task_id() == -1
            if self._active and starts and id(module) in parts:
                self._enter(Phase.FORWARD, arguments)

        def enter_optimizer(*_: Any) -> None:
            self._enter(Phase.OPTIMIZER)

        self._undo.callback(register_module_forward_pre_hook(enter_module).remove)
        self._undo.callback(register_optimizer_step_pre_hook(enter_optimizer).remove)
        self._undo.callback(_mark_backward(lambda: self._enter(Phase.BACKWARD)))

    def _enter(self, phase: Phase, batch: Any = ()) -> None:
        """A phase begins, with this batch. What fails here ends the look, not the step: arguments can be anything."""
        if not self._active or self._recorder is None:
            return
        self._phase = phase
        try:
            self._recorder.enter(phase)
            self._recorder.tag(Bucket.BATCH_DATA, (tensor for tensor in tensors_in(batch) if tensor.grad_fn is None))
        except Exception as error:  # noqa: BLE001  whatever it is, who asked is told
            self._failure = f"{type(error).__name__}: {error}"
            self.disarm()


def _mark_backward(begins: Callable[[], None]) -> Callable[[], None]:
    """Have `begins` called when backward does; returns what undoes that."""
    backward = torch.autograd.backward

    def marked(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            begins()
        return backward(*args, **kwargs)

    def undo() -> None:
        if torch.autograd.backward is marked:  # else something was put over it, and goes on calling it
            torch.autograd.backward = backward

    torch.autograd.backward = marked
    return undo


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether the memory is this tensor's alone: FSDP's first version keeps those of many modules in one flat one."""
    return sum(storage.nbytes() for _, storage in memory_of(tensor)) <= tensor.numel() * tensor.element_size()


def _has_compiled_code(modules: Iterable[nn.Module]) -> bool:
    """Whether torch.compile has compiled anything here, or is to compile one of these modules.

    What it compiles with `fullgraph` is no frame in its counts, but a graph; and is an error in the program where it
    cannot be compiled, such as below our recorder.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = {} if dynamo is None else dynamo.counters
    if counters.get("frames", {}).get("total") or counters.get("stats", {}).get("unique_graphs"):
        return True
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return any(isinstance(one, wrapper) or getattr(one, "_compiled_call_impl", None) is not None for one in modules)
