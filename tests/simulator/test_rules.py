"""Scratch that comes in steps: PyTorch's own expressions, worked out by hand for sizes people train at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.memory import Bucket
from gpumem_tui.simulator.allocator.replay import AffineTrace, NotAffine, replay
from gpumem_tui.simulator.allocator.rules import Computed, embedding_gradient, norm_gradient, reduction
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
    assert embedding_gradient(3072, 50257, 768, 8, 4) == (0,) * 11
    sizes = embedding_gradient(8192, 50257, 768, 8, 2)
    assert sizes[-1] == (819 + 8192) * 768 * 4, "in fp32 whatever the gradient is in"
    assert sizes[:3] == (8192 * 8,) * 3, "of the sort"
    assert sizes[3] > 2 * 8192 * 8
    assert embedding_gradient(10**6, 30522, 8, 8, 4)[-1] == (10**5 + 30522) * 8 * 4, "no more segments than weights"


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
    arguments = (1024 * batch_size, 50257, 64, 8, 4)
    taken = [recorder.allocate(Computed("embedding_gradient", p, arguments)) for p in range(11)]
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
