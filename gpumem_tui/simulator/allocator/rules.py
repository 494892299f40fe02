"""Device memory that CUDA kernels take for themselves in steps: sizes that are no straight line in the batch size.

A trace keeps the rule and its arguments, which are affine in the batch size, so that a replay works the size out anew.
No torch import.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Literal

NOT_EXAMINED = "not examined"
"""Why an operator that nobody has looked at is counted without scratch."""

_FLOAT_BYTES = 4
_INDEX_32_BIT = 2**31 - 1
_WARP, _MOST_THREADS = 32, 1024
_RADIX_BITS = 8
_SORT_ONE_TILE = (256, 19)
"""Threads, and items of 4 bytes for each."""
_SORT_THREADS = 384


@dataclass(frozen=True, slots=True)
class Computed:
    """A buffer of an operator: number `position` of what `rule` gives for `arguments`; it may be of no size."""

    rule: str
    position: int
    arguments: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that the kernel asks for, as expected."""
        return sizes(self.rule, self.arguments)[self.position]

    def bytes_at(self, level: Level) -> int:
        """Return the bytes that the kernel asks for where they are not known, or taken for a moment only."""
        other = AT_LEVEL[level].get(self.rule)
        return other(*self.arguments)[self.position] if other is not None else self.size_bytes

    @property
    def is_open(self) -> bool:
        """Return whether its size has only a known range."""
        return self.rule in AT_LEVEL["most"]

    @property
    def is_tried(self) -> bool:
        """Return whether it is taken once, for a moment, and only as far as there is room."""
        return self.rule == TRIED


Level = Literal["expected", "least", "most", "momentary"]
"""Which end of each size with only a known range to assume; momentary: as expected, with what is tried for a
moment."""

Buffer = int | Computed
"""The size of a buffer in bytes, or the rule that gives it."""


def size_bytes_of(buffer: Buffer) -> int:
    """Return the size of a buffer in bytes, as expected."""
    return buffer.size_bytes if isinstance(buffer, Computed) else buffer


@dataclass(frozen=True, slots=True)
class GivenBack:
    """A point at which a kernel gives back the buffer that is entry number `position` of what it takes."""

    position: int


@dataclass(frozen=True, slots=True)
class Made:
    """A point at which a kernel makes result number `position` of its operator, or all tensors of that."""

    position: int


Taken = Buffer | GivenBack | Made


