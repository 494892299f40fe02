"""Assumed elements of tensors that only a GPU computes: ranges, and how many of them masks keep.

A mask of which we know nothing is taken to keep all; masks that sort the elements of one tensor into classes, as a
router of tokens to experts does, keep all of them together. `End` shows which end of it a trace takes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch

from gpumem_tui.simulator.allocator.assumptions import End, Kind
from gpumem_tui.simulator.device.kinds import is_without_data

FEW = 2
"""Rows that are kept at the fewest: none are an error to programs that take a mean or a largest value of them, and one
is to layers that normalize over rows."""

UNKNOWN_NUMBER = 1e-6
"""The value of an unknown number: near zero, but programs may divide by it, take its logarithm, and do not find
that they have converged before they began."""

WHOLE = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_COUNTING = ("sum", "count_nonzero")
_CHOOSING = ("_to_copy", "clone", "max", "min", "amax", "amin", "all", "any")
"""Operators that add elements up, and whose results are one of them, perhaps of another type."""
_NEGATING = ("bitwise_not", "logical_not")
_PICKING = ("index", "gather", "index_select", "masked_select", "sort", "repeat", "flip", "roll", "take")
"""Operators that give some elements of their first argument."""
_WRITING = ("scatter", "scatter_", "index_copy", "index_copy_")
"""Operators that write elements at places of their first argument: dimension, places, what is written."""
_ARE_NO_NUMBERS = ("isnan", "isinf", "isposinf", "isneginf")
_GIVING_PLACES_BESIDE = frozenset(("topk", "sort", "max", "min", "kthvalue"))
_GIVING_PLACES = _GIVING_PLACES_BESIDE.union(("argmax", "argmin", "argsort", "multinomial"))
"""Operators that give places along a dimension; some of them next to values."""
_MOST_COUNTED = 4096
"""Classes whose elements are counted one by one."""

Which = tuple[bool, Hashable]
"""A class, or all but that one."""
_IS: Which = (True, None)


@dataclass(eq=False, slots=True)
class Classes:
    """Elements that a GPU sorts into classes, each into one.

    Attributes:
        elements: how many there are.
        number: of classes.
        most: elements that one class can have, as a row's best two experts differ; 0 for all.
        even: whether an equal share is what each has at the fewest; else few.
        is_one_hot: whether a mask has each element once for every class, one class next to the other.
    """

    elements: int
    number: int = 2
    most: int = 0
    even: bool = False
    is_one_hot: bool = False
    _kept: dict[Which, int] = field(default_factory=dict)
    _parts: dict[Hashable, Classes] = field(default_factory=dict)

    def part(self, key: Hashable, elements: int, most: int = 0) -> Classes:
        """Return the classes of a part of the elements."""
        return self._parts.setdefault(key, Classes(elements, self.number, min(most, elements), even=self.even))

    def kept(self, which: Which, end: End) -> int:
        """Return how many elements a class has: together as many as there are, and one for each class but the first."""
        found = self._kept.get(which)
        if found is None:
            others = self.elements - sum(self._kept.values())
            if self.even and end == "fewest":
                share = -(-self.elements // self.number)
                found = share if which[0] else self.elements - share
            elif end == "fewest" and not self._kept:
                found = min(FEW, self.elements)
            else:
                found = max(min(1, self.elements), min(others, self.most or others))
            self._kept[which] = found
        return found

    def counts(self, end: End) -> list[int]:
        """Return how many elements each of numbered classes has; together they are all."""
        found = [self.kept((True, number), end) for number in range(self.number)]
        over = sum(found) - self.elements
        for number in sorted(range(self.number), key=lambda number: -found[number]):
            less = min(over, found[number] - min(1, self.elements // self.number))
            found[number] -= less
            over -= less
        return found


@dataclass(frozen=True, slots=True)
class Uniform:
    """The assumed elements of a tensor of truth values or whole numbers.

    Attributes:
        value: as which it reads where a program goes one way or another.
        low: the least that it can be.
        high: the most; sizes are taken from it, as how many rows a mask keeps.
        certain: whether it is `value`.
        is_place: whether it is a place along a dimension, or worked out from one, and not a count.
        classes: into which a GPU sorts these elements, or of which this is a mask or the count of one.
        which: of them; None for all.
    """

    value: int
    low: int
    high: int
    certain: bool = False
    is_place: bool = False
    classes: Classes | None = None
    which: Which | None = None

    @classmethod
    def known(cls, value: int) -> Uniform:
        """Return what is certain."""
        return cls(value, value, value, certain=True)

    @classmethod
    def truth(cls, value: bool, classes: Classes | None = None, which: Which | None = None) -> Uniform:
        """Return what reads as `value` and may be either."""
        return cls(value, False, True, classes=classes, which=which)

    @property
    def is_open(self) -> bool:
        """Return whether it may be one number or another."""
        return not self.certain and self.low < self.high

    def size(self, end: End) -> int:
        """Return the number that a program takes a size from."""
        if self.is_place:
            return self.high if end == "fewest" else self.value
        if self.classes is not None and self.which is not None:
            return self.classes.kept(self.which, end)
        return self.high if end != "fewest" or not self.is_open else min(self.high, max(self.low, FEW))

    def sizes(self, tensor: torch.Tensor, end: End, *, least: int) -> torch.Tensor:
        """Return the numbers from which a program takes sizes, for each element of a tensor, on the host.

        Places that differ, as those of a row's best two, are one behind the other.

        Args:
            least: below which none is taken, as where the program divides by it.
        """
        low, high = min(max(self.low, least), self.high), self.high
        first = min(max(self.size(end), low), high)
        found = torch.full(tensor.shape, first, dtype=tensor.dtype, device="cpu")
        count = tensor.numel()
        most = self.classes.most if self.classes is not None and self.classes.elements == count else 0
        of_row = count // most if most else 1
        if self.is_place and 1 < of_row <= min(count, high - low + 1):
            steps = torch.arange(count, dtype=tensor.dtype, device="cpu").remainder(of_row).view(tensor.shape)
            found += -steps if end == "fewest" else steps
        return found


class Rows(NamedTuple):
    """How many rows are kept, and at least and at most."""

    kept: int
    low: int
    high: int
    kind: Kind = "mask"


class KnownValues(Protocol):
    """Facts about tensors on the device (see `Values`)."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor."""

    def taken_for(self, tensor: torch.Tensor) -> Uniform | None:
        """Return what each element of a tensor is taken for."""

    def is_unknown(self, value: Any) -> bool:
        """Return whether we know nothing of a tensor on the device."""


