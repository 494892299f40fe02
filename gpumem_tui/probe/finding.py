"""Finds what a process trains, and which of its memory is parameters, gradients and optimizer state.

Optimizers make themselves known as they step, modules as they are made; where the probe came in later than they, they
are searched for. Everything is held weakly, and nothing between two searches: what the program drops is gone.
"""

from __future__ import annotations

import gc
import math
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
from itertools import chain
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from gpumem_tui.probe.compiler import passed_over
from gpumem_tui.probe.wire import TrainedModel, TrainedOptimizer, TrainedParameter, Untrained
from gpumem_tui.step.sites import is_own
from gpumem_tui.step.walking import (
    buffers_in,
    gradients_of,
    instances_of,
    memory_of,
    modules_in,
    outermost,
    parameters_in,
    parameters_of,
    state_of,
)

_CHUNK = 2_000
_LONGEST = 10_000
"""Containers with more elements are data, not models: a search from the running functions leaves them out."""

_SIZED = {list, dict, tuple, set, frozenset}
_PASSED = (type, ModuleType, BuiltinFunctionType, CodeType, FrameType, TracebackType, torch.Tensor)


class Modules:
    """The modules known.

    A module becomes known when a parameter, a buffer or a part is put into it, or when it is copied or read from a
    file: both go through `nn.Module.__setstate__`.

    Attributes:
        changed: modules, parts or parameters came since this was last set to False.
    """

    def __init__(self) -> None:
        self.changed = False
        self._known: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._undo: list[Any] = []

    def follow(self) -> bool:
        """Learn of every module that is made from now on; whether that can be done.

        Costs half a microsecond a parameter of a module's making.
        Compiled code that sets a buffer traces what is called for that too, and finds nothing to do.
        """
        is_compiling = getattr(torch.compiler, "is_compiling", None)
        if is_compiling is None:  # before torch 2.3: compiled code would be broken in two
            return False
        known, numbers = self._known, self._known.data  # type: ignore[attr-defined]

        def put(module: nn.Module, name: str, *_: Any) -> None:
            if is_compiling():
                return
            if id(module) not in numbers:
                known[id(module)] = module
                self.changed = True
            elif name not in module._parameters and name not in module._buffers:
                self.changed = True

        def put_part(module: nn.Module, *_: Any) -> None:
            if is_compiling():
                return
            known[id(module)] = module
            self.changed = True

        before = nn.Module.__setstate__

        def __setstate__(module: nn.Module, state: Any) -> None:  # noqa: N807  it replaces the method
            before(module, state)  # type: ignore[no-untyped-call]
            put_part(module)

        passed_over(put)
        passed_over(put_part)
        nn.Module.__setstate__ = passed_over(__setstate__)  # type: ignore[method-assign]
        self._undo = [
            register_module_parameter_registration_hook(put).remove,
            register_module_buffer_registration_hook(put).remove,
            register_module_module_registration_hook(put_part).remove,
            lambda: _restore(__setstate__, before),
        ]
        return True

    def leave(self) -> None:
        """Learn of no more."""
        while self._undo:
            self._undo.pop()()

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Remember these modules for as long as the program keeps them."""
        for module in modules:
            if id(module) not in self._known:
                self._known[id(module)] = module
                self.changed = True

    def alive(self) -> list[nn.Module]:
        """Return all known objects that are not gone; one that is being made just now is left out."""
        modules = (ref() for ref in self._known.valuerefs())
        return [module for module in modules if module is not None and "_modules" in module.__dict__]


def _restore(ours: Any, before: Any) -> None:
    if nn.Module.__setstate__ is ours:  # else somebody has put something over it, and keeps calling it
        nn.Module.__setstate__ = before  # type: ignore[method-assign]


def modules_and_optimizers_in(objects: list[Any]) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Pick the modules and optimizers among objects."""
    modules, optimizers = instances_of(nn.Module, objects), instances_of(torch.optim.Optimizer, objects)
    return modules, [optimizer for optimizer in optimizers if "param_groups" in optimizer.__dict__]


