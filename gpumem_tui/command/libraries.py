"""What libraries do that a simulated GPU cannot follow, or that would do harm without values."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

import torch

from gpumem_tui.command.errors import is_users
from gpumem_tui.command.graphs import follow_graphs
from gpumem_tui.importing import after_import

if TYPE_CHECKING:
    from gpumem_tui.command.program import Program
    from gpumem_tui.simulator.device import SimulatedGpu


def follow_libraries(program: Program, gpu: SimulatedGpu) -> None:
    """Replace compilation by eager execution, kernel launches by nothing, and writing checkpoints by a note."""
    _stay_eager(program)
    _write_no_checkpoint(program)
    follow_graphs(program.note)
    _note_recurrent_layers(program)
    _iterate_in_full(program)
    after_import("triton.runtime.jit", lambda module: _launch_nothing(program, module.JITFunction))
    after_import(
        "triton.runtime.autotuner", lambda module: _launch_nothing(program, module.Autotuner, module.Heuristics)
    )


def _stay_eager(program: Program) -> None:
    whole: Any = torch

    def compiled(model: Any = None, **_: Any) -> Any:
        program.note("torch.compile: traced as eager PyTorch, an upper bound of what the compiled step holds")
        return (lambda function: function) if model is None else model

    whole.compile = compiled
    nn: Any = torch.nn.Module
    nn.compile = lambda module, *_, **__: compiled(module) and None


def _note_recurrent_layers(program: Program) -> None:
    """Their activations on CUDA are cuDNN's own reserve, whose size is not documented."""
    functions: Any = torch._VF

    def noted(run: Any, *args: Any) -> Any:
        program.note("recurrent layers: traced as PyTorch composes them; what cuDNN keeps instead is not known")
        return run(*args)

    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        setattr(functions, name, functools.partial(noted, getattr(functions, name)))


def _iterate_in_full(program: Program) -> None:
    """LBFGS iterates within a step until nothing changes, and losses without values never do."""
    optimizer: Any = torch.optim.LBFGS
    step = optimizer.step

    @functools.wraps(step)
    def full_step(self: Any, closure: Any) -> Any:
        program.note("LBFGS: all iterations of a step are made; its history grows with steps, up to history_size pairs")
        for group in self.param_groups:
            group["tolerance_change"] = group["tolerance_grad"] = -1.0
        return step(self, closure)

    optimizer.step = full_step


def _write_no_checkpoint(program: Program) -> None:
    whole: Any = torch
    saved = whole.save

    def save(obj: object, f: object, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, io.IOBase) and not isinstance(f, (io.FileIO, io.BufferedWriter, io.BufferedRandom)):
            saved(obj, f, *args, **kwargs)  # in memory, as pickling a tensor does
            return
        program.note(f"a checkpoint is not written, as nothing was trained ({_calling_place()})")

    whole.save = save
    after_import("safetensors.torch", lambda module: setattr(module, "save_file", save))


def _launch_nothing(program: Program, *kinds: Any) -> None:
    """A kernel's results are allocated before it is launched: a launch that does nothing leaves memory right."""

    def run(kernel: Any, *_: Any, **__: Any) -> None:
        program.note("Triton kernels are not run: what they allocate is, before they are launched")

    for kind in kinds:
        kind.run = run


def _calling_place() -> str:
    import os
    import sys

    frame = sys._getframe(2)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "by a library"
