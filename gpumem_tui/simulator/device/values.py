"""Values of tensors on the simulated device that follow from the host's: token ids, masks, lengths, counts.

Tensors there have no data. But programs branch on what they copied to the device (``mask.all()``,
``labels.max().item()``) and take shapes from it (``x[mask]``, ``torch.unique(labels)``). Small tensors with known
values therefore keep them on the host, in a storage next to their own, and operators on nothing but such tensors are
computed there as well. The model's results are never known: everything that needs a gradient counts as unknown.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import Any, Protocol

import torch

from gpumem_tui.simulator.allocator.assumptions import End
from gpumem_tui.simulator.device import host
from gpumem_tui.simulator.device.deferred import (
    MOST_ELEMENTS,
    Deferred,
    NotDeferrable,
    Referred,
    Worked,
    deferred_change,
    deferred_result,
    span_bytes,
)
from gpumem_tui.simulator.device.kinds import is_dense, is_without_data
from gpumem_tui.simulator.device.scratch import MATRIX_PRODUCTS
from gpumem_tui.simulator.device.taken import (
    UNKNOWN_NUMBER,
    WHOLE,
    Rows,
    Taken,
    Uniform,
)

_MOST_WHOLE_NUMBERS = 1 << 20
_MOST_FLOATS = 1 << 18
_MOST_DRAWN = 1 << 16
_MOST_COPIED = 1 << 22
"""Elements of a tensor up to which its values are kept: whole numbers and truth values, others, random ones, and whole
numbers as the host has them, such as the edges of a graph."""

_aten: Any = torch.ops.aten
SHAPED_BY_VALUES = frozenset(
    {
        _aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default, _aten.unique_dim.default,
        _aten.unique_consecutive.default, _aten.repeat_interleave.Tensor, _aten.bincount.default, _aten.equal.default,
    }
)  # fmt: skip
"""Operators whose result's shape, or whether there is one, depends on values."""

_TOO_MUCH_WORK = MATRIX_PRODUCTS | {
    "convolution", "convolution_overrideable", "native_batch_norm", "_cdist_forward", "grid_sampler_2d",
    "grid_sampler_3d",
}  # fmt: skip
_FROM_NO_VALUES = frozenset(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"))
_UNINITIALIZED = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
        "_efficientzerotensor",
    }
)  # fmt: skip
"""Tensors that hold nothing; forward-mode differentiation's zeros have no memory."""

_COPY: Any = _aten.copy_.default
_PERMUTATION: Any = _aten.randperm.default
"""Its parts are what samplers draw."""
_COPIES = (_COPY, _aten._to_copy.default)
_OVERWRITING = frozenset(("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"))
_SAME_OF_EQUALS = ("max", "min", "avg")
"""Reductions of DTensor's collectives that give ranks, which all hold one value, that back."""
_CHECKED_FOR_INF = "_amp_foreach_non_finite_check_and_unscale_"
_WRITES_PLACES = frozenset(("scatter_", "index_copy_", "index_put_"))
"""Operators that programs invert a permutation with, on a tensor that nothing was written to."""
_PUT = ("index_put_", "_index_put_impl_")
_ONE_HOT: Any = _aten.scatter_.value
_KEPT_TYPES = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    }
)  # fmt: skip


class Unwritten(Enum):
    """The content of a new storage into which nothing has been written."""

    YET = "yet"


class Holder(Protocol):
    """A live storage on the device and the values it holds, None where these are unknown."""

    values: torch.UntypedStorage | Uniform | Deferred | Unwritten | None