def search_running(budget_s: float) -> tuple[list[nn.Module], list[torch.optim.Optimizer], bool]:
    """Find what can be reached from the functions that run in any thread and from the main program's globals.

    Much faster than `modules_and_optimizers_in(gc.get_objects())` where a program has millions of objects. Nothing that
    belongs to the program is called: references are followed as the garbage collector follows them.

    Args:
        budget_s: the search ends after this time, whether it is through or not.

    Returns:
        The modules, the optimizers, and whether the search came to its end.
    """
    deadline = time.perf_counter() + budget_s
    seen: set[int] = set()
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    queue = _entrances()
    while queue:
        if time.perf_counter() > deadline:
            return modules, optimizers, False
        chunk, queue = queue[:_CHUNK], queue[_CHUNK:]
        more_modules, more_optimizers = modules_and_optimizers_in(chunk)
        modules += more_modules
        optimizers += more_optimizers
        new = {id(thing): thing for thing in gc.get_referents(*_entered(chunk)) if id(thing) not in seen}
        seen.update(new)
        queue += [thing for thing in new.values() if _may_lead_on(thing)]
    return modules, optimizers, True


def _may_lead_on(thing: Any) -> bool:
    kind = type(thing)
    if kind in _SIZED:
        return len(thing) <= _LONGEST
    return gc.is_tracked(thing) and not issubclass(kind, _PASSED)


def _entered(things: list[Any]) -> list[Any]:
    """Return what to follow references from: of a function only what it closes over, not all of the file it is in."""
    return [thing.__closure__ if type(thing) is FunctionType else thing for thing in things]


def _entrances() -> list[Any]:
    """List the main program's globals, and each running function's locals, with its globals if it is not torch's."""
    found: dict[int, Any] = {}
    main = sys.modules.get("__main__")
    if main is not None:
        found[id(main.__dict__)] = main.__dict__
    values: list[Any] = []
    frame: FrameType | None
    innermost: FrameType | None
    for innermost in sys._current_frames().values():
        frame = innermost
        while frame is not None:
            if not str(frame.f_globals.get("__name__")).startswith("gpumem_tui."):
                if is_own(frame.f_code.co_filename):
                    found[id(frame.f_globals)] = frame.f_globals
                values += _locals(frame)
            frame = frame.f_back
    frame = innermost = None  # this very frame was among them: it would live until the garbage collector comes by
    return [*found.values(), *(value for value in values if _may_lead_on(value))]


def _locals(frame: FrameType) -> list[Any]:
    """List what a function's local variables hold now.

    Before Python 3.13 asking makes a dictionary that lives as long as the frame, and keeps alive what the function
    drops: it is emptied again. A function that calls `locals()` may have that very dictionary, and is left out.
    """
    code: CodeType = frame.f_code
    if not code.co_flags & CO_NEWLOCALS or not code.co_flags & CO_OPTIMIZED or "locals" in code.co_names:
        return []
    held = frame.f_locals
    values = list(held.values())
    if sys.version_info < (3, 13):
        held.clear()
    return values


# The trained model

_FEW_BLOCKS = 1_000_000
"""Memory blocks of Python's (`sys.getallocatedblocks`) up to which all objects can be gone through in about 30 ms."""
_FIRST_BUDGET_S, _LAST_BUDGET_S = 0.02, 0.08


