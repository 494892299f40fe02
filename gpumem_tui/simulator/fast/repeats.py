"""Calls of a model that repeat are answered from memory: evaluation loops, and micro-batches that accumulate.

When a model has been called twice in the same way (arguments that look alike, the same mode) while as much memory was
held, and both calls, with the backward that followed, made the same allocations and releases in the same order, further
such calls make them again without running the model. Calls that find another amount held, as in the next step or where
a program keeps its losses, do so as well once calls with two amounts have done alike.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gpumem_tui.simulator.allocator.blocks import Block
from gpumem_tui.simulator.allocator.effects import AtOnce, do_again, is_at_once, observed
from gpumem_tui.simulator.allocator.timeline import TimelineRecorder
from gpumem_tui.simulator.device import autocast
from gpumem_tui.simulator.device.base import StorageView
from gpumem_tui.simulator.device.gpu import SimulatedGpu
from gpumem_tui.simulator.device.kinds import is_dense
from gpumem_tui.simulator.fast.growing import ARGUMENT, GrowingCalls
from gpumem_tui.simulator.torch_internals import Replacements
from gpumem_tui.step.phases import in_backward
from gpumem_tui.step.walking import parameters_in

Key = tuple[Any, ...]
_MOST_UNSETTLED = 4
"""Calls to wait for the end of an earlier one's graph."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_SPREADS = ("torch.nn.parallel.", "torch.distributed.")
"""Modules that exchange gradients or parameters with other ranks as they run; they are always run."""


@dataclass
class _Call:
    """A call that is being observed; positions and numbers are the recorder's."""

    key: Key
    start: int
    first: int
    recorded_uses: int
    arguments: dict[int, int]
    """By allocation of a tensor argument: its position."""

    trains: bool
    module: weakref.ref[nn.Module]
    end: int = 0
    last: int = 0
    leaves: tuple[Any, ...] = ()
    structure: Any = None
    backward_start: int = -1
    backward_first: int = 0
    gradient_numbers: dict[int, int] = field(default_factory=dict)
    """By allocation of a gradient that came in: the output's position."""

    graph_end: int = -1
    """Where its graph was gone; -1 while it lives."""


class _Graph:
    """Lives as long as the graph of a call, and then notes where that was."""

    def __init__(self, call: _Call, recorder: TimelineRecorder) -> None:
        self._call, self._recorder = call, recorder

    def __del__(self) -> None:
        self._call.graph_end = self._recorder.position


@dataclass
class _Unsettled:
    """A call whose backward has left allocations, which may go with its graph.

    Attributes:
        end: where backward returned.
        calls: how many calls have begun since.
    """

    call: _Call
    pattern: CallPattern
    left: set[int]
    end: int
    calls: int = 0


