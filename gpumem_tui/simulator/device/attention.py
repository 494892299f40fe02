"""Which scaled-dot-product kernel CUDA would run, on the simulated device.

Follows aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: the kernels a user has enabled, in priority order, the
first whose constraints the inputs meet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import pad

from gpumem_tui.simulator.device.base import library

Kernel = Literal["flash", "efficient", "math"]
_HALF = (torch.float16, torch.bfloat16)
_state = threading.local()


def register(compute_capability: Callable[[], tuple[int, int]]) -> None:
    """Route `F.scaled_dot_product_attention` on the simulated device. Call once per process."""
    aten = library("aten")

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = Attention(*args, **kwargs)
        return call.run(call.kernel(compute_capability()))

    aten.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")


def adds_in_place() -> bool:
    """Return whether this thread composes attention, of which the only sum is that of scores and mask.

    On a GPU that is in place (`attn.add_(*attn_mask)` in aten/src/ATen/native/transformers/attention.cpp); where a
    Python mode is active, torch makes another tensor of scores, in the wider type of the two.
    """
    return getattr(_state, "adds_in_place", False)


@dataclass(frozen=True)
class Attention:
    """A call of `F.scaled_dot_product_attention`; tensors are [batch, heads, tokens, width]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def kernel(self, compute_capability: tuple[int, int]) -> Kernel:
        """Return the kernel that PyTorch picks on a GPU of this compute capability.

        Where it would prefer cuDNN's (see `scratch.is_assumed`), the next in line is taken.

        Raises:
            RuntimeError: every kernel that could serve is disabled, as PyTorch does ("No available kernel").
        """
        if torch.backends.cuda.flash_sdp_enabled() and self._flash_serves(compute_capability):
            return "flash"
        if torch.backends.cuda.mem_efficient_sdp_enabled() and self._efficient_serves(compute_capability):
            return "efficient"
        if torch.backends.cuda.math_sdp_enabled():
            return "math"
        raise RuntimeError(
            f"No available kernel: {self.query.dtype} attention with a head size of {self.query.shape[-1]} on compute "
            f"capability {compute_capability[0]}.{compute_capability[1]} is not served by the enabled kernels"
        )

    def run(self, kernel: Kernel) -> torch.Tensor:
        """Return the result of a kernel, as torch's own operators shape it."""
        if kernel == "flash":
            return self._flash()
        if kernel == "efficient":
            return self._efficient()
        before, _state.adds_in_place = adds_in_place(), True
        try:
            result: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
                self.query, self.key, self.value, self.attn_mask, self.dropout_p, self.is_causal,
                scale=self.scale, enable_gqa=self.enable_gqa,
            )[0]  # fmt: skip
        finally:
            _state.adds_in_place = before
        return result

    @property
    def _trains(self) -> bool:
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def _flash_serves(self, compute_capability: tuple[int, int]) -> bool:
        query, width = self.query, self.query.shape[-1]
        # A head may be too wide for the shared memory of small chips to differentiate:
        # `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`.
        small = (8, 6) <= compute_capability <= (8, 9) or (12, 0) <= compute_capability <= (12, 1)
        too_wide = small and (192 < width <= 224 or (width > 224 and self.dropout_p > 0))
        return (
            compute_capability >= (8, 0)
            and query.dtype in _HALF
            and self.attn_mask is None
            and query.dim() == 4
            and width == self.key.shape[-1] == self.value.shape[-1]
            and width <= 256
            and not (self.is_causal and query.shape[-2] != self.key.shape[-2])
            and not (self._trains and too_wide)
        )

    def _efficient_serves(self, compute_capability: tuple[int, int]) -> bool:
        query = self.query
        half = query.dtype in _HALF
        if query.dtype == torch.bfloat16 and compute_capability < (8, 0):
            return False
        if compute_capability < (5, 0) or self.enable_gqa or query.dim() != 4:
            return False
        tensor_cores = compute_capability >= (8, 0) or (half and compute_capability >= (7, 0))
        alignment = (8 if half else 4) if tensor_cores else 1
        is_aligned = query.shape[-1] % alignment == 0 and self.value.shape[-1] % alignment == 0
        return is_aligned and (half or query.dtype == torch.float32)

    def _flash(self) -> torch.Tensor:
        """Run FlashAttention-2, which takes head sizes in multiples of 8; others are padded and the result cut."""
        query, key, value, head = self.query, self.key, self.value, self.query.shape[-1]
        scale = self.scale if self.scale is not None else head**-0.5
        if head % 8:
            query, key, value = (pad(tensor, (0, 8 - head % 8)) for tensor in (query, key, value))
        result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, self.dropout_p, self.is_causal, return_debug_mask=False, scale=scale
        )[0]
        return result[..., :head] if head % 8 else result

    def _efficient(self) -> torch.Tensor:
        """Run the kernel that adds a bias of the query's type, so a Boolean mask becomes one, as in C++."""
        query, key, bias = self.query, self.key, self.attn_mask
        if bias is not None:
            if bias.dtype == torch.bool:
                bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), -torch.inf)
            bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        result: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, self.value, bias, self._trains, self.dropout_p, self.is_causal, scale=self.scale
        )[0]
        return result