class UnknownValue(Exception):
    """Values are not known."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """The way in which an operator treats values.

    Attributes:
        writes: the positions or names of the arguments that it changes.
        overwrites: whether nothing of what the first argument held matters.
        is_computed: whether its results can be had by running it on the host.
        is_drawn: whether its results are random.
        needs_values: whether it reads the values of its tensors at all.
    """

    writes: tuple[int | str, ...]
    overwrites: bool
    is_computed: bool
    is_drawn: bool
    needs_values: bool


@lru_cache(None)
def _rule(func: torch._ops.OpOverload[..., Any]) -> _Rule:
    name, arguments = func._opname, func._schema.arguments
    writes = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    is_plain = func.namespace == "aten" and name not in _TOO_MUCH_WORK and name not in _UNINITIALIZED
    return _Rule(
        writes=writes if torch.Tag.inplace_view not in func.tags else (),
        overwrites=name in _OVERWRITING,
        is_computed=is_plain and not func.is_view and torch.Tag.inplace_view not in func.tags,
        is_drawn=torch.Tag.nondeterministic_seeded in func.tags,
        needs_values=name not in _FROM_NO_VALUES,
    )


class Values:
    """Knows the values of tensors on the device, by their storages.

    Args:
        live: what we know about each live storage, by its address.
        end: of what is not known, the one that is taken.
    """

    def __init__(self, live: Mapping[int, Holder], end: End = "most") -> None:
        self._live = live
        self.end = end
        self._taken = Taken(self)
        self._random_state: torch.Tensor | None = None
        self._referred = Referred()
        self._worked: Worked | None = None
        """Operators worked out where values are wanted at any price (`worked_out`)."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a device tensor as a host tensor, not to be changed; None where they are unknown."""
        return None if tensor.requires_grad else self._known(tensor)

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.dtype not in _KEPT_TYPES:
            return None
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        content = self._content(tensor)
        if isinstance(content, Deferred):
            if self._worked is None:
                return None
            try:
                content = self._worked.out(content)
            except (NotDeferrable, UnknownValue):
                return None
        if content is None or (isinstance(content, Uniform) and not _is_small(tensor)):
            return None
        if isinstance(content, Uniform):
            value = torch.tensor(content.value, dtype=tensor.dtype, device="cpu")
            return value.expand(tensor.shape) if content.certain else None
        seen = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return seen.set_(content, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def read(self, tensor: torch.Tensor, *, as_size: bool = False) -> Any:
        """Return the value of a tensor of one element, or what it is taken for (see `unknown`)."""
        known = self.worked(tensor)
        return self.unknown(tensor, as_size=as_size) if known is None else known.item()

    def worked(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a device tensor, also such as were too many to be kept; None where they are unknown."""
        with self.worked_out():
            return self._known(tensor)

    def unknown(self, tensor: torch.Tensor, *, as_size: bool = False) -> Any:
        """Return what each element of unknown values reads as: false, zero, or a number near zero.

        Args:
            as_size: whether the program may take a size from it, of which the largest is given.
        """
        content = self._content(tensor)
        if isinstance(content, Uniform):
            value = content.size(self.end) if as_size else content.value
            return bool(value) if tensor.dtype is torch.bool else value
        return False if tensor.dtype == torch.bool else UNKNOWN_NUMBER if tensor.is_floating_point() else 0

    def taken_for(self, tensor: torch.Tensor) -> Uniform | None:
        """Return what every element of a tensor is taken for; None where nothing is assumed of them."""
        content = self._content(tensor)
        return content if isinstance(content, Uniform) else None

    def rows(self, mask: torch.Tensor) -> Rows:
        """Return how many elements of a partly unknown mask are kept; each time as many."""
        if self.is_unknown(mask):
            self._take_for(mask, self._taken.mask_of(mask))
        return self._taken.rows(mask, self.end)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Learn what an operator that ran on the device makes known, and forget what it has changed unknowably."""
        rule = _rule(func)
        if rule.writes:
            self._follow_change(rule, func, args, kwargs)
        elif rule.is_computed:
            first = args[0] if args else None
            if rule.needs_values and self.is_unknown(first):
                self._assume(func, args, kwargs, result)
            else:
                self._follow_result(rule, func, args, kwargs, result)
        elif func._opname in _UNINITIALIZED and is_dense(result) and _is_small(result):
            holder = self._holder(result)
            if holder is not None:
                holder.values = Unwritten.YET
        elif func.namespace == "_c10d_functional" and (len(args) < 2 or args[1] in _SAME_OF_EQUALS):
            known = self._known(args[0])
            if known is not None:
                self.learn(result, known)

    def result_on_host(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives on the host's values.

        Raises:
            UnknownValue: one of them is not known, or the host cannot compute it.
        """
        return self._run(_rule(func), func, self._on_host(args), self._on_host_named(kwargs))

    @contextmanager
    def worked_out(self) -> Iterator[None]:
        """Have values that were too many to be kept be known within the context."""
        before, self._worked = self._worked, self._worked or Worked()
        try:
            yield
        finally:
            self._worked = before

    def learn(self, tensor: torch.Tensor, known: torch.Tensor, *, most: int = 0) -> None:
        """Keep the values of a new device tensor, which has a storage for itself, or of up to `most` elements."""
        holder = self._holder(tensor)
        if holder is None or known.dtype != tensor.dtype or known.shape != tensor.shape:
            return
        if not _is_small(tensor) and tensor.numel() > most:
            return
        if not (_covers_storage(tensor) and known.stride() == tensor.stride() and _covers_storage(known)):
            if tensor.untyped_storage().nbytes() != span_bytes(tensor) or tensor.storage_offset():
                return
            known = _empty_as(tensor).copy_(known)
        holder.values = known.untyped_storage()

    def _follow_change(self, rule: _Rule, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        changed = [
            kwargs.get(at) if isinstance(at, str) else args[at]
            for at in rule.writes
            if isinstance(at, str) or at < len(args)
        ]
        tensors = list(_tensors(changed))
        if func._opname == _CHECKED_FOR_INF:
            self._forget(list(_tensors(args[:1])))  # what was found stays: nothing is infinite
            return
        if not rule.is_computed:
            self._forget(tensors)
            return
        if rule.overwrites and _covers_storage(tensors[0]) and not tensors[0].requires_grad:
            self._overwrite(rule, func, tensors[0], args, kwargs)
            return
        if func is _COPY or func._opname in _WRITES_PLACES:
            self._begin_to_write(args[0])
        if func is _ONE_HOT and (one_hot := self._one_hot(*args[:4])) is not None:
            self._forget(tensors)
            self._take_for(args[0], one_hot)
            return
        if all(self._content(tensor) is None for tensor in tensors):
            return
        masks = map(self.taken_for, _tensors(args[1:2])) if func._opname in _PUT else ()
        if any(mask is not None and not mask.value for mask in masks):
            return  # nothing is taken to be changed
        try:
            self.result_on_host(func, args, kwargs)
        except UnknownValue:
            self._forget_change(rule, func, args, kwargs, tensors)

    def _begin_to_write(self, target: torch.Tensor) -> None:
        """Take what was not written of a tensor for zero, as its first part is copied into it."""
        holder = self._holder(target)
        if holder is not None and holder.values is Unwritten.YET:
            size_bytes = target.untyped_storage().nbytes()
            holder.values = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu").untyped_storage()

    def _forget_change(
        self, rule: _Rule, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], changed: list[torch.Tensor]
    ) -> None:
        """Keep how the change can be worked out where that is possible; else forget what was known."""
        kept: Deferred | Uniform | None = None
        if rule.writes == (0,) and not rule.is_drawn and isinstance(args[0], torch.Tensor):
            run = partial(self._run, rule, func)
            with suppress(NotDeferrable):
                kept = deferred_change(self._content, run, args, self._named(kwargs), args[0])
            if kept is None and args[0].dtype in WHOLE and _covers_storage(args[0]):
                kept = self._taken.follows(func, args, kwargs, args[0])
        self._forget(changed)
        holder = self._holder(changed[0])
        if kept is not None and holder is not None:
            holder.values = kept

    def _overwrite(
        self, rule: _Rule, func: Any, target: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        holder = self._holder(target)
        if holder is None:
            return
        holder.values = None
        if not _is_small(target, is_drawn=rule.is_drawn) or target.dtype not in _KEPT_TYPES:
            if func is _COPY and args[1].shape == target.shape:
                holder.values = self._refer(args[1], target)
            return
        made = _empty_as(target)
        with suppress(UnknownValue):
            self._run(rule, func, (made, *self._on_host(args[1:])), self._on_host_named(kwargs))
            holder.values = made.untyped_storage()

    def _follow_result(
        self, rule: _Rule, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        made = list(_tensors((result,)))
        for tensor in made:
            holder = self._holder(tensor)
            if not tensor.numel():
                continue
            if holder is None or holder.values is not None:
                return
            if not _is_small(tensor, is_drawn=rule.is_drawn and func is not _PERMUTATION) and not _is_data(func, args):
                self._defer(rule, func, args, kwargs, result)
                return
        if not made:
            return
        if not rule.needs_values:
            args = (torch.empty((), dtype=args[0].dtype, device="cpu").expand(args[0].shape), *args[1:])
        try:
            known = self.result_on_host(func, args, kwargs)
        except UnknownValue:
            if not self._defer(rule, func, args, kwargs, result):
                self._assume(func, args, kwargs, result)
            return
        for tensor, values in zip(made, _tensors((known,)), strict=True):
            self.learn(tensor, values, most=_MOST_COPIED)

    def _defer(self, rule: _Rule, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Keep how a result can be worked out, where that is possible."""
        if rule.is_drawn or not is_dense(result) or result.dtype not in _KEPT_TYPES:
            return False
        holder = self._holder(result)
        if holder is None:
            return False
        if func in _COPIES and (referred := self._refer(args[0], result)) is not None:
            holder.values = referred
            return True
        try:
            run = partial(self._run, rule, func)
            holder.values = deferred_result(self._content, run, args, self._named(kwargs), result)
        except NotDeferrable:
            return False
        return True

    def _refer(self, source: torch.Tensor, made: torch.Tensor) -> Deferred | None:
        """Return what a copy of a large host tensor holds, of data and not of a model's weights."""
        if is_without_data(source) or source.requires_grad or source.is_meta or host.is_moving_model():
            return None
        is_followed = source.layout is torch.strided and made.dtype in _KEPT_TYPES and source.dtype in _KEPT_TYPES
        is_whole = not made.storage_offset() and made.untyped_storage().nbytes() == span_bytes(made)
        return self._referred.content(source, made) if is_followed and is_whole else None

    def _assume(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Assume what tests of unknown values read as, which places they give, and how many are of each class."""
        for number, made in enumerate(_tensors((result,))):
            holder = self._holder(made) if is_dense(made) and made.dtype in WHOLE else None
            if holder is None or holder.values is not None:
                continue
            counted = self._taken.counted(func, args, made)
            if counted is not None:
                counts = counted.counts(self.end)
                known = torch.zeros(made.numel(), dtype=made.dtype, device="cpu")
                known[: len(counts)] = torch.tensor(counts, dtype=made.dtype, device="cpu")
                self.learn(made, known.view(made.shape))
            else:
                holder.values = self._taken.made(func, args, kwargs, made, number)

    def _one_hot(self, target: torch.Tensor, dim: int, index: Any, value: Any) -> Uniform | None:
        """Return what a tensor holds into which a one is written for each class; None if known, or other."""
        if value != 1 or self.of(index) is not None:
            return None
        return self._taken.one_hot(target, dim % target.dim(), index)

    def _take_for(self, tensor: torch.Tensor, taken: Uniform) -> None:
        holder = self._holder(tensor)
        if holder is not None and _covers_storage(tensor):
            holder.values = taken

    def _run(self, rule: _Rule, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on host tensors, with random numbers of their own."""
        before = torch.get_rng_state() if rule.is_drawn else None
        if before is not None:
            if self._random_state is None:
                self._random_state = torch.Generator().manual_seed(0).get_state()
            torch.set_rng_state(self._random_state)
        try:
            return _copied(func, args, kwargs) if func in _COPIES else func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:  # such as no kernel for the type, or an index too large
            raise UnknownValue from error
        finally:
            if before is not None:
                self._random_state = torch.get_rng_state()
                torch.set_rng_state(before)

    def _on_host(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(self._argument_on_host, values))

    def _on_host_named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._argument_on_host(value) for name, value in self._named(values).items()}

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        on_host = {"device": torch.device("cpu"), "generator": None, "pin_memory": False}
        return {name: on_host.get(name, value) for name, value in values.items()}

    def _argument_on_host(self, value: Any) -> Any:
        kind = type(value)
        if is_without_data(value):
            known = self.of(value) if is_dense(value) else None
            most = MOST_ELEMENTS if self._worked is not None else _MOST_WHOLE_NUMBERS
            if known is None or known.numel() > most:  # one number expanded may be computed on for hours
                raise UnknownValue
            return known
        if kind is list or kind is tuple:
            return kind(self._argument_on_host(one) for one in value)
        if isinstance(value, torch.Tensor) and (value.requires_grad or value.is_meta):
            raise UnknownValue
        return torch.device("cpu") if kind is torch.device else value

    def _forget(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            holder = self._holder(tensor)
            if holder is not None:
                holder.values = None

    def is_unknown(self, value: Any) -> bool:
        """Return whether a tensor on the device has values, of which we know nothing."""
        return is_dense(value) and bool(value.numel()) and self._content(value) is None

    def _holder(self, tensor: torch.Tensor) -> Holder | None:
        return self._live.get(tensor.untyped_storage()._cdata)

    def _content(self, tensor: torch.Tensor) -> torch.UntypedStorage | Uniform | Deferred | None:
        holder = self._live.get(tensor.untyped_storage()._cdata)
        return holder.values if holder is not None and holder.values is not Unwritten.YET else None


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_small(tensor: torch.Tensor, *, is_drawn: bool = False) -> bool:
    if tensor.dtype not in _KEPT_TYPES:
        return False
    most = _MOST_FLOATS if tensor.is_floating_point() else _MOST_WHOLE_NUMBERS
    return tensor.numel() <= (_MOST_DRAWN if is_drawn else most)


def _is_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator copies whole numbers of the host to the device, and not too many."""
    if func not in _COPIES or is_without_data(args[0]) or args[0].dtype not in WHOLE:
        return False
    return bool(args[0].numel() <= _MOST_COPIED)


def _copied(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Copy a host tensor, byte by byte where that is all: torch would wake a thread for every other core."""
    target, source = (args if func is _COPY else (None, args[0]))[:2]
    if target is None and kwargs.get("memory_format") is None and kwargs.get("dtype") in (None, source.dtype):
        target = _empty_as(source)
    if target is None or not (
        type(source) is torch.Tensor
        and (source.dtype, source.shape, source.stride()) == (target.dtype, target.shape, target.stride())
        and source.is_contiguous()
        and not source.is_neg()
    ):
        target = func(*args, **kwargs)
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    copied: torch.Tensor = target
    return copied


def _covers_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has every element of its storage once."""
    size_bytes = tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes() == size_bytes == span_bytes(tensor) and not tensor.storage_offset()


def _empty_as(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
