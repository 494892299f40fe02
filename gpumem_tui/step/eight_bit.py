"""The state of an 8-bit optimizer, without its computation. Beyond the standard library only torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_tui.step.walking import local

_QUANTIZED_FROM = 4096
_BLOCK = 256
_CODES = 256
"""bitsandbytes 0.48, optim/optimizer.py: `min_8bit_size`, `blocksize`; functional.py: entries of a quantization map."""


class EightBitAdamW(torch.optim.Optimizer):
    """An optimizer with the state of bitsandbytes' `AdamW8bit` that computes nothing: there are no values to compute.

    For every parameter of 4,096 elements or more two bytes an element and two 32-bit scales for every block of 256; for
    smaller ones two 32-bit moments; two quantization maps for all (bitsandbytes, optim/optimizer.py).
    """

    def __init__(self, params: Any, lr: Any = 1e-3, weight_decay: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay})
        self._maps: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the state of every parameter that has a gradient; the kernels update in place."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self._make_state(parameter)
                    parameter.grad = parameter.grad.contiguous()
        return loss

    def _make_state(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        mine = local(parameter)
        if mine.numel() < _QUANTIZED_FROM:
            for name in ("state1", "state2"):
                state[name] = torch.zeros_like(mine, dtype=torch.float32)
            return
        if not self._maps:
            self._maps = {name: torch.zeros(_CODES).to(mine.device) for name in ("qmap1", "qmap2")}
        for name in ("state1", "state2"):
            state[name] = torch.zeros_like(mine, dtype=torch.uint8)
        for name in ("absmax1", "absmax2"):
            state[name] = torch.zeros(-(-mine.numel() // _BLOCK), dtype=torch.float32, device=mine.device)
        state.update(self._maps)
