"""Calls of a model that grow evenly are answered from memory, as those that generate a text token by token.

Each call of such a loop finds inputs or a cache that are a little longer than the last one's, so that no two are equal.
But they make the same allocations in the same order, each of a size that grows evenly, or as its square, as attention's
scores do. Once enough calls in a row have done so, further ones are not run: their sizes follow, and so do the results
and the cache. Now and then one is run anyway, and where it does otherwise, calls are learned anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import sub
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gpumem_tui.simulator.allocator.rules import Buffer, Computed
from gpumem_tui.simulator.device import autocast
from gpumem_tui.simulator.device.base import StorageView
from gpumem_tui.simulator.device.gpu import SimulatedGpu
from gpumem_tui.simulator.device.kinds import is_dense
from gpumem_tui.simulator.fast.looking import PLAIN, FoundByCall

_PERIODS = (1, 8)
"""After how many calls sizes grow alike: kernels pad masks to 8 elements (`mem_eff_alignment` in
aten/src/ATen/native/transformers/attention.cpp)."""

_ALIKE = 10
"""Calls in a row that must do as those before them say, so that one of each residue is among them."""

_RUN_EVERY = 64
"""At these lengths, and right after them, calls are run: kernels change their tiles there."""

_WHOLE_EVERY = 16
"""At these lengths all allocations of a call are made, at others only those that grow or outlive it: those of one size
that a call makes and releases find the same free blocks each time."""

_MOST_AHEAD = 512
"""Calls that are made at once with one that is answered; of more, as many at even distances."""

_MOST_FAILURES = 4

ARGUMENT = 1 << 40
"""Added to the position of a tensor that was there before, where it is among the numbers of allocations."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that a call makes, in the storage of its allocation `number`; its numbers are among the call's."""

    number: int
    dtype: torch.dtype
    dimensions: int

    @property
    def width(self) -> int:
        """How many numbers say how it is laid out: shape, stride, offset, and the bytes of its storage."""
        return 2 * self.dimensions + 2

    def view(self, numbers: Sequence[int]) -> StorageView:
        """Return how it is laid out in its storage."""
        n = self.dimensions
        return StorageView(self.dtype, tuple(numbers[:n]), tuple(numbers[n : 2 * n]), numbers[2 * n])


@dataclass(frozen=True)
class _Done:
    """The effect of a call, but for sizes.

    Attributes:
        events: as in `CallPattern.forward`. `rules`: of allocations whose size a rule gives, the rule and its position.
        results: by leaf of the result: a tensor, the position of an argument that is given back, or a value in a tuple.
        changes: by slot that was changed: a tensor, or None for a whole number.
    """

    events: tuple[int, ...]
    allocations: int
    rules: tuple[tuple[int, str, int, int], ...]
    results: tuple[_Made | int | tuple[Any], ...]
    tree: Any
    changes: tuple[tuple[int, _Made | None], ...]

    @cached_property
    def outliving(self) -> frozenset[int]:
        """The allocations that outlive the call."""
        made = (*self.results, *(one for _, one in self.changes))
        return frozenset(one.number for one in made if isinstance(one, _Made))


@dataclass(frozen=True)
class _Seen:
    """A call that was run: what it found and did, with all sizes.

    Attributes:
        of_arguments: how many numbers and slots are of its arguments; the others are of its modules.
        sources: the recorder's numbers of allocations.
    """

    found: tuple[int, ...]
    of_arguments: tuple[int, int]
    done: _Done
    numbers: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass
