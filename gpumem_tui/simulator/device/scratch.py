"""Device memory that CUDA kernels take for themselves while they run, next to their results.

Fake tensors show an operator's results only. Sizes here are read from PyTorch's sources. An operator that is neither
known to take none nor has its sizes here is counted as taking none, and every trace shows which those were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.allocator.rules import NOT_EXAMINED, Buffer, Computed, GivenBack, Made, Taken, sizes
from gpumem_tui.simulator.device import attention_scratch, recurrent
from gpumem_tui.simulator.device.convolution import NAMES as CONVOLUTIONS

_FLOAT_BYTES, _INDEX_BYTES = 4, 8
_FOREACH_CHUNK = 65536
_SUMS_FUSED_SINCE, _SUMS_FUSED_BLOCKS = (2, 11), 4
"""pytorch/pytorch#172454, of January 2026, `MAX_ATOMIC_ACCUM_BLOCKS_PER_SM` in EmbeddingBackwardKernel.cu."""

_CUDNN_ATTENTION = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
_INDEX_PUTS = ("index_put", "index_put_", "_index_put_impl_")
_UNKNOWN = {
    "native_batch_norm": "cuDNN's reserve depends on layout and version",
    "native_batch_norm_backward": "cuDNN's reserve depends on layout and version",
    "sparse mm": "cuSPARSE's workspace, and that of sorting the indices, are not known",
    **dict.fromkeys(_INDEX_PUTS, "sorts what a mask picks, and only its values tell how much that is"),
    **dict.fromkeys(_CUDNN_ATTENTION, "the workspace of cuDNN's attention was recorded on Hopper only"),
}
"""Operators known to take scratch of a size that is not known, and why."""

_OTHER_ON_ROCM = {
    **{name: words.replace("cuDNN", "MIOpen") for name, words in _UNKNOWN.items() if "cuDNN's " in words},
    "sparse mm": "hipSPARSE's workspace, and that of sorting the indices, are not known",
    "_scaled_dot_product_flash_attention": "ROCm's kernel is AOTriton's or CK's; counted as CUDA's flash attention",
    "_scaled_dot_product_efficient_attention": "ROCm's kernel is AOTriton's or CK's; counted as CUDA's",
}

_CUDNN_ATTENTION_RECORDED_ON = 9
"""The major compute capability."""
_ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")

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
native_layer_norm _fused_rms_norm nll_loss_forward nll_loss_backward gather scatter scatter_ scatter_add scatter_add_
index index_select index_add_ select_backward slice_backward max_pool2d_with_indices max_pool2d_with_indices_backward
avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_nearest2d
upsample_nearest2d_backward upsample_bilinear2d
"""
MATRIX_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot"})
"""ops that fetch the thread's cuBLAS handle; its workspace is counted where that is made
(aten/src/ATen/cuda/CublasHandlePool.cpp)."""

_CUBLASLT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_WITHOUT = MATRIX_PRODUCTS.union(
    CONVOLUTIONS,
    (_VIEWS_AND_COPIES + _A_THREAD_AN_ELEMENT + _ONE_KERNEL_THAT_WRITES_ITS_RESULTS).split(),
)
"""Operators examined in aten/src/ATen/native/cuda and found to take none, besides views and what is pointwise; of
convolutions `DeviceMemory.record_made` takes what they do."""

_WITHOUT_FAMILIES = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
"""Multi-tensor kernels: what they work on is passed by value (MultiTensorApply.cuh)."""

COLLECTIVES = ("c10d", "_c10d_functional")
_WITHOUT_NAMESPACES = (*COLLECTIVES, "fsdp", "gpumem_tui")
"""NCCL keeps its buffers outside the allocator, and FSDP's copies in and out work on what they are given. The last is
`workload.quantized`, which represents bitsandbytes' kernels (csrc/kernels.cu, kDequantizeBlockwise): they write their
result and no more."""


def is_assumed(
    func: torch._ops.OpOverload[..., Any], args: Sequence[Any], compute_capability: tuple[int, int], arch: str = ""
) -> bool:
    """Return whether what an operator takes on this architecture is not known, so that none is an assumption."""
    settled = _SETTLED.get(func._opname)
    if settled is not None and settled(args):
        return False
    return _is_assumed(func, compute_capability, arch)


@lru_cache(4096)
def _is_assumed(func: torch._ops.OpOverload[..., Any], compute_capability: tuple[int, int], arch: str) -> bool:
    name = func._opname
    if name in _ATTENTION:
        return bool(arch)
    if name in _CUDNN_ATTENTION:
        return compute_capability[0] != _CUDNN_ATTENTION_RECORDED_ON
    if name in _UNKNOWN:
        return True
    known = name in _SCRATCH or name in _WITHOUT or func.is_view or torch.Tag.pointwise in func.tags
    return not known and func.namespace not in _WITHOUT_NAMESPACES and not name.startswith(_WITHOUT_FAMILIES)


def assumptions(counted: Mapping[str, int], gpu: Gpu) -> tuple[tuple[str, int, str], ...]:
    """Return operators whose scratch is an assumption: (operator, times, why)."""
    return tuple((operator, times, assumption(operator, gpu.arch)) for operator, times in sorted(counted.items()))


def assumption(operator: str, arch: str = "") -> str:
    """Return why an operator's scratch is an assumption."""
    if arch and operator in _OTHER_ON_ROCM:
        return _OTHER_ON_ROCM[operator]
    return _UNKNOWN.get(operator, NOT_EXAMINED)


