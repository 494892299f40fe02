"""A world of several ranks of which only one exists: collectives do nothing, memory is real.

PyTorch's own `fake` process group answers every collective at once, as if all ranks held what this one holds. Functions
that read results back from a collective, and so would wait or see other values, are answered here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

from gpumem_tui.importing import after_import
from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.cuda.collectives import OF_OBJECTS, OF_TENSORS, among_equals
from gpumem_tui.simulator.device.base import library
from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.torch_internals import original, replace, replace_everywhere

_NCCL_TIMEOUT = timedelta(minutes=10)
"""`kProcessGroupNCCLDefaultTimeout` (ProcessGroupNCCL.hpp), which a build without NCCL does not know."""

c10d: Any = dist.distributed_c10d
_torch_distributed: Any = dist


def answer_alone(rank: int) -> None:
    """Have every process group that the program makes from now on be one of which only this rank exists."""
    _answer_once()
    replace(c10d, "rendezvous", functools.partial(_rendezvous, rank))
    replace_everywhere(c10d, "is_nccl_available", lambda: True)
    replace(c10d, "default_pg_nccl_timeout", c10d.default_pg_nccl_timeout or _NCCL_TIMEOUT)
    if not hasattr(c10d, "ProcessGroupNCCL"):
        replace(c10d, "ProcessGroupNCCL", _NcclGroup)
        replace(dist, "ProcessGroupNCCL", _NcclGroup)


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
    for name in ("send", "recv", "isend", "irecv"):
        replace_everywhere(c10d, name, _between_two(original(c10d, name)))
    replace_everywhere(c10d, "monitored_barrier", lambda *_, **__: None)
    collectives = library("c10d")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::") and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
            collective = name.partition("::")[2]
            given = len(getattr(torch.ops.c10d, collective).default._schema.returns)
            collectives.impl(collective, functools.partial(_done, given), "Meta")
    replicate_alone()
    after_import("torch.distributed.fsdp._optim_utils", know_other_shards)
    after_import("torch.distributed.tensor._sharding_prop", _propagate_without_memory)
    after_import("torch.distributed.pipelining.stage", _vote_alone)


def _done(given: int, result: Any = None, *_: Any) -> Any:
    """Return what a collective gives on tensors without data, of which torch gives nothing, up to 2.10 of hardly any.

    Args:
        given: how much it gives: nothing, that it is done, or its first argument before that.
        result: that argument.
    """
    works: Any = torch._C._distributed_c10d
    if hasattr(works, "FakeWork"):
        done = works.FakeWork()
    else:  # torch 2.6
        ended: torch.futures.Future[Any] = torch.futures.Future()
        ended.set_result([])
        done = works._create_work_from_future(ended)
    return (None, done.boxed(), (result, done.boxed()))[given]


def _between_two(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sends to one other rank, or receives from it, and has the result say that ranks differ."""

    @functools.wraps(exchange)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if backend.current is not None:
            line = "alone is traced: it exchanges tensors with single ranks, as a pipeline, where others may hold more"
            backend.current.notes[f"rank {backend.rank} {line}; --rank N follows another"] = None
        return exchange(*args, **kwargs)

    return noted


def _vote_alone(module: Any) -> None:
    """Have a stage of a pipeline decide by itself whether the shapes that stages exchange are given (since torch 2.13).

    Args:
        module: `torch.distributed.pipelining.stage`.
    """

    def vote(self: Any, has_backward: bool, **_: Any) -> torch.Tensor:
        return torch.tensor([not module.InferenceMode.needs_dynamic(self._user_meta, has_backward)])

    if hasattr(module.PipelineStage, "_warmup_forward_vote"):
        replace(module.PipelineStage, "_warmup_forward_vote", vote)
        replace(module.PipelineStage, "_warmup_backward_result", lambda _, received_result: received_result)


def _fake_group(
    make: Callable[..., Any], size: int, rank: int, ranks: list[int], asked: Any, *args: Any, **kw: Any
) -> Any:
    """Make a group as `_new_process_group_helper`: one that does not communicate, under the asked backend's name."""
    kw.update({name: None for name in ("backend_options", "device_id") if name in kw})
    made = make(size, rank, ranks, c10d.Backend("fake"), *args, **kw)
    group, store = made
    if group in c10d._world.pg_map and asked != c10d.Backend.UNDEFINED:
        c10d._world.pg_map[group] = (asked, store)
    return made


