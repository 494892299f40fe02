"""Device memory that CUDA kernels take for themselves in steps: sizes that are no straight line in the batch size.

A trace keeps the rule and its arguments, which are affine in the batch size, so that a replay works the size out anew.
No torch import.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

NOT_EXAMINED = "not examined"
"""Why an operator that nobody has looked at is counted without scratch."""

ASSUMES_ALL = "assumes all"
"""How a note begins that says of which rows, chosen by what the GPU computes, all are taken."""

_FLOAT_BYTES = 4
_INDEX_32_BIT = 2**31 - 1
_WARP = 32
_RADIX_BITS = 8
_SORT_ONE_TILE, _SORT_TILE = (256, 19), (384, 20)
"""Threads, and items of 4 bytes for each."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A buffer of an operator: number `position` of what `rule` gives for `arguments`; it may be of no size."""

    rule: str
    position: int
    arguments: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that the kernel asks for; where they are not known, the least."""
        return sizes(self.rule, self.arguments)[self.position]

    @property
    def most_bytes(self) -> int:
        """Bytes that the kernel asks for; where they are not known, the most."""
        return sizes_at_most(self.rule, self.arguments)[self.position]

    @property
    def needed_bytes(self) -> int:
        """`size_bytes` without what the kernel does without where there is no room for it."""
        return NEEDED.get(self.rule, sizes_at_most)(self.rule, self.arguments)[self.position]

    @property
    def is_open(self) -> bool:
        """Return whether its size is known as a range only."""
        return self.rule in AT_MOST


Buffer = int | Computed
"""The size of a buffer in bytes, or the rule that gives it."""


def size_bytes_of(buffer: Buffer) -> int:
    """Return the size of a buffer in bytes; where that is not known, the least."""
    return buffer.size_bytes if isinstance(buffer, Computed) else buffer


@dataclass(frozen=True, slots=True)
class GivenBack:
    """A point at which a kernel gives back the buffer that is entry number `position` of what it takes."""

    position: int


Taken = Buffer | GivenBack


@lru_cache(4096)
def sizes(rule: str, arguments: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes of every buffer that a rule of `RULES` gives; always as many, 0 for one not taken."""
    return RULES[rule](*arguments)


@lru_cache(4096)
def sizes_at_most(rule: str, arguments: tuple[int, ...]) -> tuple[int, ...]:
    """Return these bytes with the most of what is known as a range only."""
    return AT_MOST.get(rule, RULES[rule])(*arguments)