def scratch(func: torch._ops.OpOverload[..., Any], args: Sequence[Any], profile: Profile) -> list[Taken]:
    """Return the buffers that an operator's CUDA kernel takes while it runs, in order.

    Scratch not given back on the way is given back at the end, the last first.
    """
    found = _SCRATCH.get(func._opname)
    return list(found(args, profile)) if found is not None else []


# Matrix products


def takes_cublaslt(func: torch._ops.OpOverload[..., Any], args: Sequence[Any]) -> bool:
    """Return whether a product adds its bias in the same kernel, which is cuBLASLt's.

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


def _product(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Copy factors whose layout cuBLAS does not take, as of a gradient that `sum` has spread.

    aten/src/ATen/native/cuda/Blas.cpp, `prepare_matrix_for_cublas` and `prepare_batch_matrix_for_cublas`. Arguments end
    with the two factors.
    """
    factors = [factor for factor in args[:3] if isinstance(factor, torch.Tensor)][-2:]
    return [factor.numel() * factor.element_size() for factor in factors if not _has_rows(factor)]


def _has_rows(matrix: torch.Tensor) -> bool:
    """Return whether a matrix, or each of a batch, is in rows or in columns, one behind the other."""
    (rows, columns), (row_stride, column_stride) = matrix.shape[-2:], matrix.stride()[-2:]
    if matrix.is_contiguous():
        return row_stride != 0 and column_stride != 0
    in_rows = column_stride == 1 and row_stride >= max(1, columns)
    return in_rows or (row_stride == 1 and column_stride >= max(1, rows))


# Reductions and norms


def _computed(rule: str, *arguments: int) -> list[Buffer]:
    return [Computed(rule, position, arguments) for position in range(len(sizes(rule, arguments)))]


