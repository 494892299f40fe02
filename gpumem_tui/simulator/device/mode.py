"""Runs PyTorch programs on tensors without data and tells the allocator what the device would be asked for."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch._higher_order_ops import utils as higher_order
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch

from gpumem_tui.errors import in_one_line, named
from gpumem_tui.simulator.device import attention, host, kernels, recurrent
from gpumem_tui.simulator.device.answers import COPIES, COPY, MISS, TO_COPY, Answers
from gpumem_tui.simulator.device.asking import decides, is_checked, passes_on
from gpumem_tui.simulator.device.base import DEVICE_TYPE, DeviceParts
from gpumem_tui.simulator.device.convolution import NAMES as CONVOLUTIONS
from gpumem_tui.simulator.device.detectors import Detectors, Kept
from gpumem_tui.simulator.device.kinds import (
    SPARSE_PRODUCT,
    HostConverter,
    SparseTensors,
    as_fakes,
    is_without_data,
    nested_length,
    parameters_among,
    plain,
)
from gpumem_tui.simulator.device.memory import DeviceMemory
from gpumem_tui.simulator.device.scratch import COLLECTIVES, MAKING
from gpumem_tui.simulator.device.shapes import (
    INDEXED,
    INTO_WIDER,
    PACK,
    TAKEN_FROM_VALUES,
    WIDER_PRODUCTS,
    AssumedRows,
    NoExample,
    Shapes,
    Untraceable,
    by_assumption,
    can_be_assumed,
    gives_numbers,
    in_words,
    is_unique,
    result_by_example,
)
from gpumem_tui.simulator.device.values import Uniform, UnknownValue, Values
from gpumem_tui.step.phases import in_backward

_aten: Any = torch.ops.aten
_DEVICE: Any = torch.ops.prim.device.default
_NO_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl
_WithoutDispatch: Any = torch._C._DisableTorchDispatch
_IS_PINNED, _NONZERO, _READ = _aten.is_pinned.default, _aten.nonzero.default, _aten._local_scalar_dense.default
_LIFT_FRESH, _AUTOGRAD = _aten.lift_fresh.default, torch._C.DispatchKey.AutogradFunctionality
_ADD, _ADD_IN_PLACE = _aten.add.Tensor, _aten.add_.Tensor
_FILLS = frozenset(
    {
        _aten.normal_.default, _aten.uniform_.default, _aten.zero_.default, _aten.fill_.Scalar,
        _aten.exponential_.default, _aten.bernoulli_.float,
    }
)  # fmt: skip
"""In-place initializers. They return their first argument; listed, as asking torch's own function imports a lot."""

_SHAPES = {**recurrent.SHAPES, **kernels.GIVEN, **WIDER_PRODUCTS}

_COMPOSED = frozenset(("to", "linear", "matmul"))
"""Operators made of others, which autograd takes apart, but not what a tensor of another kind, as a jagged one, asks of
the parts that it is made of."""

_SPLIT, _SLICE = _aten.split.Tensor, _aten.slice.Tensor
_CUTS = frozenset((_SPLIT, _SLICE))
_WATCHED_ON_HOST = _CUTS | host.MAKERS | {_IS_PINNED}
_LEAST_ROWS, _MOST_ROWS = 4, 1024
"""Operators by which a step cuts its batch into parts, and rows of a part. Smaller parts are seen at the batch sizes
that are traced anyway; a larger one would take a batch of twice as many, out of a program's own data."""

_TRUE = torch.tensor(True, device="cpu")

_fake_dispatch: Any = FakeTensorMode.__torch_dispatch__
_fake_dispatch = getattr(_fake_dispatch, "__wrapped__", _fake_dispatch)
"""Without the wrapper that keeps torch.compile out of it, which costs each operator more than remembered answers do."""


