"""Scratch that comes in steps: PyTorch's own expressions, worked out by hand for sizes people train at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.allocator.replay import AffineTrace, NotAffine, replay
from gpumem_tui.simulator.allocator.rules import (
    Computed,
    efficient_attention_gradient,
    embedding_gradient,
    norm_gradient,
    reduction,
)
from gpumem_tui.simulator.allocator.timeline import Timeline, TimelineRecorder
from gpumem_tui.step import Phase

A100 = (108, 2048)
V100 = (80, 2048)


def test_a_bias_gradient_takes_a_partial_sum_for_every_thread_and_output() -> None:
    """BERT-large, 4 x 512 tokens: 32 thread blocks an output, each of 32 threads with 4 outputs side by side."""
    assert reduction(4096, 2048, 4, 4, 0, 4096, 4, *V100) == (4096 * 4 * 32 * 32 * 4, 4 * 32)


@pytest.mark.parametrize(("run", "vector"), [(768, 4), (766, 2), (767, 1)])
def test_outputs_side_by_side_are_as_many_as_divide_evenly(run: int, vector: int) -> None:
    partial_bytes, _ = reduction(run, 32768, 4, 4, 0, run, 4, *A100)
    width = 32
    values = 32768 // (512 // vector // width)
    blocks = -(-(run // vector) // width)
    split = max(min(-(-108 * (2048 // (512 // vector)) // blocks), values // 16), values // 256)
    assert partial_bytes == 4 * run * split * width * vector


def test_a_reduction_of_more_outputs_than_one_index_reaches_is_halved_along_them() -> None:
    """Down to one input nothing is left to halve there."""
    partial_bytes, semaphores = reduction(2**34, 1, 4, 4, 0, 2**34, 4, *A100)
    assert (partial_bytes, semaphores) == (0, 0)


def test_a_small_reduction_stays_within_its_thread_blocks() -> None:
    assert reduction(768, 256, 4, 4, 0, 768, 4, *A100) == (0, 0), "fewer than 256 values a thread"
    assert reduction(8 * 1024 * 768, 8, 4, 4, 0, 768, 4, *A100) == (0, 0), "a position embedding's gradient"
    assert reduction(8192, 4096, 4, 4, 2, 1, 1, *A100) == (0, 0), "a norm's mean, a row a warp"


def test_a_sum_of_everything_takes_a_result_a_block() -> None:
    """10^8 values: 512 threads a block that read 4 at once; as many blocks as there is room for, and one semaphore."""
    partial_bytes, semaphores_bytes = reduction(1, 10**8, 4, 4, 2, 1, 1, *A100)
    assert partial_bytes == 4 * -(-(-(-(10**8) // 512) // 1) // 256)
    assert semaphores_bytes == 4


def test_what_cannot_be_indexed_with_32_bits_is_taken_in_halves() -> None:
    rows = 2**31 // 4096 // 4
    assert reduction(4096, 2 * rows, 4, 4, 0, 4096, 4, *A100) == reduction(4096, rows, 4, 4, 0, 4096, 4, *A100)


def test_an_embeddings_gradient_is_summed_in_parts_above_3072_indices() -> None:
    assert embedding_gradient(3072, 50257, 768, 8, 4, 8, 432) == (0,) * 15
    sizes = embedding_gradient(8192, 50257, 768, 8, 2, 8, 432)
    assert sizes[-2:] == ((819 + 8192) * 768 * 4, 0), "in fp32 for a gradient of any type"
    assert sizes[:3] == (8192 * 8,) * 3, "of the sort"
    assert sizes[3] > 2 * 8192 * 8
    wide = embedding_gradient(10**6, 30522, 8, 8, 4, 8, 432)
    assert wide[-2] == (10**5 + 30522) * 8 * 4, "no more segments than weights"


@pytest.mark.parametrize(
    ("indices", "weights", "width", "sort_bytes", "unique_bytes", "sums_bytes"),
    [
        (4096, 32_000, 512, 83_455, 1_279, (409 + 4096) * 512 * 4),
        (8192, 32_000, 512, 150_015, 1_279, 18_454_528),
        (16_384, 32, 12, 283_135, 1_279, 13_360),
        (262_144, 32, 12, 4_269_567, 2_047, 209_968),
    ],
)
def test_an_embeddings_gradient_takes_what_an_h200_was_recorded_with(
    indices: int, weights: int, width: int, sort_bytes: int, unique_bytes: int, sums_bytes: int
) -> None:
    """A language model's words, and T5's relative positions, whose few long segments are summed in one kernel."""
    sizes = embedding_gradient(indices, weights, width, 8, 4, 9, 4 * 132)
    assert (sizes[3], sizes[7], sizes[10], sizes[13]) == (sort_bytes, unique_bytes, 1_279, sums_bytes)


def test_the_gradient_of_few_weights_in_16_bits_is_summed_in_fp32() -> None:
    assert embedding_gradient(65_536, 256, 512, 8, 2, 9, 528)[-2:] == ((6553 + 256) * 8, 256 * 512 * 4)
    assert embedding_gradient(65_536, 256, 512, 8, 2, 9, 0)[-2:] == ((6553 + 256) * 512 * 4, 0), "torch up to 2.10"


def test_the_efficient_kernel_keeps_gradients_of_wide_keys_for_every_part() -> None:
    assert efficient_attention_gradient(48, 256, 256, 64, 64, 64, 64, 1, 0) == (3_148_800,), "recorded on an H200"
    narrow, wide = (efficient_attention_gradient(8, 128, 128, 160, 160, 128, 64, 1, own)[0] for own in (0, 1))
    assert wide - narrow == 8 * 2 * 64 * (256 + 256) * 4, "two parts of 64 keys, whose width is rounded to 128"


def test_a_layer_norm_of_many_rows_keeps_partial_gradients() -> None:
    assert norm_gradient(65536, 768, 4, 108) == (0, 0)
    assert norm_gradient(131072, 768, 4, 108) == ((32768 // 24) * 768 * 4,) * 2
    assert norm_gradient(131072, 4096, 4, 108) == (0, 0), "wide enough to keep the GPU busy by columns"


# In a trace


def step(batch_size: int) -> Timeline:
    """One embedding gradient of 1,024 tokens a sample."""
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    recorder.allocate(512, bucket=Bucket.PARAMETERS)
    recorder.mark(1, Phase.BACKWARD)
    arguments = (1024 * batch_size, 50257, 64, 8, 4, 8, 432)
    taken = [recorder.allocate(Computed("embedding_gradient", p, arguments)) for p in range(15)]
    for number in taken:
        recorder.release(number)
    return recorder.finish()


def test_a_rule_is_applied_anew_at_every_batch_size() -> None:
    trace = AffineTrace.fit((2, step(2)), (3, step(3)))
    trace.check(5, step(5))
    assert trace.at(40).sizes == step(40).sizes
    assert replay(trace.at(3)).peak_allocated_bytes == 512
    assert replay(trace.at(4)).peak_allocated_bytes > 4 * 1024 * 64 * 4


def test_another_rule_is_another_program() -> None:
    first, second = step(2), step(3)
    other = tuple((number, replace(computed, position=0)) for number, computed in second.computed)
    with pytest.raises(NotAffine, match="allocates differently"):
        AffineTrace.fit((2, first), (3, replace(second, computed=other)))
