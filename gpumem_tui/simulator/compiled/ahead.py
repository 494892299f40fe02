"""Compiles what training will call while a program evaluates before it trains, in a process forked from this one.

The fork calls the module once as training would, and sends what AOTAutograd writes to its cache: the key of a graph,
and all that was compiled for it. This process takes that where it comes to a graph of the same key, which torch makes
of the graph, its inputs and every setting, and of the same places in the program; else it compiles as ever.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from gpumem_tui.simulator import torch_internals
from gpumem_tui.simulator.compiled.beside import Fork, can_fork, is_sent, loaded
from gpumem_tui.simulator.compiled.wrapper import own_line

_CACHE = "torch._functorch._aot_autograd.autograd_cache"
_TIMES_BESIDE = 2
"""How much longer a fork may take than what was done next to it: a training graph takes up to twice an evaluation's."""


class Ahead:
    """Graphs compiled ahead: of the first module that is called, if that evaluates.

    Args:
        said: returns the lines about the compiler; a fork that adds a line is not taken.
        may_begin: there is a processor for it.
    """

    def __init__(self, said: Callable[[], object], *, may_begin: bool) -> None:
        self._said = said
        self._fork: Fork | None = None
        self._before: object = None
        self._may_begin = may_begin

    def prepare(self) -> None:
        """Have torch ask for what was compiled ahead, where this torch does it in a way that was checked."""
        self._may_begin &= torch_internals.is_checked(f"{_CACHE}.AOTAutogradCache.try_load")
        if self._may_begin:
            cache = import_module(_CACHE).AOTAutogradCache
            torch_internals.replace(cache, "try_load", staticmethod(self._asked))
            torch_internals.replace(cache, "save", staticmethod(self._compiled))

    def settings(self) -> dict[str, bool]:
        """Return settings with which AOTAutograd asks for what was compiled ahead, and shows what it compiles."""
        if self._fork is None:
            return {"enable_autograd_cache": False}
        return {"enable_autograd_cache": True, "bundled_autograd_cache": True}

    def called(self, module: Any, call: Callable[[], object]) -> None:
        """Fork where what is called first seems to evaluate what is trained later.

        Args:
            module: that was compiled, if it is one.
            call: calls it as it is called now.
        """
        may_begin, self._may_begin = self._may_begin, False
        if not may_begin or torch.is_grad_enabled() or torch.is_inference_mode_enabled() or not can_fork():
            return
        is_trained = isinstance(module, nn.Module) and any(one.requires_grad for one in module.parameters())
        if not is_trained or module.training:
            return
        with suppress(OSError):
            self._fork = Fork()
        if self._fork is None or not self._fork.is_here:
            atexit.register(self._end)
            return
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            for part in module.modules():
                part.training = True
            with torch.enable_grad():
                call()
        finally:
            os._exit(1)

    def framed(self) -> None:
        """End the fork when it would continue with the program: its first frame came to no graph."""
        if self._fork is not None and self._fork.is_here:
            os._exit(1)

    def _end(self) -> None:
        fork, self._fork = self._fork, None
        if fork is not None:
            fork.end()

    def _asked(
        self, graph: Any, inputs: Any, config: Any, extra: Any, *_: Any, compile_region_name: Any = None
    ) -> tuple[Any, Any]:
        """Return what was compiled ahead for a graph, if anything was, as `AOTAutogradCache.try_load` does."""
        fork, cache = self._fork, import_module(_CACHE)
        if fork is None or not torch.is_grad_enabled():
            return None, config
        key = hashlib.sha256(repr([own_line(node) for node in graph.graph.nodes]).encode())
        try:
            with import_module("torch._inductor.config").patch(fx_graph_cache=True):
                key.update(cache.autograd_cache_key(graph, inputs, config, extra)[0].encode())
        except Exception:  # noqa: BLE001 - torch's many reasons to give a graph no key
            self.framed()
            return None, config
        if fork.is_here:
            fork.send(key.digest())
            self._before = self._said()
            return None, replace(config, cache_info=cache.AOTAutogradCacheInfo(key.hexdigest(), time.time_ns(), []))
        try:
            if fork.received(key.digest_size, _TIMES_BESIDE) == key.digest():
                with suppress(EOFError, pickle.UnpicklingError):
                    entry = pickle.loads(fork.received(times=_TIMES_BESIDE))  # noqa: S301 - our own fork wrote it
                    options = cache.create_fx_config(extra, compile_region_name)
                    return entry.wrap_post_compile(inputs, config, options), config
        finally:
            self._end()
        return None, config

    def _compiled(self, _key: str, entry: Any, *_: Any, **__: Any) -> None:
        """Send what was compiled for a graph, and end the fork: `AOTAutogradCache.save`."""
        fork, forward, backward = self._fork, entry.compiled_fw, entry.compiled_bw
        if fork is None or not fork.is_here:
            return
        if backward and is_sent(forward.result) and is_sent(backward.result) and self._said() == self._before:
            saved = backward.backward_state_indices, backward.num_symints_saved_for_bw_
            entry.compiled_fw, entry.compiled_bw = _Part(forward.result), _Part(backward.result, *saved)
            fork.send(pickle.dumps(entry))
        os._exit(0)


@dataclass
class _Part:
    """A forward, or a backward, among what AOTAutograd writes to its cache: an `InductorOutput` of its.

    Attributes:
        result: what Inductor compiled.
        backward_state_indices: of a backward.
        num_symints_saved_for_bw_: of a backward; None for a forward.
    """

    result: Any
    backward_state_indices: Any = None
    num_symints_saved_for_bw_: int | None = None

    def load(self, inputs: Any) -> Any:
        """Return it with its wrapper executed.

        Args:
            inputs: of the forward.
        """
        self._inputs = inputs
        return loaded(self.result)

    def post_compile(self, result: Any, options: Any) -> Any:
        """Return it as it is called, as if it had been compiled here with these options of Inductor's."""
        constants = import_module("torch._inductor.output_code").CompiledFxGraphConstants()
        result.post_compile(self._inputs, constants, options)
        if self.num_symints_saved_for_bw_ is None:
            return result
        return import_module("torch._dynamo").disable(result, reason="do not trace generated backwards pass")