@lru_cache(4096)
def sizes(rule: str, arguments: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes of every buffer that a rule of `RULES` gives; always as many, 0 for one not taken."""
    return RULES[rule](*arguments)


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


def embedding_gradient(  # noqa: PLR0913 - the arguments of a rule are plain numbers, which a trace stores
    indices: int, weights: int, width: int, index_bytes: int, element_bytes: int, architecture: int, fuses: int
) -> tuple[int, ...]:
    """Return sorted and original positions, the sort's own, segments and their sums, of more than 3,072 indices.

    aten/src/ATen/native/cuda/Embedding.cu (`embedding_dense_backward_cuda`), which sorts by all bits, and
    EmbeddingBackwardKernel.cu: number 6 are the keys that `unique_by_key` writes, 7 and 10 what CUB takes for it and
    for a scan. Few long segments are summed into the result, or its like in fp32, at once. Recorded on an H200: 83,455
    bytes to sort 4,096 indices, 150,015 for 8,192, 4,269,567 for 262,144.

    Args:
        architecture: its major compute capability.
        fuses: up to how many blocks the sums of long segments are one kernel's; 0 where they never are.
    """
    if indices <= 3072:
        return (0,) * 15
    segments = min(indices, weights)
    partial = indices // 10 + segments
    threads = -(-width // _WARP) * _WARP
    blocks = -(-segments * threads // min(threads, _MOST_THREADS))
    sums: tuple[int, int] = (partial * width * max(element_bytes, _FLOAT_BYTES), 0)
    if blocks < fuses and partial > 4 * blocks:
        sums = (partial * index_bytes, weights * width * _FLOAT_BYTES if element_bytes < _FLOAT_BYTES else 0)
    return (
        indices * index_bytes,
        indices * index_bytes,
        indices * index_bytes,
        *radix_sort(indices, index_bytes, index_bytes, 8 * index_bytes, architecture),
        indices * index_bytes,
        8,
        indices * index_bytes,
        _tile_states(indices, 448 * 11 if architecture >= 9 else 192 * 7, 8),  # tuning_unique_by_key.cuh
        segments * index_bytes,
        segments * index_bytes,
        _tile_states(segments, _SCAN_TILE_BYTES // index_bytes, index_bytes),
        8,
        partial * index_bytes,
        *sums,
    )


def index_sort(items: int, rows: int, architecture: int) -> tuple[int, ...]:
    """Sort rows' numbers with where each came from, both of 64 bits; only as many bits as the largest number has."""
    return radix_sort(items, 8, 8, max(1, (rows - 1).bit_length()), architecture)


def radix_sort(items: int, key_bytes: int, value_bytes: int, key_bits: int, architecture: int) -> tuple[int, ...]:
    """Return what CUB takes to sort pairs into other arrays (dispatch_radix_sort.cuh in cub/device/dispatch, SM80 on).

    One tile takes 1 byte. More take histograms of every pass over 8 bits, what each tile tells the next, and, where
    there is more than one pass, another copy of keys and values; every part in whole 256 bytes. Recorded on two GPUs:
    72,191 bytes for 4,096 pairs of 8 bytes and 14 bits, 138,751 for 8,192 (tests/recordings). The tiles are of the
    architecture, its major compute capability.
    """
    scale = max(key_bytes, value_bytes, 4)
    if not items:
        return (0,)
    if items <= _SORT_ONE_TILE[0] * max(1, _SORT_ONE_TILE[1] * 4 // scale):
        return (1,)
    passes = -(-key_bits // _RADIX_BITS)
    tiles = -(-items // (_SORT_THREADS * max(1, _sorted_each(key_bytes, value_bytes, architecture) * 4 // scale)))
    digits = 1 << _RADIX_BITS
    copies = (items * value_bytes, items * key_bytes) if passes > 1 else ()
    parts = (passes * digits * 8, tiles * digits * 4, *copies, passes * 4)
    return (sum(-(-part // 256) * 256 for part in parts) + 255,)


def _sorted_each(key_bytes: int, value_bytes: int, architecture: int) -> int:
    """Return how many items of 4 bytes a thread sorts (CCCL's tuning_radix_sort.cuh, `Policy800` and `Policy900`)."""
    if architecture < 9:
        return 17 if key_bytes == 4 and value_bytes else 21
    if key_bytes == 4:
        return 29 if value_bytes == 8 else 17 if value_bytes else 19
    return 24 if value_bytes == 8 else 30


SORTED_IN_PLACE = 4096
_SORTED_ALONE, _SORTED_BY_CUB = 1_000_000, 128
"""Values of a row, values of a row, rows (`should_use_small_sort` and `launch_stable_sort_kernel`)."""


def row_sort(rows: int, length: int, key_bytes: int, is_strided: int, architecture: int) -> tuple[int, ...]:
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
        return (*copies, length * 8, 0, 0, *radix_sort(length, key_bytes, 8, 8 * key_bytes, architecture), 0)
    if rows >= _SORTED_BY_CUB:
        return (*copies, count * 8, count * (key_bytes + 8) + 511, 0, 0, 0)
    by_value = radix_sort(count, key_bytes, 8, 8 * key_bytes, architecture)
    by_row = radix_sort(count, 8, 0, (rows - 1).bit_length(), architecture)
    return (*copies, count * 8, count * 8, count * key_bytes, *by_value, *by_row)


def row_topk(  # noqa: PLR0913 - the arguments of a rule are plain numbers, which a trace stores
    rows: int, length: int, wanted: int, key_bytes: int, is_strided: int, multiprocessors: int, architecture: int
) -> tuple[int, ...]:
    """Find the `wanted` largest values of each row (aten/src/ATen/native/cuda/TensorTopK.cpp and .cu, 2.10 on).

    A few long rows are sorted whole (`should_use_sort`): their values and where these come from, and what the sort
    takes. Else a copy of what is not contiguous; and where many blocks search a row together (`mbtopk::launch`): of
    each row its value, counts and digits, of each block its counts. More than 4,096 found values are sorted elsewhere
    with a sort of their own, and where they come from is picked once more. CUB's memory to scan the blocks' counts,
    about a kilobyte, is left out.
    """
    count = rows * length
    copy = 0
    blocks: tuple[int, ...] = (0,) * 7
    whole: tuple[int, ...] = (0,) * 10
    again: tuple[int, ...] = (0,) * 11
    if rows <= _TOPK_SORTED[0] and length >= _TOPK_SORTED[1]:
        whole = (count * key_bytes, count * 8, *row_sort(rows, length, key_bytes, is_strided, architecture))
    else:
        copy = is_strided * count * key_bytes
        if length >= next((least for most, least in _TOPK_MANY_BLOCKS if rows <= most), _TOPK_SHORTEST):
            blocks = _topk_blocks(rows, length, key_bytes, multiprocessors)

    if wanted > SORTED_IN_PLACE:
        found = rows * wanted
        again = (found * 8, found * key_bytes, *row_sort(rows, wanted, key_bytes, 0, architecture), found * 8)
    return (copy, *blocks, *whole, *again)


def _topk_blocks(rows: int, length: int, key_bytes: int, multiprocessors: int) -> tuple[int, ...]:
    """Return the buffers of `mbtopk::launch`, whose blocks have as many values as `get_items_per_thread` states."""
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
    return (_tile_states(length, _SCAN_TILE_BYTES // max(4, value_bytes), value_bytes),)


def _tile_states(items: int, tile: int, value_bytes: int) -> int:
    """Return the states of a scan's tiles, a status and a value each, and those of a warp before the first.

    CCCL 3, cub/agent/single_pass_scan_operators.cuh (`tile_state_allocation_size`) within a block of their own, both in
    whole 256 bytes. Recorded on an H200: 1,279 bytes for 4,096 to 16,384 items of 8 bytes, 2,047 for 262,144.
    """
    states = (-(-items // tile) + _WARP) * 2 * max(4, value_bytes)
    return -(-(-(-states // 256) * 256 + 255) // 256) * 256 + 255


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


def efficient_attention_gradient(  # noqa: PLR0913 - the arguments of a rule are plain numbers, which a trace stores
    heads: int,
    queries: int,
    keys: int,
    width: int,
    value_width: int,
    rows: int,
    columns: int,
    accumulates: int,
    accumulates_keys: int,
) -> tuple[int, ...]:
    """Return the accumulators of the efficient kernel's backward.

    aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h, `workspace_size`: of each head, blocks
    of the query gradient with a lock each, and where the kernel does not hold them the gradients of key and value, once
    for each part of the keys (`num_splits_key` in attention_backward.cu). Recorded on an H200: 3,148,800 bytes of 48
    heads, 256 tokens, 64 wide.

    Args:
        heads: of all samples. `rows`, `columns`: of a block.
        accumulates: 1 if the query gradient is, and `accumulates_keys` if the two others are.
    """
    elements = 0
    if accumulates:
        elements += -(-queries // rows) * -(-width // columns) * (rows * columns + 4)
    if accumulates_keys:
        splits = 1 if heads >= 256 and keys <= 2 * columns else -(-keys // columns)
        splits = max(1, min(splits, 200 // max(1, heads)))
        elements += splits * columns * sum(-(-one // rows) * rows for one in (width, value_width))
    return (heads * -(-elements // 4) * 4 * _FLOAT_BYTES,)


_CAPPED_BYTES = 128 * 1024 * 1024
"""The most recorded for fp32 convolutions without tensor cores: 4 MiB for an input of 11.7 MB, 128 MiB for
each of 47 MB to 3 GB (HugePandaCoder/octree-nca-groupeq, my_snapshot.pickle, `run_conv_plan`); the weight's size and up
to 256 bytes for small ones (JasperSolt/EoR_NN, snapshot.pickle)."""

_FEW_BLOCKS = 8
"""A weight's gradient by fewer thread blocks was measured to be worked out another way (4 images of 64 to 64 channels
on an H200; 8 images not)."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The workspace of one pass of a convolution, in bytes that are affine in the batch size; a rule's arguments.

    Attributes:
        least, expected, most: what we know about it.
        copied: all its tensors; without tensor cores it takes as much at most, and not more than `_CAPPED_BYTES`.
        chosen: the most that an algorithm takes which may be chosen, and is done without where there is no room
            (aten/src/ATen/native/cudnn/Conv_v8.cpp, `try_configs`).
        partial, parts: bytes of one partial sum, and how many are taken, next to what is expected; of at least
            `rows_a_part` of `rows` result pixels each.
        tile_rows, tiles_beside, processors: where so many tiles lie side by side of every so many rows, those that
            are left when all processors have had equally many are cut into parts, if they are for about half of these.
        most_of_few: the most where fewer than `_FEW_BLOCKS` of `blocks` thread blocks work on it.
    """

    least: int = 0
    expected: int = 0
    most: int = 0
    copied: int = 0
    chosen: int = 0
    partial: int = 0
    parts: int = 0
    rows: int = 0
    rows_a_part: int = 1
    tile_rows: int = 0
    tiles_beside: int = 0
    processors: int = 0
    most_of_few: int = 0
    blocks: int = _FEW_BLOCKS

    @property
    def expected_bytes(self) -> int:
        """The bytes that are expected."""
        return self.expected + self._sums_bytes

    @property
    def needed_bytes(self) -> int:
        """The most without what is done without where there is no room."""
        most = self.most if self.blocks >= _FEW_BLOCKS else max(self.most, self.most_of_few)
        return max(most, self.expected_bytes, min(self.copied, _CAPPED_BYTES))

    @property
    def most_bytes(self) -> int:
        """The most that may be taken."""
        return max(self.needed_bytes, self.chosen)

    @property
    def least_bytes(self) -> int:
        """The least that may be taken."""
        return max(0, min(self.least + self._sums_bytes, self.expected_bytes) if self.least else 0)

    @property
    def _sums_bytes(self) -> int:
        parts = min(self.parts, self.rows // self.rows_a_part)
        if self.tile_rows:
            parts = _parts_left(-(-self.rows // self.tile_rows) * self.tiles_beside, self.processors)
        return self.partial * parts

    def computed(self, knowledge: str) -> Computed:
        """Return it as a size that a trace stores; `knowledge` is a word of `CONVOLUTIONS`."""
        return Computed(CONVOLUTIONS[knowledge], 0, astuple(self))


def _parts_left(tiles: int, processors: int) -> int:
    """Return into how many parts those tiles are cut that are left for a last round.

    Measured on an H200's 132: 64 are cut in two, of 68 32 in three; 29, 36, 58, 76, 82 and more were not.
    """
    left = tiles % processors
    if tiles < processors or not 0.45 * processors < left < 0.55 * processors:
        return 0
    return 2 * left if 2 * left <= processors else 3 * ((processors - left) // 2)


CONVOLUTIONS = {known: f"{known} convolution" for known in ("measured", "bounded", "unknown")}
"""The rules of convolutions' workspaces, by what we know about them."""

TRIED = "tried convolution"
"""The rule of what cuDNN's benchmark tries: no bytes, but for the moment."""

RULES: dict[str, Callable[..., tuple[int, ...]]] = {
    "reduction": reduction,
    "efficient_attention_gradient": efficient_attention_gradient,
    "embedding_gradient": embedding_gradient,
    "norm_gradient": norm_gradient,
    "index_sort": index_sort,
    "row_scan": row_scan,
    "row_sort": row_sort,
    "row_topk": row_topk,
    **dict.fromkeys(CONVOLUTIONS.values(), lambda *sizes: (Workspace(*sizes).expected_bytes,)),
    TRIED: lambda _: (0,),
}

AT_LEVEL: dict[Level, dict[str, Callable[..., tuple[int, ...]]]] = {
    "expected": {},
    "least": dict.fromkeys(CONVOLUTIONS.values(), lambda *sizes: (Workspace(*sizes).least_bytes,)),
    "most": dict.fromkeys(CONVOLUTIONS.values(), lambda *sizes: (Workspace(*sizes).most_bytes,)),
    "momentary": {TRIED: lambda tried_bytes: (tried_bytes,)},
}
"""Further sizes that rules give at other levels than expected."""
