"""A step on the CPU, from the operators that run: their results are its allocations. Needs no allocator's help."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from gpumem_tui.memory import Bucket
from gpumem_tui.probe.documents import KeptPlace, LookedDevice
from gpumem_tui.probe.history import StepHistory, listed_as_kept
from gpumem_tui.probe.wire import CPU
from gpumem_tui.step import Phase, Site
from gpumem_tui.step.phases import in_backward
from gpumem_tui.step.sites import SiteFinder
from gpumem_tui.step.walking import host_memory_of, tensors_in

_MOST_EVENTS = 1_000_000


class _StorageRef(weakref.ref):  # type: ignore[type-arg]  # generic to the type checker only, before Python 3.9.1
    """A weak reference to a storage that knows the allocation's number and, when it is gone, the storage's key."""

    __slots__ = ("key", "number")
    key: int
    number: int


class OperatorRecorder(TorchDispatchMode):
    """Follows every tensor that an operator makes in this thread, until its storage goes.

    Attributes:
        method: what a document calls this way of recording.
        active: whether it records; it can be switched off at any moment.
        unavailable: what it cannot tell, with the reason.
    """

    method = "operators"

    def __init__(self, sites: SiteFinder, phases_known: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        counted = "those of model and optimizer, and those made while it looks; what else was there before is not seen"
        self.unavailable = {"allocator": f"host memory has no caching allocator; counted are tensors: {counted}"}
        self._sites = sites
        self._history = StepHistory(phases_known)
        self._live: dict[int, _StorageRef] = {}
        self._started = 0.0
        self.active = self._entered = False
        self._failed: Exception | None = None

    def start(self) -> str:
        """Begin; or the reason why that would get into the program's way."""
        if torch._C._len_torch_dispatch_stack():
            return "the program has a dispatch mode of its own active"
        self._started = time.perf_counter()
        self.active = self._entered = True
        self.__enter__()  # type: ignore[no-untyped-call]
        return ""

    def stop(self) -> bool:
        """Record no more, and leave; whether that could be done.

        Modes are a stack: below a mode that the program entered since, or from another thread, this one must wait; and
        inside of backward too, after which autograd restores the stack that was there before.
        """
        self.active = False
        if self._entered and not in_backward() and _get_current_dispatch_mode() is self:
            self._entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return not self._entered

    @property
    def events(self) -> int:
        """Allocations and releases so far."""
        return self._history.events

    def enter(self, phase: Phase) -> None:
        """A phase begins."""
        self._history.enter(phase, self._now())

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> None:
        """State what these tensors are. One not seen before was there before the step."""
        for tensor in tensors:
            for storage in host_memory_of(tensor):
                self._know(storage)
                self._history.tag(self._live[storage._cdata].number, bucket)

    def own(self, owned: Iterable[tuple[str, torch.Tensor]]) -> None:
        """State of which modules these tensors are. One not seen before was there before the step."""
        for module, tensor in owned:
            for storage in host_memory_of(tensor):
                self._know(storage)
                self._history.own(self._live[storage._cdata].number, module)

    def end_step(self) -> None:
        """The step ends; the next may be recorded too."""
        self._history.end_step()

    def result(self) -> list[LookedDevice]:
        """What was recorded of the step that has just ended.

        Raises:
            Exception: what went wrong while recording; the program did not notice.
        """
        if self._failed is not None:
            raise self._failed
        return [self._history.result(CPU, "")]

    def kept(self) -> list[KeptPlace]:
        """What each of the steps left behind; asked at the end of the last.

        Raises:
            Exception: as `result`.
        """
        if self._failed is not None:
            raise self._failed
        return listed_as_kept(CPU, self._history.kept())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.active:
            self._try(lambda: self._see_arguments((args, kwargs)))
        result = func(*args, **kwargs)
        if self.active:
            self._try(lambda: self._see_results(func, result))
        return result

    def _try(self, record: Callable[[], None]) -> None:
        try:
            record()
        except Exception as error:  # noqa: BLE001  the program's operator must not fail for it; `result` raises it
            self._failed, self.active = error, False

    def _see_arguments(self, arguments: Any) -> None:
        for tensor in tensors_in(arguments):
            for storage in host_memory_of(tensor):
                self._know(storage)

    def _see_results(self, func: Any, result: Any) -> None:
        site: Site | None = None
        for tensor in tensors_in(result):
            for storage in host_memory_of(tensor):
                if storage.nbytes() and storage._cdata not in self._live:
                    site = site or self._sites.site(f"aten.{func._opname}")
                    self._follow(storage, self._allocated(storage.nbytes(), site))

    def _allocated(self, size_bytes: int, site: Site) -> int:
        if self._history.events >= _MOST_EVENTS:
            raise RuntimeError(f"the step has more than {_MOST_EVENTS:,} allocations and releases")
        return self._history.allocate(size_bytes, self._now(), site, in_backward() and torch.is_grad_enabled())

    def _know(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._live:
            self._follow(storage, self._history.existing(storage.nbytes()))

    def _follow(self, storage: torch.UntypedStorage, number: int) -> None:
        reference = _StorageRef(storage, self._released)
        reference.key, reference.number = storage._cdata, number
        self._live[storage._cdata] = reference

    def _released(self, reference: _StorageRef) -> None:
        if self._live.get(reference.key) is reference:
            del self._live[reference.key]
            if self.active:
                self._history.release(reference.number, self._now())

    def _now(self) -> float:
        return time.perf_counter() - self._started