def _rendezvous(
    followed: int, url: str, rank: int = -1, world_size: int = -1, **_: object
) -> Iterator[tuple[Any, int, int]]:
    """Return the rendezvous of ranks, of which the `followed` one is alone.

    Raises:
        ValueError: neither the call nor the environment shows how many ranks there are.
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
    if place != followed:
        os._exit(0)
    backend.ranks = size
    yield _torch_distributed.HashStore(), place, size


class _NcclGroup:
    """Stand-in for `ProcessGroupNCCL` in a build without NCCL; its options change nothing here."""

    class Options:
        def __init__(self, *_: object, **__: object) -> None:
            self.config = _NcclGroup.Config()

    class Config: ...

    NCCLConfig = Config


def _propagate_without_memory(module: Any) -> None:
    """Have DTensor learn what operators answer, on fake tensors of the whole shape, without allocating anything."""
    propagator = module.ShardingPropagator
    propagate = original(propagator, "_propagate_tensor_meta_non_cached")

    def unrecorded(self: Any, schema: Any) -> Any:
        if backend.current is None:
            return propagate(self, schema)
        with backend.current.mode.unrecorded():
            return propagate(self, schema)

    replace(propagator, "_propagate_tensor_meta_non_cached", unrecorded)


# DistributedDataParallel and FSDP1 with rank 0 alone: it waits for no other rank, and asks none for state


class _Communication:
    """The communication of a replica's bucket once its gradients are there: a hook of the program's, or nothing.

    The reducer can only be given one hook, and without one expects results that the `fake` process group does not have.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.state: Any = None
        self.hook: Any = None

    def __call__(self, _state: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        if backend.current is not None:
            backend.current.tag(self._bucket, [buffer])
        if self.hook is not None:
            return self.hook(self.state, bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future


def replicate_alone() -> None:
    """Have a DistributedDataParallel wait for no other rank from now on."""
    ddp: Any = DistributedDataParallel
    construct = original(ddp, "__init__")

    def construct_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        # A gradient is a part of its bucket, or copied to and from it.
        self._communication = _Communication(Bucket.GRADIENTS if self.gradient_as_bucket_view else Bucket.TEMPORARY)
        _torch_distributed._register_comm_hook(self.reducer, None, self._communication)

    def register_comm_hook(self: Any, state: object, hook: Any) -> None:
        self._check_comm_hook(hook)
        self._comm_hooks.append((hook, state))
        self._communication.state, self._communication.hook = state, hook

    def register_builtin(self: Any, kind: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        if kind == _torch_distributed.BuiltinCommHookType.FP16_COMPRESS:
            self._communication.hook = fp16_compress_hook

    replace(ddp, "__init__", construct_alone)
    replace(ddp, "register_comm_hook", register_comm_hook)
    replace(ddp, "_register_builtin_comm_hook", register_builtin)
    replace(ddp_module, "_verify_param_shape_across_processes", lambda *_, **__: None)


def know_other_shards(module: Any) -> None:
    """Have other ranks have optimizer states from now on of what this rank has nothing of.

    FSDP1's shard of flat parameters has nothing of some of the original ones: these are other ranks', and so is their
    optimizer state, of which FSDP asks all ranks for an optimizer's state dict.

    Args:
        module: `torch.distributed.fsdp._optim_utils`.
    """
    map_keys, gather = original(module, "_map_param_key_to_optim_keys"), original(module, "_allgather_state_info")

    def map_all_keys(
        state_dict: Any, group: Any, params: Any, names: Any, managed: Any, merge_keys: bool = False
    ) -> tuple[list[Any], dict[Any, Any]]:
        keys, places = map_keys(state_dict, group, params, names, managed, merge_keys)
        if not (merge_keys and places):
            return keys, places
        trained = {names[param][0] for param in params.values() if param.requires_grad} & managed.keys()
        others = {module._OptimStateKey(unflat_param_names=(name,), is_fsdp_managed=True) for name in trained}
        return sorted({*keys, *others}), places

    def gather_all(state: Any, own: Any) -> Any:
        gathered = gather(state, own)
        known = next((info for info in gathered[0].values() if info.tensors), None)
        if known is not None:
            for of_rank in gathered[1:]:
                empty = [name for name, info in of_rank.items() if not info.tensors]
                of_rank.update(dict.fromkeys(empty, module.StateInfo({}, known.scalar_tensors, known.non_tensors)))
        return gathered

    replace(module, "_map_param_key_to_optim_keys", map_all_keys)
    replace(module, "_allgather_state_info", gather_all)