class _Line:
    """Calls in a row that grow evenly, each by `step`; the last of them is number 0.

    Attributes:
        period: after so many calls sizes grow alike.
        calls: the last three periods of them.
        first: the number of the first. `end`: of the first that does otherwise; None for none.
        checked: the numbers of those that were run to see whether they still do.
    """

    calls: tuple[_Seen, ...]
    step: tuple[int, ...]
    period: int
    first: int
    end: int | None = None
    checked: set[int] = field(default_factory=set)

    @cached_property
    def _varying(self) -> int:
        return next((index for index, change in enumerate(self.step) if change), -1)

    @cached_property
    def leaves_modules(self) -> bool:
        """Whether nothing of the modules changes from call to call, so that they need not be looked at."""
        numbers, slots = self.calls[-1].of_arguments
        return not any(self.step[numbers:]) and all(slot < slots for slot, _ in self.calls[-1].done.changes)

    def number_of(self, found: tuple[int, ...]) -> int | None:
        """Return the number of the call that finds this, perhaps in its arguments alone; None where it is none."""
        index, last = self._varying, self.calls[-1].found
        number = 0 if index < 0 else (found[index] - last[index]) // self.step[index]
        if number < self.first or (self.end is not None and number >= self.end):
            return None
        is_one = all(one == start + number * step for one, start, step in zip(found, last, self.step, strict=False))
        return number if is_one else None

    def is_run(self, number: int) -> bool:
        """Return whether a call is to be run, to see whether it does as the others say."""
        length = self._length(number)
        return number > 0 and length % _RUN_EVERY in (0, 1) and number not in self.checked and self._varying >= 0

    def is_whole(self, number: int) -> bool:
        """Return whether all allocations of a call are made."""
        return self._varying < 0 or self._length(number) % _WHOLE_EVERY == 0

    def _length(self, number: int) -> int:
        return self.calls[-1].found[self._varying] + number * self.step[self._varying]

    def at(self, number: int) -> tuple[_Seen, tuple[int, ...]]:
        """Return a call that does as number `number` would, and that one's numbers."""
        periods = -(-number // self.period)
        at = number - periods * self.period - 1
        base, before, earlier = (self.calls[at - back * self.period] for back in range(3))
        if not periods:
            return base, base.numbers
        return base, _extrapolated(base.numbers, before.numbers, earlier.numbers, periods)

    def growing(self, seen: _Seen) -> tuple[int, ...]:
        """Return the events of a call without what it makes and releases in one size."""
        if id(seen) not in self._leaner:
            position = next(index for index, one in enumerate(self.calls) if one is seen)
            before = self.calls[position - self.period]
            sizes = range(seen.done.allocations)
            same = {n + 1 for n in sizes if seen.numbers[n] == before.numbers[n]} - seen.done.outliving
            same.difference_update(number for number, *_ in seen.done.rules)
            self._leaner[id(seen)] = tuple(event for event in seen.done.events if abs(event) not in same)
        return self._leaner[id(seen)]

    @cached_property
    def _leaner(self) -> dict[int, tuple[int, ...]]:
        return {}


class _Kind:
    """Calls that differ in sizes and whole numbers alone."""

    def __init__(self) -> None:
        self.lines: list[_Line] = []
        self.failures = 0
        self._row: list[_Seen] = []
        self._alike = dict.fromkeys(_PERIODS, 0)

    def learn(self, seen: _Seen | None) -> _Line | None:
        """Take in what a call has done, right after the last one; None for what cannot be done again.

        Returns the line that it makes known.
        """
        if seen is None:
            self.failures += 1
            self._row.clear()
            return None
        row = self._row
        if len(row) > 1 and _between(row[-1].found, seen.found) != _between(row[-2].found, row[-1].found):
            del row[:-1]
            self._alike = dict.fromkeys(_PERIODS, 0)
        row.append(seen)
        for period in _PERIODS:
            follows = len(row) > 3 * period and _follows(*(row[-1 - back * period] for back in range(4)))
            self._alike[period] = self._alike[period] + 1 if follows else 0
            if self._alike[period] >= max(_ALIKE, period):
                first = 1 - self._alike[period] - 3 * period
                step = _between(row[-2].found, row[-1].found)
                line = _Line(tuple(row[-3 * period :]), step, period, max(first, 1 - len(row)))
                self.lines.append(line)
                row.clear()
                self._alike = dict.fromkeys(_PERIODS, 0)
                return line
        return None


def _line_of(lines: Iterable[_Line], found: tuple[int, ...]) -> tuple[_Line, int] | tuple[None, int]:
    """Return the line that a call is on, and its number there; None where it is on none."""
    for line in lines:
        if (number := line.number_of(found)) is not None:
            return line, number
    return None, 0


def _between(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sub, after, before))


