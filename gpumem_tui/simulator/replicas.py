"""DistributedDataParallel and FSDP1 with rank 0 alone: it waits for no other rank, and asks none for state."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.device import backend
from gpumem_tui.simulator.torch_internals import original, replace

c10d: Any = torch.distributed


class _Communication:
    """What a replica does with a bucket whose gradients are there: a hook of the program's, or nothing.

    The reducer can only be given one hook, and without one expects results that the `fake` process group does not have.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.state: Any = None
        self.hook: Any = None

    def __call__(self, state: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        if backend.current is not None:
            backend.current.tag(self._bucket, [buffer])
        if self.hook is not None:
            return self.hook(self.state, bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future


def replicate_alone() -> None:
    """From now on a DistributedDataParallel waits for no other rank."""
    ddp: Any = DistributedDataParallel
    construct = original(ddp, "__init__")

    def construct_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        # A gradient is a part of its bucket, or copied to and from it.
        self._communication = _Communication(Bucket.GRADIENTS if self.gradient_as_bucket_view else Bucket.TEMPORARY)
        c10d._register_comm_hook(self.reducer, None, self._communication)

    def register_comm_hook(self: Any, state: object, hook: Any) -> None:
        self._check_comm_hook(hook)
        self._comm_hooks.append((hook, state))
        self._communication.state, self._communication.hook = state, hook

    def register_builtin(self: Any, kind: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        if kind == c10d.BuiltinCommHookType.FP16_COMPRESS:
            self._communication.hook = fp16_compress_hook

    replace(ddp, "__init__", construct_alone)
    replace(ddp, "register_comm_hook", register_comm_hook)
    replace(ddp, "_register_builtin_comm_hook", register_builtin)
    replace(ddp_module, "_verify_param_shape_across_processes", lambda *_, **__: None)


def know_other_shards(module: Any) -> None:
    """From now on other ranks have optimizer states of what this rank has nothing of.

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
