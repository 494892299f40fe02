"""Cross-entropy over many classes in pieces, each computed again in backward: no second copy of all logits is kept."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gpumem_tui.formula.extras import LOSS_CHUNKS

CHUNKED_FROM = 8192
"""Classes from which a loss is cut: the vocabulary of a language model."""

_KEPT_OPTIONS = ("ignore_index", "reduction", "label_smoothing")
_PLAIN = nn.functional.cross_entropy
_piece = threading.local()
"""Whether this thread is at the loss of a piece, which is not to be cut."""


def why_not_chunked(logits: Any, target: Any, *args: Any, **kwargs: Any) -> str:
    """Why a call of `torch.nn.functional.cross_entropy` is left as it is; empty if it is cut."""
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
    """The summed loss. Of backward, only the gradient of the logits is as large as the logits are."""

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
    """As autocast would, in 32 bits where it was on; it is off in backward."""
    _piece.is_computed = True  # torch may look its function up by name again, and find the one that cuts
    try:
        return _PLAIN(piece.float() if ctx.wide else piece, wanted, reduction="sum", **ctx.options)
    finally:
        _piece.is_computed = False


def _pieces(logits: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    return zip(_cut(logits), _cut(target), strict=True)


def _cut(rows: Any) -> Any:
    return rows.chunk(LOSS_CHUNKS)