def _reduction(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Split `sum` and the like: (tensor, dimensions or none for all, …).

    Whole numbers and masks are summed as int64, from a copy (`make_reduction_from_out_ty` in ReduceOpsUtils.h).
    """
    tensor, wanted = args[0], args[1] if len(args) > 1 else None
    if tensor.is_floating_point() or tensor.is_complex():
        return _reduced(tensor, wanted, max(_FLOAT_BYTES, tensor.element_size()), profile)
    copied = [] if tensor.dtype is torch.int64 else [tensor.numel() * _INDEX_BYTES]
    return [*copied, *_reduced(tensor, wanted, _INDEX_BYTES, profile)]


def _norm(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Split a norm: (tensor, order, dimensions or none for all, …)."""
    return _reduction([args[0], args[2] if len(args) > 2 else None], profile)


def _extremum(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Split `amax` and the like, which compare values as they are."""
    return _reduced(args[0], args[1] if len(args) > 1 else None, args[0].element_size(), profile)


def _reduced(tensor: torch.Tensor, wanted: Any, accumulator_bytes: int, profile: Profile) -> list[Buffer]:
    """Lay a reduction out as TensorIterator: dimensions by stride, neighbours that form one run taken as one."""
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
    """Return (stride, size) of the reduced or the other dimensions, those that lie behind each other merged."""
    runs: list[tuple[int, int]] = []
    for stride, size, _ in (entry for entry in ordered if entry[2] is is_reduced):
        if runs and runs[-1][0] * runs[-1][1] == stride:
            runs[-1] = (runs[-1][0], runs[-1][1] * size)
        else:
            runs.append((stride, size))
    return runs


def _foreach_norm(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Take a partial norm for every chunk of the largest tensor, for each (ForeachReduceOp.cu)."""
    chunks = max(-(-tensor.numel() // _FOREACH_CHUNK) for tensor in args[0])
    return [len(args[0]) * chunks * max(_FLOAT_BYTES, args[0][0].element_size())]


def _embedding(args: Sequence[Any], _profile: Profile) -> list[Taken]:
    """Copy indices that no view makes one row of, such as expanded ones (Embedding.cpp, `embedding_symint`)."""
    return [*_copied(args[1]), Made(0)]


def _embedding_backward(args: Sequence[Any], profile: Profile) -> list[Taken]:
    """Sort the indices: (gradient, indices, number of weights, …)."""
    gradient, indices, weights = args[:3]
    copied: list[Taken] = [*_copied(indices), *_copied(gradient)]
    can_fuse = profile.version >= _SUMS_FUSED_SINCE and not torch.are_deterministic_algorithms_enabled()
    buffers = _computed(
        "embedding_gradient", indices.numel(), weights, gradient.shape[-1], indices.element_size(),
        gradient.element_size(), profile.compute_capability[0],
        can_fuse * profile.multiprocessors * _SUMS_FUSED_BLOCKS,
    )  # fmt: skip
    first = len(copied)
    sorting: list[Taken] = [*buffers[:4], GivenBack(first + 3), GivenBack(first + 2), Made(0)]
    unique = first + len(sorting) + 2
    found: list[Taken] = [*buffers[4:8], GivenBack(unique + 1), GivenBack(unique)]
    scan = first + len(sorting) + len(found) + 2
    return [*copied, *sorting, *found, *buffers[8:11], GivenBack(scan), *buffers[11:]]


def _layer_norm_backward(args: Sequence[Any], profile: Profile) -> list[Buffer]:
    """Take partial gradients: (gradient, input, normalized shape, …)."""
    values, columns = args[1], math.prod(args[2])
    return _computed(
        "norm_gradient", values.numel() // columns, columns, values.element_size(), profile.multiprocessors
    )


def _group_norm(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Take scale and shift of every channel of a sample; none for one position or without weight and bias.

    aten/src/ATen/native/cuda/group_norm_kernel.cu, `GroupNormKernelImplInternal`. Arguments are (input, weight, bias,
    samples, channels, positions, groups, …).
    """
    images, weight, bias, samples, channels, positions = args[:6]
    if positions == 1 or (weight is None and bias is None):
        return []
    return [samples * channels * max(_FLOAT_BYTES, images.element_size())] * 2


def _group_norm_backward(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Take two sums for each channel of a sample; for the input's gradient its scale, and two factors a group.

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


# Softmax and losses


def _softmax(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Copy scores that are not contiguous (SoftMax.cu, `host_softmax`). Arguments are (scores, …)."""
    return _copied(args[0])


def _softmax_backward(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Take the product of gradient and result, and copies of what is not contiguous.

    aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out` (as long as there is one: 2019 to 2.13) and
    `host_softmax_backward`; published as 15,099,495,424 bytes (pytorch/pytorch#72450). Arguments are (gradient, result,
    …).
    """
    gradient, result = args[:2]
    product_bytes = result.numel() * max(gradient.element_size(), result.element_size())
    return [product_bytes, *([] if gradient.is_contiguous() else [product_bytes]), *_copied(result)]


def _log_softmax_backward(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Copy what is not contiguous (SoftMax.cu, `host_softmax_backward`). Arguments are (gradient, result, …)."""
    return [*_copied(args[0]), *_copied(args[1])]


def _copied(tensor: torch.Tensor) -> list[Buffer]:
    """Return the copy that `contiguous` makes."""
    return [] if tensor.is_contiguous() else [tensor.numel() * tensor.element_size()]


def _ctc_backward(args: Sequence[Any], _profile: Profile) -> list[Buffer]:
    """Take a table of paths from the end, as large as the forward's (ATen's native/cuda/LossCTC.cu, `log_beta`)."""
    return [args[6].numel() * args[6].element_size()]


# Sorting, scanning, indexing


def _index_put(args: Sequence[Any], profile: Profile) -> list[Taken]:
    """Add elements up in the order of where they go: (tensor, indices, values, accumulate, …).

    Indexing.cu, `index_put_with_sort_kernel` and `computeLinearIndex`; without `accumulate` nothing is sorted.
    """
    tensor, indices, values = args[:3]
    given = [index for index in indices if index is not None]
    if len(args) < 4 or not args[3] or not given or not _is_without_mask(args):
        return []
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))
    taken: list[Taken] = []
    for position in range(len(given)):
        first = len(taken)
        size = count * _INDEX_BYTES
        taken += [size, size, GivenBack(first)]  # wrapped around, then times the stride
        if position:
            taken.append(GivenBack(first + 1))
    by_dimension = list(zip(tensor.shape, [*indices, *[None] * (tensor.dim() - len(indices))], strict=True))
    reached = count * math.prod(size for size, index in by_dimension if index is None)  # one reached twice counts twice
    if not (values.is_contiguous() and values.numel() == reached):  # else every value is in its place already
        taken.append(reached * values.element_size())
    rows = math.prod(size for size, index in by_dimension if index is not None)
    taken += [count * _INDEX_BYTES] * 3  # sorted, and where each came from, before and after
    taken += [Computed("index_sort", 0, (count, rows, profile.compute_capability[0])), GivenBack(len(taken))]
    return taken


def _is_without_mask(args: Sequence[Any]) -> bool:
    """Return whether adding up by index has nothing to count: how many elements a mask picks only its values tell."""
    masks = (torch.bool, torch.uint8)
    return len(args) < 4 or not args[3] or all(index is None or index.dtype not in masks for index in args[1])


def _sort(args: Sequence[Any], profile: Profile) -> list[Taken]:
    """Sort rows: (tensor, dimension, …); where stability is asked for, the dimension comes by name, and is the last.

    Sort.cpp, `sort_cuda_kernel`: up to 4,096 values of a row are sorted where they lie in the result; for more see the
    rule.
    """
    tensor = args[0]
    dimension = args[1] if len(args) > 1 and type(args[1]) is int else -1
    if not tensor.numel() or not tensor.dim():
        return []
    length = tensor.shape[dimension]
    arguments = (
        tensor.numel() // length, length, tensor.element_size(), int(tensor.stride(dimension) != 1),
        profile.compute_capability[0],
    )  # fmt: skip
    return _sorted_rows([Computed("row_sort", position, arguments) for position in range(8)], 0)


def _topk(args: Sequence[Any], profile: Profile) -> list[Taken]:
    """Search rows: (tensor, count, dimension, …); see the rule."""
    tensor, count = args[:2]
    if not tensor.numel() or not tensor.dim() or not count:
        return []
    dimension = args[2] if len(args) > 2 else -1
    length = tensor.shape[dimension]
    arguments = (
        tensor.numel() // length, length, count, tensor.element_size(), int(not tensor.is_contiguous()),
        profile.multiprocessors, profile.compute_capability[0],
    )  # fmt: skip
    buffers = [Computed("row_topk", position, arguments) for position in range(29)]
    taken: list[Taken] = [*buffers[:8], *(GivenBack(position) for position in reversed(range(8)))]
    for first in (8, 18):  # whole rows, and what was found: two buffers, and what sorting them takes
        taken += buffers[first : first + 2]
        start = len(taken)
        taken += _sorted_rows(buffers[first + 2 : first + 10], start)
        taken += [GivenBack(start + offset) for offset in (9, 4, 3, 2, 1, 0)]
    return [*taken, buffers[28]]


def _sorted_rows(buffers: Sequence[Buffer], start: int) -> list[Taken]:
    """Take the buffers of the rule `row_sort`, from entry number `start` on: two are given back before the last."""
    return [*buffers[:7], GivenBack(start + 6), GivenBack(start + 5), buffers[7]]


def _scan(args: Sequence[Any], _profile: Profile) -> list[Taken]:
    """Scan rows, as `cumsum` and `cumprod` do: (tensor, dimension, …).

    ReduceOps.cpp, `impl_func_cum_ops`: whole numbers and masks are summed as int64, from a copy. ScanUtils.cuh,
    `scan_dim`: a single row goes to CUB.
    """
    tensor = args[0]
    is_whole = not tensor.is_floating_point() and not tensor.is_complex()
    taken: list[Taken] = []
    value_bytes = tensor.element_size()
    if is_whole and tensor.dtype is not torch.int64:
        value_bytes = _INDEX_BYTES
        taken.append(tensor.numel() * value_bytes)
    elif not tensor.is_contiguous():
        taken.append(tensor.nbytes)
    if tensor.dim() and tensor.numel():
        length = tensor.shape[args[1]]
        taken.append(Computed("row_scan", 0, (tensor.numel() // length, length, value_bytes)))
    return taken


MAKING = frozenset({"embedding", "embedding_dense_backward", "_cudnn_rnn", "_cudnn_rnn_backward"})
"""Operators whose buffers say where their results are made (`Made`)."""

_SETTLED = dict.fromkeys(_INDEX_PUTS, _is_without_mask)
"""Operators that are partly known, and whether it is for some arguments."""

_SCRATCH: dict[str, Callable[[Sequence[Any], Profile], Sequence[Taken]]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    "sort": _sort,
    "topk": _topk,
    **dict.fromkeys(("cumsum", "cumprod"), _scan),
    **dict.fromkeys(_INDEX_PUTS, _index_put),
    "_scaled_dot_product_flash_attention": attention_scratch.flash_forward,
    "_scaled_dot_product_flash_attention_backward": attention_scratch.flash_backward,
    "_scaled_dot_product_efficient_attention_backward": attention_scratch.efficient_backward,
    "_flash_attention_backward": attention_scratch.flash_backward_of_rows,
    "_efficient_attention_backward": attention_scratch.efficient_backward_of_rows,
    "_scaled_dot_product_cudnn_attention": attention_scratch.cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": attention_scratch.cudnn_backward,
    "_safe_softmax": attention_scratch.safe_softmax,
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "embedding": _embedding,
    "_ctc_loss_backward": _ctc_backward,
    "embedding_dense_backward": _embedding_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(("sum", "mean", "prod"), _reduction),
    **dict.fromkeys(("amax", "amin", "all", "any"), _extremum),
    "linalg_vector_norm": _norm,
    "_foreach_norm": _foreach_norm,
    "_cudnn_rnn": recurrent.scratch,
    "_cudnn_rnn_backward": recurrent.backward_scratch,
}