class Repeats:
    """Observes the outermost calls of modules on one simulated GPU, and answers those that repeat.

    Args:
        called: called with a module whose call is answered, as its hooks would be.
        ahead: as `GrowingCalls` has it.
    """

    def __init__(
        self, gpu: SimulatedGpu, called: Callable[[nn.Module], None] = lambda _: None,
        ahead: Callable[[nn.Module], int] = lambda _: 0,
    ) -> None:  # fmt: skip
        self._gpu = gpu
        self._called = called
        self._recorder = gpu.recorder
        self._thread = threading.get_ident()
        self._depth = 0
        self._seen: dict[Key, CallPattern] = {}
        self._latest: dict[Key, CallPattern] = {}
        """By key but for the memory that was held."""

        self._known: dict[Key, CallPattern] = {}
        self._confirmed: dict[Key, tuple[int, CallPattern]] = {}
        self._settled: dict[Key, CallPattern] = {}
        """By key but for the memory that was held: with what amount a pattern was confirmed last, and those that were
        with two amounts."""

        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        """Graphs of calls that no backward has reached: of two in one backward, each does otherwise than alone."""

        self._refused: set[Key] = set()
        self._evaluated: _Call | None = None
        self._called_back: list[_Call] = []
        self._answered_back: list[Key] = []
        self._unsettled: list[_Unsettled] = []
        self._clearings: list[tuple[int, int]] = []
        self._clearing = 0
        self._cached: list[Allocation] = []
        self._growing = GrowingCalls(gpu, ahead)
        self._anchor = torch.zeros((), requires_grad=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe and answer within the context."""

        def answered(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth or threading.get_ident() != self._thread or in_backward():
                return call(module, *args, **kwargs)
            self._depth += 1
            try:
                return self._call(lambda: call(module, *args, **kwargs), module, args, kwargs)
            finally:
                self._depth -= 1

        def run_backward(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = engine(*args, **kwargs)
            if not in_backward():
                self._after_backward()
            return result

        with Replacements() as replacements:
            replacements.wrap(nn.Module, "__call__", answered)
            replacements.wrap(torch.autograd, "_engine_run_backward", run_backward)
            autocast.observers.append(self)
            try:
                yield
            finally:
                autocast.observers.remove(self)

    def clearing(self) -> None:
        """Note that autocast is about to forget its copies of weights."""
        self._clearing = self._recorder.position

    def cleared(self) -> None:
        """Note that autocast has forgotten its copies of weights, and give them back."""
        self._clearings.append((self._clearing, self._recorder.position))
        for allocation in self._cached:
            self._gpu.memory.free(*allocation)
        self._cached.clear()

    # Observing

    def _call(self, run: Callable[[], Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._conclude_evaluation()
        self._settle(1)
        with torch._C.DisableTorchFunction():  # which every look at a tensor's attributes would go through
            key = self._key(module, args, kwargs)
        is_refused = key is None or not self._refused.isdisjoint((key, key[1:]))
        pattern = None if key is None or is_refused else self._known.get(key) or self._settled.get(key[1:])
        if pattern is None and not torch.is_grad_enabled():
            with torch._C.DisableTorchFunction():
                begun = self._growing.begin(module, args, kwargs)
            if begun is not None and begun.is_known:
                self._called(module)
                return self._growing.answer(begun, module)
            if begun is not None:
                run = partial(self._growing.observe, run, begun, module, args, kwargs)
        if key is None or is_refused:
            return run()
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if pattern is not None:
            state = self._gpu.begin_round()
            self._called(module)
            return self._repeat(key, pattern, tensors, module, state)
        numbers = {self._gpu.memory.allocation_of(tensor): position for position, tensor in enumerate(tensors)}
        arguments = {number: position for number, position in numbers.items() if number is not None}
        recorder, uses = self._recorder, self._gpu.streams.recorded_uses
        observed = _Call(
            key, recorder.position, recorder.allocations, uses, arguments, torch.is_grad_enabled(), weakref.ref(module)
        )
        result = run()
        observed.end, observed.last = self._recorder.position, self._recorder.allocations
        leaves, observed.structure = pytree.tree_flatten(result)
        described = tuple(self._output(observed, leaf) for leaf in leaves)
        if any(leaf is _UNSUITABLE for leaf in described):
            self._refused.add(key)
            return result
        observed.leaves = described
        if not torch.is_grad_enabled():
            self._evaluated = observed
        graph = _Graph(observed, recorder)
        self._waiting.add(graph)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_gradient(observed, position, graph))
        return result

    def _key(self, module: nn.Module, args: Any, kwargs: Any) -> Key | None:
        kind = f"{type(module).__module__}."
        trains = torch.is_grad_enabled()
        if kind.startswith(_SPREADS) and (trains or "parallel.data_parallel" in kind):
            return None
        if trains and self._gpu.mode.sparse.are_gradients:
            return None
        held_bytes = self._gpu.allocator.stats.allocated_bytes
        stream = self._gpu.streams.current
        parts: list[Any] = [held_bytes, id(module), module.training, trains, stream, *autocast.state()]
        if trains:
            parameters = [p for p in parameters_in(module) if p.requires_grad]
            if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters):
                return None
            parts += (len(parameters), sum(p.grad is None for p in parameters), len(self._waiting))
        return tuple(parts) if _describe((args, kwargs), parts, trains) else None

    def _output(self, call: _Call, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if isinstance(leaf, _PLAIN) else _UNSUITABLE
        number = self._gpu.memory.allocation_of(leaf) if is_dense(leaf) else None
        if number is None or not call.first < number <= call.last:
            return _UNSUITABLE
        return CallOutput(
            number - call.first, leaf.untyped_storage().nbytes(), StorageView.of(leaf), has_gradient=leaf.requires_grad
        )

    def _on_gradient(self, call: _Call, position: int, graph: _Graph) -> Callable[[torch.Tensor], None]:
        def arrived(gradient: torch.Tensor, _held: _Graph = graph) -> None:
            self._waiting.discard(_held)
            if call.backward_start < 0:
                call.backward_start, call.backward_first = self._recorder.position, self._recorder.allocations
                self._called_back.append(call)
            elif call not in self._called_back:
                self._refused.add(call.key)  # a second backward through the same call
            number = self._gpu.memory.allocation_of(gradient) if is_dense(gradient) else None
            if number is not None and number <= call.backward_first:  # else the call's own backward made it
                call.gradient_numbers[number] = position

        return arrived

    def _after_backward(self) -> None:
        calls, self._called_back = self._called_back, []
        answered, self._answered_back = self._answered_back, []
        self._settle(0)
        if len(calls) == 1 and not answered:
            self._learn(calls[0], self._recorder.position)
        elif len(calls) + len(answered) > 1:  # what each of them did cannot be separated
            self._refused.update((*(call.key for call in calls), *(key[1:] for key in answered)))

    def _reached(self, key: Key, repetition: Repetition) -> None:
        """Note that backward has reached a call that was answered."""
        self._waiting.discard(repetition)
        self._answered_back.append(key)

    def _conclude_evaluation(self) -> None:
        if self._evaluated is not None:
            call, self._evaluated = self._evaluated, None
            call.backward_start = self._recorder.position
            call.backward_first = self._recorder.allocations
            self._learn(call, call.backward_start)

    def _learn(self, call: _Call, end: int) -> None:
        found = self._pattern(call, end)
        self._clearings = []
        if found is None:
            self._seen.pop(call.key, None)
        elif found[1]:
            if found[1].isdisjoint(self._gradients_of(call.module())):  # which a program releases when it likes
                self._unsettled.append(_Unsettled(call, *found, end))
        else:
            self._remember(call.key, found[0])

    def _gradients_of(self, module: nn.Module | None) -> set[int | None]:
        gradients = [p.grad for p in parameters_in(module) if p.grad is not None] if module is not None else []
        return set(map(self._gpu.memory.allocation_of, gradients))

    def _settle(self, calls: int) -> None:
        """Learn the calls whose graphs are gone by now, after so many further calls have begun."""
        waiting, self._unsettled = self._unsettled, []
        for one in waiting:
            one.calls += calls
            if one.call.graph_end >= 0:
                at_end = self._recorder.releases_around(one.call.graph_end, one.end)
                released = tuple(number for number in at_end if number in one.left)
                if len(released) == len(one.left):
                    first, before, own = one.call.first, one.call.backward_first, one.call.last - one.call.first
                    numbers = (n - first if n <= one.call.last else n - before + own for n in released)
                    self._remember(one.call.key, replace(one.pattern, at_end=tuple(numbers)))
                else:
                    self._seen.pop(one.call.key, None)
            elif one.calls < _MOST_UNSETTLED:
                self._unsettled.append(one)

    def _remember(self, key: Key, pattern: CallPattern) -> None:
        if pattern in (self._seen.get(key), self._latest.get(key[1:])):
            self._known[key] = pattern
            held_bytes, before = self._confirmed.get(key[1:], (key[0], None))
            if held_bytes != key[0] and before == pattern:
                self._settled[key[1:]] = pattern
            self._confirmed[key[1:]] = key[0], pattern
        else:
            self._seen[key] = pattern
        self._latest[key[1:]] = pattern

    def _pattern(self, call: _Call, end: int) -> tuple[CallPattern, set[int]] | None:
        """Return what a call did and which allocations it left; None if it touched what was there before.

        None as well if it left something to other streams, or without a backward.
        """
        if self._gpu.streams.recorded_uses != call.recorded_uses:
            return None
        own = call.last - call.first
        live: set[int] = set()

        def event(number: int) -> int:
            """Return an event of forward or backward in the pattern's numbers; 0 for an allocation of neither."""
            index = abs(number)
            if index in call.arguments:
                return -ARGUMENT - call.arguments[index]
            if call.first < index <= call.last:
                found = index - call.first
            elif index > call.backward_first:
                found = index - call.backward_first + own
            else:
                return 0
            (live.add if number > 0 else live.discard)(found)
            return found if number > 0 else -found

        forward = tuple(event(number) for number in self._recorder.between(call.start, call.end))
        kept = set(live)
        cached = tuple(
            -number - call.first
            for start, stop in self._clearings
            for number in self._recorder.between(max(start, call.end), min(stop, call.backward_start))
            if call.first < -number <= call.last
        )
        backward: list[int] = []
        gradients: list[tuple[int, int]] = []
        for number in self._recorder.between(call.backward_start, end):
            if -number in call.gradient_numbers:
                gradients.append((call.gradient_numbers[-number], len(backward)))
                continue
            backward.append(event(number))
        live.difference_update(cached)
        live.difference_update(leaf.number for leaf in call.leaves if isinstance(leaf, CallOutput))
        if 0 in forward or 0 in backward or not kept.issuperset(cached) or (live and not call.trains):
            return None
        last = call.backward_first + max((number - own for number in backward), default=0)
        numbers = [*range(call.first + 1, call.last + 1), *range(call.backward_first + 1, last + 1)]
        sizes = tuple(self._recorder.size_bytes(number) for number in numbers)
        left = {numbers[number - 1] for number in live}
        pattern = CallPattern(
            forward, tuple(backward), tuple(numbers), sizes, cached, tuple(gradients), call.leaves, call.structure
        )
        return pattern, left

    # Repeating

    def _repeat(
        self, key: Key, pattern: CallPattern, arguments: Sequence[torch.Tensor], module: nn.Module, state: int
    ) -> Any:
        """Return the call's results, and record its events as if it had run; the allocator is in a `state`."""
        repetition = Repetition(self._gpu, pattern, arguments, self._cached, state)
        if any(isinstance(leaf, CallOutput) and leaf.has_gradient for leaf in pattern.outputs):
            self._waiting.add(repetition)
            repetition.on_backward = partial(self._reached, key)
            made: Any = RepeatedCall.apply(self._anchor, repetition, list(parameters_in(module)))  # type: ignore[no-untyped-call]
        else:
            made = tuple(repetition.forward())
        tensors = iter(made)
        leaves = [next(tensors) if isinstance(leaf, CallOutput) else leaf for leaf in pattern.outputs]
        return pytree.tree_unflatten(leaves, pattern.structure)


_UNSUITABLE: Any = object()
"""Stand-in for a result that cannot be made again."""


def _describe(value: Any, parts: list[Any], trains: bool) -> bool:
    """Add what tells arguments apart; False for one that a repeated call may not have."""
    if isinstance(value, torch.Tensor):
        if trains and value.requires_grad:
            return False
        parts += (value.dtype, value.shape, value.stride() if value.layout is torch.strided else None, value.device)
        return True
    if isinstance(value, _PLAIN):
        parts.append(value)
        return True
    if isinstance(value, (list, tuple)):
        parts.append(len(value))
        return all(_describe(item, parts, trains) for item in value)
    if isinstance(value, dict):
        parts += value
        return all(_describe(item, parts, trains) for item in value.values())
    return False


# A call of a model that is not run: what an equal one did to memory is done again, in forward and in backward


Allocation = tuple[int, Block | None]


@dataclass(frozen=True)
class CallOutput:
    """A tensor that a call gives back: a view of the storage that the call's allocation `number` holds."""

    number: int
    storage_bytes: int
    view: StorageView
    has_gradient: bool


@dataclass(frozen=True)
class CallPattern:
    """The allocations and releases of a call.

    Allocations are numbered from 1 in the order of forward and backward.

    Attributes:
        forward, backward: the events: ``k`` when allocation k is made, ``-k`` when it is released; `ARGUMENT` and k
            stand for the call's k-th tensor argument, which its graph may be the last to hold.
        sources: the recorder's number of each allocation when it was observed.
        sizes: requested bytes by allocation.
        cached: allocations of forward that live until autocast forgets its copies of weights, in the order in which
            they are released then.
        gradients: by output: after how many events of backward its gradient is released; -1 if not within it.
        at_end: allocations that live as long as the graph, as a leaf within it does (what PEFT has require a gradient
            for checkpoints) with its gradient, in the order in which they are released then.
        effects: what forward does to the allocator, by the state that it finds.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    sources: tuple[int, ...] = field(compare=False)
    sizes: tuple[int, ...]
    cached: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    outputs: tuple[CallOutput | Any, ...]
    structure: Any
    at_end: tuple[int, ...] = ()
    effects: dict[int, AtOnce] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def forward_is_its_own(self) -> bool:
        """Return whether forward releases nothing but what it has made."""
        return min(self.forward, default=0) > -ARGUMENT

    @cached_property
    def kept_by_forward(self) -> tuple[int, ...]:
        """The allocations that forward makes and does not release, in order."""
        released = {-event for event in self.forward if event < 0}
        return tuple(event for event in self.forward if event > 0 and event not in released)


class Repetition:
    """A call that is not run: its allocations and its results."""

    def __init__(
        self, gpu: SimulatedGpu, pattern: CallPattern, arguments: Sequence[torch.Tensor], cached: list[Allocation],
        state: int,
    ) -> None:  # fmt: skip
        self._gpu, self._mode, self._memory = gpu, gpu.mode, gpu.memory
        self._state = state
        self.pattern = pattern
        self._cached = cached
        self.on_backward: Callable[[Any], None] = lambda _: None
        self._live: dict[int, Allocation] = {}
        self._released_in_backward = {-event for event in pattern.backward if event < 0}
        self._held: dict[int, object] = {
            number: arguments[number - ARGUMENT] for number in self._released_in_backward if number >= ARGUMENT
        }

    def numbers(self) -> set[int]:
        """Return the allocations that live as its graph does, but for its results."""
        return {number for number, _ in self._live.values()}

    def forward(self) -> list[torch.Tensor]:
        """Record forward's events, and return the results in the order of the outputs."""
        outputs = [leaf for leaf in self.pattern.outputs if isinstance(leaf, CallOutput)]
        storages: dict[int, torch.UntypedStorage] = {}
        by_number = {output.number: output for output in outputs}
        if not (is_at_once(self._gpu.allocator) and self.pattern.forward_is_its_own):
            self._replay(self.pattern.forward, by_number, storages)
        elif (effect := self.pattern.effects.setdefault(self._state, AtOnce())).is_known:
            self._forward_at_once(effect, by_number, storages)
        else:
            stays: dict[int, Block | None] = {}
            with observed(self._gpu.allocator, effect, stays):
                self._replay(self.pattern.forward, by_number, storages)
                stays.update((number, block) for number, (_, block) in self._live.items())
                stays.update((number, self._memory.block_of(storage)) for number, storage in storages.items())
        self._cached += [self._live.pop(number) for number in self.pattern.cached if number in self._live]
        self._held.update((number, storages[number]) for number in self._released_in_backward & storages.keys())
        return [self._mode.results.view_of(storages[one.number], one.view) for one in outputs]

    def _forward_at_once(
        self, effect: AtOnce, outputs: dict[int, CallOutput], storages: dict[int, torch.UntypedStorage]
    ) -> None:
        blocks = do_again(self._gpu.allocator, effect)
        sources = self.pattern.sources[: sum(event > 0 for event in self.pattern.forward)]
        before = self._gpu.recorder.repeat(self.pattern.forward, sources)
        for number in self.pattern.kept_by_forward:
            if number in outputs:
                storages[number] = self._memory.hold(outputs[number].storage_bytes, before + number, blocks.get(number))
            else:
                self._live[number] = before + number, blocks.get(number)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Record backward's events, among them the release of the gradients that came in."""
        self.on_backward(self)
        position = 0
        for output, after in self.pattern.gradients:
            self._replay(self.pattern.backward[position:after], {}, {})
            position = after
            gradient = gradients[output]
            if gradient is not None:
                self._memory.release(gradient)
        self._replay(self.pattern.backward[position:], {}, {})
        self._held.clear()

    def _replay(
        self, events: Sequence[int], outputs: dict[int, CallOutput], storages: dict[int, torch.UntypedStorage]
    ) -> None:
        allocate, free = self._memory.allocate_again, self._memory.free
        live, sources = self._live, self.pattern.sources
        for event in events:
            if event > 0:
                if event in outputs:
                    storages[event] = self._memory.new_storage(outputs[event].storage_bytes, sources[event - 1])
                else:
                    live[event] = allocate(sources[event - 1])
            elif -event in live:
                free(*live.pop(-event))
            else:
                self._held.pop(-event, None)

    def __del__(self) -> None:
        """Give back what lives as long as the graph; all that it held if it is dropped without a backward."""
        at_end = (self._live.pop(number) for number in self.pattern.at_end if number in self._live)
        for allocation in (*at_end, *self._live.values()):
            self._memory.free(*allocation)


class RepeatedCall(torch.autograd.Function):
    """The place of a repeated call in autograd's graph, which holds the parameters as the call's own would.

    Trained ones live as long as the graph (`AccumulateGrad`), the others until backward (saved tensors).
    """

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, repetition: Repetition, parameters: list[nn.Parameter]) -> Any:
        """Record what forward did, and return its results."""
        ctx.repetition, ctx.parameters = repetition, parameters
        ctx.set_materialize_grads(False)
        made = repetition.forward()
        outputs = [leaf for leaf in repetition.pattern.outputs if isinstance(leaf, CallOutput)]
        ctx.mark_non_differentiable(
            *(tensor for tensor, output in zip(made, outputs, strict=True) if not output.has_gradient)
        )
        positions = [p for p, leaf in enumerate(repetition.pattern.outputs) if isinstance(leaf, CallOutput)]
        ctx.positions = positions
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Record what backward did."""
        by_leaf: list[torch.Tensor | None] = [None] * (max(ctx.positions) + 1)
        for position, gradient in zip(ctx.positions, gradients, strict=True):
            by_leaf[position] = gradient
        ctx.repetition.backward(by_leaf)
        ctx.parameters = [parameter for parameter in ctx.parameters if parameter.requires_grad]
        return None, None, None
