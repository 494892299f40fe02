"""Device memory that CUDA kernels take for themselves while they run, beside their results.

Fake tensors show an operator's results only. Sizes here are read from PyTorch's sources; an operator whose scratch is
not known is in `UNKNOWN_SCRATCH`, and every trace counts those it meets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

_FLOAT_BYTES = 4
_FLASH_ROWS = 128

UNKNOWN_SCRATCH = {
    "convolution": "cuDNN's workspace depends on the algorithm that it picks",
    "convolution_overrideable": "cuDNN's workspace depends on the algorithm that it picks",
    "convolution_backward": "cuDNN's workspace depends on the algorithm that it picks",
    "convolution_backward_overrideable": "cuDNN's workspace depends on the algorithm that it picks",
    "native_batch_norm": "cuDNN's reserve depends on layout and version",
    "native_batch_norm_backward": "cuDNN's reserve depends on layout and version",
    "embedding_dense_backward": "sorting scratch and partial sums depend on how often tokens repeat",
    "sort": "depends on the sorting library's version",
    "topk": "depends on the algorithm that size selects",
    "cumsum": "depends on the scan library's version",
    "index_put_": "sorting scratch when accumulating",
    "_scaled_dot_product_flash_attention": "PyTorch may run cuDNN's kernel on Hopper and Blackwell; counted as flash",
}
"""Operators known to take scratch of a size that is not known: counted as none, and said so."""


_CUDNN_ATTENTION = ((9, 0), (10, 0), (10, 3))
"""Architectures on which recent PyTorch with a recent cuDNN prefers cuDNN's attention (sdp_utils.cpp,
`check_prefer_cudnn_attention`)."""


def is_assumed(operator: str, compute_capability: tuple[int, int]) -> bool:
    """Whether what an operator takes on this architecture is not known, so that counting none is an assumption."""
    if operator == "_scaled_dot_product_flash_attention":
        return compute_capability in _CUDNN_ATTENTION
    return operator in UNKNOWN_SCRATCH


def scratch_bytes(operator: str, args: Sequence[Any]) -> list[int]:
    """Sizes of the buffers that an operator's CUDA kernel holds while it runs, in the order it takes them."""
    sizes = _SCRATCH.get(operator)
    return sizes(args) if sizes is not None else []


def _flash_backward(args: Sequence[Any]) -> list[int]:
    """Row sums and the fp32 accumulator of the query's gradient; with grouped heads, key and value gradients per head.

    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd` (non-deterministic).
    Arguments are grad_out, query, key, value, …, each [batch, heads, tokens, width].
    """
    query, key = args[1], args[2]
    batch, heads, tokens, width = query.shape
    rows = math.ceil(tokens / _FLASH_ROWS) * _FLASH_ROWS
    columns = math.ceil(width / 32) * 32 if width <= 128 else math.ceil(width / 64) * 64
    sizes = [batch * heads * rows * _FLOAT_BYTES, batch * rows * heads * columns * _FLOAT_BYTES]
    if key.shape[1] != heads:
        sizes += [batch * key.shape[2] * heads * width * query.element_size()] * 2
    return sizes


def _efficient_backward(args: Sequence[Any]) -> list[int]:
    """Row sums of gradient · output. In 16 bits the kernel makes them; in fp32 a product of full size comes first.

    aten/src/ATen/native/transformers/cuda/attention_backward.cu, `_efficient_attention_backward`
    (`kKernelComputesDelta`). Arguments are grad_out, query, key, value, …, each [batch, heads, tokens, width].
    """
    grad_out, query = args[0], args[1]
    delta = query.shape[0] * query.shape[1] * query.shape[2] * _FLOAT_BYTES
    if query.dtype == torch.float32:
        return [grad_out.numel() * _FLOAT_BYTES, delta]
    return [delta]


_SCRATCH: dict[str, Callable[[Sequence[Any]], list[int]]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