class DeviceMode(FakeTensorMode):
    """Fake tensors on the simulated device, real tensors on the CPU.

    Data loading and step counters keep their values; only what lies on the device is without data. Every storage that
    an operator makes on the device is allocated, and released when the last tensor that holds it is gone, in the order
    in which eager PyTorch does it.

    Args:
        assumed_rows: how many rows operators give whose result's shape depends on what the GPU computes.

    Attributes:
        values: what is known of the values of tensors on the device.
        rows_asked_for: the largest part into which the program cuts what it trains on (see `_rows_asked_for`), 0 for
            none.
        arriving: called with a tensor of the host that is copied to the device; returns what to copy in its place.
    """

    supports_higher_order_operators = True

    def __init__(self, gpu: DeviceParts, memory: DeviceMemory, assumed_rows: AssumedRows) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.fake_tensor_converter = HostConverter(copy_data=False, export=False)
        self._gpu = gpu
        self._memory = memory
        self._assumed_rows = assumed_rows
        self.assumed = memory.assumed
        self.values = Values(memory.live)
        self.rows_asked_for = 0
        self.arriving: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._answers = Answers(self)
        self._shapes = Shapes(self.values)
        self._detectors = Detectors()
        self._sparse = SparseTensors()
        self._index_bytes: list[int] = []
        self._given: Any = None
        """What the operator that is being followed is assumed to give, where that depends on unknown values."""

        self._steers = False
        """Whether the operator that is being followed takes whole numbers or truth values by a mask."""

        self._depth = 0
        self._is_in_body = False
        self._thread = threading.local()
        self._turn = threading.RLock()
        self._in_turn = 0
        os.register_at_fork(after_in_child=_fresh_turn(weakref.ref(self)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer that there is nothing to skip: nothing is compiled here, and torch's wrapper takes its time."""
        return False

    @property
    def avoid_device_init(self) -> bool:
        """There is no device to initialize."""
        return True

    def prepare_thread(self) -> None:
        """Have `torch.tensor(..., device=...)` begin on the host, as `FakeTensorMode` does in its thread."""
        if not getattr(self._thread, "is_prepared", False):
            torch._C._set_only_lift_cpu_tensors(True)
            self._thread.is_prepared = True

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not types and not kwargs and type(func) is OpOverload:  # on tensors of the host, as in data loaders
            if func is _LIFT_FRESH or (
                func is _READ and not isinstance(args[0], torch.Tensor)
            ):  # of a number in a tensor
                return args[0]  # as it does, without the way there: data loaders ask it of every array
            if func not in _WATCHED_ON_HOST:
                return func(*args)
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs)
        parameters = parameters_among((*args, *kwargs.values()) if kwargs else args)
        if any(not issubclass(kind, FakeTensor) and kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types):
            return NotImplemented  # a kind of its own, as DTensor: what it does with the tensors in it comes here again
        if func in _CUTS:
            self.rows_asked_for = max(self.rows_asked_for, _rows_asked_for(func, args))
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":  # asked for by torch itself, where nothing renames it
            kwargs = {**kwargs, "device": torch.device(DEVICE_TYPE, 0)}
        if kwargs.get("pin_memory"):  # host memory alone, and there is no driver to pin it
            kwargs = {**kwargs, "pin_memory": False}
        elif func is _IS_PINNED:  # asked by torch's own C++, of what it has just had pinned
            return True
        if device is not None and device.type == "meta" and not self.is_dispatching:
            return func(*_on_meta(args), **kwargs)
        if not parameters and not _concerns_device(types, kwargs):
            if func is _LIFT_FRESH:
                return args[0]  # as it does, without the way there: data loaders ask it of every array
            is_factory = device is not None or func in host.MAKERS
            if self.is_dispatching and is_factory:  # a part of an operator on tensors without data
                return _fake_dispatch(self, func, types, args, kwargs)
            if func in host.ALL_MAKERS and host.ends_on_device(func, args, kwargs):
                with self._turn:
                    return self._work_out(func, types, self._without_data(args), kwargs)
            return func(*args, **kwargs)
        body = None if self.is_dispatching else kernels.body_of(func)
        if body is not None and (made := self._run_body(func, body, args, kwargs)) is not MISS:
            return made
        with self._turn:
            self._in_turn = threading.get_ident()
            caller = sys._getframe().f_back
            try:
                if not parameters:
                    return self._follow(func, types, args, kwargs, caller)
                with as_fakes(parameters):
                    return self._follow(func, (*types, FakeTensor), args, kwargs, caller)
            except Exception as error:
                is_final = isinstance(error, Untraceable) or self.is_dispatching
                if is_final or not (in_backward() or isinstance(error, NotImplementedError)):
                    raise
                raise self._failed(func, args, error) from error

    def _follow(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: FrameType | None
    ) -> Any:
        """Run an operator that concerns the device; one thread at a time."""
        self.prepare_thread()
        if func is _DEVICE:
            return args[0].fake_device
        if not in_backward():
            self._memory.raise_if_full()
        if func is _READ:
            return self.read(args[0])
        if func in COPIES:
            args = tuple(map(plain, args))
        if func is COPY and not isinstance(args[0], FakeTensor):
            self._wait_for_copy(args, kwargs)
            return self.values.copy_to_host(args[0], args[1])
        if self._depth:
            if func in TAKEN_FROM_VALUES:
                return self._shaped_by_values(func, types, args, kwargs)
            return _fake_dispatch(self, func, types, args, kwargs)
        if func._opname in _COMPOSED or (torch.is_inference_mode_enabled() and _is_composed(func)):
            with self:
                return func.decompose(*args, **kwargs)
        if self._sparse.concern(func, args):
            return self._follow_sparse(func, types, args, kwargs)
        if func is TO_COPY and host.is_to_host(args[0], kwargs):
            self._wait_for_copy(args, kwargs)
            if host.is_copied_offloaded(args[0]):
                return self._work_out(func, types, args, kwargs)
            return self.values.copied_to_host(args[0], kwargs.get("dtype"))
        if func is _ADD and (attention.adds_in_place() or kernels.adds_bias(args, caller)):
            return self._added_in_place(args, kwargs)
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        if in_backward():
            self._gpu.passes.note_operator()
            func = kernels.in_place(func, args, self._memory.made_in, caller)
        if func is TO_COPY and self.arriving is not None and type(args[0]) is torch.Tensor:
            args = (self.arriving(args[0]), *args[1:])
        if func.namespace in COLLECTIVES:
            self._gpu.communicate(args)
        self._memory.operator = f"aten.{func._opname}"
        key = self._answers.key(func, args, kwargs)
        result = self._answers.recall(key, args) if key is not None else MISS
        if result is MISS:
            result = self._work_out(func, types, args, kwargs)
            if key is not None:
                self._answers.learn(key, func, args, result)
        if func._opname in CONVOLUTIONS:
            self._memory.record_convolution(func, args, result)
        elif func._opname not in MAKING:
            self._memory.record(kernels.made_on_device(func, args, result) if func is not PACK else result[:1])
        self.values.follow(func, args, kwargs, result)
        if self._given is not None:
            if func is _NONZERO or gives_numbers(func):
                self.values.learn(result, self._given)
            self._given = None
        if func is COPY and args[0].fake_device.type == "cpu":
            self._wait_for_copy(args, kwargs)
        elif func in COPIES and host.holds_values(args):
            self._memory.note_copy_from_host(args[0] if func is COPY else result)
            self._wait_for_copy(args, kwargs)
        self._memory.use_scratch(func, args, self._index_bytes, result)
        self._index_bytes = []
        return result

    def read(self, tensor: torch.Tensor) -> Any:
        """Return the value of a tensor of one element, once the GPU is done (see `Values.read`).

        Where a truth value is unknown and one way on only raises, as that of an assertion, the program goes the other.
        """
        self._gpu.streams.synchronize()
        taken = self.values.taken_for(tensor)
        as_size = taken is not None and tensor.dtype is not torch.bool and taken.high > taken.value and not decides()
        value = self.values.read(tensor, as_size=as_size)
        if as_size:
            self._assumed_rows.keep_all(self._gpu.sites.calling_line(), value)
        if tensor.dtype is not torch.bool or self.values.of(tensor) is not None:
            return value
        passing = passes_on()
        if passing is None or passing == value:
            return value
        self._note_assumed("a check of values computed on the GPU is taken as passed")
        return passing

    def _added_in_place(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Add the mask to the scores of attention, where a GPU adds it to them."""
        scores = args[0]
        result = self.view_of(
            scores.untyped_storage(), scores.dtype, scores.shape, scores.stride(), scores.storage_offset()
        )
        self.values.follow(_ADD_IN_PLACE, args, kwargs, result)
        return result

    def _follow_sparse(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on sparse tensors, or one that makes one."""
        with self:
            made = self._sparse.made_of_dense(func, args, kwargs)
        if made is not None:
            return made
        self._memory.operator = f"aten.{func._opname}"
        if not self._sparse.is_followed(func, in_backward()):
            raise self._failed(func, args, UnsupportedOperatorException(func))
        if func not in self._sparse.PRODUCTS:
            return self._work_out(func, types, args, kwargs)
        with no_dispatch():
            result = self._shaped_as(self._sparse.product(args))
        self._memory.record(result)
        self.assumed[SPARSE_PRODUCT] += 1
        return result

    def _without_data(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments, with fake tensors for those on the host."""

        def fake(value: Any) -> Any:
            return self.from_tensor(value) if isinstance(value, torch.Tensor) else value

        return tuple([fake(one) for one in value] if isinstance(value, list) else fake(value) for value in args)

    def _run_body(self, func: Any, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run what a program has made an operator of: its own come here one by one, whole; `MISS` where it fails."""
        before, self._is_in_body = self._is_in_body, True
        try:
            with self, torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False), torch.no_grad():
                return body(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the program's own, or what a library of a GPU's raises without one
            self._note_assumed(f"what {func} takes within itself is not traced ({named(error)}: {in_one_line(error)})")
            return MISS
        finally:
            self._is_in_body = before

    def _run_higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that calls others, which come here one by one."""
        table: Any = func.python_key_table
        fakes: Any = getattr(higher_order, "registered_hop_fake_fns", {})  # since torch 2.8
        with self:
            if func in fakes:
                return fakes[func](*args, **kwargs)
            if FakeTensorMode in table:
                return table[FakeTensorMode](self, *args, **kwargs)
        raise Untraceable(f"{func.name()} does not say what shape its result has ({self._gpu.sites.calling_line()})")

    # Results on tensors without data

    def _work_out(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the operator makes of fake tensors: by values, by cuDNN's shapes, by torch, or by an example."""
        self._depth = 1
        self._steers = func in INDEXED and not (args[0].is_floating_point() or args[0].is_complex())
        try:
            if func in _FILLS:
                return args[0]
            if func in INTO_WIDER:
                return kwargs["out"]
            if func in TAKEN_FROM_VALUES:
                return self._shaped_by_values(func, types, args, kwargs)
            if func in _SHAPES:
                with no_dispatch():
                    return self._shaped_as(_SHAPES[func](args, self._gpu.profile))
            try:
                return _fake_dispatch(self, func, types, args, kwargs)
            except DynamicOutputShapeException:
                kept = self._assumed_share(func, args)
                if kept is None:
                    raise
                with no_dispatch():
                    self._given = by_assumption(func, args, kept.share, kept.where)
                    return self._shaped_as(self._given)
            except (NotImplementedError, UnsupportedOperatorException):
                if isinstance(kwargs.get("out"), torch.Tensor):  # of products in 8 bits torch knows the shape but there
                    return kwargs["out"]
                with suppress(NoExample), no_dispatch():
                    return self._shaped_as(result_by_example(func, args, kwargs))
                raise
        except Exception as error:
            raise self._failed(func, args, error) from error
        finally:
            self._depth = 0
            # Left there, its weak references would keep `Module.half()` and the like from swapping parameters.
            self.fake_tensor_converter.meta_converter.tensor_memo.clear()

    def _failed(self, func: Any, args: tuple[Any, ...], error: Exception) -> Exception:
        """Return the error to raise; in backward the program ends here, as it would not reach the program."""
        sites = self._gpu.sites
        line = sites.place()
        if not line:
            forward = sites.forward_line()
            line = f"in the backward of {forward}" if forward else "at an unknown place"
            if in_backward() and not forward:
                line = "in backward"
        failure = in_words(func, args, error, line)
        if in_backward() and not self._is_in_body:
            if failure is error and not sites.calling_line():
                failure = Untraceable(f"{func} cannot be followed: {named(error)}: {in_one_line(error)} ({line})")
            self._gpu.on_backward_error(failure)
        return failure

    def _shaped_by_values(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return a result whose shape depends on values, where these are known; index operators use masks so, too."""
        try:
            known = self._shapes.of_result(func, args, kwargs)
        except UnknownValue:
            kept = self._assumed_share(func, args)
            if kept is None:
                return super().__torch_dispatch__(func, types, args, kwargs)
            with no_dispatch():
                known = self._given = by_assumption(func, args, kept.share, kept.where)
                if kept.library and func is _NONZERO and args[0].dtype == torch.bool:
                    mask = torch.zeros(args[0].shape, dtype=torch.bool, device="cpu")
                    self.values.learn(args[0], mask.index_put_(known.unbind(1), _TRUE))
        if func is _NONZERO and self._memory.operator != "aten.nonzero":
            self._index_bytes.append(known.nbytes)
        return (self._shaped_as(known[0]), known[1]) if func is PACK else self._shaped_as(known)

    def _assumed_share(self, func: Any, args: tuple[Any, ...]) -> Kept | None:
        """Return what an operator is assumed to keep at this line of the program; None where nothing tells.

        A mask on whole numbers and truth values, as on the edges of a graph, keeps all of them: the most that a GPU
        may. Where a function checks values, those are valid, and all the same one.
        """
        if not can_be_assumed(func):
            return None
        told = self._assumed_rows.at(self._gpu.sites.calling_line(), func)
        if told is not None:
            return Kept(told)
        taken = self.values.taken_for(args[0]) if func is _NONZERO else None
        if func is _NONZERO and (self._steers or (taken is not None and torch.is_inference_mode_enabled())):
            return self._kept_by_mask(args[0], taken)
        if is_unique(func) and not args[0].is_floating_point() and is_checked():
            self._note_assumed("values that are checked are taken as valid, and as one")
            return Kept(0.5 / max(1.0, float(args[0].numel())))  # one, as rows are rounded up
        kept = self._detectors.kept(args[0].shape) if func is not _NONZERO or not args[0].is_floating_point() else None
        if kept is not None:
            words = f"as many boxes and anchors are taken as {kept.library} can keep, which only its predictions tell"
            self._assumed_rows.used[f"{words}; --assume-rows takes fewer"] = None
        return kept

    def _kept_by_mask(self, mask: torch.Tensor, taken: Uniform | None) -> Kept:
        if taken is None or taken.high:
            self._assumed_rows.keep_all(self._gpu.sites.calling_line(), mask.shape[0] if mask.dim() else 1)
            return Kept(1.0)
        self._note_assumed("no value of a network is taken for zero in inference mode")
        return Kept(0.0)

    def _note_assumed(self, words: str) -> None:
        """Say once of a line of the program what was assumed there."""
        self._assumed_rows.used[f"{self._gpu.sites.calling_line()}: {words}"] = None

    def _shaped_as(self, known: Any) -> Any:
        """Make tensors without data of the shapes of `known`; parts of one storage if those are, without data."""
        if isinstance(known, torch.Tensor) and not isinstance(known, FakeTensor):
            elem = known
            if not known.is_meta:
                elem = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device="meta")
            return self._answers.on_device(elem)
        return type(known)(self._shaped_as(one) for one in known) if isinstance(known, (tuple, list)) else known

    def view_of(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
    ) -> torch.Tensor:
        """Make a tensor on the device in a storage of it; stride and offset are in elements."""
        with torch._C.DisableTorchFunction(), _WithoutDispatch():
            elem = torch.empty(0, dtype=dtype, device="meta")
            elem.set_(storage, offset, shape, stride)
            return self._answers.on_device(elem)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Have operators within the context work on fake tensors without anything being allocated for them."""
        self._depth += 1
        self._in_turn = threading.get_ident()
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def is_dispatching(self) -> bool:
        """Return whether torch is at work on fake tensors, and not the program, in this thread."""
        return self._depth > 0 and self._in_turn == threading.get_ident()

    def create_symbolic_nested_int(self, **_: object) -> torch.SymInt:
        """Make the length that differs between the rows of a jagged tensor, as tensors with data have it."""
        self.cache_enabled = False  # its keys take lengths of this kind for expressions
        return nested_length()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMode:
        """Return the mode itself: the copy of a tensor lies on the same device."""
        return self

    def _wait_for_copy(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Wait for the end of a copy between host and device, unless asked not to (`copy_kernel_cuda` in Copy.cu)."""
        if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):  # copy_(self, src, non_blocking)
            self._gpu.streams.synchronize()


def _on_meta(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments, with a tensor of the meta device for each that has no data."""

    def placed(value: Any) -> Any:
        if not is_without_data(value):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return tuple(map(placed, args))


def _concerns_device(types: Any, kwargs: Mapping[str, Any]) -> bool:
    if any(issubclass(kind, FakeTensor) for kind in types):
        return True
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == DEVICE_TYPE


@lru_cache(None)
def _is_composed(func: Any) -> bool:
    """Return whether an operator is made of others alone; in inference mode torch does not take it apart itself."""
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


def _rows_asked_for(func: Any, args: tuple[Any, ...]) -> int:
    """Return how many of a tensor's rows one of `_CUTS` asks for where there are fewer; 0 where there are as many.

    A step that cuts its batch (``for part in batch.split(64)``) makes the same allocations for every batch that is no
    larger than one part, so that traces at small sizes say nothing of larger ones.
    """
    tensor = args[0]
    if not tensor.dim() or (len(args) > (2 if func is _SPLIT else 1) and args[2 if func is _SPLIT else 1]):
        return 0
    if func is _SPLIT:
        wanted = args[1]
    else:
        start, end = (args[2] if len(args) > 2 else None) or 0, args[3] if len(args) > 3 else None
        wanted = 0 if start < 0 or end is None else end - start
    return wanted if type(wanted) is int and max(_LEAST_ROWS, tensor.shape[0] + 1) <= wanted <= _MOST_ROWS else 0


def _fresh_turn(mode: weakref.ref[DeviceMode]) -> Callable[[], None]:
    """Return what renews the lock of a forked child, in which the thread whose turn it was does not exist."""

    def renew() -> None:
        found = mode()
        if found is not None:
            found._turn = threading.RLock()

    return renew
