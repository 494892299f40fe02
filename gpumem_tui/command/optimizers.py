"""Another optimizer in the place of the one that a program makes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gpumem_tui.step.eight_bit import EightBitAdamW

_NOT_REPLACED = ("LBFGS", "SparseAdam")
"""They step otherwise: with a closure that is called many times, and on sparse gradients."""


def torch_optimizers() -> tuple[type[torch.optim.Optimizer], ...]:
    """torch's own classes of optimizers."""
    found = [thing for thing in vars(torch.optim).values() if inspect.isclass(thing)]
    own = [kind for kind in found if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
    return tuple(kind for kind in own if kind.__name__ not in _NOT_REPLACED)


@dataclass(frozen=True)
class _Replacement:
    """What takes an optimizer's place. `is_like`: of an optimizer, whether it keeps the same, or less, already."""

    kind: type[torch.optim.Optimizer]
    is_like: Callable[[torch.optim.Optimizer], bool]
    options: Mapping[str, Any] = field(default_factory=dict)


def _keeps_nothing(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)


def _is_small(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adafactor) or _keeps_nothing(optimizer)


def _is_small_or_sgd(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) or _is_small(optimizer)


REPLACEMENTS: Mapping[str, _Replacement] = {
    "adamw-8bit": _Replacement(EightBitAdamW, _is_small),
    "adafactor": _Replacement(torch.optim.Adafactor, _is_small),
    "sgd-momentum": _Replacement(
        torch.optim.SGD,
        lambda optimizer: isinstance(optimizer, torch.optim.SGD) or _is_small(optimizer),
        {"momentum": 0.9},
    ),
    "sgd": _Replacement(torch.optim.SGD, _keeps_nothing, {"momentum": 0.0, "nesterov": False}),
}
"""By change."""


def title_of(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer by name."""
    if isinstance(optimizer, torch.optim.SGD):
        return "SGD without momentum" if _keeps_nothing(optimizer) else "SGD with momentum"
    return type(optimizer).__name__


def replace_optimizers(key: str, count: Callable[[], None]) -> None:
    """Whatever of torch's optimizers the program makes is one of another kind from now on.

    Args:
        key: of `REPLACEMENTS`.
        count: called for every one.
    """
    replacement = REPLACEMENTS[key]
    for kind in torch_optimizers():
        if kind is not replacement.kind:
            _make_instead(kind, replacement)
    construct_with(replacement.kind, replacement.options, count)


def construct_with(kind: Any, options: Mapping[str, Any], count: Callable[[], None]) -> None:
    """Optimizers of a kind are made with these options from now on, whatever the program gives. `count`: for each."""
    init = kind.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def changed(*args: Any, **kwargs: Any) -> None:
        count()
        given = signature.bind(*args, **kwargs)
        given.arguments.update(options)
        init(*given.args, **given.kwargs)

    kind.__init__ = changed


def _make_instead(kind: Any, replacement: _Replacement) -> None:
    signature = inspect.signature(kind.__init__)

    @functools.wraps(kind.__init__)  # programs look there for what an optimizer takes
    def make(wanted: Any, *args: Any, **kwargs: Any) -> Any:
        if wanted is not kind or not (args or kwargs):  # a class made from torch's, or a copy
            return object.__new__(wanted)
        given = signature.bind(None, *args, **kwargs)
        kept = {name: value for name, value in given.arguments.items() if name in ("lr", "weight_decay")}
        given.apply_defaults()
        return _made(replacement, kept, dict(given.arguments))

    kind.__new__ = staticmethod(make)


def _made(replacement: _Replacement, kept: dict[str, Any], before: dict[str, Any]) -> torch.optim.Optimizer:
    """The other optimizer, for the same groups of parameters.

    Args:
        kept: what was given and means the same to both.
        before: all that the optimizer would have been made with; it stays readable where schedulers look for it.
    """
    names = before.keys() - {"self", "params", "lr", "weight_decay"}
    groups = [
        {name: value for name, value in group.items() if name not in names} if isinstance(group, dict) else group
        for group in before["params"]
    ]
    kind: Any = replacement.kind
    optimizer: torch.optim.Optimizer = kind(groups, **kept)
    for values in (optimizer.defaults, *optimizer.param_groups):
        for name in names:
            values.setdefault(name, before[name])
    return optimizer
