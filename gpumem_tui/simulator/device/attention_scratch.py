"""Device memory that the kernels of scaled dot product attention take for themselves while they run.

Arguments are those of the operators: tensors are [batch, heads, tokens, width].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gpumem_tui.simulator.allocator.profile import Profile, per_multiprocessor
from gpumem_tui.simulator.allocator.rules import Buffer, Computed, GivenBack, Taken

_FLOAT_BYTES = 4
FLASH_ROWS = 128
_RANDOM_STATE_BYTES = 16

_CUDNN_PLAN_BYTES = 256
"""Memory of a cuDNN plan besides its frontend's request: 256 bytes in each call that was recorded on an H200
(torch 2.11, cuDNN 9.19), forward and backward, in fp16 and bf16, 64 and 128 wide, causal or not, with dropout or not,
of 128 to 1,024 tokens, 197 among them."""

_LARGEST_SHARED_BYTES = 160 << 10
"""Kernels of 128 by 128 in 16 bits need the shared memory of an A100 or H100, which the chips for consumers lack."""


def safe_softmax(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Take which elements and which whole rows are masked, and a zero; the result is chosen in place.

    aten/src/ATen/native/transformers/attention.cpp, `_safe_softmax` (since pytorch/pytorch#139613, of November 2024).
    Arguments are (scores, dimension, …).
    """
    scores, dimension = args[:2]
    return [scores.numel(), scores.numel() // scores.shape[dimension], scores.element_size()]


def rounded(count: int, of: int) -> int:
    """Return the next multiple."""
    return math.ceil(count / of) * of


def flash_columns(width: int) -> int:
    """Return how wide a head's fp32 accumulator is in FlashAttention-2."""
    return rounded(width, 32 if width <= 128 else 64)


def flash_forward(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Take the random state a second time where there is dropout (flash_attn/flash_api.cpp, `mha_fwd`).

    Arguments are (query, key, value, dropout, …).
    """
    return [_RANDOM_STATE_BYTES] if len(args) > 3 and args[3] > 0 else []


def flash_backward(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Take row sums and the query gradient's fp32 accumulator; with grouped heads key and value gradients per head.

    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd` (non-deterministic).
    Arguments are grad_out, query, key, value, ….
    """
    gradient, query, key = args[:3]
    batch, heads, tokens, width = query.shape
    rows, columns = rounded(tokens, FLASH_ROWS), flash_columns(width)
    copied = _copied_by_tokens(gradient)
    buffers = [*copied, batch * heads * rows * _FLOAT_BYTES, batch * rows * heads * columns * _FLOAT_BYTES]
    if key.shape[1] != heads:
        buffers += [batch * key.shape[2] * heads * width * query.element_size()] * 2
    return buffers


def flash_backward_of_rows(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Take the scratch where tokens come before heads; of sequences one after the other each is padded to 128 rows.

    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_varlen_bwd`. Arguments are grad_out, query,
    key, value, out, logsumexp, cum_seq_q, ….
    """
    gradient, query, key = args[:3]
    if args[6] is None:
        return flash_backward([one.transpose(1, 2) for one in args[:3]], profile)
    tokens, heads, width = query.shape
    rows = tokens + FLASH_ROWS * (args[6].numel() - 1)
    columns = flash_columns(width)
    copied = [] if gradient.is_contiguous() else [gradient.numel() * gradient.element_size()]
    buffers = [*copied, heads * rows * _FLOAT_BYTES, rows * heads * columns * _FLOAT_BYTES]
    if key.shape[1] != heads:
        buffers += [key.shape[0] * heads * width * query.element_size()] * 2
    return buffers


def cudnn_forward(_args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Take the plan's workspace (aten/src/ATen/native/cudnn/MHA.cpp, `run_cudnn_SDP_fprop`)."""
    return [_CUDNN_PLAN_BYTES]


def cudnn_backward(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Take one workspace: an fp32 figure a row, the query gradient in fp32, and the plan's.

    cudnn-frontend, include/cudnn_frontend/node/scaled_dot_product_flash_attention.h, `CompositeSDPABackwardNode`:
    `softmax_sum` and `dQ_accum`; of grouped heads `dK_fullhead` and `dV_fullhead` too, key's and value's gradients of
    every query head in 16 bits. So were the 47 recordings' and the programs' workspaces on an H200, to the byte:
    50,528,512 bytes of 4 × 12 heads (of keys 4) × 1,024 × 128, 9,834,496 of 16 × 12 × 197 × 64.
    MHA.cpp, `run_cudnn_SDP_bprop`: a gradient whose last dimension is strided is copied.
    Arguments are grad_out, query, key, value, ….
    """
    gradient, query, key, value = args[:4]
    batch, heads, tokens, width = query.shape
    workspace_bytes = batch * heads * tokens * (width + 1) * _FLOAT_BYTES + _CUDNN_PLAN_BYTES
    for grouped in (key, value):
        if grouped.shape[1] != heads:
            workspace_bytes += batch * heads * grouped.shape[2] * grouped.shape[3] * query.element_size()
    copied = [] if gradient.stride(-1) == 1 else [gradient.numel() * gradient.element_size()]
    return [*copied, workspace_bytes]


def efficient_backward(args: Sequence[Any], profile: Profile) -> list[Taken]:
    """Take row sums of gradient · output, and the kernel's accumulators.

    aten/src/ATen/native/transformers/cuda/attention_backward.cu, `_efficient_attention_backward`: in 16 bits the kernel
    makes the sums (`kKernelComputesDelta`); else there are a full product in fp32, its sums, and these by head.
    Arguments are grad_out, query, key, value, ….
    """
    gradient, query, key, value = args[:4]
    batch, heads, tokens, width = query.shape
    is_half = query.element_size() <= 2
    rows, columns, in_registers = _efficient_block(
        is_half, max(width, value.shape[3]), bool(len(args) > 9 and args[9]), profile.compute_capability
    )
    accumulates = 0 if profile.compute_capability < (7, 0) and not is_half else 1
    taken: list[Taken] = list(_copied_by_tokens(gradient))
    sums_bytes = batch * heads * tokens * _FLOAT_BYTES
    first = len(taken)
    if is_half and (in_registers or profile.compute_capability >= (7, 5) or profile.compute_capability < (7, 0)):
        taken.append(sums_bytes)
    else:
        product_bytes = gradient.numel() * _FLOAT_BYTES
        casts = [product_bytes] * 2 if is_half else []
        taken += [*casts, product_bytes, sums_bytes]
        if heads > 1 and tokens > 1:
            taken.append(sums_bytes)
            taken += [GivenBack(position) for position in reversed(range(first, first + len(casts) + 2))]
    arguments = (
        batch * heads, tokens, key.shape[2], width, value.shape[3], rows, columns, accumulates,
        int(is_half and not in_registers),
    )  # fmt: skip
    sums = max(position for position, one in enumerate(taken) if not isinstance(one, GivenBack))
    return [*taken, Computed("efficient_attention_gradient", 0, arguments), GivenBack(sums)]


def efficient_backward_of_rows(args: Sequence[Any], profile: Profile) -> list[Taken]:
    """Take the scratch where tokens come before heads.

    Arguments are grad_out, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    logsumexp, dropout_p, ….
    """
    by_heads = [one.transpose(1, 2) for one in args[:4]]
    return efficient_backward([*by_heads, *[None] * 5, args[11]], profile)


def _efficient_block(is_half: bool, width: int, drops: bool, capability: tuple[int, int]) -> tuple[int, int, bool]:
    """Return rows and columns of a kernel's blocks, and whether it keeps the gradients of key and value in registers.

    The first of mem_eff_attention/kernels/cutlassB.h that is wide enough and has room in shared memory.
    """
    if width <= 64:
        return 64, 64, is_half
    has_room = per_multiprocessor(capability)["shared_memory_per_block_optin"] >= _LARGEST_SHARED_BYTES
    if is_half and capability >= (8, 0):
        if capability in ((8, 6), (8, 9)) and width <= 96 and not drops:
            return 128, 64, True
        if width <= 128:
            return (128, 128, True) if has_room else (64, 64, False)
        return (128, 64, False) if has_room else (64, 64, False)
    if is_half and (7, 0) <= capability < (8, 0):
        return 128, 64, width <= 128
    is_large = not is_half and capability >= (8, 0) and has_room
    return (128, 64, False) if is_large else (64, 64, False)


def _copied_by_tokens(gradient: torch.Tensor) -> list[Buffer]:
    """Return the copy of a gradient that does not lie by batch, token, head and width, as these kernels want it."""
    return [] if gradient.transpose(1, 2).is_contiguous() else [gradient.numel() * gradient.element_size()]
