"""FSDP1 of which only rank 0 exists: its shard of flat parameters has nothing of some of the original ones.

These are other ranks', and so is their optimizer state, of which FSDP asks all ranks for an optimizer's state dict.
"""

from __future__ import annotations

from typing import Any

from gpumem_tui.simulator.torch_internals import original, replace


def know_other_shards(module: Any) -> None:
    """From now on other ranks have states of what this rank has nothing of.

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
