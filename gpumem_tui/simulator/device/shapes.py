"""Results that torch's shape functions do not give: by values, by an assumption, by an example, or in words why not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from gpumem_tui.simulator.allocator.assumptions import Assumption, End, Kind
from gpumem_tui.simulator.device.kinds import is_sparse, is_without_data
from gpumem_tui.simulator.device.values import SHAPED_BY_VALUES, UnknownValue, Values
from gpumem_tui.simulator.device.ways import Way

_aten: Any = torch.ops.aten
_EQUAL, _CLOSE, MASKED_SELECT = _aten.equal.default, _aten.allclose.default, _aten.masked_select.default
NONZERO, _BINCOUNT = _aten.nonzero.default, _aten.bincount.default
_UNIQUE2, _UNIQUE_CONSECUTIVE = _aten._unique2.default, _aten.unique_consecutive.default
INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_UNIQUE_DIM = _aten.unique_dim.default
_UNIQUE = (_UNIQUE2, _UNIQUE_CONSECUTIVE, _UNIQUE_DIM)
REPEATED = _aten.repeat_interleave.Tensor
PACK = _aten._pack_padded_sequence.default
_CTC = (_aten._ctc_loss.default, _aten._ctc_loss.Tensor)
TAKEN_FROM_VALUES = SHAPED_BY_VALUES.union((PACK, _CLOSE, *_CTC))
"""Operators that this module answers, as far as the values it needs exist."""


class Shapes:
    """The shapes that operators in `TAKEN_FROM_VALUES` give.

    Args:
        values: what we know about the tensors on the device.
    """

    def __init__(self, values: Values) -> None:
        self._values = values
        self._known: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
            PACK: lambda args: PACK(_without_data(args[0]), *args[1:]),
            **dict.fromkeys(_CTC, self._connectionist_loss),
        }
        self._unknown: dict[Any, Callable[[tuple[Any, ...], Mapping[str, Any]], Any]] = {
            _EQUAL: lambda args, _: args[0].shape == args[1].shape,  # as of zeros
            _CLOSE: lambda _args, _: True,
            MASKED_SELECT: lambda args, _: self._selected(*args),
            _BINCOUNT: self._counted,
            REPEATED: lambda _, kwargs: _repeated(kwargs.get("output_size")),
        }
        """By operator what it gives where its values are not known."""

    def of_result(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result as tensors that have its shapes; `PACK`'s second one is the host's, with its values.

        Raises:
            UnknownValue: the shapes depend on values that are not known.
        """
        if func in self._known:
            return self._known[func](args)
        try:
            with self._values.worked_out():
                return self._values.result_on_host(func, args, kwargs)
        except UnknownValue:
            if func in self._unknown:
                return self._unknown[func](args, kwargs)
            raise

    def _selected(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with self._values.worked_out():
            known = self._values.of(mask)
        if known is None:
            raise UnknownValue
        taken = int(known.expand(torch.broadcast_shapes(mask.shape, tensor.shape)).sum())
        return torch.empty(taken, dtype=tensor.dtype, device="meta")

    def _counted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Return `bincount`'s result for as many numbers as it is asked for, or as there can be: none is above."""
        taken = self._values.taken_for(args[0])
        least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        if not least and (taken is None or not taken.is_place):
            raise UnknownValue
        weights = args[1] if len(args) > 1 else kwargs.get("weights")
        count = max(least, 0 if taken is None or not taken.is_place else taken.high + 1)
        return torch.empty(count, dtype=torch.int64 if weights is None else torch.float64, device="meta")

    def _connectionist_loss(self, args: tuple[Any, ...]) -> Any:
        """Return the losses, and the table of paths that its backward needs, as wide as the longest target.

        Arguments are (log probabilities, targets, input lengths, target lengths, …). Lengths that are not known are
        taken for the longest there can be: of the inputs none makes the table smaller (`log_alpha` in
        aten/src/ATen/native/cuda/LossCTC.cu).
        """
        values, targets, *lengths = args[:4]
        inputs = self._numbers(lengths[0], values.shape[0])
        wanted = self._numbers(lengths[1], targets.shape[1] if targets.dim() == 2 else None)
        return _CTC[0](_without_data(values), _without_data(targets), inputs, wanted, *args[4:])

    def _numbers(self, lengths: Any, most: int | None) -> list[int]:
        if not isinstance(lengths, torch.Tensor):
            return list(lengths)
        known = self._values.of(lengths) if lengths.device.type != "cpu" else lengths
        if known is not None:
            return [int(length) for length in known]
        if most is None:
            raise UnknownValue
        return [most] * lengths.numel()


@dataclass
class AssumedRows:
    """The share of rows assumed to be kept by operators such as `nonzero`, whose count unknown values decide.

    Attributes:
        shares: by place in the program (``FILE:LINE``; empty for every other one) the share, from 0 to 1, or, above
            1, the number of rows.
        end: which end is taken elsewhere.
        used: a line for each place at which something was assumed.
        taken: what was assumed of rows, by place.
        reads: the ways of numbers that the program read and that are not known, by its line.
    """

    shares: tuple[tuple[str, float], ...] = ()
    end: End = "most"
    used: dict[str, None] = field(default_factory=dict)
    taken: dict[tuple[str, Kind], Assumption] = field(default_factory=dict)
    reads: dict[str, Way] = field(default_factory=dict)

    def at(self, line: str, func: Any) -> float | None:
        """Return the share at a line of the program, None where none is given."""
        found = next((share for place, share in self.shares if place and line.endswith(place)), None)
        if found is None:
            found = dict(self.shares).get("")
        if found is not None:
            kept = f"{100 * found:g} %" if found <= 1 else f"{found:,.0f}"
            self.used[f"{line}: {func} is assumed to keep {kept} (--assume-rows)"] = None
        return found

    def number(self, line: str, words: str) -> float | None:
        """Return the number that was given for a line of the program, of what `words` say; None where none was."""
        found = next((number for place, number in self.shares if place and line.endswith(place)), None)
        if found is not None:
            self.used[f"{line}: {found:,.15g} {words} (--assume-rows)"] = None
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Return a line for each thing that was assumed."""
        return (*self.used, *(one.words for one in self.taken.values() if one.kind != "number"))

    @property
    def most_words(self) -> str:
        """Say what was assumed of the most rows, and how to have fewer."""
        most = max(self.taken.values(), key=lambda one: one.rows)
        return f"{most.words} ({most.remedy})"

    def read_before(self, error: BaseException) -> str:
        """Return the words for a read of an unknown number with which the line works that an error comes from."""
        at = error.__traceback__
        while at is not None:
            for line, way in self.reads.items():
                if way.reaches(at.tb_frame.f_code.co_filename, at.tb_lineno):
                    return f"works with a number that only the GPU computes, read {gives_it(line)}"
            at = at.tb_next
        return ""

    def take(self, new: Assumption) -> None:
        """Note what is assumed of rows; of several at one line the most."""
        key = new.place, new.kind
        before = self.taken.get(key)
        if before is None or before.high < new.high:
            self.taken[key] = new
        elif before.high == new.high and before.rows < new.rows:
            self.taken[key] = replace(before, rows=new.rows)


def gives_it(line: str) -> str:
    """Return a line of the program, and how a number that it reads is given."""
    return f"at {line} (--assume-rows {line}=NUMBER gives it)"


def part_of(told: float, of: int, low: int = 0) -> int:
    """Return how many of `of` rows a share of them is, or a number above 1 itself; `low` at the least."""
    return low + math.ceil(told * (of - low)) if told <= 1 else max(low, min(of, round(told)))


def is_unique(func: Any) -> bool:
    """Return whether an operator looks for values that differ."""
    return func in _UNIQUE


def looked_at(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape of what an operator keeps a part of."""
    if func is MASKED_SELECT:
        return tuple(torch.broadcast_shapes(args[0].shape, args[1].shape))
    if func is _UNIQUE_DIM:
        return (int(args[0].shape[args[1]]),)
    return tuple(args[0].shape[:1] if gives_numbers(func) else args[0].shape)


def by_assumption(func: Any, args: tuple[Any, ...], kept: int, where: str) -> Any:
    """Return what an operator would give if it kept so many of what it looks at, and that `where` `Kept` states.

    Raises:
        UnknownValue: it keeps no part of anything.
    """
    make = _numbers_kept if gives_numbers(func) else _KEPT.get(func)
    if make is None:
        raise UnknownValue
    return make(args, kept, where)


def _selected(args: tuple[Any, ...], kept: int, _where: str) -> torch.Tensor:
    return torch.empty(kept, dtype=args[0].dtype, device="cpu")


def _numbers_kept(args: tuple[Any, ...], kept: int, _where: str) -> torch.Tensor:
    return _spread(args[0].shape[:1], kept)


def _repeated(rows: int | None) -> torch.Tensor:
    if rows is None:
        raise UnknownValue
    return torch.empty(rows, dtype=torch.int64, device="cpu")


def _places_kept(args: tuple[Any, ...], kept: int, where: str) -> torch.Tensor:
    shape = args[0].shape
    flat = _spread(shape, kept)
    if where != "evenly":
        flat = torch.arange(kept, device="cpu") + (math.prod(shape) - kept) * (where == "last")
    if not shape:
        return flat.new_empty((kept, 0))
    return torch.stack(torch.unravel_index(flat, shape), dim=1)


def _differing(
    tensor: torch.Tensor, shape: tuple[int, ...], kept: int, found: tuple[int, ...], wanted: tuple[Any, ...]
) -> tuple[torch.Tensor, ...]:
    """Return the values that differ, and, where they are wanted, which one each is and how many are.

    Args:
        shape: of the values; found: of which one each is.
    """
    values = torch.empty(shape, dtype=tensor.dtype, device="cpu")
    inverse, counts = (*wanted, False, False)[:2]
    none = values.new_empty(0, dtype=torch.int64)
    return values, none.new_empty(found) if inverse else none, none.new_empty(kept) if counts else none


def _differing_rows(args: tuple[Any, ...], kept: int, _where: str) -> tuple[torch.Tensor, ...]:
    tensor, dim = args[:2]
    shape = list(tensor.shape)
    shape[dim] = kept
    return _differing(tensor, tuple(shape), kept, (tensor.shape[dim],), args[3:5])


_KEPT: dict[Any, Callable[[tuple[Any, ...], int, str], Any]] = {
    MASKED_SELECT: _selected,
    NONZERO: _places_kept,
    _UNIQUE2: lambda args, kept, _: _differing(args[0], (kept,), kept, args[0].shape, args[2:4]),
    _UNIQUE_CONSECUTIVE: lambda args, kept, _: _differing(args[0], (kept,), kept, args[0].shape, args[1:3]),
    _UNIQUE_DIM: _differing_rows,
    REPEATED: lambda _args, kept, _where: _repeated(kept),
}
"""By operator what it would give if it kept so many of what it looks at, evenly spread or at one end."""


def can_be_assumed(func: Any) -> bool:
    """Return whether `by_assumption` knows what an operator keeps, or one that it is made of."""
    return func in _KEPT or func in INDEXED or gives_numbers(func)


def gives_numbers(func: Any) -> bool:
    """Return whether an operator gives the numbers of those boxes that do not overlap a better one."""
    return bool(func._opname == "nms" and func.namespace == "torchvision")


def _spread(shape: tuple[int, ...], kept: int) -> torch.Tensor:
    """Return the numbers of so many elements, evenly spread."""
    return (torch.arange(kept, device="cpu") * (math.prod(shape) / max(1, kept))).long()


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# Products whose result is of a wider type than their factors (since torch 2.8)


def _wider_product(args: tuple[Any, ...], _profile: object) -> torch.Tensor:
    left, right, dtype = args[-3:]
    return torch.empty((*left.shape[:-1], right.shape[-1]), dtype=dtype, device="meta")


_PRODUCTS = tuple(getattr(_aten, name) for name in ("mm", "bmm", "addmm", "baddbmm") if hasattr(_aten.mm, "dtype"))
WIDER_PRODUCTS = {packet.dtype: _wider_product for packet in _PRODUCTS}
INTO_WIDER = frozenset(packet.dtype_out for packet in _PRODUCTS)
"""Operators whose type torch's shape functions take for a factor, or that write into a given tensor."""


# In words why not


class Untraceable(RuntimeError):
    """The step does something that cannot be followed without values; one line naming the operator and the place."""

    says_where = True


def in_words(func: Any, args: tuple[Any, ...], error: Exception, line: str) -> Exception:
    """Return what the fake tensors could not follow, naming operator and `line`; any other error as it is."""
    has_no_shape = isinstance(error, NotImplementedError | UnsupportedOperatorException)
    if has_no_shape and (is_sparse(func, args) or "Sparse" in str(error)):  # as results are of whose kind a flag tells
        problem = (
            "works on a sparse tensor, of which products with dense ones and the updates of SGD, SparseAdam and "
            "Adagrad are followed: make it dense (of an embedding, sparse=False), or run on a real GPU"
        )
    elif func is REPEATED and isinstance(error, DynamicOutputShapeException):
        how = "repeats rows by numbers that only the GPU computes and nothing bounds"
        return Untraceable(f"{func} {how}, and nothing is computed here, {gives_it(line)}")
    elif isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        problem = (
            "gives a result whose shape depends on what the GPU computes, and nothing is computed here: take it "
            "from data of the CPU, keep the shape fixed (torch.where, a mask as factor), or run on a real GPU"
        )
    elif "NestedInt" in str(error) or func._opname.startswith("_nested_"):
        problem = (
            "works on a jagged tensor, of which only what is done row by row is followed: pad it, or run on a real GPU"
        )
    elif has_no_shape:
        problem = "does not say what shape its result has (it has no meta kernel)"
    else:
        return error
    return Untraceable(f"{func} {problem} ({line})")


# By an example

_MOST_ELEMENTS = 1 << 24
"""Most elements of all arguments together: more would take seconds, and memory that the host may not have."""

_SHAPED_BY_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view)


