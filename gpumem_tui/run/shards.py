"""FSDP2 put over a program's models as it makes its optimizer, as its author would by `fully_shard`."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpumem_tui.importing import after_import
from gpumem_tui.run.adapters import change_groups
from gpumem_tui.run.parts import has_parameters, repeated_blocks
from gpumem_tui.run.replacements import construct_with
from gpumem_tui.step.sites import callers
from gpumem_tui.step.walking import instances_of, modules_in, outermost, parameters_in
from gpumem_tui.workload.errors import is_users

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""They have no forward, and so are not sharded themselves."""

_LIGHTNING = (
    ("Trainer", "lightning.pytorch.trainer.trainer"), ("Trainer", "pytorch_lightning.trainer.trainer"),
    ("Fabric", "lightning.fabric.fabric"), ("Fabric", "lightning_fabric.fabric"),
)  # fmt: skip
"""Lightning's classes whose `strategy` shows how ranks hold a model, and their modules."""


def why_not_sharded(roots: Iterable[nn.Module], optimizers: Iterable[object]) -> str:
    """Say why models are not sharded; empty where they can be."""
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    if any(type(root).__name__ == "DeepSpeedEngine" for root in roots):
        return "DeepSpeed's own configuration decides what is sharded"
    return "" if any(True for _ in optimizers) else "no optimizer of torch's stepped"


