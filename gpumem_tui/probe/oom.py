"""The black box: what there was when memory ran out."""

from __future__ import annotations

import atexit
import builtins
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch

from gpumem_tui import host_memory
from gpumem_tui.probe import allocator
from gpumem_tui.probe.compiler import uncompiled
from gpumem_tui.probe.finding import Holdings
from gpumem_tui.probe.wire import CPU, KeptPlace, PostMortem, Record
from gpumem_tui.step.sites import callers, is_own

_OutOfMemory: type[BaseException] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: .*memory: you tried to allocate (\d+) bytes")
"""So torch states it, in a plain `RuntimeError` (c10/core/impl/alloc_cpu.cpp)."""
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_CAUGHT_EVERY_S = 1.0
_SAME_ERROR_S = 60.0
_MESSAGE_LENGTH = 2000
_LONGEST_CHAIN = 100
_MOST_KEPT = 10
_GROUPS: tuple[type[BaseException], ...] = tuple(
    group for group in [getattr(builtins, "BaseExceptionGroup", None)] if group is not None
)


@dataclass(frozen=True)
class LastState:
    """The figures that the probe has at the moment. `samples` are the last records, oldest first.

    `kept`: what each step leaves behind, as far as steps were recorded.
    """

    step: int
    holdings: dict[int, Holdings]
    samples: list[Record]
    kept: tuple[KeptPlace, ...] = ()


