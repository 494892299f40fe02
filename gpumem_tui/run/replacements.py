"""Replacements for a program's optimizer, loss or block.

Code as its author would write it, which torch's compiler compiles with the program.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn

from gpumem_tui.formula.recipe import LOSS_CHUNKS
from gpumem_tui.simulator.torch_internals import original
from gpumem_tui.step.eight_bit import EightBitAdamW

_CHECKPOINT: Any = original(checkpointing, "checkpoint")

# Another optimizer

_NOT_REPLACED = ("LBFGS", "SparseAdam")
"""They step otherwise: with a closure that is called many times, and on sparse gradients."""


def torch_optimizers() -> tuple[type[torch.optim.Optimizer], ...]:
    """Return the classes of optimizers that are torch's own."""
    found = [thing for thing in vars(torch.optim).values() if inspect.isclass(thing)]
    own = [kind for kind in found if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
    return tuple(kind for kind in own if kind.__name__ not in _NOT_REPLACED)


@dataclass(frozen=True)
class _Replacement:
    """An optimizer that takes another's place. `is_like`: whether an optimizer keeps no more already."""

    kind: type[torch.optim.Optimizer]
    is_like: Callable[[torch.optim.Optimizer], bool]
    options: Mapping[str, Any] = field(default_factory=dict)


def _keeps_nothing(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)


def _is_small(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adafactor) or _keeps_nothing(optimizer)


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
    """Return an optimizer's name."""
    if isinstance(optimizer, torch.optim.SGD):
        return "SGD without momentum" if _keeps_nothing(optimizer) else "SGD with momentum"
    return type(optimizer).__name__


def replace_optimizers(key: str, count: Callable[[], None]) -> None:
    """Have every optimizer of torch's that the program makes be one of another kind from now on.

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
    """Make what is of a class with these options from now on, overriding the program's. `count`: for each."""
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
    """Make the other optimizer for the same groups of parameters.

    Args:
        kept: options that mean the same thing to both.
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


# Another loss

CHUNKED_FROM = 8192
"""Classes from which a loss is cut: the vocabulary of a language model."""

_KEPT_OPTIONS = ("ignore_index", "reduction", "label_smoothing")
_PLAIN = nn.functional.cross_entropy
_piece = threading.local()
"""Whether this thread is at the loss of a piece, which is not to be cut."""


def why_not_chunked(logits: Any, target: Any, *args: Any, **kwargs: Any) -> str:
    """Say why a call of `torch.nn.functional.cross_entropy` is left as it is; empty if it is cut."""
    if logits.dim() != 2 or logits.shape[1] < CHUNKED_FROM:
        return f"no cross-entropy of torch over {CHUNKED_FROM:,} classes or more"
    if not logits.requires_grad:
        return "the loss has no gradient"
    if target.is_floating_point() or target.dim() != 1:
        return "the loss is against probabilities, not classes"
    if args or any(value is not None for name, value in kwargs.items() if name not in _KEPT_OPTIONS):
        return "the loss weighs its classes"
    if kwargs.get("reduction", "mean") not in ("mean", "sum"):
        return "the loss is not summed"
    return ""


def chunked_cross_entropy(count: Callable[[], None]) -> None:
    """Cut every loss that can be, from now on. `count`: called for each."""

    @functools.wraps(_PLAIN)
    def cross_entropy(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002  as torch's is called
        if getattr(_piece, "is_computed", False) or why_not_chunked(input, target, *args, **kwargs):
            return _PLAIN(input, target, *args, **kwargs)
        count()
        options = {name: kwargs[name] for name in ("ignore_index", "label_smoothing") if name in kwargs}
        total = _InPieces.apply(input, target, options)  # type: ignore[no-untyped-call]
        if kwargs.get("reduction") == "sum":
            return total
        return total / (target != kwargs.get("ignore_index", -100)).sum()

    functions: Any = nn.functional
    functions.cross_entropy = cross_entropy


class _InPieces(torch.autograd.Function):
    """The summed loss. In backward only the gradient of the logits is as large as the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Any, target: Any, options: dict[str, Any]) -> Any:
        ctx.save_for_backward(logits, target)
        ctx.options = options
        ctx.wide = torch.is_autocast_enabled("cuda")
        losses = [_loss(piece, wanted, ctx) for piece, wanted in _pieces(logits, target)]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        logits, target = ctx.saved_tensors
        found = torch.empty_like(logits)
        for (piece, wanted), place in zip(_pieces(logits, target), _cut(found), strict=True):
            with torch.enable_grad():
                leaf = piece.detach().requires_grad_()
                loss = _loss(leaf, wanted, ctx)
            place.copy_(torch.autograd.grad(loss, leaf, gradient)[0])  # not kept while the next piece is computed
        return found, None, None


def _loss(piece: Any, wanted: Any, ctx: Any) -> Any:
    """Return a piece's loss, in 32 bits where autocast was on, as autocast would; in backward it is off."""
    _piece.is_computed = True  # torch may look its function up by name again, and find the one that cuts
    try:
        return _PLAIN(piece.float() if ctx.wide else piece, wanted, reduction="sum", **ctx.options)
    finally:
        _piece.is_computed = False


def _pieces(logits: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    return zip(_cut(logits), _cut(target), strict=True)


def _cut(rows: Any) -> Any:
    return rows.chunk(LOSS_CHUNKS)


# A block that is computed again in backward


def checkpointed(block: nn.Module) -> None:
    """Keep nothing of a block but its inputs."""
    forward = block.forward

    @functools.wraps(forward)
    def kept(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return _CHECKPOINT(functools.partial(forward, **kwargs), *args, use_reentrant=False)

    block.forward = kept