class Sharder:
    """Shards models from now on: as an optimizer is made for them, or a replica, whichever comes first.

    Lightning does that itself.

    Args:
        count: called for each model.

    Attributes:
        written: the lines that its author would write for it.
    """

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._new: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
        """By the id of a parameter as the program knows it, that and what takes its place."""
        self.written: dict[str, None] = {}
        self._by_lightning = False
        for name, module in _LIGHTNING:
            after_import(module, functools.partial(self._tell_lightning, name))
        change_groups(self._sharded)
        if dist.is_available():
            _replicate_nothing(self._shard_replica)

    def _sharded(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups of an optimizer with the shards of their parameters, after sharding what they belong to."""
        if self._by_lightning:
            return groups
        wanted = {id(one) for group in groups for one in group["params"] if not _is_shard(one)} - self._new.keys()
        for model in outermost(instances_of(nn.Module, gc.get_objects())):
            if not wanted.isdisjoint(map(id, parameters_in(model))):
                self._shard(_called_part(model))
        for group in groups:
            group["params"] = [self._new.get(id(one), (None, one))[1] for one in group["params"]]
        return groups

    def _shard_replica(self, model: nn.Module) -> None:
        if not any(_is_shard(parameter) for parameter in parameters_in(model)):
            self._shard(_called_part(model))
        self.written["without DistributedDataParallel"] = None

    def _tell_lightning(self, name: str, module: Any) -> None:
        """Have a class of Lightning's be made with its own strategy for all ranks."""
        here, world = (int(os.environ[variable]) for variable in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        says = {"strategy": "fsdp", "devices": here, **({"num_nodes": world // here} if world > here else {})}

        def told() -> None:
            self._by_lightning = True
            self.written[f"{name}({', '.join(f'{option}={value!r}' for option, value in says.items())})"] = None
            self._count()

        construct_with(getattr(module, name), says, told)

    def _shard(self, model: nn.Module) -> None:
        """Shard a model by its blocks; what the program still holds of its parameters has no memory then."""
        from torch.distributed.fsdp import fully_shard

        self._count()
        blocks = list(repeated_blocks(model))
        self._write(model, blocks)
        for part in (*blocks, model):
            before = list(_places(part))
            fully_shard(part)
            for owner, name, parameter in before:
                if (new := owner._parameters[name]) is not None and new is not parameter:
                    self._new[id(parameter)] = (parameter, new)
                    parameter.data = parameter.new_empty(0)

    def _write(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        name, place = _named(model)
        lines = [f"before {place or 'the optimizer is made'}:", "from torch.distributed.fsdp import fully_shard"]
        if not dist.is_initialized():
            lines.append('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))')
        if blocks:
            lines.append(f"for block in {_listed(name, model, blocks)}: fully_shard(block)")
        self.written.update(dict.fromkeys((*lines, f"fully_shard({name})")))


def _is_shard(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "placements")


def _places(part: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the owner, the name and the parameter, of all that are whole."""
    for module in modules_in(part):
        for name, parameter in module._parameters.items():
            if parameter is not None and not _is_shard(parameter):
                yield module, name, parameter


def _called_part(model: nn.Module) -> nn.Module:
    """Return the model within what only holds it, as the module of a library's trainer or of a compiler."""
    while True:
        parts = [part for part in model._modules.values() if part is not None and has_parameters(part)]
        if len(parts) != 1 or model._parameters or isinstance(parts[0], (*_CONTAINERS, nn.Sequential)):
            return model
        model = parts[0]


def _replicate_nothing(shard: Callable[[nn.Module], None]) -> None:
    """Have a DistributedDataParallel be no more than a name for its model, which is sharded."""
    ddp: Any = nn.parallel.DistributedDataParallel

    def construct(self: Any, module: nn.Module, *_: Any, **__: Any) -> None:
        nn.Module.__init__(self)
        shard(module)
        self.module, self.require_backward_grad_sync = module, True

    ddp.__init__ = construct
    ddp.forward = lambda self, *args, **kwargs: self.module(*args, **kwargs)
    ddp.no_sync = lambda _: nullcontext()
    ddp.register_comm_hook = lambda *_, **__: None


# Lines that its author would write


def _named(model: nn.Module) -> tuple[str, str]:
    """Return what the program calls a model and the line that the optimizer is made from, in its outermost function."""
    found = "model", ""
    for frame in callers(sys._getframe(2)):
        if is_users(frame.f_code.co_filename) and (name := _variable(frame, model)):
            found = name, f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
    return found


def _variable(frame: FrameType, model: nn.Module) -> str:
    """Return how a function refers to a model: by a variable, an attribute of one, or a part of that; empty for not."""
    held = [(name, value) for name, value in frame.f_locals.items() if not name.startswith("_")]
    held += [
        (f"{name}.{attribute}", value)
        for name, owner in held
        if not isinstance(owner, (nn.Module, type(sys), type))
        for attribute, value in getattr(owner, "__dict__", {}).items()
    ]
    names = [
        (path, name)
        for name, value in held
        if issubclass(type(value), nn.Module) and (path := _path(value, model)) is not None
    ]
    return min((name + path for path, name in names), key=lambda text: (text == "self", len(text)), default="")


def _path(owner: nn.Module, wanted: nn.Module) -> str | None:
    """Return what is after a module's name for one within it, as in Python."""
    known, waiting = {id(owner)}, [(owner, "")]
    while waiting:
        module, path = waiting.pop(0)
        if module is wanted:
            return path
        for name, part in module._modules.items():
            if part is not None and id(part) not in known:
                known.add(id(part))
                waiting.append((part, path + (f"[{name}]" if name.isdecimal() else f".{name}")))
    return None


def _listed(name: str, model: nn.Module, blocks: list[nn.Module]) -> str:
    """Return what to go through for these blocks, which lie in lists and sequences."""
    wanted, found = set(map(id, blocks)), list[str]()
    for container in modules_in(model):
        places = [place for place, part in enumerate(container._modules.values()) if id(part) in wanted]
        if places and not isinstance(container, nn.ModuleDict):
            text = name + (_path(model, container) or "")
            if len(places) < len(container._modules):  # those that follow each other
                first, numbers = places[0], range(len(places))
                text += f"[{first}:{first + sum(places[number] == first + number for number in numbers)}]"
            found.append(text)
    return found[0] if len(found) == 1 else f"({', '.join(f'*{text}' for text in found)})"
