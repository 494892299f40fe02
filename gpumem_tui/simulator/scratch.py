"""Device memory that CUDA kernels take for themselves while they run, beside their results.

Fake tensors show an operator's results only. Sizes here are read from PyTorch's sources. An operator that is neither
known to take none nor has its sizes here is counted as taking none, and every trace says which those were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from gpumem_tui.simulator import convolution, packed, recurrent, sorting
from gpumem_tui.simulator.profile import Profile
from gpumem_tui.simulator.rules import NOT_EXAMINED, Buffer, Computed, GivenBack, Taken, sizes

_FLOAT_BYTES = 4
_FLASH_ROWS = 128
_FOREACH_CHUNK = 65536

_UNKNOWN = {
    "convolution": "cuDNN's workspace depends on the algorithm that it picks",
    "convolution_overrideable": "cuDNN's workspace depends on the algorithm that it picks",
    "convolution_backward": "cuDNN's workspace depends on the algorithm that it picks",
    "convolution_backward_overrideable": "cuDNN's workspace depends on the algorithm that it picks",
    "native_batch_norm": "cuDNN's reserve depends on layout and version",
    "native_batch_norm_backward": "cuDNN's reserve depends on layout and version",
    "sparse mm": "cuSPARSE's workspace, and that of sorting the indices, are not known",
    **dict.fromkeys(sorting.INDEX_PUTS, "sorts what a mask picks, and only its values tell how much that is"),
    "_scaled_dot_product_flash_attention": "PyTorch prefers cuDNN's kernel on Hopper and Blackwell; counted as flash",
    "_scaled_dot_product_efficient_attention": "PyTorch may prefer cuDNN's kernel on Hopper and Blackwell",
}
"""Operators known to take scratch of a size that is not known, and why."""

_CUDNN_ATTENTION = ((9, 0), (10, 0), (10, 3))
"""Architectures on which recent PyTorch with cuDNN 9.15.1 or later prefers cuDNN's attention for 16-bit values
(sdp_utils.cpp, `check_prefer_cudnn_attention`; CUDA 12 wheels come with an older cuDNN). Elsewhere it comes last."""

_VIEWS_AND_COPIES = """
_unsafe_view alias detach lift lift_fresh set_ resize_ contiguous clone copy_ _to_copy repeat expand_copy
empty empty_like empty_strided new_empty new_empty_strided new_zeros new_ones new_full zeros zeros_like ones ones_like
full full_like arange scalar_tensor eye tril triu tril_ triu_ roll flip cat stack constant_pad_nd _local_scalar_dense
"""
_A_THREAD_AN_ELEMENT = """
fill_ zero_ lerp_ normal_ uniform_ bernoulli_ random_ exponential_ rand rand_like randn randn_like randint randint_like
native_dropout _cudnn_init_dropout_state _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_
"""
_ONE_KERNEL_THAT_WRITES_ITS_RESULTS = """
_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data native_layer_norm _fused_rms_norm
nll_loss_forward nll_loss_backward embedding gather scatter scatter_ scatter_add scatter_add_ index index_select
index_add_ select_backward slice_backward max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d
avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward
upsample_bilinear2d
"""
MATRIX_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot"})
"""ops that fetch the thread's cuBLAS handle; its workspace is counted where that is made
(aten/src/ATen/cuda/CublasHandlePool.cpp)."""

_CUBLASLT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_WITHOUT = MATRIX_PRODUCTS.union(
    (_VIEWS_AND_COPIES + _A_THREAD_AN_ELEMENT + _ONE_KERNEL_THAT_WRITES_ITS_RESULTS).split(), packed.WITHOUT
)
"""Operators examined in aten/src/ATen/native/cuda and found to take none, besides views and what is pointwise."""

_SETTLED = {**sorting.SETTLED, packed.GEMM: packed.unpacks}
"""Operators of which not all is known, and whether it is for some arguments."""

_WITHOUT_FAMILIES = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
"""Multi-tensor kernels: what they work on is passed by value (MultiTensorApply.cuh)."""

_COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")
"""NCCL keeps its buffers outside the allocator; FSDP's copies in and out work on what they are given."""

