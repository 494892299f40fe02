"""Compiles the backward of a graph beside its forward, in a process forked from this one.

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

_LARGE = 100
"""Nodes of a graph from which on compiling it takes longer than a fork of a process that has torch imported."""

_PATIENCE_S, _TIMES_FORWARD = 10, 4
"""How long a fork may take, by what the forward took: an ordinary backward takes 1.3 times that."""


class Beside:
    """One of Dynamo's graphs while it is compiled, the backward perhaps in a fork.

    Args:
        said: returns what is said of the compiler; a fork in which anything more is said is not taken.
    """

    def __init__(self, said: Callable[[], object]) -> None:
        self._said = said
        self._fork: tuple[int, int] | None = None
        self._answer_fd: int | None = None
        self._before: object = None
        self._began = 0.0

    def __enter__(self) -> Beside:
        _compiling.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._answer_fd is not None:
            os._exit(1)  # a fork that came to no backward
        _compiling.remove(self)
        self._end()

    def forks(self, graph: Any, inputs: Sequence[Any], options: dict[str, Any]) -> bool:
        """Fork where that pays before a forward is compiled; True in the fork, which goes on without.

        Args:
            graph: the forward.
            inputs: of it.
            options: of Inductor's for it.
        """
        if options.get("is_backward") or options.get("is_inference") or options.get("cudagraphs"):
            return False  # how a forward is captured decides how its backward is
        if len(graph.graph.nodes) < _LARGE or self._fork or not _can_fork() or _described(inputs) is None:
            return False
        self._before, self._began = self._said(), time.monotonic()
        fd, answer_fd = os.pipe()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: torch's know of forks
                pid = os.fork()
        except OSError:  # as many processes as there may be
            os.close(fd)
            os.close(answer_fd)
            return False
        if pid:
            os.close(answer_fd)
            self._fork = (pid, fd)
            return False
        os.close(fd)
        self._answer_fd = answer_fd
        return True

    def backward(self, compile_: Callable[[], Any], inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return a compiled backward, the fork's if there is one for these inputs.

        Args:
            compile_: compiles it here.
            inputs: of the backward, as the forward leaves them.
            options: of Inductor's for it.
        """
        if self._answer_fd is not None:
            self._answer(self._answer_fd, compile_(), inputs)
        wanted, answer = _described(inputs), self._answered()
        if answer is None or answer[0] != wanted:
            return compile_()
        result = answer[1]
        module = result.current_callable.loaded()
        result.current_callable, result.fx_kwargs = module.call, options
        result.compiled_fn_runner = module.runner
        result.recursively_apply_fns = getattr(module.runner, "recursively_apply_fns", None)
        return result

    def _answer(self, fd: int, result: Any, inputs: Sequence[Any]) -> None:
        """Send what was compiled, and end the fork."""
        described = _described(inputs)
        if described is None or result.constants or result.torchbind_constants or self._said() != self._before:
            os._exit(1)
        result.compiled_fn_runner = result.recursively_apply_fns = None
        result.fx_kwargs = {}
        with open(fd, "wb") as file:
            pickle.dump((described, result), file)
        os._exit(0)

    def _answered(self) -> Any:
        """Return what the fork sends: what its inputs were, and what it compiled; None where it did not."""
        if self._fork is None:
            return None
        _, fd = self._fork
        ends = time.monotonic() + _PATIENCE_S + _TIMES_FORWARD * (time.monotonic() - self._began)
        parts = []
        while select.select([fd], [], [], max(0.0, ends - time.monotonic()))[0]:
            parts.append(os.read(fd, 1 << 20))
            if not parts[-1]:
                break
        self._end()
        with suppress(EOFError, pickle.UnpicklingError):
            return pickle.loads(b"".join(parts))  # noqa: S301 - this process's own fork wrote it
        return None

    def _end(self) -> None:
        """End the fork, which may have ended."""
        if self._fork is None:
            return
        pid, fd = self._fork
        self._fork = None
        os.close(fd)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


_compiling: list[Beside] = []


def compiled(usual: Callable[..., Any], graph: Any, inputs: Sequence[Any], *args: Any, **options: Any) -> Any:
    """Have Inductor compile a graph (`fx_codegen_and_compile`), a backward perhaps beside its forward."""

    def compile_() -> Any:
        return usual(graph, inputs, *args, **options)

    if not options.get("is_backward") or not _compiling:
        return compile_()
    return _compiling[-1].backward(compile_, inputs, options)


def is_fork() -> bool:
    """Return whether this process compiles beside another one, and nothing is called in it."""
    return any(one._answer_fd is not None for one in _compiling)


def _can_fork() -> bool:
    """Return whether there is a processor for a fork, and no other thread but those that live beside a program.

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
