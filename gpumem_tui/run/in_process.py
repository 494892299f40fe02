"""A block of code of this very process, followed on a simulated GPU that it finds as CUDA's."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.errors import RunError, in_one_line
from gpumem_tui.run.events import Ready, TraceDone
from gpumem_tui.run.program import Program
from gpumem_tui.simulator.allocator.profile import profile_for, too_old
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.cuda.presented import presented_as_cuda
from gpumem_tui.simulator.device.gpu import SimulatedGpu, backend, simulate
from gpumem_tui.simulator.device.kinds import become, is_without_data
from gpumem_tui.simulator.device.scratch import assumptions
from gpumem_tui.simulator.device.shapes import Untraceable
from gpumem_tui.simulator.torch_internals import Replacements
from gpumem_tui.step.walking import instances_of, tensors_in

_ENDLESS = 1 << 62
_NOT_COMPILED = (
    "torch.compile is left out in a block of this process: `gpumem-tui predict -- CMD` follows what it compiles"
)
_one_at_a_time = threading.Lock()


@dataclass
class FollowedBlock:
    """A block that runs on a simulated GPU. `done`: what it took; None until it has ended without an error."""

    done: tuple[Ready, TraceDone] | None = None


@contextmanager
def simulated_block(gpu: Gpu, *, unlimited: bool = False) -> Iterator[FollowedBlock]:
    """Have the code of a `with` block run on a simulated GPU, and follow it.

    Tensors there have shapes and no values. Models and optimizers of before are as they were once it has ended.
    Backward runs in this thread: autograd made its threads, perhaps before that GPU was known, and makes no others.

    Args:
        unlimited: trace what it needs; else `torch.OutOfMemoryError` is raised in the block where it does not fit.

    Raises:
        RunError: this torch or this process cannot simulate a GPU.
    """
    if reason := too_old(torch.__version__):
        raise RunError(f"torch {torch.__version__} {reason}")
    if torch.cuda.is_initialized() and backend.current is None:
        where = 'write `gpumem_tui.predict(["python", "train.py"])`, which starts one, or restart this one'
        raise RunError(f"this process uses a real GPU already, and another process has to simulate one: {where}")
    if backend.current is not None or not _one_at_a_time.acquire(blocking=False):
        raise RunError("this process simulates a GPU already: leave the other `with` block first, or the other thread")
    try:
        profile, began_s, block = profile_for(torch.__version__, gpu), time.perf_counter(), FollowedBlock()
        simulated = SimulatedGpu(gpu, profile, unlimited=unlimited)
        with ExitStack() as stack:
            stack.enter_context(_kept())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(simulate(simulated))
            stack.enter_context(presented_as_cuda(simulated))
            stack.enter_context(_uncompiled(simulated.notes))
            program = Program(simulated, torch.cuda, _ENDLESS, lambda _: None, lambda: None, lambda: None)
            program.start()
            stack.callback(program.stop)
            try:
                yield block
            except Untraceable as error:
                raise RunError(in_one_line(error)) from error
            program.name_what_lives()
            block.done = _done(simulated, program, began_s)
    finally:
        _one_at_a_time.release()


def _done(simulated: SimulatedGpu, program: Program, began_s: float) -> tuple[Ready, TraceDone]:
    """Return what a block took, as a process of a command reports it."""
    done = TraceDone(
        AffineTrace.constant(simulated.finish()),
        time.perf_counter() - began_s,
        assumptions(simulated.mode.assumed, simulated.gpu),
        only_at=1,
        notes=(*program.notes(), *simulated.causes(), *simulated.notes),
        is_estimate=_NOT_COMPILED in simulated.notes,
        parameters=program.parameters(),
        steps=program.steps,
        allocator=simulated.allocator.settings.text,
    )
    return Ready.of(torch.__version__, simulated.profile), done


@contextmanager
def _uncompiled(notes: dict[str, None]) -> Iterator[None]:
    """Have `torch.compile` return what it is given, and note that: following the compiler changes a process for good.

    Modules that were compiled before run as they are, too.
    """

    def compile_(model: Any = None, **_options: Any) -> Any:
        notes[_NOT_COMPILED] = None
        return (lambda given: given) if model is None else model

    dynamo = sys.modules.get("torch._dynamo")
    with Replacements() as replacements, nullcontext() if dynamo is None else dynamo.set_stance("force_eager"):
        replacements.set(torch, "compile", compile_)
        yield


@contextmanager
def _kept() -> Iterator[None]:
    """Have the models and optimizers of now be as they are now again, once a block that may move them has ended."""
    things = gc.get_objects()
    held: dict[int, tuple[Any, torch.Tensor, Any]] = {}
    buffers = []
    for module in instances_of(nn.Module, things):
        buffers.append((module, dict(module._buffers)))
        for parameter in module._parameters.values():
            if parameter is not None and not is_without_data(parameter):
                held[id(parameter)] = parameter, parameter.detach(), parameter.grad
    optimizers = instances_of(torch.optim.Optimizer, things)
    states = [(one, {key: copy(value) for key, value in one.state.items()}) for one in optimizers]
    del things
    try:
        yield
    finally:
        for parameter, data, gradient in held.values():
            if is_without_data(parameter):
                become(parameter, data)
                parameter.grad = gradient
        for module, before in buffers:
            if any(is_without_data(one) for one in module._buffers.values()):
                module._buffers.update(before)
        for optimizer, state in states:
            if any(map(is_without_data, tensors_in(optimizer.state))):
                optimizer.state.clear()
                optimizer.state.update(state)
