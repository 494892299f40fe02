"""Results of operators on tensors without data: from an earlier call, by values, as CUDA has it, or by torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch

from gpumem_tui.errors import in_one_line, named
from gpumem_tui.simulator.allocator.assumptions import Assumption, Kind
from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.allocator.rules import Taken
from gpumem_tui.simulator.device import kernels, recurrent
from gpumem_tui.simulator.device.answers import MISS, Answers
from gpumem_tui.simulator.device.asking import is_checked
from gpumem_tui.simulator.device.base import Call, DeviceParts, Handler, StorageView
from gpumem_tui.simulator.device.detectors import Detectors
from gpumem_tui.simulator.device.kinds import is_without_data, show
from gpumem_tui.simulator.device.memory import DeviceMemory
from gpumem_tui.simulator.device.shapes import (
    INTO_WIDER,
    MASKED_SELECT,
    NONZERO,
    PACK,
    REPEATED,
    TAKEN_FROM_VALUES,
    WIDER_PRODUCTS,
    AssumedRows,
    NoExample,
    Shapes,
    Untraceable,
    by_assumption,
    can_be_assumed,
    in_words,
    is_unique,
    looked_at,
    part_of,
    result_by_example,
)
from gpumem_tui.simulator.device.taken import FEW
from gpumem_tui.simulator.device.values import UnknownValue, Values
from gpumem_tui.simulator.device.ways import Way
from gpumem_tui.step.phases import in_backward

_aten: Any = torch.ops.aten
_WithoutDispatch: Any = torch._C._DisableTorchDispatch
_FILLS = (
    _aten.normal_.default, _aten.uniform_.default, _aten.zero_.default, _aten.fill_.Scalar,
    _aten.exponential_.default, _aten.bernoulli_.float,
)  # fmt: skip
"""In-place initializers. They return their first argument; listed, as asking torch's own function imports a lot."""

_SHAPES: Mapping[Any, Callable[[tuple[Any, ...], Profile], Any]] = {
    **recurrent.SHAPES,
    **kernels.GIVEN,
    **WIDER_PRODUCTS,
}

_TRUE = torch.tensor(True, device="cpu")

_fake_dispatch: Any = FakeTensorMode.__torch_dispatch__
_fake_dispatch = getattr(_fake_dispatch, "__wrapped__", _fake_dispatch)
"""Without the wrapper that keeps torch.compile out of it, which costs each operator more than remembered answers do."""


