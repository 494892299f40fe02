"""How tensors of the host become tensors without data, where an operator on the device takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode


class HostConverter(FakeTensorConverter):
    """Converts plain tensors at once; torch's own way serves tracers too, loads the compiler, and takes a hundred times
    as long.
    """

    def from_real_tensor(
        self, fake_mode: FakeTensorMode, t: torch.Tensor, make_constant: bool = False, *args: Any, **kwargs: Any
    ) -> FakeTensor:
        """`t` without its data."""
        if make_constant or args or not is_plain(t):
            return super().from_real_tensor(fake_mode, t, make_constant, *args, **kwargs)
        with torch._C._DisableTorchDispatch():
            elem = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            return FakeTensor(fake_mode, elem, t.device)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether all that operators below autograd ask of a host tensor is its shape, strides, type and values."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_neg() or tensor.is_complex())
    )