_OURS = "gpumem_tui"
"""`workload.quantized`, which stands for bitsandbytes' kernels (csrc/kernels.cu, kDequantizeBlockwise): they write
their result and no more."""


def is_assumed(func: torch._ops.OpOverload[..., Any], args: Sequence[Any], compute_capability: tuple[int, int]) -> bool:
    """Whether what an operator takes on this architecture is not known, so that counting none is an assumption."""
    settled = _SETTLED.get(func._opname)
    if settled is not None and settled(args):
        return False
    return _is_assumed(func, compute_capability)


@lru_cache(4096)
def _is_assumed(func: torch._ops.OpOverload[..., Any], compute_capability: tuple[int, int]) -> bool:
    name = func._opname
    if name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"):
        return compute_capability in _CUDNN_ATTENTION
    if name in _UNKNOWN:
        return True
    known = name in _SCRATCH or name in _WITHOUT or func.is_view or torch.Tag.pointwise in func.tags
    return not known and func.namespace not in (*_COLLECTIVES, _OURS) and not name.startswith(_WITHOUT_FAMILIES)


def assumption(operator: str) -> str:
    """Why an operator's scratch is an assumption."""
    return _UNKNOWN.get(operator, NOT_EXAMINED)


def takes_cublaslt(func: torch._ops.OpOverload[..., Any], args: Sequence[Any]) -> bool:
    """Whether a product adds its bias in the same kernel, which is cuBLASLt's.

    aten/src/ATen/native/cuda/Blas.cpp, `addmm_out_cuda_impl`. Arguments are (bias, matrix, matrix, …).
    """
    if func._opname != "addmm":
        return False
    bias, other = args[0], args[2]
    return (
        bias.dim() == 1
        and bias.is_contiguous()
        and bias.dtype in _CUBLASLT_DTYPES
        and bias.shape[0] == other.shape[1] > 1
        and other.shape[0] > 1
    )


def scratch(func: torch._ops.OpOverload[..., Any], args: Sequence[Any], profile: Profile) -> list[Taken]:
    """The buffers that an operator's CUDA kernel takes while it runs, in order.

    What it does not give back on the way it gives back at its end, the last one first.
    """
    found = _SCRATCH.get(func._opname)
    return list(found(args, profile)) if found is not None else []