class Results:
    """Makes the results of operators on tensors without data; allocates nothing.

    Attributes:
        handlers: by operator how its result is worked out where torch does not, or does otherwise than CUDA.
        depth: above 0 while operators are parts of one that is worked out, or nothing is to be recorded.
        is_in_body: whether what runs is the body of an operator of the program's.
        assumed: what the operator that was worked out last is assumed to give, where unknown values decide that.
        index_bytes: sizes of the indices that it has made of masks.
    """

    def __init__(
        self, mode: FakeTensorMode, gpu: DeviceParts, memory: DeviceMemory, values: Values, assumed_rows: AssumedRows
    ) -> None:
        self._mode, self._gpu, self._memory, self._values = mode, gpu, memory, values
        self._assumed_rows = assumed_rows
        self._answers = Answers(mode)
        self._shapes = Shapes(values)
        self._detectors = Detectors()
        self.depth = 0
        self.is_in_body = False
        self.assumed: Any = None
        self.index_bytes: list[Taken] = []
        self.handlers: dict[Any, Handler] = {
            **dict.fromkeys(_FILLS, lambda call: call.args[0]),
            **dict.fromkeys(INTO_WIDER, lambda call: call.kwargs["out"]),
            **{func: partial(self._as_cuda, shape) for func, shape in _SHAPES.items()},
            **dict.fromkeys(TAKEN_FROM_VALUES, self.by_values),
        }

    def of(self, call: Call) -> Any:
        """Return what an operator gives: what it gave before where that is unchanged, else `worked_out`."""
        self.assumed, self.index_bytes = None, []
        key = self._answers.key(call.func, call.args, call.kwargs)
        if key is None:
            return self.worked_out(call)
        result = self._answers.recall(key, call.args)
        if result is MISS:
            result = self.worked_out(call)
            self._answers.learn(key, call.func, call.args, result)
        return result

    def worked_out(self, call: Call) -> Any:
        """Return what an operator gives, by its handler if it has one.

        Raises:
            Untraceable: it cannot be followed.
        """
        self.depth = 1
        try:
            return self.handlers.get(call.func, self._by_torch)(call)
        except Exception as error:
            raise self.failed(call, error) from error
        finally:
            self.depth = 0
            # Left there, its weak references would keep `Module.half()` and the like from swapping parameters.
            self._mode.fake_tensor_converter.meta_converter.tensor_memo.clear()

    def as_torch_does(self, call: Call) -> Any:
        """Return what torch's own shape function gives."""
        return _fake_dispatch(self._mode, call.func, call.types, call.args, call.kwargs)

    def by_values(self, call: Call) -> Any:
        """Return a result whose shape depends on values, if known; index operators use masks so, too."""
        func, args = call.func, call.args
        try:
            known = self._shapes.of_result(func, args, call.kwargs)
        except UnknownValue:
            try:
                with no_dispatch():
                    known = self.assumed = self._assumed(func, args)
            except UnknownValue:
                return self.as_torch_does(call)
        if func is NONZERO and self._memory.operator != "aten.nonzero":
            self.index_bytes.append(known.nbytes)
        return (self.shaped_as(known[0]), known[1]) if func is PACK else self.shaped_as(known)

    def _by_torch(self, call: Call) -> Any:
        """Return what torch's shape function gives; where it cannot, by an assumption or by an example."""
        func, args, kwargs = call.func, call.args, call.kwargs
        try:
            return self.as_torch_does(call)
        except DynamicOutputShapeException:
            with suppress(UnknownValue), no_dispatch():
                self.assumed = self._assumed(func, args)
                return self.shaped_as(self.assumed)
            raise
        except (NotImplementedError, UnsupportedOperatorException):
            if isinstance(kwargs.get("out"), torch.Tensor):  # of products in 8 bits torch knows the shape but there
                return kwargs["out"]
            with suppress(NoExample), no_dispatch():
                return self.shaped_as(result_by_example(func, args, kwargs))
            raise

    def _as_cuda(self, shape: Callable[[tuple[Any, ...], Profile], Any], call: Call) -> Any:
        with no_dispatch():
            return self.shaped_as(shape(call.args, self._gpu.profile))

    def _assumed(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return what an operator is assumed to give at this line of the program, as a GPU's values are not known.

        A share that was asked for; what a detector can keep; one value where a function checks whether all are valid;
        else the most, or the fewest, that there can be.

        Raises:
            UnknownValue: nothing can be assumed of it.
        """
        if not can_be_assumed(func):
            raise UnknownValue
        if func is REPEATED:
            return by_assumption(func, args, self._repeated(args[0]), "evenly")
        shape = looked_at(func, args)
        of = math.prod(shape)
        told = self.told(func)
        if told is not None:
            return by_assumption(func, args, part_of(told, of), "evenly")
        if is_unique(func):
            return by_assumption(func, args, self._differing(args[0], of), "evenly")
        is_mask = func is not NONZERO or not args[0].is_floating_point()
        boxes = self._detectors.kept(shape) if is_mask else None
        if boxes is not None:
            words = f"as many boxes and anchors are taken as {boxes.library} can keep, which only its predictions tell"
            self._assumed_rows.used[f"{words}; --assume-rows takes fewer"] = None
            most = math.ceil(of * boxes.share)
            found = by_assumption(func, args, self.assume("boxes", min(FEW, most), most), boxes.where)
            if func is NONZERO and args[0].dtype == torch.bool:
                mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
                self._values.learn(args[0], mask.index_put_(found.unbind(1), _TRUE))
            return found
        return by_assumption(func, args, self._kept(func, args, of), "evenly")

    def told(self, func: Any) -> float | None:
        """Return the share that an operator keeps at this line, as typed, of the program; None where nothing was."""
        return self._assumed_rows.at(self._gpu.sites.calling_line(), func)

    def number(self, words: str, line: str = "") -> float | None:
        """Return the number given for this line of the program, or another, of what `words` say; None for none."""
        if not self._assumed_rows.shares:
            return None
        return self._assumed_rows.number(line or self._gpu.sites.calling_line(), words)

    @property
    def reads_otherwise(self) -> bool:
        """Return whether numbers that nothing bounds read as others than usual."""
        return self._assumed_rows.end == "otherwise"

    def note_read(self, way: Way) -> None:
        """Note that the program reads a number here that is not known, and its way."""
        if way.lines:
            self._assumed_rows.reads.setdefault(self._gpu.sites.calling_line(), way)

    def note_unbounded(self) -> None:
        """Note that something may be sized by a number that is read here, and that nothing bounds."""
        self._assumed_rows.take(Assumption(self._gpu.sites.calling_line(), "number", 0, 0, 0))

    def _kept(self, func: Any, args: tuple[Any, ...], of: int) -> int:
        """Return how many of the elements that an operator looks at it keeps."""
        if func not in (NONZERO, MASKED_SELECT):
            return self.assume("boxes", min(FEW, of), of)
        mask: torch.Tensor = args[func is MASKED_SELECT]
        return self.keep(mask) * (of // max(1, mask.numel()))

    def keep(self, mask: torch.Tensor) -> int:
        """Return how many elements of a mask are taken for kept, and note that."""
        rows = self._values.rows(mask)
        if not rows.high:
            self.note_assumed("no value of a network is taken for zero in inference mode")
        return self.assume(rows.kind, rows.low, rows.high, rows.kept)

    def _differing(self, tensor: torch.Tensor, of: int) -> int:
        """Return how many values of a tensor differ: all, or as many as there are places that they can be."""
        if not tensor.is_floating_point() and is_checked():
            self.note_assumed("values that are checked are taken as valid, and as one")
            return min(1, of)
        taken = self._values.taken_for(tensor)
        most = min(of, taken.high - taken.low + 1) if taken is not None and taken.is_open else of
        return self.assume("differing", min(1, most), most)

    def _repeated(self, repeats: torch.Tensor) -> int:
        """Return how many rows there are in all where each is repeated as often as a tensor has it.

        Raises:
            UnknownValue: nothing bounds its numbers, and none was given for this line.
        """
        given = self.number("rows in all")
        taken = self._values.taken_for(repeats)
        if given is not None and given > 1:
            return round(given)
        if taken is None:
            raise UnknownValue
        high = max(0, taken.high) * repeats.numel()
        low = max(taken.low * repeats.numel(), min(FEW, high))
        return self.assume("count", low, high) if given is None else part_of(given, high, low)

    def rows_of(self, indices: torch.Tensor, most: int) -> int:
        """Return how many different places of `most` there are among indices in columns: known, or assumed."""
        with no_dispatch():
            known = self._values.of(indices)
            if known is not None:
                return int(torch.unique(known, dim=1).shape[1])
        return self.assume("differing", 1, min(indices.shape[1], most))

    def assume(self, kind: Kind, low: int, high: int, rows: int | None = None, line: str = "") -> int:
        """Note how many rows are taken at a line of the program, between what ends, and return them.

        Args:
            rows: None for as many as there are at the end that is taken.
            line: ``file:line``; empty for the one that is running.
        """
        if rows is None:
            rows = low if self._assumed_rows.end == "fewest" else high
        if low < high:
            line = line or self._gpu.sites.calling_line() or self._gpu.sites.forward_line()
            self._assumed_rows.take(Assumption(line, kind, rows, low, high))
        return rows

    def note_assumed(self, words: str) -> None:
        """Say once of a line of the program what was assumed there."""
        self._assumed_rows.used[f"{self._gpu.sites.calling_line()}: {words}"] = None

    def failed(self, call: Call, error: Exception) -> Exception:
        """Return the error to raise; in backward the program ends here, as it would not reach the program."""
        sites = self._gpu.sites
        line = sites.place()
        if not line:
            forward = sites.forward_line()
            line = f"in the backward of {forward}" if forward else "at an unknown place"
            if in_backward() and not forward:
                line = "in backward"
        failure = in_words(call.func, call.args, error, line)
        if in_backward() and not self.is_in_body:
            if failure is error and not sites.calling_line():
                failure = Untraceable(f"{call.func} cannot be followed: {named(error)}: {in_one_line(error)} ({line})")
            self._gpu.on_backward_error(failure)
        return failure

    # Tensors without data

    def shaped_as(self, known: Any) -> Any:
        """Make tensors without data of the shapes of `known`; parts of one storage if those are, without data."""
        if isinstance(known, torch.Tensor) and not is_without_data(known):
            elem = known
            if not known.is_meta:
                elem = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device="meta")
            return self._answers.on_device(elem)
        return type(known)(self.shaped_as(one) for one in known) if isinstance(known, (tuple, list)) else known

    def view_of(
        self, storage: torch.UntypedStorage, view: StorageView, device: torch.device | None = None
    ) -> torch.Tensor:
        """Make a tensor without data that is so laid out in a storage, for the program: on the device, or on the host.

        Args:
            device: the host; None for the device.
        """
        with torch._C.DisableTorchFunction(), _WithoutDispatch():
            elem = torch.empty(0, dtype=view.dtype, device="meta")
            elem.set_(storage, view.offset, view.shape, view.stride)
            if device is not None and device.type == "cpu":
                return show(FakeTensor(self._mode, elem, device))  # type: ignore[no-any-return]
            return show(self._answers.on_device(elem))  # type: ignore[no-any-return]