class BlackBox:
    """Records every time memory runs out, and the error that ends the process; the last one is kept.

    CUDA's allocator tells when it gives up, before the error is raised and while everything is still held. An error
    that ends the process without that (host memory, another allocator, a version of torch that does not tell) is seen
    by `sys.excepthook`; where the program or a library has put its own there, by what the interpreter remembers of it
    at the exit. An error counts as out-of-memory too if it was raised from such a one, while one was handled, or as a
    group that holds one.

    Args:
        look: gives the state; called inside a failing allocation, in any thread.
        publish: writes the document of an out-of-memory.
        publish_error: writes down the error that ends the process: its class, its text, and the line that raised it.
        guarded: calls what it is given, or leaves that be; nothing that is raised there gets past it. An exception
            would take the place of the program's own.
    """

    def __init__(
        self,
        look: Callable[[], LastState],
        publish: Callable[[PostMortem], None],
        publish_error: Callable[[str, str, str], None],
        guarded: Callable[[Callable[[], None]], object],
    ) -> None:
        self._look = look
        self._publish = publish
        self._publish_error = publish_error
        self._guarded = guarded
        self._last: PostMortem | None = None
        self._last_at = -_SAME_ERROR_S
        self._watches_allocator = False
        self._uncaught = 0

    def arm(self) -> None:
        """Watch the allocator and the exit; of `sys.exit` with a text, nothing is left to be seen later."""
        self.watch_allocator()
        before = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.process_failed(error, trace)
            before(kind, error, trace)

        sys.excepthook = excepthook
        leave = sys.exit

        def sys_exit(status: Any = None, /) -> NoReturn:
            if isinstance(status, str) and threading.current_thread() is threading.main_thread():
                line = _calling_line(sys._getframe(1))
                self._guarded(lambda: self._publish_error(SystemExit.__name__, status[:_MESSAGE_LENGTH], line))
            leave(status)

        sys.exit = sys_exit
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """Report the error that the interpreter keeps, as `sys.excepthook` may have been replaced."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and id(error) != self._uncaught and not _is_interactive():
            self.process_failed(error, error.__traceback__)

    def watch_allocator(self) -> None:
        """Watch the allocator from when CUDA is initialized, now or later; this does not initialize it.

        Nothing is done where it is being initialized just now, as an attach by pid may find it: the lock that CUDA's
        start holds may be held by this very thread. That can be tried again. A second call does nothing.
        """
        attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        call_later: Any = getattr(torch.cuda, "_lazy_call", None)
        starting: Any = getattr(torch.cuda, "_initialization_lock", None)
        if self._watches_allocator or None in (attach, call_later, starting) or not starting.acquire(blocking=False):
            return
        starting.release()
        self._watches_allocator = True

        def observe() -> None:
            with suppress(RuntimeError):  # cudaMallocAsync, and allocators of the program's own, tell nobody
                attach(uncompiled(self.allocation_failed))

        call_later(observe)  # raises into the program's first use of CUDA what `observe` raises

    def allocation_failed(self, device: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
        """Write down a request that the allocator gives up on; the program may yet catch the error.

        Args:
            total_bytes: of the device, or where the process has set itself a limit, this limit: so the allocator
                reports it (`malloc` in c10/cuda/CUDACachingAllocator.cpp).
        """
        if time.monotonic() - self._last_at < _CAUGHT_EVERY_S:
            return
        frame = sys._getframe(1)
        self._guarded(
            lambda: self._write(
                _document(
                    self._look(),
                    device=device,
                    requested_bytes=requested_bytes,
                    device_total_bytes=total_bytes,
                    device_free_bytes=free_bytes,
                    source=_calling_line(frame),
                )
            )
        )

    def process_failed(self, error: BaseException, trace: TracebackType | None) -> None:
        """Write down the error that ends the process."""
        self._uncaught = id(error)
        self._guarded(
            lambda: self._publish_error(type(error).__name__, str(error)[:_MESSAGE_LENGTH], _failing_line(trace))
        )
        cause = next((one for one in _chain(error) if _is_out_of_memory(one)), None)
        if cause is not None:
            where = trace if cause is error else cause.__traceback__
            self._guarded(lambda: self._write(self._last_document(cause, where)))

    def _last_document(self, error: BaseException, trace: TracebackType | None) -> PostMortem:
        text = str(error)
        document = self._last
        if not isinstance(error, _OutOfMemory):
            document = _host_document(self._look(), text)
        elif document is None or document.device == CPU or time.monotonic() - self._last_at > _SAME_ERROR_S:
            state = self._look()
            device = re.search(r"GPU (\d+)", text)
            document = _document(
                state,
                int(device[1]) if device else None,
                requested_bytes=_size(rf"Tried to allocate {_SIZE}", text),
                requested_is_rounded=True,
                device_total_bytes=_size(rf"total capacity of {_SIZE}", text),
                device_limit_bytes=_size(rf"{_SIZE} allowed;", text),
                device_free_bytes=_size(rf"of which {_SIZE} is free", text),
            )
        source = _failing_line(trace) or document.source
        return replace(document, source=source, message=text[:_MESSAGE_LENGTH], fatal=True)

    def _write(self, document: PostMortem) -> None:
        self._last, self._last_at = document, time.monotonic()
        self._publish(document)


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether it states itself that a device's memory ran out, or the host's."""
    if isinstance(error, RuntimeError) and _HOST_MEMORY.search(str(error)):
        return True
    return isinstance(error, (_OutOfMemory, MemoryError))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from or while handling, and what a group of them holds; each once."""
    waiting, seen = [error], {id(error)}
    for _ in range(_LONGEST_CHAIN):
        if not waiting:
            return
        one = waiting.pop(0)
        yield one
        held = one.exceptions if isinstance(one, _GROUPS) else ()  # type: ignore[attr-defined]  # Python 3.11
        for other in (one.__cause__, one.__context__, *held):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                waiting.append(other)


def _is_interactive() -> bool:
    """Return whether the interpreter remembers the last error of a session that went on: a prompt's, a notebook's."""
    ipython = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)


def _document(state: LastState, device: int | None, **more: Any) -> PostMortem:
    """Make the document of this moment, with the allocator's figures where there is one.

    Args:
        more: further facts, by the names of `PostMortem`.
    """
    held = state.holdings.get(CPU if device is None else device, Holdings())
    document = PostMortem(
        step=state.step,
        wall_ns=time.time_ns(),
        device=device,
        buckets={
            "parameters": held.parameters_bytes,
            "gradients": held.gradients_bytes,
            "optimizer": held.optimizer_bytes,
        },
        samples=tuple(record.as_json() for record in state.samples),
        kept=tuple(one for one in state.kept if one.device == device)[:_MOST_KEPT],
        **more,
    )
    if device is None or device < 0 or not allocator.is_running():
        return document
    figures = {name: None if value < 0 else value for name, value in allocator.figures(device).items()}
    kind, total_bytes = torch.cuda.get_device_properties(device), document.device_total_bytes
    limit_bytes = document.device_limit_bytes or allocator.limit_bytes(device)
    if total_bytes is not None and not document.requested_is_rounded and total_bytes < kind.total_memory:
        limit_bytes = total_bytes
    return replace(
        document,
        device_uuid=allocator.device_uuid(device),
        device_name=kind.name,
        compute_capability=(kind.major, kind.minor),
        device_total_bytes=kind.total_memory if total_bytes is None or limit_bytes is not None else total_bytes,
        device_limit_bytes=limit_bytes,
        requested_live_bytes=figures.pop("requested_bytes"),
        **figures,  # type: ignore[arg-type]  # each is a figure or None
    )


def _host_document(state: LastState, text: str) -> PostMortem:
    """Make the document of an error that reports exhausted host memory.

    How much of that is free depends on whom one asks, so it has what the process holds and what binds it instead.
    """
    requested, limit = _HOST_MEMORY.search(text), host_memory.limit()
    return _document(
        state,
        CPU,
        requested_bytes=int(requested[1]) if requested else None,
        resident_bytes=host_memory.resident_bytes(),
        limit_bytes=None if limit is None else limit.bytes,
        limit_owner="" if limit is None else limit.owner,
    )


def _size(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


def _failing_line(trace: TracebackType | None) -> str:
    """Return ``file:line`` of the innermost frame of the program in a traceback."""
    found = ""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if is_own(path):
            found = f"{os.path.basename(path)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _calling_line(frame: FrameType | None) -> str:
    """Return ``file:line`` of the innermost frame of the program that is running; empty in autograd's threads."""
    own = (at for at in callers(frame) if is_own(at.f_code.co_filename))
    return next((f"{os.path.basename(at.f_code.co_filename)}:{at.f_lineno}" for at in own), "")