@dataclass(frozen=True)
class Holdings:
    """Bytes on one device, by storage. `buffers_bytes` is part of `parameters_bytes`."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    buffers_bytes: int = 0


@dataclass(frozen=True)
class FoundTraining:
    """Every tensor of what is trained, at one moment. Holds them alive: drop it soon.

    Attributes:
        parameters: of the optimizers. `more_parameters`: of the modules around and next to them, frozen ones included.
        state: what optimizers keep, by the `id` of its parameter.
    """

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    state: dict[int, list[torch.Tensor]]
    more_parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]

    @property
    def optimizer(self) -> list[torch.Tensor]:
        """The tensors that optimizers keep."""
        return [tensor for tensors in self.state.values() for tensor in tensors]

    def holdings(self) -> dict[int, Holdings]:
        """Sum the bytes by device. A storage counts once, where it is met first.

        An optimizer's knowledge comes before that of modules: torch.compile makes modules that hold everything.
        """
        counted: set[int] = set()

        def count(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
            sizes: dict[int, int] = {}
            for tensor in tensors:
                for device, storage in memory_of(tensor):
                    key = storage._cdata
                    if key not in counted:
                        counted.add(key)
                        sizes[device] = sizes.get(device, 0) + storage.nbytes()
            return sizes

        parameters, gradients, optimizer = count(self.parameters), count(self.gradients), count(self.optimizer)
        more, buffers = count(self.more_parameters), count(self.buffers)
        return {
            device: Holdings(
                parameters_bytes=parameters.get(device, 0) + more.get(device, 0) + buffers.get(device, 0),
                gradients_bytes=gradients.get(device, 0),
                optimizer_bytes=optimizer.get(device, 0),
                buffers_bytes=buffers.get(device, 0),
            )
            for device in {*parameters, *gradients, *optimizer, *more, *buffers}
        }


class Finder:
    """Knows the optimizers that stepped, and all modules.

    A module tree is trained when any of its parameters is in an optimizer or has a gradient. Other trees (a frozen
    teacher, a reference model, a moving average of the weights) hold parameters too: else the remainder at the
    peak, which is called activations, would have them.

    Attributes:
        complete: whether no module can be missing, but for one that is made in ways of its own: the program was
            followed from its beginning, or all of its objects were gone through since.
    """

    def __init__(self) -> None:
        self.complete = True
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._known = Modules()
        self._modules: list[weakref.ref[nn.Module]] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._untrained: list[weakref.ref[nn.Module]] = []
        self._stale = True
        self._budget_s = _FIRST_BUDGET_S

    def follow(self, late: bool) -> None:
        """Learn of every module that is made from now on. `late`: some may have been made before."""
        self.complete = self._known.follow() and not late

    def leave(self) -> None:
        """Learn of nothing more."""
        self._known.leave()

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of an optimizer that has stepped for the first time."""
        self._optimizers.add(optimizer)
        self._stale = True

    @property
    def stale(self) -> bool:
        """Return whether an `update` would find something, or may."""
        return self._stale or self._known.changed or (not self.complete and self._budget_s <= _LAST_BUDGET_S)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped, or were found, and are alive."""
        return list(self._optimizers)

    @property
    def roots(self) -> list[nn.Module]:
        """The modules at the top of the trees that are trained, as of the last `update` or `scan`."""
        return _alive(self._roots)

    @property
    def untrained(self) -> list[nn.Module]:
        """Root modules without any trained parameter."""
        return _alive(self._untrained)

    def update(self) -> None:
        """Sort the modules found so far.

        Where the probe came late, a program of few objects is gone through once, in about 30 ms. In a program with
        millions, only objects within reach of its running functions are searched, for at most 20 ms, then 40 and 80.
        """
        if not self.complete and sys.getallocatedblocks() <= _FEW_BLOCKS:
            self._add(*modules_and_optimizers_in(gc.get_objects()))
            self.complete = True
        elif not self.complete and self._budget_s <= _LAST_BUDGET_S:
            modules, optimizers, through = search_running(self._budget_s)
            self._add(modules, optimizers)
            self._budget_s = math.inf if through else 2 * self._budget_s
        self._arrange()

    def scan(self, objects: Iterable[Any] | None = None) -> None:
        """Find modules and optimizers, by default among all that the garbage collector tracks.

        A tenth of a second where they are two million.
        """
        self._add(*modules_and_optimizers_in(gc.get_objects() if objects is None else list(objects)))
        self.complete = True
        self._arrange()

    def _add(self, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._known.add(modules)
        for optimizer in optimizers:
            self._optimizers.add(optimizer)

    def _arrange(self) -> None:
        """Tell which of the known modules are roots, and which of these are trained."""
        self._stale = self._known.changed = False
        optimized = {id(parameter) for parameter in self._parameters()}
        roots = _without_copies(outermost(self._known.alive()))
        trained = {id(root): _is_trained(root, optimized) for root in roots}
        self._roots = [weakref.ref(root) for root in roots if trained[id(root)]]
        self._untrained = [weakref.ref(root) for root in roots if not trained[id(root)]]
        self._modules = [weakref.ref(module) for module in modules_in(*roots) if module._parameters or module._buffers]

    def trained(self) -> FoundTraining:
        """Collect what is trained, as it is now."""
        parameters = {id(parameter): parameter for parameter in self._parameters()}
        more: dict[int, torch.Tensor] = {}
        buffers: list[torch.Tensor] = []
        for ref in self._modules:
            module = ref()
            if module is None:
                self._stale = True
                continue
            more.update((id(p), p) for p in module._parameters.values() if p is not None and id(p) not in parameters)
            buffers.extend(b for b in module._buffers.values() if b is not None)
        gradients = gradients_of((*parameters.values(), *more.values()))
        state = state_of(self._optimizers)
        return FoundTraining(list(parameters.values()), gradients, state, list(more.values()), buffers)

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            yield from parameters_of(optimizer)


def _alive(refs: list[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [module for module in (ref() for ref in refs) if module is not None]


def _is_trained(root: nn.Module, optimized: set[int]) -> bool:
    return any(id(p) in optimized or (p.is_leaf and p.grad is not None) for p in parameters_in(root))


def _without_copies(roots: list[nn.Module]) -> list[nn.Module]:
    """Leave out trees that hold nothing but what others hold, such as graphs that torch.compile made of them."""
    known: set[int] = set()
    kept = []
    for root in sorted(roots, key=lambda root: isinstance(root, torch.fx.GraphModule)):
        held = {id(tensor) for tensor in parameters_in(root)}
        if not held <= known:
            known |= held
            kept.append(root)
    return kept


# The trained model, for viewers

_MOST_PARAMETERS = 20_000


def describe_models(roots: Iterable[nn.Module]) -> list[TrainedModel]:
    """Describe what is trained, parameter by parameter. Nothing is copied from a device."""
    found: list[TrainedModel] = []
    for root in roots:
        named = list(nn.Module.named_parameters(root))
        parameters = tuple(
            TrainedParameter(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).replace("torch.", ""),
                trained=parameter.requires_grad,
            )
            for name, parameter in named[:_MOST_PARAMETERS]
        )
        found.append(TrainedModel(name=_name(root), parameters=parameters, truncated=len(named) > _MOST_PARAMETERS))
    return found


def describe_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> list[TrainedOptimizer]:
    """Describe the optimizers and the options of their first groups."""
    return [
        TrainedOptimizer(
            name=_name(optimizer),
            parameters=sum(len(group["params"]) for group in optimizer.param_groups),
            options={key: value for key, value in optimizer.param_groups[0].items() if _is_plain(value)},
        )
        for optimizer in optimizers
        if optimizer.param_groups
    ]


def describe_untrained(untrained: Iterable[nn.Module], trained: Iterable[nn.Module]) -> list[Untrained]:
    """Sum what untrained trees hold, by class and device. A storage counts once, and not if a trained tree has it."""
    counted = {storage._cdata for root in trained for _, storage in _storages(root)}
    sizes: dict[tuple[str, int], int] = {}
    for root in untrained:
        for device, storage in _storages(root):
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                key = _name(root), device
                sizes[key] = sizes.get(key, 0) + storage.nbytes()
    return [Untrained(name=name, device=device, bytes=size) for (name, device), size in sizes.items() if size]


def _storages(root: nn.Module) -> Iterator[tuple[int, torch.UntypedStorage]]:
    return (memory for tensor in chain(parameters_in(root), buffers_in(root)) for memory in memory_of(tensor))


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, str))
