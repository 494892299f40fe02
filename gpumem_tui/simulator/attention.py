"""Which scaled-dot-product kernel CUDA would run, on the simulated device.

Follows aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: the kernels a user has enabled, in priority order, the
first whose constraints the inputs meet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import torch

Kernel = Literal["flash", "efficient", "math"]
_libraries: list[torch.library.Library] = []
_state = threading.local()


def register(compute_capability: Callable[[], tuple[int, int]]) -> None:
    """Route `F.scaled_dot_product_attention` on the simulated device. Call once per process."""
    aten = torch.library.Library("aten", "IMPL")

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        kernel = choose(query, key, value, attn_mask, compute_capability(), enable_gqa, dropout_p, is_causal)
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kernel == "efficient":
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        before, _state.adds_in_place = adds_in_place(), True
        try:
            result: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        finally:
            _state.adds_in_place = before
        return result

    aten.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    _libraries.append(aten)


def adds_in_place() -> bool:
    """Whether this thread composes attention, of which the only sum is that of scores and mask.

    On a GPU that is in place (`attn.add_(*attn_mask)` in aten/src/ATen/native/transformers/attention.cpp); where a
    Python mode is active, torch makes another tensor of scores, in the wider type of the two.
    """
    return getattr(_state, "adds_in_place", False)


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    compute_capability: tuple[int, int],
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Kernel:
    """The kernel PyTorch picks on a GPU of this compute capability.

    Where it would prefer cuDNN's (see `scratch.is_assumed`), the next in line is taken.

    Raises:
        RuntimeError: every kernel that could serve is disabled, as PyTorch does ("No available kernel").
    """
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    flash = (
        torch.backends.cuda.flash_sdp_enabled()
        and _flash_serves(query, key, value, attn_mask, compute_capability)
        and not (is_causal and query.shape[-2] != key.shape[-2])
        and not (trains and _flash_backward_lacks(query.shape[-1], dropout_p, compute_capability))
    )
    if flash:
        return "flash"
    if torch.backends.cuda.mem_efficient_sdp_enabled() and _efficient_serves(
        query, key, value, compute_capability, enable_gqa
    ):
        return "efficient"
    if torch.backends.cuda.math_sdp_enabled():
        return "math"
    raise RuntimeError(
        f"No available kernel: {query.dtype} attention with a head size of {query.shape[-1]} on compute "
        f"capability {compute_capability[0]}.{compute_capability[1]} is not served by the enabled kernels"
    )


def _flash_serves(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    compute_capability: tuple[int, int],
) -> bool:
    same_head = query.shape[-1] == key.shape[-1] == value.shape[-1]
    return (
        compute_capability >= (8, 0)
        and query.dtype in (torch.float16, torch.bfloat16)
        and attn_mask is None
        and query.dim() == 4
        and same_head
        and query.shape[-1] <= 256
    )


def _flash_backward_lacks(width: int, dropout_p: float, compute_capability: tuple[int, int]) -> bool:
    """Whether a head is too wide for the shared memory of small chips to differentiate.

    `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`.
    """
    small = (8, 6) <= compute_capability <= (8, 9) or (12, 0) <= compute_capability <= (12, 1)
    return small and (192 < width <= 224 or (width > 224 and dropout_p > 0))


def _efficient_serves(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    compute_capability: tuple[int, int],
    enable_gqa: bool,
) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.dtype == torch.bfloat16 and compute_capability < (8, 0):
        return False
    if compute_capability < (5, 0) or enable_gqa or query.dim() != 4 or not (half or query.dtype == torch.float32):
        return False
    tensor_cores = compute_capability >= (8, 0) or (half and compute_capability >= (7, 0))
    alignment = (8 if half else 4) if tensor_cores else 1
    return query.shape[-1] % alignment == 0 and value.shape[-1] % alignment == 0


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """FlashAttention-2 takes head sizes in multiples of 8; others are padded and the result cut."""
    head = query.shape[-1]
    scale = scale if scale is not None else head**-0.5
    if head % 8:
        pad = (0, 8 - head % 8)
        query, key, value = (torch.nn.functional.pad(tensor, pad) for tensor in (query, key, value))
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale
    )[0]
    return result[..., :head] if head % 8 else result


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The kernel adds a bias of the query's dtype, so a Boolean mask becomes one, as in C++."""
    bias: Any = attn_mask
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_grad = any(tensor.requires_grad for tensor in (query, key, value)) and torch.is_grad_enabled()
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return result
