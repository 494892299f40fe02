"""A world of several ranks of which only rank 0 exists: collectives do nothing, memory is real.

PyTorch's own `fake` process group answers every collective at once, as if all ranks held what rank 0 holds. What reads
results back from a collective, and so would wait or see other values, is answered here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist

from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.importing import after_import
from gpumem_tui.simulator.collectives import OF_OBJECTS, OF_TENSORS, among_equals
from gpumem_tui.simulator.device import backend
from gpumem_tui.simulator.replicas import know_other_shards, replicate_alone
from gpumem_tui.simulator.torch_internals import original, replace, replace_everywhere

_NCCL_VERSION = (2, 27, 5)
"""What the CUDA wheels of torch 2.9 and 2.10 come with (`nvidia-nccl-cu12` in their metadata)."""

_NCCL_TIMEOUT = timedelta(minutes=10)
"""`kProcessGroupNCCLDefaultTimeout` (ProcessGroupNCCL.hpp), which a build without NCCL does not know."""

c10d: Any = dist.distributed_c10d
_torch_distributed: Any = dist


@contextmanager
def rank_zero_of(ranks: int) -> Iterator[None]:
    """Within the context, this process is rank 0 of `ranks`."""
    _answer_once()
    dist.init_process_group("fake", store=_torch_distributed.HashStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def world_of(recipe: Recipe) -> AbstractContextManager[None]:
    """The world that the recipe's step lives in: of its ranks where they share what they hold, else none."""
    if recipe.tensor_parallel > 1:
        return rank_zero_of(recipe.tensor_parallel)
    return nullcontext() if recipe.sharding == "none" else rank_zero_of(recipe.gpus)


def answer_alone() -> None:
    """From now on every process group that the program makes is one of which only this process, rank 0, exists."""
    _answer_once()
    replace(c10d, "rendezvous", _rendezvous)
    replace_everywhere(c10d, "is_nccl_available", lambda: True)
    replace(c10d, "default_pg_nccl_timeout", c10d.default_pg_nccl_timeout or _NCCL_TIMEOUT)
    if not hasattr(c10d, "ProcessGroupNCCL"):
        replace(c10d, "ProcessGroupNCCL", _NcclGroup)
        replace(dist, "ProcessGroupNCCL", _NcclGroup)
    replace(torch.cuda.nccl, "version", lambda: _NCCL_VERSION)


@functools.cache
def _answer_once() -> None:
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    assert fake_pg
    make = original(c10d, "_new_process_group_helper")
    replace(c10d, "_new_process_group_helper", functools.partial(_fake_group, make))
    for name, answer in OF_OBJECTS.items():
        replace_everywhere(c10d, name, answer)
    for name, follow in OF_TENSORS.items():
        replace_everywhere(c10d, name, among_equals(original(c10d, name), follow))
    replace_everywhere(c10d, "monitored_barrier", lambda *_, **__: None)
    replicate_alone()
    after_import("torch.distributed.fsdp._optim_utils", know_other_shards)
    after_import("torch.distributed.tensor._sharding_prop", _propagate_without_memory)


def _fake_group(
    make: Callable[..., Any], size: int, rank: int, ranks: list[int], asked: Any, *args: Any, **kw: Any
) -> Any:
    """`_new_process_group_helper`, whose groups do not communicate but bear the name of the backend asked for."""
    kw.update({name: None for name in ("backend_options", "device_id") if name in kw})
    made = make(size, rank, ranks, c10d.Backend("fake"), *args, **kw)
    group, store = made
    if group in c10d._world.pg_map and asked != c10d.Backend.UNDEFINED:
        c10d._world.pg_map[group] = (asked, store)
    return made


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: object) -> Iterator[tuple[Any, int, int]]:
    """The rendezvous of ranks: this one is alone.

    Raises:
        ValueError: neither the call nor the environment says how many ranks there are.
    """
    query = parse_qs(urlparse(url).query)

    def found(given: int, name: str) -> int:
        value = str(given) if given >= 0 else query.get(name.lower(), [""])[0] or os.environ.get(name, "")
        if not value:
            raise ValueError(
                f"init_process_group finds no {name}, which a launcher sets: start the command with `torchrun "
                "--nproc-per-node N` or give --gpus N"
            )
        return int(value)

    place, size = found(rank, "RANK"), found(world_size, "WORLD_SIZE")
    if place > 0:
        os._exit(0)  # rank 0 is the one that is followed
    yield _torch_distributed.HashStore(), place, size


class _NcclGroup:
    """Stands for `ProcessGroupNCCL` in a build without NCCL; its options change nothing here."""

    class Options:
        def __init__(self, *_: object, **__: object) -> None:
            self.config = _NcclGroup.Config()

    class Config: ...

    NCCLConfig = Config


def _propagate_without_memory(module: Any) -> None:
    """DTensor runs operators on fake tensors of the whole shape to learn what they answer: that allocates nothing."""
    propagator = module.ShardingPropagator
    propagate = original(propagator, "_propagate_tensor_meta_non_cached")

    def unrecorded(self: Any, schema: Any) -> Any:
        if backend.current is None:
            return propagate(self, schema)
        with backend.current.mode.unrecorded():
            return propagate(self, schema)

    replace(propagator, "_propagate_tensor_meta_non_cached", unrecorded)