def _product(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Copies of factors whose layout cuBLAS does not take, as of a gradient that `sum` has spread.

    aten/src/ATen/native/cuda/Blas.cpp, `prepare_matrix_for_cublas` and `prepare_batch_matrix_for_cublas`. Arguments end
    with the two factors.
    """
    factors = [factor for factor in args[:3] if isinstance(factor, torch.Tensor)][-2:]
    return [factor.numel() * factor.element_size() for factor in factors if not _has_rows(factor)]


def _has_rows(matrix: torch.Tensor) -> bool:
    """Whether a matrix, or each of a batch, lies in rows or in columns, one behind the other."""
    (rows, columns), (row_stride, column_stride) = matrix.shape[-2:], matrix.stride()[-2:]
    if matrix.is_contiguous():
        return row_stride != 0 and column_stride != 0
    in_rows = column_stride == 1 and row_stride >= max(1, columns)
    return in_rows or (row_stride == 1 and column_stride >= max(1, rows))


def _computed(rule: str, *arguments: int) -> list[Buffer]:
    return [Computed(rule, position, arguments) for position in range(len(sizes(rule, arguments)))]


def _reduction(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """`sum` and the like: (tensor, dimensions or none for all, …)."""
    tensor, wanted = args[0], args[1] if len(args) > 1 else None
    accumulator_bytes = max(_FLOAT_BYTES, tensor.element_size()) if tensor.is_floating_point() else 8
    return _reduced(tensor, wanted, accumulator_bytes, profile)


def _norm(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """(tensor, order, dimensions or none for all, …)"""
    return _reduction([args[0], args[2] if len(args) > 2 else None], profile)


def _extremum(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """`amax` and the like, which compare values as they are."""
    return _reduced(args[0], args[1] if len(args) > 1 else None, args[0].element_size(), profile)


def _reduced(tensor: torch.Tensor, wanted: Any, accumulator_bytes: int, profile: Profile) -> list[Buffer]:
    """How TensorIterator lays a reduction out: dimensions by stride, neighbours that form one run taken as one."""
    numbers = (wanted,) if isinstance(wanted, int) else wanted or range(tensor.dim())
    reduced = {number % tensor.dim() for number in numbers} if tensor.dim() else set()
    ordered = sorted(
        (stride, size, number in reduced)
        for number, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1
    )
    inner, outer = _runs(ordered, is_reduced=True), _runs(ordered, is_reduced=False)
    if not tensor.numel() or not inner:
        return []
    inputs, outputs = math.prod(size for _, size in inner), math.prod(size for _, size in outer)
    layout, run, stride = 1, 1, 1
    if outer and outer[0][0] < inner[0][0]:
        layout = 0
        if outer[0][0] == 1:
            run, stride = outer[0][1], math.gcd(*(step for step, _ in (*inner, *outer[1:])), 4)
    elif inner[0][0] == 1 and len(inner) == 1:
        layout = 2
    return _computed(
        "reduction", outputs, inputs, accumulator_bytes, tensor.element_size(), layout, run, stride,
        profile.multiprocessors, profile.threads_per_multiprocessor,
    )  # fmt: skip


def _runs(ordered: Sequence[tuple[int, int, bool]], *, is_reduced: bool) -> list[tuple[int, int]]:
    """(stride, size) of the reduced or the other dimensions, with adjacent ones that lie behind each other merged."""
    runs: list[tuple[int, int]] = []
    for stride, size, _ in (entry for entry in ordered if entry[2] is is_reduced):
        if runs and runs[-1][0] * runs[-1][1] == stride:
            runs[-1] = (runs[-1][0], runs[-1][1] * size)
        else:
            runs.append((stride, size))
    return runs


def _foreach_norm(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """A partial norm for every chunk of the largest tensor, for each (ForeachReduceOp.cu)."""
    chunks = max(-(-tensor.numel() // _FOREACH_CHUNK) for tensor in args[0])
    return [len(args[0]) * chunks * max(_FLOAT_BYTES, args[0][0].element_size())]


def _embedding_backward(args: Sequence[Any], profile: Profile) -> list[Taken]:
    """(gradient, indices, number of weights, …)"""
    gradient, indices, weights = args[:3]
    buffers = _computed(
        "embedding_gradient", indices.numel(), weights, gradient.shape[-1], indices.element_size(),
        gradient.element_size(),
    )  # fmt: skip
    return [*buffers[:4], GivenBack(3), GivenBack(2), *buffers[4:]]


def _layer_norm_backward(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """(gradient, input, normalized shape, …)"""
    values, columns = args[1], math.prod(args[2])
    return _computed(
        "norm_gradient", values.numel() // columns, columns, values.element_size(), profile.multiprocessors
    )


def _group_norm(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Scale and shift of every channel of a sample; none for one position or without weight and bias.

    aten/src/ATen/native/cuda/group_norm_kernel.cu, `GroupNormKernelImplInternal`. Arguments are (input, weight, bias,
    samples, channels, positions, groups, …).
    """
    images, weight, bias, samples, channels, positions = args[:6]
    if positions == 1 or (weight is None and bias is None):
        return []
    return [samples * channels * max(_FLOAT_BYTES, images.element_size())] * 2


def _group_norm_backward(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Two sums for each channel of a sample, its scale, and two factors for each group, where the input's gradient is
    wanted.

    The same file, `GroupNormBackwardKernelImplInternal` and, for one position, `GroupNorm1dBackward`. Arguments are
    (gradient, input, mean, reciprocal deviation, weight, samples, channels, positions, groups, which gradients).
    """
    gradient, _, _, _, weight, samples, channels, positions, groups, wanted = args[:10]
    value_bytes = max(_FLOAT_BYTES, gradient.element_size())
    of_channels, of_groups = samples * channels * value_bytes, samples * groups * value_bytes
    factors: list[Buffer] = [of_groups] * 2 if wanted[0] else []
    if positions == 1:
        return factors
    scale = [of_channels] if wanted[0] and weight is not None else []
    return [of_channels, of_channels, *scale, *factors]


def _safe_softmax(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """The plain softmax, which elements and which rows are masked, and two scalars, until the result is chosen.

    aten/src/ATen/native/transformers/attention.cpp, `_safe_softmax`. Arguments are (scores, dimension, …).
    """
    scores, dimension = args[:2]
    scalar_bytes = scores.element_size()
    return [
        scores.numel() * scalar_bytes,
        scalar_bytes,
        scores.numel(),
        scores.numel() // scores.shape[dimension],
        scalar_bytes,
    ]


def _flash_backward(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Row sums and the fp32 accumulator of the query's gradient; with grouped heads, key and value gradients per head.

    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd` (non-deterministic).
    Arguments are grad_out, query, key, value, …, each [batch, heads, tokens, width].
    """
    query, key = args[1], args[2]
    batch, heads, tokens, width = query.shape
    rows = math.ceil(tokens / _FLASH_ROWS) * _FLASH_ROWS
    columns = math.ceil(width / 32) * 32 if width <= 128 else math.ceil(width / 64) * 64
    buffers: list[Buffer] = [batch * heads * rows * _FLOAT_BYTES, batch * rows * heads * columns * _FLOAT_BYTES]
    if key.shape[1] != heads:
        buffers += [batch * key.shape[2] * heads * width * query.element_size()] * 2
    return buffers


def _efficient_backward(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Row sums of gradient · output. In 16 bits the kernel makes them; in fp32 a product of full size comes first.

    aten/src/ATen/native/transformers/cuda/attention_backward.cu, `_efficient_attention_backward`
    (`kKernelComputesDelta`). Arguments are grad_out, query, key, value, …, each [batch, heads, tokens, width].
    """
    grad_out, query = args[0], args[1]
    delta = query.shape[0] * query.shape[1] * query.shape[2] * _FLOAT_BYTES
    if query.dtype == torch.float32:
        return [grad_out.numel() * _FLOAT_BYTES, delta]
    return [delta]


def _ctc_backward(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """A table of paths from the end, as large as the forward's (aten/src/ATen/native/cuda/LossCTC.cu, `log_beta`)."""
    return [args[6].numel() * args[6].element_size()]


_SCRATCH: dict[str, Callable[[Sequence[Any], Profile], Sequence[Taken]]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    **dict.fromkeys(("convolution", "convolution_overrideable"), convolution.forward),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), convolution.backward),
    "sort": sorting.sort,
    "topk": sorting.topk,
    **dict.fromkeys(("cumsum", "cumprod"), sorting.scan),
    **dict.fromkeys(sorting.INDEX_PUTS, sorting.index_put),
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_safe_softmax": _safe_softmax,
    "_ctc_loss_backward": _ctc_backward,
    "embedding_dense_backward": _embedding_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(("sum", "mean", "prod"), _reduction),
    **dict.fromkeys(("amax", "amin", "all", "any"), _extremum),
    "linalg_vector_norm": _norm,
    "_foreach_norm": _foreach_norm,
    packed.GEMM: packed.product,
    "_cudnn_rnn": recurrent.scratch,
    "_cudnn_rnn_backward": recurrent.backward_scratch,
}