def _follows(seen: _Seen, *before: _Seen) -> bool:
    """Return whether a call is as the three before it say, the latest first."""
    if any(one.done != seen.done for one in before):
        return False
    last, earlier, first = (one.numbers for one in before)
    return seen.numbers == _extrapolated(last, earlier, first, 1)


def _extrapolated(
    last: tuple[int, ...], before: tuple[int, ...], earlier: tuple[int, ...], steps: int
) -> tuple[int, ...]:
    """Return numbers so many steps after the last of three, as the parabola through these has them.

    By Newton's backward differences (Abramowitz and Stegun 1964, 25.2.28).
    """
    half = steps * (steps + 1) // 2
    return tuple(x + steps * (x - y) + half * (x - 2 * y + z) for x, y, z in zip(last, before, earlier, strict=True))


@dataclass
class Begun:
    """A call without gradients that is about to be run or answered.

    Attributes:
        look: at its arguments, and, where it is run, at the state of its modules. `key`: what the former must equal.
        arguments: the leaves of its arguments.
    """

    look: FoundByCall
    key: tuple[Any, ...]
    line: _Line | None
    number: int
    arguments: list[Any]
    of_arguments: tuple[int, int]
    kind: _Kind

    @property
    def is_known(self) -> bool:
        """Whether it need not be run."""
        return self.line is not None and not self.line.is_run(self.number)


