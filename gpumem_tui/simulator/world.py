"""A world of several ranks of which only rank 0 exists: collectives do nothing, memory is real.

PyTorch's own `fake` process group answers every collective at once. What reads results back from a collective is kept
from doing so here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module


class _SteadyReducer:
    """DDP's reducer, except that buckets stay as built: rebuilding them asks rank 0 for an order that nobody sends."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def world(ranks: int) -> Iterator[None]:
    """Within the context, this process is rank 0 of `ranks`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ddp: Any = DistributedDataParallel
    modules: Any = ddp_module
    construct, verify = ddp.__init__, modules._verify_param_shape_across_processes

    def construct_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.register_comm_hook(None, lambda state, bucket: _reduced(bucket.buffer()))
        self.reducer = _SteadyReducer(self.reducer)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    ddp.__init__, modules._verify_param_shape_across_processes = construct_alone, lambda *_, **__: None
    try:
        yield
    finally:
        ddp.__init__, modules._verify_param_shape_across_processes = construct, verify
        dist.destroy_process_group()


def _reduced(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
