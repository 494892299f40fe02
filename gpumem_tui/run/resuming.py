"""A start from a checkpoint, of programs whose library restores one: with the state that an optimizer's step leaves.

There is no checkpoint to read. An optimizer's state is taken from a step of a twin whose parameters hold no memory, and
is loaded as the library loads it: to the host or to the GPU, then into the optimizer. Weights are read on the host and
copied into the model's own, which takes nothing.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from gpumem_tui.importing import after_import
from gpumem_tui.step.walking import parameters_of, parts_of, tensors_in
from gpumem_tui.workload.errors import one_line

if TYPE_CHECKING:
    from gpumem_tui.run.program import Program
    from gpumem_tui.simulator.device.gpu import SimulatedGpu

_HOST = torch.device("cpu")
_SHARDED = "ranks hold parts of it"


def resume_where_told(program: Program, gpu: SimulatedGpu) -> None:
    """Have trainers that are not told to resume do so once their optimizers are made, where that is asked for."""
    if not program.later.resumes:
        return
    restore = functools.partial(_restore, program, gpu)

    def transformers(module: Any) -> None:
        """Load right before training, where Trainer does: to the GPU with several ranks."""

        def after(handler: Any, args: Any, *_: Any, **__: Any) -> None:
            if handler.optimizer is not None:
                restore([handler.optimizer], args.device if args.world_size > 1 else _HOST)

        _call_after(module.CallbackHandler, "on_train_begin", after)

    def lightning(module: Any) -> None:
        """Load on the host, as Lightning does (`Strategy.load_checkpoint`)."""

        def after(connector: Any) -> None:
            if not connector._loaded_checkpoint:
                restore(connector.trainer.optimizers, _HOST)

        _call_after(module._CheckpointConnector, "restore_training_state", after)

    def accelerate(module: Any) -> None:
        """Load after what is prepared, as scripts do: `load_state`, to the GPU with several ranks."""

        def after(accelerator: Any, *_: Any, **__: Any) -> None:
            if not program.later.is_declared and accelerator._optimizers:
                place = accelerator.device if accelerator.num_processes > 1 else _HOST
                restore(accelerator._optimizers, place)

        _call_after(module.Accelerator, "prepare", after)

    after_import("transformers.trainer_callback", transformers)
    for package in ("lightning.pytorch", "pytorch_lightning"):
        after_import(f"{package}.trainer.connectors.checkpoint_connector", lightning)
    after_import("accelerate.accelerator", accelerate)


def _call_after(owner: Any, name: str, after: Callable[..., None]) -> None:
    call = getattr(owner, name)

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        after(*args, **kwargs)
        return result

    setattr(owner, name, called)


def _restore(program: Program, gpu: SimulatedGpu, optimizers: Iterable[Any], place: torch.device) -> None:
    """Load the state that each optimizer has after a step, once; say where that is not known."""
    if "resuming" in program.later.reached:
        return
    for wrapped in optimizers:
        optimizer = getattr(wrapped, "optimizer", wrapped)
        try:
            if _is_sharded(optimizer):
                raise TypeError(_SHARDED)
            state = _state_after_a_step(optimizer, place)
        except Exception as error:  # noqa: BLE001  an optimizer of the program's may do anything
            program.note(f"--resume: what {type(optimizer).__name__} restores is not known ({one_line(error)})")
            return
        gpu.loaded(tensors_in(state), "")
        optimizer.load_state_dict(state)
    program.later.came("resuming", program.steps)


def _is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ranks hold parts of an optimizer's parameters, which its engine restores in its own way."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    flat = () if fsdp is None else (fsdp.FlatParameter,)
    parameters = parameters_of(optimizer)
    return type(optimizer).__module__.startswith("deepspeed") or any(
        isinstance(one, flat) or parts_of(one) is not None for one in parameters
    )


def _state_after_a_step(optimizer: torch.optim.Optimizer, place: torch.device) -> dict[str, Any]:
    """Return an optimizer's `state_dict` as after a step, its tensors in a place."""
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": list(map(_without_memory, group["params"])), "fused": None, "foreach": None}
        for group in optimizer.param_groups
    ]
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(twin)  # without its hooks, which tell that a step was made
    kept = twin.state_dict()["state"]
    found = {
        number: {name: _in_place(value, place) for name, value in values.items()} for number, values in kept.items()
    }
    return {**optimizer.state_dict(), "state": found}


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    made = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta", requires_grad=parameter.requires_grad)
    made.grad = torch.empty_like(made) if parameter.requires_grad else None
    return made


def _in_place(value: Any, place: torch.device) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "meta":
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=place)