class GrowingCalls:
    """Observes the outermost calls of modules without gradients on one simulated GPU, and answers those that follow.

    Args:
        ahead: returns, as a call of a module is answered, how many further ones are made with it at once.
    """

    def __init__(self, gpu: SimulatedGpu, ahead: Callable[[nn.Module], int]) -> None:
        self._gpu = gpu
        self._ahead = ahead
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self._without_modules: dict[tuple[Any, ...], list[_Line]] = {}
        """By what arguments must equal: the lines on which nothing of the modules changes."""

        self._rows: dict[str, int] = {}
        """By line of the program: how many calls in a row it makes."""

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Begun | None:
        """FoundByCall at a call that is about to be made; None for one that cannot be answered."""
        look = FoundByCall(self._gpu.memory)
        modes = torch.is_inference_mode_enabled(), self._gpu.streams.current, *autocast.state()
        look.structure += (id(module), module.training, *modes)
        if not (look.take(args) and look.take(kwargs)):
            return None
        key, arguments = tuple(look.structure), pytree.tree_leaves((args, kwargs))
        of_arguments = len(look.numbers), len(look.slots)
        line, number = _line_of(self._without_modules.get(key, ()), tuple(look.numbers))
        begun = Begun(look, key, line, number, arguments, of_arguments, _Kind())
        if begun.is_known:
            return begun
        if not look.take_state(module):
            return None
        begun.kind = self._kinds.setdefault(tuple(look.structure), begun.kind)
        if line is None:
            begun.line, begun.number = _line_of(begun.kind.lines, tuple(look.numbers))
        return begun if begun.kind.failures <= _MOST_FAILURES else None

    def observe(self, run: Callable[[], Any], begun: Begun, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a call and learn what it does."""
        recorder, uses = self._gpu.recorder, self._gpu.streams.recorded_uses
        start, first = recorder.position, recorder.allocations
        arguments, begun.arguments = [id(one) for one in begun.arguments], []
        result = run()
        seen = None
        if uses == self._gpu.streams.recorded_uses:
            after = FoundByCall(self._gpu.memory)
            with torch._C.DisableTorchFunction():
                if after.take(args) and after.take(kwargs) and after.take_state(module):
                    seen = self._seen(begun, after, start, first, result, arguments)
        line, number = begun.line, begun.number
        if line is not None and seen is not None:
            base, numbers = line.at(number)
            line.checked.add(number)
            if (seen.done, seen.numbers) == (base.done, numbers):
                return result
        if line is not None:
            line.end = number
        if (known := begun.kind.learn(seen)) is not None and known.leaves_modules:
            self._without_modules.setdefault(begun.key, []).append(known)
        return result

    def _seen(
        self, begun: Begun, after: FoundByCall, start: int, first: int, result: Any, arguments: Sequence[int]
    ) -> _Seen | None:
        """Return what a call has done; None where that cannot be done again."""
        recorder, before = self._gpu.recorder, begun.look
        last = recorder.allocations
        if after.structure != before.structure[-len(after.structure) :]:
            return None
        held = {slot.allocation: index for index, slot in enumerate(before.slots) if slot.allocation}
        events: list[int] = []
        live: set[int] = set()
        for event in recorder.between(start, recorder.position):
            number = abs(event)
            if first < number <= last:
                events.append(event - first if event > 0 else event + first)
                (live.add if event > 0 else live.discard)(number - first)
            elif number in held:
                events.append(-ARGUMENT - held[number])
            else:
                return None
        numbers = [recorder.size_bytes(number) for number in range(first + 1, last + 1)]
        rules = []
        for number in range(first + 1, last + 1):
            if (rule := recorder.rule_of(number)) is not None:
                rules.append((number - first, rule.rule, rule.position, len(rule.arguments)))
                numbers += rule.arguments
        leaves, tree = pytree.tree_flatten(result)
        results: list[_Made | int | tuple[Any]] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                made = self._made(leaf, first, numbers)
                if made is None:
                    return None
                results.append(made)
            elif isinstance(leaf, PLAIN):
                results.append((leaf,))
            elif id(leaf) in arguments:
                results.append(arguments.index(id(leaf)))
            else:
                return None
        changes = self._changes(before, after, first, numbers)
        if changes is None:
            return None
        done = _Done(tuple(events), last - first, tuple(rules), tuple(results), tree, changes)
        if not live <= done.outliving:
            return None
        found = tuple(before.numbers)
        return _Seen(found, begun.of_arguments, done, tuple(numbers), tuple(range(first + 1, last + 1)))

    def _changes(
        self, before: FoundByCall, after: FoundByCall, first: int, numbers: list[int]
    ) -> tuple[tuple[int, _Made | None], ...] | None:
        """Return what a call has changed, adding its numbers; None where that cannot be done again."""
        changes: list[tuple[int, _Made | None]] = []
        for index, (old, new) in enumerate(zip(before.slots, after.slots, strict=True)):
            is_same = before.numbers[slice(*old.numbers)] == after.numbers[slice(*new.numbers)]
            if is_same and old.allocation == new.allocation:
                continue
            if old.container is None or old.container is not new.container:
                return None
            if old.is_number:
                changes.append((index, None))
                numbers += after.numbers[slice(*new.numbers)]
                continue
            made = self._made(new.container[new.key], first, numbers)
            if made is None:
                return None
            changes.append((index, made))
        return tuple(changes)

    def _made(self, tensor: torch.Tensor, first: int, numbers: list[int]) -> _Made | None:
        """Return a tensor that a call has made, adding its numbers; None of another, and of one whose values matter."""
        if not is_dense(tensor) or tensor.requires_grad:
            return None
        storage = tensor.untyped_storage()
        ref = self._gpu.memory.live.get(storage._cdata)
        if ref is None or ref.number <= first or isinstance(ref.values, torch.UntypedStorage):
            return None
        view = StorageView.of(tensor)
        numbers += (*view.shape, *view.stride, view.offset, storage.nbytes())
        return _Made(ref.number - first, view.dtype, len(view.shape))

    # Answering

    def answer(self, begun: Begun, module: nn.Module) -> Any:
        """Return the results of a call that is not run, and do to memory and to its state what it would.

        Where further calls are made at once, they are of the last one.
        """
        assert begun.line is not None, "the growth is settled"
        ahead = self._ahead(module)
        last = begun.number + ahead
        if not ahead and any(begun.line.step):
            self._note(begun.number - begun.line.first + 1)
        for number in range(begun.number, last, max(1, -(-ahead // _MOST_AHEAD))):
            self._do(begun, number)
        done, made = self._do(begun, last, is_last=last > begun.number)
        tensors = iter(made)
        leaves = []
        for one in done.results:
            if isinstance(one, _Made):
                leaves.append(next(tensors))
            else:
                leaves.append(begun.arguments[one] if isinstance(one, int) else one[0])
        return pytree.tree_unflatten(leaves, done.tree)

    def _note(self, calls: int) -> None:
        """Say of a line of the program how many calls in a row it makes at most."""
        place = self._gpu.sites.calling_line()
        if calls > self._rows.get(place, 0):
            self._gpu.notes.pop(self._words(place), None)
            self._rows[place] = calls
            self._gpu.notes[self._words(place)] = None

    def _words(self, place: str) -> str:
        return f"assumes {self._rows.get(place, 0):,} calls in a row at {place}: no value of the GPU's ends them sooner"

    def _do(self, begun: Begun, number: int, *, is_last: bool = False) -> tuple[_Done, list[torch.Tensor]]:
        """Do what a call of a line would, and return the tensors that it would give."""
        line, slots = begun.line, begun.look.slots
        assert line is not None, "the growth is settled"
        seen, numbers = line.at(number)
        done, memory = seen.done, self._gpu.memory
        tensors, state = _laid_out(done, numbers)
        bytes_of = {made.number: ints[-1] for made, ints in (*tensors, *state.values()) if made is not None}
        sizes = _sizes(done, numbers)
        storages: dict[int, torch.UntypedStorage] = {}
        live: dict[int, Any] = {}

        def view(made: _Made, ints: Sequence[int]) -> torch.Tensor:
            return self._gpu.mode.results.view_of(storages[made.number], made.view(ints))

        def change(indices: Iterable[int]) -> None:
            for index in indices:
                made, ints = state.pop(index)
                slots[index].container[slots[index].key] = ints[0] if made is None else view(made, ints)

        for event in done.events if is_last or line.is_whole(number) else line.growing(seen):
            if event > 0:
                allocated = memory.allocate_again(seen.sources[event - 1], sizes[event - 1])
                if event in bytes_of:
                    storages[event] = memory.hold(bytes_of[event], *allocated)
                else:
                    live[event] = allocated
            elif event <= -ARGUMENT:
                released = slots[-event - ARGUMENT].allocation
                there = [index for index, (made, _) in state.items() if made is None or made.number in storages]
                change(index for index in there if slots[index].allocation == released)
            else:
                memory.free(*live.pop(-event))
        change(list(state))
        return done, [view(made, ints) for made, ints in tensors if made is not None]


_Laid = tuple[_Made | None, tuple[int, ...]]


def _laid_out(done: _Done, numbers: tuple[int, ...]) -> tuple[list[_Laid], dict[int, _Laid]]:
    """Return the tensors that a call gives, and by slot what it changes, each with its numbers."""
    at = iter(numbers[done.allocations + sum(count for *_, count in done.rules) :])
    tensors: list[_Laid] = [(one, tuple(islice(at, one.width))) for one in done.results if isinstance(one, _Made)]
    return tensors, {index: (one, tuple(islice(at, one.width if one else 1))) for index, one in done.changes}


def _sizes(done: _Done, numbers: tuple[int, ...]) -> Sequence[Buffer]:
    """Return the sizes of a call's allocations, some of them by a rule."""
    if not done.rules:
        return numbers
    sizes: list[Buffer] = list(numbers[: done.allocations])
    at = iter(numbers[done.allocations :])
    for number, rule, position, count in done.rules:
        sizes[number - 1] = Computed(rule, position, tuple(islice(at, count)))
    return sizes