class Taken:
    """Works out what the results of operators on unknown values are taken for.

    Args:
        known: what we know about tensors.
    """

    def __init__(self, known: KnownValues) -> None:
        self._known = known

    def made(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: torch.Tensor, number: int
    ) -> Uniform | None:
        """Return what result `number` of an operator is taken for: numbers are finite, and compare as a small one."""
        if result.dtype is torch.bool and (tested := self._tested(func, args, result)) is not None:
            return tested
        if number == (func._opname in _GIVING_PLACES_BESIDE) and (at := self._places(func, args, kwargs, result)):
            return at
        return self.follows(func, args, kwargs, result)

    def counted(self, func: Any, args: tuple[Any, ...], result: torch.Tensor) -> Classes | None:
        """Return the classes of which an operator counts the elements, as many as its result has; None of another."""
        taken = self._known.taken_for(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if taken is None or taken.classes is None or taken.which is not None or result.dim() > 1:
            return None
        number = taken.classes.number
        if func._opname == "sum" and taken.classes.is_one_hot and number == result.numel() <= _MOST_COUNTED:
            return taken.classes
        return taken.classes if func._opname == "bincount" and number <= min(result.numel(), _MOST_COUNTED) else None

    def _places(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: torch.Tensor
    ) -> Uniform | None:
        """Return what the whole numbers that an operator gives are taken for, where they are places or drawn."""
        name, first = func._opname, args[0] if args else None
        per_row = 1
        if name == "randint":
            high = args[1] if func._schema.arguments[0].name == "low" else args[0]
        elif name in _GIVING_PLACES and isinstance(first, torch.Tensor) and first.dim():
            dim = -1 if name == "multinomial" else _argument(func, args, kwargs, "dim")
            high = first.numel() if dim is None else first.shape[dim]
            per_row = made.shape[dim] if made.dim() == first.dim() and type(dim) is int else 1
        else:
            return None
        most = max(1, int(high))
        classes = Classes(made.numel(), most, made.numel() // max(1, per_row), even=True)
        return Uniform(0, 0, most - 1, is_place=True, classes=classes)

    def _tested(self, func: Any, args: tuple[Any, ...], result: torch.Tensor) -> Uniform | None:
        """Return what a test of numbers is assumed to give; None where it is none, or elements may differ."""
        name = func._opname
        if name in _ARE_NO_NUMBERS:
            return Uniform.known(False)
        if name in ("any", "all") and args[0].dtype not in WHOLE:  # as optimizers ask of weights: not zero
            return Uniform.truth(True)
        if name == "isin":  # what is looked for, as the end of a text, is not found
            return Uniform.truth(False, Classes(result.numel()), _IS)
        if name not in _COMPARISONS or args[0].dtype is torch.bool:
            return None
        one, other = args[:2]
        left, right = self._as_number(one), self._as_number(other)
        if left is None or right is None:
            return self._one_hot_of(one, other, result) if name == "eq" else None
        value = _COMPARISONS[name](left, right)
        at = self._known.taken_for(one)
        if name in ("eq", "ne") and at is not None and at.is_place and at.is_open and at.low <= right <= at.high:
            value = name == "ne"  # one place of many
        if one is other or (type(other) is float and math.isinf(other)):
            return Uniform.known(value)
        is_of_zero = one.is_floating_point() and abs(right) < UNKNOWN_NUMBER
        if is_of_zero and not value and torch.is_inference_mode_enabled():  # are there weights that were never trained?
            return Uniform(False, False, False)
        taken = self._known.taken_for(one)
        if name in ("eq", "ne") and taken is not None and taken.classes is not None and taken.which is None:
            classes, count = taken.classes, one.numel()
            if count != classes.elements:
                classes = classes.part((one.storage_offset(), *one.shape, *one.stride()), count)
            return Uniform.truth(value, classes, (name == "eq", int(right)))
        return Uniform.truth(value, Classes(result.numel()), _IS)

    def follows(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: torch.Tensor
    ) -> Uniform | None:
        """Return what each element of a result is, of tensors whose elements are alike; None where none follows."""
        name = func._opname
        if name in _PICKING:
            return self._picked(args[0], result)
        if name in _WRITING:
            return self._written(*args[:4])
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        found = [self._of_each(tensor, is_counted=result.dtype is not torch.bool) for tensor in tensors]
        taken = [one for one in found if one is not None]
        if len(taken) < len(found) or not taken:
            return None
        certain, is_place = all(one.certain for one in taken), any(one.is_place for one in taken)
        first = taken[0]
        if name in _NEGATING and first.classes is not None and first.which is not None:
            return Uniform(
                not first.value, False, True, classes=first.classes, which=(not first.which[0], first.which[1])
            )
        if name == "any" and first.classes is not None and first.which is not None and result.numel() > 1:
            one = first.classes.part(("any", result.numel()), first.classes.elements, result.numel())
            return Uniform.truth(bool(first.value), one, first.which)
        if name in _COUNTING or (name in _CHOOSING and len(taken) == 1):
            kind = bool if name == "count_nonzero" or result.dtype is torch.bool else int
            each = tensors[0].numel() // max(1, result.numel()) if name in _COUNTING else 1
            value, low, high = (kind(end) * each for end in (first.value, first.low, first.high))
            is_whole = name in ("_to_copy", "clone") or (name in _COUNTING and result.numel() == 1)
            of = (first.classes, first.which) if is_whole else (None, None)
            return Uniform(value, low, high, certain, is_place, *of)
        if torch.Tag.pointwise not in func.tags:
            return None

        def computed(*numbers: int) -> int:
            each = zip(numbers, tensors, strict=True)
            scalars = iter([torch.tensor(number, dtype=of.dtype, device="cpu") for number, of in each])
            given = [next(scalars) if isinstance(argument, torch.Tensor) else argument for argument in args]
            return int(torch.empty((), dtype=result.dtype, device="cpu").copy_(func(*given, **kwargs)))

        try:
            ends = [computed(*numbers) for numbers in product(*((one.low, one.high) for one in taken))]
            value, low, high = computed(*(one.value for one in taken)), min(ends), max(ends)
            if result.dtype is torch.bool and low < high:
                return Uniform.truth(bool(value), Classes(result.numel()), _IS)
            return Uniform(value, low, high, certain, is_place)
        except RuntimeError:  # such as a division by zero
            return None

    def _picked(self, source: torch.Tensor, result: torch.Tensor) -> Uniform | None:
        """Return what elements are taken for that are picked of others, none smaller or larger than all of these."""
        taken = self._known.taken_for(source) or self._between(source)
        if taken is None or result.dtype is not source.dtype or result.dtype is torch.bool:
            return None
        if not taken.is_place:
            return None if taken.classes is not None else taken
        classes = taken.classes and Classes(result.numel(), taken.classes.number, even=True)
        return replace(taken, classes=classes, which=None)

    def _written(self, target: torch.Tensor, _dim: int, places: torch.Tensor, written: Any) -> Uniform | None:
        """Return what elements are taken for some of which, or all, are written over."""
        if not isinstance(written, torch.Tensor) or target.dtype is torch.bool:
            return None
        new, at = self._range(written), self._known.of(places) if is_without_data(places) else places
        if target.dim() == 1 and at is not None and len(at.unique()) == len(target):
            return new
        old = self._range(target)
        if old is None or new is None:
            return None
        return Uniform(old.value, min(old.low, new.low), max(old.high, new.high))

    def _range(self, tensor: torch.Tensor) -> Uniform | None:
        """Return the range of whole numbers, those of a class of their own aside."""
        taken = self._known.taken_for(tensor) or self._between(tensor)
        return taken and replace(taken, classes=None, which=None)

    def _between(self, source: torch.Tensor) -> Uniform | None:
        """Return the range of whole numbers known; None of others."""
        known = self._known.of(source) if is_without_data(source) else source
        if known is None or known.dtype not in WHOLE or known.dtype is torch.bool or not known.numel() or known.is_meta:
            return None
        least, most = (int(end) for end in torch.aminmax(known))
        return Uniform(min(max(0, least), most), least, most, certain=least == most)

    def _one_hot_of(self, index: torch.Tensor, numbers: Any, result: torch.Tensor) -> Uniform | None:
        """Return what comparing classes with the numbers of them all gives, as `torch.nn.functional.one_hot` does."""
        known = self._known.of(numbers) if is_without_data(numbers) else numbers
        if known is None or known.dim() != 1 or not torch.equal(known, torch.arange(len(known), dtype=known.dtype)):
            return None
        return self.one_hot(result, result.dim() - 1, index)

    def one_hot(self, target: torch.Tensor, dim: int, index: torch.Tensor) -> Uniform | None:
        """Return what a tensor holds that has a one for the class that `index` has along a dimension, and zeros."""
        number = target.shape[dim]
        if (
            index.dim() != target.dim()
            or index.shape[dim] != 1
            or index.numel() * number != target.numel()
            or target.stride(dim) != 1
        ):
            return None
        taken = self._known.taken_for(index)
        most = taken.classes.most if taken is not None and taken.classes is not None else 0
        return Uniform(0, 0, 1, classes=Classes(index.numel(), number, most, even=True, is_one_hot=True))

    def mask_of(self, mask: torch.Tensor) -> Uniform:
        """Return what a mask is taken for, or numbers of which some are none, where we know nothing of it."""
        return Uniform.truth(False, Classes(mask.numel()), _IS)

    def rows(self, mask: torch.Tensor, end: End) -> Rows:
        """Return how many elements of a partly unknown mask are kept."""
        taken, count = self._known.taken_for(mask), mask.numel()
        view = (int(mask.storage_offset()), *mask.shape, *mask.stride())
        classes, which = (None, None) if taken is None else (taken.classes, taken.which)
        if taken is not None and not taken.high:
            return Rows(0, 0, 0)
        if classes is None:
            classes = Classes(count)
        elif classes.is_one_hot and count == classes.elements * classes.number:
            return Rows(classes.elements, classes.elements, classes.elements)
        elif classes.is_one_hot and count == classes.elements:
            which = True, view[0]
        elif count not in (classes.elements, classes.most):
            classes = classes.part(view, count)
        kept = min(count, classes.kept(which or _IS, end))
        few = -(-classes.elements // classes.number) if classes.even else min(FEW, count)
        return Rows(kept, few, min(count, classes.most or count), "classes" if classes.even else "mask")

    def _of_each(self, tensor: torch.Tensor, *, is_counted: bool) -> Uniform | None:
        """Return what each element of a tensor is taken for; None where they may differ, or we know nothing."""
        taken = self._known.taken_for(tensor) if is_without_data(tensor) else None
        if taken is not None:
            return taken
        if is_counted and tensor.dtype is torch.bool and self._known.is_unknown(tensor):
            return Uniform.truth(False)
        known = self._known.of(tensor) if is_without_data(tensor) else tensor
        if known is None or known.dtype not in WHOLE or not known.numel() or known.is_meta:
            return None
        least, most = (int(end) for end in torch.aminmax(known.int() if known.dtype is torch.bool else known))
        return Uniform.known(least) if least == most else None

    def _as_number(self, value: Any) -> float | None:
        """Return one number for all elements: as `read` where they are unknown, None where they may differ."""
        if not isinstance(value, torch.Tensor):
            return float(value)
        known = self._known.of(value) if is_without_data(value) else value
        if known is None:
            taken = self._known.taken_for(value)
            return float(taken.value) if taken is not None else UNKNOWN_NUMBER * value.is_floating_point()
        return float(known.item()) if known.numel() == 1 else None


def _argument(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an argument by its name, or what it is by default."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None
