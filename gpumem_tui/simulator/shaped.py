"""Results whose shapes follow from values: what operators such as `nonzero` give where the values are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gpumem_tui.simulator.values import SHAPED_BY_VALUES, UnknownValue, Values

_aten: Any = torch.ops.aten
_EQUAL, _CLOSE, _MASKED_SELECT = _aten.equal.default, _aten.allclose.default, _aten.masked_select.default
_NONZERO = _aten.nonzero.default
_UNIQUE_CONSECUTIVE = _aten.unique_consecutive.default
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_UNIQUE = (_aten._unique2.default, _UNIQUE_CONSECUTIVE)
PACK = _aten._pack_padded_sequence.default
_CTC = (_aten._ctc_loss.default, _aten._ctc_loss.Tensor)
TAKEN_FROM_VALUES = SHAPED_BY_VALUES.union((PACK, _CLOSE, *_CTC))
"""Operators that this module answers, as far as the values that it takes are known."""


class Shapes:
    """What operators in `TAKEN_FROM_VALUES` give.

    Args:
        values: what is known of the tensors on the device.
    """

    def __init__(self, values: Values) -> None:
        self._values = values

    def of_result(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result as tensors that have its shapes; `PACK`'s second one is the host's, with its values.

        Raises:
            Unknown: the shapes depend on values that are not known.
        """
        if func is PACK:
            return func(_without_data(args[0]), *args[1:])
        if func in _CTC:
            return self._connectionist_loss(args)
        try:
            return self._values.result_on_host(func, args, kwargs)
        except UnknownValue:
            if func is _EQUAL or func is _CLOSE:  # as of zeros
                return func is _CLOSE or args[0].shape == args[1].shape
            if func is _MASKED_SELECT:
                return self._selected(*args)
            raise

    def _selected(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        known = self._values.of(mask)
        if known is None:
            raise UnknownValue
        taken = int(known.expand(torch.broadcast_shapes(mask.shape, tensor.shape)).sum())
        return torch.empty(taken, dtype=tensor.dtype, device="meta")

    def _connectionist_loss(self, args: tuple[Any, ...]) -> Any:
        """The losses, and the table of paths that its backward needs, as wide as the longest target.

        Arguments are (log probabilities, targets, input lengths, target lengths, …). Lengths that are not known are
        taken for the longest there can be: of the inputs none makes the table smaller (`log_alpha` in
        aten/src/ATen/native/cuda/LossCTC.cu).
        """
        values, targets, *lengths = args[:4]
        inputs = self._numbers(lengths[0], values.shape[0])
        wanted = self._numbers(lengths[1], targets.shape[1] if targets.dim() == 2 else None)
        return _CTC[0](_without_data(values), _without_data(targets), inputs, wanted, *args[4:])

    def _numbers(self, lengths: Any, most: int | None) -> list[int]:
        if not isinstance(lengths, torch.Tensor):
            return list(lengths)
        known = self._values.of(lengths) if lengths.device.type != "cpu" else lengths
        if known is not None:
            return [int(length) for length in known]
        if most is None:
            raise UnknownValue
        return [most] * lengths.numel()


@dataclass
class AssumedRows:
    """What share is kept where operators such as `nonzero` keep what unknown values tell them to.

    Attributes:
        shares: by place in the program (``FILE:LINE``; empty for every other one) the share, from 0 to 1.
        used: a line for each place at which one was assumed.
    """

    shares: tuple[tuple[str, float], ...] = ()
    used: dict[str, None] = field(default_factory=dict)

    def at(self, line: str, func: Any) -> float | None:
        """The share at a line of the program, None where none is given."""
        found = next((share for place, share in self.shares if place and line.endswith(place)), None)
        if found is None:
            found = dict(self.shares).get("")
        if found is not None:
            self.used[f"{line}: {func} is assumed to keep {100 * found:g} % (--assume-rows)"] = None
        return found


def by_assumption(func: Any, args: tuple[Any, ...], share: float) -> Any:
    """What an operator in `TAKEN_FROM_VALUES` would give if it kept `share` of what it looks at, evenly spread.

    Raises:
        Unknown: it keeps no share of anything.
    """
    if func is _MASKED_SELECT:
        return torch.empty(
            _kept(torch.broadcast_shapes(args[0].shape, args[1].shape), share), dtype=args[0].dtype, device="cpu"
        )
    if _is_selection(func):
        return _spread(args[0].shape[:1], share)
    if func is _NONZERO:
        shape = args[0].shape
        flat = _spread(shape, share)
        kept = len(flat)
        if not shape:
            return flat.new_empty((kept, 0))
        return torch.stack(torch.unravel_index(flat, shape), dim=1)
    if func in _UNIQUE:
        inverse, counts = args[1:3] if func is _UNIQUE_CONSECUTIVE else (*args[2:4], False, False)[:2]
        values = torch.empty(_kept(args[0].shape, share), dtype=args[0].dtype, device="cpu")
        numbers = torch.empty_like(values, dtype=torch.int64)
        none = numbers.new_empty(0)
        return values, none.new_empty(args[0].shape) if inverse else none, numbers if counts else none
    raise UnknownValue


def can_be_assumed(func: Any) -> bool:
    """Whether `by_assumption` knows what an operator keeps, or one that it is made of."""
    return func in (_MASKED_SELECT, _NONZERO, *_UNIQUE, *_INDEXED) or _is_selection(func)


def _is_selection(func: Any) -> bool:
    """Whether an operator gives the numbers of those boxes that do not overlap a better one."""
    return bool(func._opname == "nms" and func.namespace == "torchvision")


def _spread(shape: tuple[int, ...], share: float) -> torch.Tensor:
    """The numbers of a share of all elements, evenly spread."""
    kept = _kept(shape, share)
    return (torch.arange(kept, device="cpu") * (math.prod(shape) / max(1, kept))).long()


def _kept(shape: tuple[int, ...], share: float) -> int:
    return math.ceil(math.prod(shape) * share)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
