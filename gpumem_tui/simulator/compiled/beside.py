"""Compiles the backward of a graph next to its forward, in a process forked from this one.

AOTAutograd has both graphs before either is compiled, and compiles the forward first. The fork takes it for compiled,
so that it comes to the backward at once, and sends what Inductor makes of it: a wrapper's source and a few figures, as
no kernel is compiled. Where that is not for sure what this process would come to, it compiles the backward as ever.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from gpumem_tui.simulator.compiled.wrapper import Wrapper

_LARGE = 100
"""Nodes of a graph from which on compiling it takes longer than a fork of a process that has torch imported."""

_PATIENCE_S, _TIMES_FORWARD = 10, 4
"""How long a fork may take, by what the forward took: an ordinary backward takes 1.3 times that."""


class Fork:
    """A process forked from this one, which sends bytes and ends.

    Attributes:
        is_here: this is that process.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._fd, answer_fd = os.pipe()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: torch's know of forks
                self._pid = os.fork()
        except OSError:  # as many processes as there may be
            os.close(self._fd)
            os.close(answer_fd)
            raise
        self.is_here = not self._pid
        os.close(self._fd if self.is_here else answer_fd)
        if self.is_here:
            self._fd = answer_fd
            _forked.append(self)

    def send(self, content: bytes) -> None:
        """Send bytes, in the fork."""
        while content:
            content = content[os.write(self._fd, content) :]

    def received(self, size: int = -1, times: float = 0) -> bytes:
        """Return what the fork sends, fewer bytes where it ends or takes too long.

        Args:
            size: as many bytes; all where negative.
            times: how long it may take, next to a fixed time, in times of what it has had up to now.
        """
        now = time.monotonic()
        ends = now + _PATIENCE_S + times * (now - self._began)
        parts, left = [b""], size
        while left and select.select([self._fd], [], [], max(0.0, ends - time.monotonic()))[0]:
            parts.append(os.read(self._fd, 1 << 20 if left < 0 else left))
            left -= len(parts[-1]) if left > 0 else 0
            if not parts[-1]:
                break
        return b"".join(parts)

    def end(self) -> None:
        """End it, which may have ended."""
        os.close(self._fd)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


_forked: list[Fork] = []
"""The forks that this process is, one of another."""


class Beside:
    """One of Dynamo's graphs while it is compiled, the backward perhaps in a fork.

    Args:
        said: returns the lines about the compiler; a fork that adds a line is not taken.
    """

    def __init__(self, said: Callable[[], object]) -> None:
        self._said = said
        self._fork: Fork | None = None
        self._before: object = None

    def __enter__(self) -> Beside:
        _compiling.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _compiling.remove(self)
        if self._fork is not None:
            if self._fork.is_here:
                os._exit(1)  # it came to no backward
            self._fork.end()

    def forks(self, graph: Any, inputs: Sequence[Any], options: dict[str, Any]) -> bool:
        """Fork where that pays before a forward is compiled; True in the fork, which continues without.

        Args:
            graph: the forward.
            inputs: of it.
            options: of Inductor's for it.
        """
        if options.get("is_backward") or options.get("is_inference") or options.get("cudagraphs"):
            return False  # how a forward is captured decides how its backward is
        if len(graph.graph.nodes) < _LARGE or self._fork or not can_fork() or _described(inputs) is None:
            return False
        self._before = self._said()
        with suppress(OSError):
            self._fork = Fork()
        return self._fork is not None and self._fork.is_here

    def backward(self, compile_: Callable[[], Any], inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return a compiled backward, the fork's if there is one for these inputs.

        Args:
            compile_: compiles it here.
            inputs: of the backward, as the forward leaves them.
            options: of Inductor's for it.
        """
        if self._fork is None:
            return compile_()
        if self._fork.is_here:
            self._answer(self._fork, compile_(), inputs)
        wanted = _described(inputs)
        with suppress(EOFError, pickle.UnpicklingError):
            described, result = pickle.loads(self._fork.received(times=_TIMES_FORWARD))  # noqa: S301 - our own fork's
            if described == wanted:
                result.fx_kwargs = options
                return result if is_fork() else loaded(result)
        return compile_()

    def _answer(self, fork: Fork, result: Any, inputs: Sequence[Any]) -> None:
        """Send what was compiled, and end the fork."""
        described = _described(inputs)
        if described is not None and is_sent(result) and self._said() == self._before:
            result.fx_kwargs = {}
            fork.send(pickle.dumps((described, result)))
            os._exit(0)
        os._exit(1)


def is_sent(result: Any) -> bool:
    """Return whether what Inductor made in a fork can be sent, and make it ready for that."""
    result.compiled_fn_runner = result.recursively_apply_fns = None
    return isinstance(result.current_callable, Wrapper) and not (result.constants or result.torchbind_constants)


def loaded(result: Any) -> Any:
    """Return what was sent with its wrapper executed."""
    module = result.current_callable.loaded()
    result.current_callable, result.compiled_fn_runner = module.call, module.runner
    result.recursively_apply_fns = getattr(module.runner, "recursively_apply_fns", None)
    return result


_compiling: list[Beside] = []


def compiled(usual: Callable[..., Any], graph: Any, inputs: Sequence[Any], *args: Any, **options: Any) -> Any:
    """Have Inductor compile a graph (`fx_codegen_and_compile`), a backward perhaps next to its forward."""

    def compile_() -> Any:
        return usual(graph, inputs, *args, **options)

    if not options.get("is_backward") or not _compiling:
        return compile_()
    return _compiling[-1].backward(compile_, inputs, options)


def is_fork() -> bool:
    """Return whether this process compiles next to another one, and nothing is called in it."""
    return bool(_forked)


def can_fork() -> bool:
    """Return whether there is a processor for a fork, and no other thread but those that live next to a program.

    These (tqdm's, torch's own) hardly ever hold a lock; a fork that waits for one is not waited for.
    """
    others = (one for one in threading.enumerate() if one is not threading.current_thread())
    return len(os.sched_getaffinity(0)) > 1 and all(one.daemon for one in others)


def _described(inputs: Sequence[Any]) -> list[Any] | None:
    """Return what a graph is compiled by of its inputs; None where one is of no fixed size."""
    found: list[Any] = []
    for one in inputs:
        if not isinstance(one, torch.Tensor):
            return None
        sizes = (*one.shape, *one.stride(), one.storage_offset())
        if not all(type(size) is int for size in sizes):
            return None
        found.append((type(one), sizes, one.dtype, one.device, one.requires_grad))
    return found
