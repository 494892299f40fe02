"""CUDA graphs on a simulated GPU: what is captured runs once, then; a replay repeats the optimizer steps in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules._functions import SyncBatchNorm
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gpumem_tui.simulator.torch_internals import replace

_POOL = (0, 1)
_SYNC_BATCH_NORM = SyncBatchNorm.forward.__code__


class CapturedGraph:
    """`torch.cuda.CUDAGraph`; what is allocated then comes from the pool of the stream it is captured on."""

    _capturing: CapturedGraph | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        self._stepped: list[Optimizer] = []
        self._watch: Any = None

    @classmethod
    def is_capturing(cls) -> bool:
        """Whether there is a graph that is being captured.

        `SyncBatchNorm` is told so: if not, it looks by values for ranks without samples, to leave these out.
        """
        return cls._capturing is not None or sys._getframe(1).f_code is _SYNC_BATCH_NORM

    def capture_begin(self, *_: object, **__: object) -> None:
        """Note from here on which optimizers step."""
        self._stepped.clear()
        CapturedGraph._capturing = self
        self._watch = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped.append(optimizer))

    def capture_end(self) -> None:
        """The capture is complete."""
        CapturedGraph._capturing = None
        self._watch.remove()

    def replay(self) -> None:
        """The optimizers that were captured have stepped once more."""
        for optimizer in self._stepped:
            for hook in list(optimizers._global_optimizer_post_hooks.values()):
                hook(optimizer, (), {})

    def instantiate(self) -> None: ...

    def reset(self) -> None: ...

    def pool(self) -> tuple[int, int]:
        return _POOL

    def enable_debug_mode(self) -> None: ...

    def debug_dump(self, debug_path: str) -> None: ...


def follow_graphs(note: Callable[[str], None]) -> None:
    """Give programs graphs that can be captured without CUDA, and `note` what that means."""

    class NotedGraph(CapturedGraph):
        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(keep_graph)
            note("CUDA graphs: traced once, as they are captured, without the memory that a graph keeps for itself")

    cuda: Any = torch.cuda
    for module in (cuda, cuda.graphs):
        replace(module, "CUDAGraph", NotedGraph)
        replace(module, "graph_pool_handle", lambda: _POOL)
        replace(module, "is_current_stream_capturing", CapturedGraph.is_capturing)
