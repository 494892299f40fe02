"""Older versions of torch: a step that the installed torch runs, by an older one's rules.

Each rule names the change in PyTorch's source that ended it. An operator without a rule is as in the installed torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import adam

from gpumem_tui.simulator.device import autocast
from gpumem_tui.simulator.torch_internals import Replacements

_GRADIENTS_KEPT_BEFORE = (2, 0)
"""`zero_grad` drops gradients rather than zero them since pytorch/pytorch#92731, of January 2023."""

_ONE_BY_ONE_BEFORE = (2, 0)
"""Optimizers take all parameters at once by default since pytorch/pytorch#95862, of March 2023, merged into 2.0."""

_DENOMINATOR_COPIED_BEFORE = (2, 1)
"""The update of Adam and AdamW at once added epsilon to a copy of its roots (``denom = torch._foreach_add(…)`` in
torch/optim/adam.py) until pytorch/pytorch#104898 and #104991, of July 2023: two copies of all parameters, one since."""


_RELU_KEPT_ITS_INPUT_BEFORE, _SOFTMAX_KEPT_ITS_INPUT_BEFORE = (1, 10), (1, 11)
"""Memory of backward besides its result until pytorch/pytorch#63089 (August 2021) and #65242 (October 2021)."""

_NORM_IN_ITS_OWN_TYPE_BEFORE = (2, 12)
"""Autocast runs `rms_norm` in float32 since 2.12: its registrations for AutocastCUDA have it, those of 2.11 do not."""


def follow(version: tuple[int, ...], replacements: Replacements) -> None:
    """Have torch's Python do what that of a version did, until `replacements` end."""
    if version < _GRADIENTS_KEPT_BEFORE:
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            replacements.wrap(owner, "zero_grad", _zeroed)
    if version < _ONE_BY_ONE_BEFORE:
        name = "_default_to_fused_or_foreach"
        for module in [module for key, module in sys.modules.items() if key.startswith("torch.optim.")]:
            if name in vars(module):
                replacements.set(module, name, _neither)
    for before, owner, name in _KEPT_THEIR_INPUT:
        if version < before:
            replacements.wrap(owner, name, _keeping_input)
    if version < _DENOMINATOR_COPIED_BEFORE:
        replacements.wrap(adam, "_multi_tensor_adam", _with_copied_denominator)
    if version < _NORM_IN_ITS_OWN_TYPE_BEFORE:
        autocast.left_alone.add("rms_norm")
        replacements.callback(autocast.left_alone.clear)


def _zeroed(zero_grad: Callable[..., None], owner: Any, set_to_none: bool = False) -> None:
    zero_grad(owner, set_to_none=set_to_none)


def _neither(params: list[torch.Tensor], differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:  # noqa: ARG001
    """Return neither; of what torch.jit.script takes in the other's place."""
    return False, False


def _keeping_input(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Have a result hold what it was made of until its gradient is there; of a loss its `log_softmax` does."""
    result = function(*args, **kwargs)
    node = getattr(result, "grad_fn", None)
    if node is not None and node.name().startswith("Nll"):
        node = node.next_functions[0][0]
    if node is not None:
        held = [args[0] if args else kwargs["input"]]
        node.register_hook(lambda *_: held.clear())
    return result


_KEPT_THEIR_INPUT: tuple[tuple[tuple[int, int], Any, str], ...] = (
    (_RELU_KEPT_ITS_INPUT_BEFORE, torch, "relu"),
    (_RELU_KEPT_ITS_INPUT_BEFORE, torch.Tensor, "relu"),
    *(
        (_SOFTMAX_KEPT_ITS_INPUT_BEFORE, owner, name)
        for owner in (torch, torch.Tensor)
        for name in ("softmax", "log_softmax")
    ),
    (_SOFTMAX_KEPT_ITS_INPUT_BEFORE, torch.nn.functional, "cross_entropy"),
)


def _with_copied_denominator(update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    copies: list[torch.Tensor] = []

    def rooted(root: Callable[..., Any], tensors: Any) -> Any:
        roots = root(tensors)
        copies.extend(map(torch.empty_like, roots))
        return roots

    with Replacements() as replacements:
        replacements.wrap(torch, "_foreach_sqrt", rooted)
        update(*args, **kwargs)
