"""A world of several ranks of which only rank 0 exists: collectives do nothing, memory is real.

PyTorch's own `fake` process group answers every collective at once. What reads results back from a collective is kept
from doing so here.
"""

from __future__ import annotations

import os
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
    ddp: Any = DistributedDataParallel
    modules: Any = ddp_module
    construct, verify = ddp.__init__, modules._verify_param_shape_across_processes
    dist.init_process_group("fake", store=_store(), rank=0, world_size=ranks)
    _replicate_alone()
    try:
        yield
    finally:
        ddp.__init__, modules._verify_param_shape_across_processes = construct, verify
        dist.destroy_process_group()


def answer_alone() -> None:
    """From now on every process group that the program makes is one of which only this process, rank 0, exists."""
    c10d: Any = dist.distributed_c10d
    start, group = c10d.init_process_group, c10d.new_group

    def init_process_group(
        backend: object = None, init_method: object = None, timeout: object = None, world_size: int = -1,
        rank: int = -1, store: object = None, **_: object,
    ) -> None:  # fmt: skip
        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE") or 1)
        start("fake", store=_store(), rank=0, world_size=size)

    def new_group(ranks: object = None, *_: object, **named: Any) -> Any:
        kept = {name: named[name] for name in ("use_local_synchronization", "group_desc") if name in named}
        return group(ranks, backend="fake", **kept)

    def all_gather_object(object_list: list[Any], obj: Any, group: object = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: object, **__: object) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter_object_list(output: list[Any], objects: list[Any], *_: object, **__: object) -> None:
        output[0] = objects[0]

    answers = {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "all_gather_object": all_gather_object,
        "gather_object": gather_object,
        "scatter_object_list": scatter_object_list,
        "broadcast_object_list": lambda *_, **__: None,
        "is_nccl_available": lambda: True,
        "barrier": lambda *_, **__: None,
    }
    for name, answer in answers.items():
        for module in (c10d, dist):
            setattr(module, name, answer)
    _replicate_alone()


def _store() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def _replicate_alone() -> None:
    """DistributedDataParallel that waits for nobody."""
    ddp: Any = DistributedDataParallel
    modules: Any = ddp_module
    construct = ddp.__init__

    def construct_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.register_comm_hook(None, lambda state, bucket: _reduced(bucket.buffer()))
        self.reducer = _SteadyReducer(self.reducer)

    ddp.__init__, modules._verify_param_shape_across_processes = construct_alone, lambda *_, **__: None


def _reduced(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
