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

from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.device.base import library

Kernel = Literal["cudnn", "flash", "efficient", "math"]
ASKED_FOR: dict[str, Kernel] = {
    "_can_use_flash_attention": "flash",
    "_can_use_mem_efficient_attention": "efficient",
    "_can_use_cudnn_attention": "cudnn",
}
"""By name of torch's C++ what is asked whether a kernel serves."""
_HALF = (torch.float16, torch.bfloat16)
_BIAS_ALIGNMENT = 8
"""The number of which the efficient kernel wants every stride of a bias to be a multiple (attention.cpp,
`preprocess_mask`)."""
_SIXTEENTHS_SINCE = (2, 12)
"""cuDNN's kernel has dropout in steps of 1/16, and serves no other since pytorch/pytorch#174245, of February 2026."""
_state = threading.local()


def register(profile: Callable[[], Profile]) -> None:
    """Route `F.scaled_dot_product_attention` on the simulated device. Call once per process."""
    aten = library("aten")

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = Attention(*args, **kwargs)
        return call.run(call.kernel(profile()))

    aten.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")


def can_use(kernel: Kernel, profile: Callable[[], Profile]) -> Callable[[Any, bool], bool]:
    """Return what answers for CUDA whether a kernel serves, as attention of jagged tensors asks before it picks one."""

    def answered(call: Any, _says_why: bool = False) -> bool:
        tensors = call.query, call.key, call.value, call.attn_mask
        asked = Attention(*tensors, call.dropout, call.is_causal, enable_gqa=call.enable_gqa)
        return asked.serving(profile())[kernel]()

    return answered


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

    def serving(self, profile: Profile) -> dict[Kernel, Callable[[], bool]]:
        """Return for each kernel whether it is enabled and serves this call by a profile."""
        cuda, capability = torch.backends.cuda, profile.compute_capability
        return {
            "flash": lambda: cuda.flash_sdp_enabled() and self._flash_serves(capability),
            "efficient": lambda: cuda.mem_efficient_sdp_enabled() and self._efficient_serves(capability),
            "math": cuda.math_sdp_enabled,
            "cudnn": lambda: cuda.cudnn_sdp_enabled() and self._cudnn_serves(profile),
        }

    def kernel(self, profile: Profile) -> Kernel:
        """Return the kernel that PyTorch picks by a profile.

        Raises:
            RuntimeError: every kernel that could serve is disabled, as PyTorch does ("No available kernel").
        """
        capability, serves = profile.compute_capability, self.serving(profile)
        order: list[Kernel] = sorted(serves, key=lambda name: profile.prefers_cudnn_attention and name != "cudnn")
        for kernel in order:
            if serves[kernel]():
                return kernel
        raise RuntimeError(
            f"No available kernel: {self.query.dtype} attention with a head size of {self.query.shape[-1]} on compute "
            f"capability {capability[0]}.{capability[1]} is not served by the enabled kernels"
        )

    def run(self, kernel: Kernel) -> torch.Tensor:
        """Return the result of a kernel, as torch's own operators shape it."""
        if kernel == "flash":
            return self._flash()
        bias = self._bias()
        if kernel == "efficient":
            return self._efficient(bias)
        aten: Any = torch.ops.aten
        result: torch.Tensor
        if kernel == "cudnn":
            result = aten._scaled_dot_product_cudnn_attention(
                self.query, self.key, self.value, bias, self._trains, self.dropout_p, self.is_causal, scale=self.scale
            )[0]
            return result
        before, _state.adds_in_place = adds_in_place(), True
        try:
            result = aten._scaled_dot_product_attention_math(
                self.query, self.key, self.value, bias, self.dropout_p, self.is_causal,
                scale=self.scale, enable_gqa=self.enable_gqa,
            )[0]  # fmt: skip
        finally:
            _state.adds_in_place = before
        return result

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value

    @property
    def _trains(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._tensors)

    def _is_plain(self, *, ignores_single: bool) -> bool:
        """Return whether four dimensions, types, batch sizes and the last strides are as every fused kernel wants them.

        `check_tensor_shapes`, `check_tensor_dtype`, `check_nonzero_sequence_lengths_dense` and
        `check_last_dim_stride_equals_1_dense` of sdp_utils_cpp.h, which asks it of the mask too.
        """
        query, mask = self.query, self.attn_mask
        if any(tensor.dim() != 4 or tensor.dtype != query.dtype for tensor in self._tensors):
            return False
        lies_in_rows = all(tensor.stride(-1) == 1 for tensor in self._tensors)
        return (
            self.key.shape[0] == self.value.shape[0] == query.shape[0]
            and (query.is_nested or bool(query.shape[2] and self.key.shape[2]))
            and (lies_in_rows or (ignores_single and query.shape[-1] == 1))
            and (mask is None or mask.stride(-1) == 1)
        )

    def _shares_heads(self, *, as_groups: bool) -> bool:
        """Return whether the heads are as many, or may be groups (`check_batch_size_and_num_heads_dense`)."""
        heads, others = self.query.shape[1], (self.key.shape[1], self.value.shape[1])
        if as_groups and self.enable_gqa:
            return not any(heads % other for other in others)
        return others == (heads, heads)

    def _cudnn_serves(self, profile: Profile) -> bool:
        """Return what `can_use_cudnn_attention` does, as the library of 2.11 has it."""
        query, version = self.query, profile.cudnn
        if not version or profile.compute_capability < (8, 0) or query.dtype not in _HALF:
            return False
        if not self._is_plain(ignores_single=True) or not self._shares_heads(as_groups=True):
            return False
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            return False
        if self.dropout_p and not self._cudnn_drops(profile):
            return False
        widths = query.shape[-1], self.value.shape[-1]
        widest = 128
        if profile.compute_capability == (9, 0) and version >= 91000:
            widest = 256
        elif profile.compute_capability[0] == 10 and version >= 91100 and widths == (192, 128):
            widest = 192
        fits = max(widths) <= widest and not any(width % 8 for width in widths)
        return fits and self.key.shape[2] != 1 and self._cudnn_adds_mask()

    def _cudnn_drops(self, profile: Profile) -> bool:
        in_steps = profile.version < _SIXTEENTHS_SINCE or (self.dropout_p * 16).is_integer()
        return in_steps and self.query.shape[2] != 1 and not 91100 < profile.cudnn < 91400

    def _cudnn_adds_mask(self) -> bool:
        """Return what `check_attn_mask_shape` does: a bias without a gradient that spreads over the scores."""
        mask = self.attn_mask
        if mask is None:
            return True
        scores = (*self.query.shape[:3], self.key.shape[2])
        spreads = all(one in (1, wanted) for one, wanted in zip(reversed(mask.shape), reversed(scores), strict=False))
        return not mask.requires_grad and mask.dim() in (2, 4) and spreads

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
            and self._is_plain(ignores_single=True)
            and self._shares_heads(as_groups=True)
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
        if compute_capability < (5, 0) or not self._is_plain(ignores_single=False):
            return False
        tensor_cores = compute_capability >= (8, 0) or (half and compute_capability >= (7, 0))
        alignment = (8 if half else 4) if tensor_cores else 1
        is_aligned = query.shape[-1] % alignment == 0 and self.value.shape[-1] % alignment == 0
        is_aligned = is_aligned and query.shape[-1] == self.key.shape[-1]
        return is_aligned and self._shares_heads(as_groups=False) and (half or query.dtype == torch.float32)

    def _bias(self) -> torch.Tensor | None:
        """Return the mask; of a Boolean one what it adds, in the query's type (`convert_boolean_attn_mask`)."""
        mask = self.attn_mask
        if mask is None or mask.dtype != torch.bool:
            return mask
        lowest = torch.scalar_tensor(-torch.inf, dtype=self.query.dtype, device=mask.device)
        return torch.where(mask, 0.0, lowest)

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

    def _efficient(self, bias: torch.Tensor | None) -> torch.Tensor:
        """Run the kernel that reads several elements of a bias at once: it is padded to that, and cut, where needed."""
        query, key = self.query, self.key
        if bias is not None:
            if any(stride % _BIAS_ALIGNMENT for stride in bias.stride()[:-1]):
                keys = bias.shape[-1]
                bias = pad(bias, (0, _BIAS_ALIGNMENT - keys % _BIAS_ALIGNMENT))[..., :keys]
            bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        result: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, self.value, bias, self._trains, self.dropout_p, self.is_causal, scale=self.scale
        )[0]
        return result