class NoExample(Exception):
    """The operator cannot be run on the host for its shape."""


def result_by_example(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the operator on the host, on ones; None of one that gives nothing.

    As `FakeTensorMode` does where it may, which knows no device but the host's and CUDA's.

    Raises:
        NoExample: its shape depends on values, the host has no kernel of it, it gives back or changes an argument, or
            there is too much to compute.
    """
    if any(tag in func.tags for tag in _SHAPED_BY_VALUES):
        raise NoExample
    written = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not func._schema.returns:
        return None
    if written or any(given.alias_info is not None for given in func._schema.returns):
        raise NoExample
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    if any(isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided for leaf in leaves):
        raise NoExample
    fakes = [leaf for leaf in leaves if is_without_data(leaf)]
    if sum(math.prod(fake.shape) for fake in fakes) > _MOST_ELEMENTS:
        raise NoExample
    on_host = torch.device("cpu")

    def example(leaf: Any) -> Any:
        if is_without_data(leaf):
            return torch.ones_like(torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=on_host))
        return on_host if isinstance(leaf, torch.device) else leaf

    given_args, given_kwargs = pytree.tree_map(example, (args, dict(kwargs)))
    state = torch.get_rng_state()
    try:
        made = func(*given_args, **given_kwargs)
        if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in pytree.tree_leaves(made)):
            raise NoExample
        return made
    except (RuntimeError, IndexError, ValueError) as error:  # NotImplementedError is a RuntimeError
        raise NoExample from error
    finally:
        torch.set_rng_state(state)
