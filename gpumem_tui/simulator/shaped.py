"""Results whose shapes follow from values: what operators such as `nonzero` give where the values are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gpumem_tui.simulator.values import SHAPED_BY_VALUES, Unknown, Values

_aten: Any = torch.ops.aten
_EQUAL, _CLOSE, _MASKED_SELECT = _aten.equal.default, _aten.allclose.default, _aten.masked_select.default
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
        except Unknown:
            if func is _EQUAL or func is _CLOSE:  # as of zeros
                return func is _CLOSE or args[0].shape == args[1].shape
            if func is _MASKED_SELECT:
                return self._selected(*args)
            raise

    def _selected(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        known = self._values.of(mask)
        if known is None:
            raise Unknown
        taken = int(known.expand(torch.broadcast_shapes(mask.shape, tensor.shape)).sum())
        return torch.empty(taken, dtype=tensor.dtype, device="meta")

    def _connectionist_loss(self, args: tuple[Any, ...]) -> Any:
        """The losses, and the table of paths that its backward needs, as wide as the longest target.

        Arguments are (log probabilities, targets, input lengths, target lengths, …).
        """
        inputs, targets = (self._numbers(lengths) for lengths in args[2:4])
        return _CTC[0](_without_data(args[0]), _without_data(args[1]), inputs, targets, *args[4:])

    def _numbers(self, lengths: Any) -> list[int]:
        if not isinstance(lengths, torch.Tensor):
            return list(lengths)
        known = self._values.of(lengths) if lengths.device.type != "cpu" else lengths
        if known is None:
            raise Unknown
        return [int(length) for length in known]


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