def reduction(  # noqa: PLR0913 - the arguments of a rule are plain numbers, which a trace stores
    outputs: int,
    inputs: int,
    accumulator_bytes: int,
    element_bytes: int,
    layout: int,
    run: int,
    stride: int,
    multiprocessors: int,
    threads_per_multiprocessor: int,
) -> tuple[int, ...]:
    """Return partial results and semaphores of a reduction that is split over thread blocks.

    PyTorch's aten/src/ATen/native/cuda/Reduce.cuh (2.13), `setReduceConfig` and `global_memory_size`: which asks for
    ``outputs`` times what the blocks use where threads side by side work on different outputs.

    Args:
        inputs: reduced elements per output. `layout`: 0 if neighbours in memory belong to different outputs, 1 if to
            the same output, 2 if so and all that is reduced is one run.
        run: length of the fastest output dimension; `stride`: the greatest common divisor of all other strides. Up to
            four outputs side by side are read at once, as far as both are divisible.
    """
    while outputs * inputs * element_bytes > _INDEX_32_BIT:  # taken in halves along the outermost dimension
        if inputs > 1 and (layout == 0 or outputs == 1):
            inputs = -(-inputs // 2)
        else:
            outputs = -(-outputs // 2)
    fastest, other = (outputs, inputs) if layout == 0 else (inputs, outputs)
    vector = math.gcd(run, stride, 4) if layout == 0 else 1
    if layout == 0:
        fastest //= vector
    elif layout == 2 and fastest >= 128:
        fastest //= 4
    most_threads = 512 // vector
    across, down = (min(1 << (max(1, size).bit_length() - 1), most_threads) for size in (fastest, other))
    width = min(across, _WARP)
    height = min(down, most_threads // width)
    width = min(across, most_threads // height)
    values, per_block = (inputs, width) if layout == 0 else (-(-inputs // width), 1)
    if values < min(height * 16, 256):
        return 0, 0
    values = -(-values // height)
    blocks = -(-(outputs // vector) // per_block)
    most_blocks = multiprocessors * (threads_per_multiprocessor // (width * height))
    if values < 256 or blocks > most_blocks:
        return 0, 0
    split = max(min(-(-most_blocks // blocks), -(-values // 16)), -(-values // 256))
    if split == 1:
        return 0, 0
    partial_bytes = accumulator_bytes * outputs * split * (width * vector if layout == 0 else 1)
    return partial_bytes, 4 * blocks


def embedding_gradient(indices: int, weights: int, width: int, index_bytes: int, element_bytes: int) -> tuple[int, ...]:
    """Return sorted and original positions, the sort's own, segments and their sums, of more than 3,072 indices.

    aten/src/ATen/native/cuda/Embedding.cu (`embedding_dense_backward_cuda`) and EmbeddingBackwardKernel.cu.
    """
    if indices <= 3072:
        return (0,) * 11
    segments = min(indices, weights)
    partial = indices // 10 + segments
    sum_bytes = max(element_bytes, _FLOAT_BYTES)
    return (
        indices * index_bytes,
        indices * index_bytes,
        indices * index_bytes,
        *radix_sort(indices, index_bytes, index_bytes, weights.bit_length()),
        indices * index_bytes,
        8,
        segments * index_bytes,
        segments * index_bytes,
        8,
        partial * index_bytes,
        partial * width * sum_bytes,
    )


def index_sort(items: int, rows: int) -> tuple[int, ...]:
    """Sort rows' numbers with where each came from, both of 64 bits; only as many bits as the largest number has."""
    return radix_sort(items, 8, 8, max(1, (rows - 1).bit_length()))


def radix_sort(items: int, key_bytes: int, value_bytes: int, key_bits: int) -> tuple[int, ...]:
    """Return what CUB takes to sort pairs into other arrays (dispatch_radix_sort.cuh in cub/device/dispatch, SM80 on).

    One tile takes 1 byte. More take histograms of every pass over 8 bits, what each tile tells the next, and, where
    there is more than one pass, another copy of keys and values; every part in whole 256 bytes. Recorded on two GPUs:
    72,191 bytes for 4,096 pairs of 8 bytes and 14 bits, 138,751 for 8,192 (tests/recordings).
    """
    scale = max(key_bytes, value_bytes, 4)
    if not items:
        return (0,)
    if items <= _SORT_ONE_TILE[0] * max(1, _SORT_ONE_TILE[1] * 4 // scale):
        return (1,)
    passes = -(-key_bits // _RADIX_BITS)
    tiles = -(-items // (_SORT_TILE[0] * max(1, _SORT_TILE[1] * 4 // scale)))
    digits = 1 << _RADIX_BITS
    copies = (items * value_bytes, items * key_bytes) if passes > 1 else ()
    parts = (passes * digits * 8, tiles * digits * 4, *copies, passes * 4)
    return (sum(-(-part // 256) * 256 for part in parts) + 255,)


SORTED_IN_PLACE = 4096
_SORTED_ALONE, _SORTED_BY_CUB = 1_000_000, 128
"""Values of a row, values of a row, rows (`should_use_small_sort` and `launch_stable_sort_kernel`)."""


def row_sort(rows: int, length: int, key_bytes: int, is_strided: int) -> tuple[int, ...]:
    """Sort rows of more than 4,096 values (aten/src/ATen/native/cuda/SortStable.cu, `launch_stable_sort_kernel`).

    Itself, values and indices row by row, if they are not; then one row, or one of a million values, is sorted as it
    is (`segmented_sort_large_segments`), fewer than 128 rows by value and then by row (`…_by_full_sort`), with copies
    of the values and scratch that are given back between the two, and more by CUB (`segmented_sort_pairs`).
    """
    count = rows * length
    if length <= SORTED_IN_PLACE:
        return (0,) * 8
    copies = (count * key_bytes, count * key_bytes, count * 8) if is_strided else (0, 0, 0)
    if rows == 1 or length >= _SORTED_ALONE:
        return (*copies, length * 8, 0, 0, *radix_sort(length, key_bytes, 8, 8 * key_bytes), 0)
    if rows >= _SORTED_BY_CUB:
        return (*copies, count * 8, count * (key_bytes + 8) + 511, 0, 0, 0)
    by_value = radix_sort(count, key_bytes, 8, 8 * key_bytes)
    by_row = radix_sort(count, 8, 0, (rows - 1).bit_length())
    return (*copies, count * 8, count * 8, count * key_bytes, *by_value, *by_row)


def row_topk(
    rows: int, length: int, wanted: int, key_bytes: int, is_strided: int, multiprocessors: int
) -> tuple[int, ...]:
    """Find the `wanted` largest values of each row (aten/src/ATen/native/cuda/TensorTopK.cpp and .cu, 2.10 on).

    A few long rows are sorted whole (`should_use_sort`): their values and where these come from, and what the sort
    takes. Else a copy of what is not contiguous; and where many blocks search a row together (`mbtopk::launch`): of
    each row its value, counts and digits, of each block its counts. More than 4,096 found values are sorted elsewhere
    with a sort of their own, and where they come from is picked once more. What CUB takes to scan the blocks' counts,
    about a kilobyte, is left out.
    """
    count = rows * length
    copy = 0
    blocks: tuple[int, ...] = (0,) * 7
    whole: tuple[int, ...] = (0,) * 10
    again: tuple[int, ...] = (0,) * 11
    if rows <= _TOPK_SORTED[0] and length >= _TOPK_SORTED[1]:
        whole = (count * key_bytes, count * 8, *row_sort(rows, length, key_bytes, is_strided))
    else:
        copy = is_strided * count * key_bytes
        if length >= next((least for most, least in _TOPK_MANY_BLOCKS if rows <= most), _TOPK_SHORTEST):
            blocks = _topk_blocks(rows, length, key_bytes, multiprocessors)

    if wanted > SORTED_IN_PLACE:
        found = rows * wanted
        again = (found * 8, found * key_bytes, *row_sort(rows, wanted, key_bytes, 0), found * 8)
    return (copy, *blocks, *whole, *again)


def _topk_blocks(rows: int, length: int, key_bytes: int, multiprocessors: int) -> tuple[int, ...]:
    """Return the buffers of `mbtopk::launch`, whose blocks have as many values as `get_items_per_thread` says."""
    resident = multiprocessors * (_REGISTERS // (_TOPK_REGISTERS * _TOPK_THREADS)) * _TOPK_THREADS
    a_thread = max(4, min(64, -(-rows * length // resident)))
    blocks = rows * -(-length // (a_thread * _TOPK_THREADS))
    digits = 1 << _RADIX_BITS
    radix_bytes = max(4, key_bytes)
    return (
        rows * key_bytes, 2 * rows * 4, 2 * rows * radix_bytes, blocks * digits * 2, rows * digits * 4, blocks * 4,
        blocks * 4,
    )  # fmt: skip


_TOPK_SORTED = 10, 100_000
"""At most so many rows of at least so many values."""

_TOPK_MANY_BLOCKS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
_TOPK_SHORTEST = 400
"""Up to so many rows, how many values a row must have for many blocks; beyond, `_TOPK_SHORTEST`
(`should_use_multiblock`)."""

_TOPK_THREADS, _TOPK_REGISTERS, _REGISTERS = 256, 40, 65536
"""Threads of a block, what each takes, and what a multiprocessor has of them (CUDA C++ Programming Guide)."""


def row_scan(rows: int, length: int, value_bytes: int) -> tuple[int, ...]:
    """Return what tiles of CUB's scan of one row tell each other (cub/device/dispatch/dispatch_scan.cuh)."""
    if rows != 1:
        return (0,)
    tiles = -(-length // (_SCAN_TILE_BYTES // max(4, value_bytes)))
    return ((tiles + 32) * 2 * max(4, value_bytes) + 255,)


_SCAN_TILE_BYTES = 128 * 15 * 4
"""Threads, items of 4 bytes for each."""


def norm_gradient(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> tuple[int, ...]:
    """Return partial gradients of a norm's weight and of its bias, where there are more than 65,536 rows.

    aten/src/ATen/native/cuda/layer_norm_kernel.cu, `LaunchGammaBetaBackwardCUDAKernel`.
    """
    if rows <= 64 * 1024 or columns // _WARP >= multiprocessors // 2:
        return 0, 0
    blocks = min(32 * 1024 // -(-columns // _WARP), -(-rows // 32))
    return (blocks * columns * element_bytes,) * 2


_CONVOLUTION_MOST_BYTES = 128 * 1024 * 1024
"""What fp32 convolutions without tensor cores were recorded to take at most: 4 MiB for an input of 11.7 MB, 128 MiB for
each of 47 MB to 3 GB (HugePandaCoder/octree-nca-groupeq, my_snapshot.pickle, `run_conv_plan`); the weight's size and up
to 256 bytes for small ones (JasperSolt/EoR_NN, snapshot.pickle)."""


def convolution_at_most(
    input_bytes: int, weight_bytes: int, output_bytes: int, converts: int, tried_bytes: int
) -> tuple[int, ...]:
    """Return the most that cuDNN's workspace of one convolution is known to take; the least is none.

    A tensor core kernel on tensors in NCHW order works on copies of them in NHWC order: a half precision convolution of
    256 to 256 channels was measured to reserve its input and output a second time (pytorch/pytorch#123533).

    Args:
        converts: 1 if such a kernel may be chosen and the tensors would have to be copied for it; else 0.
        tried_bytes: the most that an algorithm takes which may be chosen, and is done without where there is no room.
    """
    copies_bytes = input_bytes + weight_bytes + output_bytes
    most_bytes = copies_bytes if converts else min(copies_bytes, _CONVOLUTION_MOST_BYTES)
    return (max(most_bytes, tried_bytes),)


RULES: dict[str, Callable[..., tuple[int, ...]]] = {
    "reduction": reduction,
    "embedding_gradient": embedding_gradient,
    "norm_gradient": norm_gradient,
    "index_sort": index_sort,
    "row_scan": row_scan,
    "row_sort": row_sort,
    "row_topk": row_topk,
    "convolution": lambda *_: (0,),
}

AT_MOST: dict[str, Callable[..., tuple[int, ...]]] = {"convolution": convolution_at_most}
"""Of the rules that give the least of a range: what gives the most."""


NEEDED: dict[str, Callable[[str, tuple[int, ...]], tuple[int, ...]]] = {
    "convolution": lambda rule, arguments: sizes_at_most(rule, (*arguments[:-1], 0))
}
"""Of these rules the last argument is done without: where there is no room for an algorithm's workspace, PyTorch takes
the next one (aten/src/ATen/native/cudnn/Conv_v8.cpp, `generate_and_filter_plans` and `try_plans`)."""
