"""Scratch of kernels, by PyTorch's own expressions, and the list of unknown ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import KIB, MIB
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.rules import NOT_EXAMINED, Computed, GivenBack, Made, radix_sort, sizes
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from gpumem_tui.simulator.device.scratch import assumption, is_assumed, scratch
from tests.simulator.simulated_steps import GPT2, LLAMA, MLP, RESNET, on, simulated_gpu, trained

aten = torch.ops.aten
A100 = profile_for("2.13.0", find_gpu("a100-80gb"))


def taken(func: Any, *args: Any) -> list[int]:
    """Bytes of every buffer on an A100."""
    return [
        found.size_bytes if isinstance(found, Computed) else found
        for found in scratch(func, args, A100)
        if not isinstance(found, (GivenBack, Made))
    ]


def _heads(batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(batch, heads, tokens, width, dtype=dtype, device="meta")


FLASH = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default


def test_flash_backward_rounds_rows_to_128_and_width_to_32() -> None:
    query = _heads(2, 12, 1000, 40, torch.bfloat16)
    assert taken(FLASH, query.transpose(1, 2).contiguous().transpose(1, 2), query, query, query) == [
        2 * 12 * 1024 * 4,
        2 * 1024 * 12 * 64 * 4,
    ]


def test_flash_backward_expands_grouped_keys_and_values() -> None:
    query, key = _heads(2, 32, 128, 128, torch.bfloat16), _heads(2, 8, 128, 128, torch.bfloat16)
    assert taken(FLASH, query, query, key, key)[3:] == [2 * 128 * 32 * 128 * 2] * 2


def test_efficient_backward_multiplies_in_full_size_only_in_fp32() -> None:
    single, half = _heads(2, 12, 1024, 64, torch.float32), _heads(2, 12, 1024, 64, torch.float16)
    kernel = 2 * 12 * 16 * (64 * 64 + 4) * 4
    by_tokens = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (single, half)]
    assert taken(EFFICIENT, by_tokens[0], *[single] * 3) == [single.numel() * 4, *[2 * 12 * 1024 * 4] * 2, kernel]
    assert taken(EFFICIENT, by_tokens[1], *[half] * 3) == [2 * 12 * 1024 * 4, kernel]
    assert taken(EFFICIENT, *[half] * 4) == [half.nbytes, 2 * 12 * 1024 * 4, kernel]


@pytest.mark.parametrize(
    ("shape", "dims", "layout", "outputs", "run"),
    [
        ((4096, 768), [0], 0, 768, 768),
        ((4, 1024, 768), [0, 1], 0, 768, 768),
        ((4096, 768), [1], 2, 4096, 1),
        ((4096, 768), None, 2, 1, 1),
        ((8, 64, 32, 32), [0, 2, 3], 1, 64, 1),
        ((4, 1024, 768), [1], 0, 4 * 768, 768),
    ],
)
def test_a_reduction_is_laid_out_by_stride(
    shape: tuple[int, ...], dims: list[int] | None, layout: int, outputs: int, run: int
) -> None:
    tensor = torch.empty(shape, device="meta")
    found = scratch(aten.sum.dim_IntList, (tensor, dims), A100)
    assert isinstance(found[0], Computed)
    assert found[0].arguments == (
        outputs,
        tensor.numel() // outputs,
        4,
        4,
        layout,
        run,
        found[0].arguments[6],
        108,
        2048,
    )


def test_a_channels_last_sum_is_one_of_columns() -> None:
    tensor = torch.empty(8, 64, 32, 32, device="meta").to(memory_format=torch.channels_last)
    found = scratch(aten.sum.dim_IntList, (tensor, [0, 2, 3]), A100)
    assert isinstance(found[0], Computed)
    assert found[0].arguments[:6] == (64, 8 * 32 * 32, 4, 4, 0, 64)


def test_a_16_bit_sum_is_accumulated_in_fp32_and_an_extremum_is_not() -> None:
    tensor = torch.empty(4096, 768, dtype=torch.bfloat16, device="meta")
    total, highest = (scratch(op, (tensor, [0]), A100)[0] for op in (aten.sum.dim_IntList, aten.amax.default))
    assert isinstance(total, Computed)
    assert isinstance(highest, Computed)
    assert (total.arguments[2], highest.arguments[2]) == (4, 2)


def test_the_bias_gradient_of_a_linear_layer_shows_in_the_peak() -> None:
    rows, width = 32768, 768
    partial_bytes, _ = sizes("reduction", (width, rows, 4, 4, 0, width, 4, 108, 2048))
    peaks = []
    for bias in (True, False):
        with on() as (device, memory):
            layer = nn.Linear(64, width, bias=bias, device=device)
            output = layer(torch.randn(rows, 64, device=device))
            memory.reset_peak_memory_stats()
            output.backward(torch.randn_like(output))
            peaks.append(memory.max_memory_allocated())
    assert partial_bytes > 100 * MIB
    assert peaks[0] - peaks[1] == pytest.approx(partial_bytes, abs=64 * KIB)


def test_a_safe_softmax_holds_its_mask_beside_the_result() -> None:
    scores = _heads(2, 4, 128, 128, torch.float32)
    assert taken(aten._safe_softmax.default, scores, -1) == [scores.numel(), 2 * 4 * 128, 4]


def test_a_softmaxs_backward_multiplies_gradient_and_result_first() -> None:
    scores = _heads(2, 4, 128, 128, torch.bfloat16)
    assert taken(aten._softmax_backward_data.default, scores, scores, -1, scores.dtype) == [scores.nbytes]
    assert not taken(aten._log_softmax_backward_data.default, scores, scores, -1, scores.dtype)
    turned = scores.transpose(1, 2)
    assert taken(aten._softmax_backward_data.default, turned, turned, -1, scores.dtype) == [scores.nbytes] * 3
    assert taken(aten._softmax.default, turned, -1, False) == [scores.nbytes]


def test_the_peak_of_a_softmaxs_gradient_is_the_published_one() -> None:
    """pytorch/pytorch#72450: 15,099,495,424 bytes on a GPU; what is there, result, gradient, product, input's."""
    with on() as (device, memory):
        x = torch.rand(5120, 2, 384, 384, dtype=torch.bfloat16, device=device, requires_grad=True)
        loss = x.softmax(dim=-1).mean()
        loss.backward()
        assert memory.max_memory_allocated() == 15_099_495_424


def test_cudnns_attention_takes_what_an_h200_was_recorded_with() -> None:
    backward = aten._scaled_dot_product_cudnn_attention_backward.default
    query, image = _heads(4, 12, 1024, 128, torch.bfloat16), _heads(16, 12, 197, 64, torch.float16)
    keys = _heads(4, 4, 1024, 128, torch.bfloat16)
    assert taken(backward, query, query, keys, keys) == [50_528_512], "a Llama with grouped heads"
    assert taken(backward, image, image, image, image) == [9_834_496]
    turned = image.transpose(2, 3).contiguous().transpose(2, 3)
    assert taken(backward, turned, image, image, image) == [image.nbytes, 9_834_496]
    assert taken(aten._scaled_dot_product_cudnn_attention.default, image, image, image) == [256]


def test_a_foreach_norm_keeps_a_part_for_every_65536_elements() -> None:
    tensors = [torch.empty(200_000, device="meta"), torch.empty(10, device="meta")]
    assert taken(aten._foreach_norm.Scalar, tensors, 2) == [2 * 4 * 4]


# Assumptions


@pytest.mark.parametrize(
    ("func", "assumed"),
    [
        (aten.add.Tensor, False),
        (aten.view.default, False),
        (aten.mm.default, False),
        (aten._foreach_addcmul_.Scalar, False),
        (aten._fused_adamw_.default, False),
        (aten.sum.dim_IntList, False),
        (aten.native_layer_norm_backward.default, False),
        (aten.convolution.default, False),
        (aten.sort.default, False),
        (aten.topk.default, False),
        (aten.native_group_norm_backward.default, False),
        (aten.linalg_qr.default, True),
    ],
)
def test_an_operator_is_examined_or_assumed(func: Any, assumed: bool) -> None:
    assert is_assumed(func, (torch.empty(8, 8, device="meta"), 2), (8, 0)) is assumed


def test_cudnns_attention_is_assumed_where_it_was_not_recorded() -> None:
    cudnn = aten._scaled_dot_product_cudnn_attention.default
    assert {sm: is_assumed(cudnn, (), sm) for sm in ((8, 0), (9, 0), (10, 0))} == {
        (8, 0): True, (9, 0): False, (10, 0): True,
    }  # fmt: skip
    assert not is_assumed(aten._scaled_dot_product_flash_attention.default, (), (9, 0))


def test_every_assumption_gives_its_reason() -> None:
    assert "cuDNN" in assumption("native_batch_norm")
    assert assumption("linalg_qr") == NOT_EXAMINED


@pytest.mark.parametrize(
    ("shape", "recipe"),
    [(GPT2, Recipe()), (LLAMA, Recipe("amp-bf16", "adafactor", "full")), (MLP, Recipe("amp-fp16", "sgd-momentum"))],
    ids=lambda value: value.name if hasattr(value, "name") else value.precision,
)
def test_every_operator_of_a_transformer_is_examined(shape: Any, recipe: Recipe) -> None:
    assert not trained(shape, recipe, 2, steps=1).mode.assumed


def test_only_cudnns_normalization_is_assumed_of_a_convolutional_network() -> None:
    assumed = set(trained(RESNET, Recipe(), 2, steps=1).mode.assumed)
    assert assumed == {"native_batch_norm", "native_batch_norm_backward"}


# Products


def test_a_factor_that_is_spread_over_its_elements_is_copied() -> None:
    spread, matrix = torch.empty((), device="meta").expand(64, 32), torch.empty(32, 16, device="meta")
    assert taken(aten.mm.default, spread, matrix) == [64 * 32 * 4]
    assert taken(aten.addmm.default, torch.empty(16, device="meta"), spread, matrix) == [64 * 32 * 4]


def test_rows_columns_and_parts_of_them_are_taken_as_they_lie() -> None:
    matrix = torch.empty(64, 64, device="meta")
    for factor in (matrix, matrix.t(), matrix[:32, :32], matrix[:32, :32].t()):
        assert not taken(aten.mm.default, factor, factor)
    heads = torch.empty(2, 128, 8, 64, device="meta").transpose(1, 2).flatten(0, 1)
    assert not taken(aten.bmm.default, heads, heads.transpose(1, 2))
    assert taken(aten.bmm.default, torch.empty(2, 64, 64, 2, device="meta")[..., 0], heads[:2]) == [2 * 64 * 64 * 4]


# Group norm


def test_group_norm_backward_takes_12_bytes_a_channel_and_8_a_group_of_every_sample() -> None:
    images, weight = torch.empty(128, 32, 512, device="meta"), torch.empty(32, device="meta")
    moments = torch.empty(128, 8, device="meta")
    backward = aten.native_group_norm_backward.default
    buffers = taken(backward, images, images, moments, moments, weight, 128, 32, 512, 8, [True, True, True])
    assert sum(buffers) == 12 * 128 * 32 + 8 * 128 * 8
    assert taken(aten.native_group_norm.default, images, weight, weight, 128, 32, 512, 8, 1e-5) == [128 * 32 * 4] * 2


# Sorting


@pytest.mark.parametrize(("pairs", "size_bytes"), [(1000, 1), (2048, 1), (4096, 72_191), (8192, 138_751)])
def test_sorting_takes_what_two_gpus_were_recorded_with(pairs: int, size_bytes: int) -> None:
    assert sizes("index_sort", (pairs, 10_000, 8)) == (size_bytes,)


def test_sorting_rows_numbers_passes_over_no_more_bits_than_they_have() -> None:
    """So that what a step takes at any batch follows from two, though bits do not grow evenly with the rows."""
    sizes_bytes = [sizes("index_sort", (4 * 2048 * batch, 2048 * batch, 8))[0] for batch in (2, 3, 5, 40)]
    assert sizes_bytes == [
        radix_sort(8192 * batch, 8, 8, bits, 8)[0] for batch, bits in ((2, 12), (3, 13), (5, 14), (40, 17))
    ]


def test_accumulating_by_index_sorts_the_indices() -> None:
    table, indices = torch.empty(10_000, 512, device="meta"), torch.empty(8, 512, dtype=torch.int64, device="meta")
    buffers = scratch(aten.index_put_.default, [table, [indices], torch.empty(8, 512, 512, device="meta"), True], A100)
    found = [buffer.size_bytes if isinstance(buffer, Computed) else buffer for buffer in buffers]
    assert found == [32_768, 32_768, GivenBack(0), 32_768, 32_768, 32_768, 72_191, GivenBack(6)]


def test_rows_of_up_to_4096_values_are_sorted_where_they_lie() -> None:
    assert not any(taken(aten.sort.default, torch.empty(512, 4096, device="meta"), -1))


@pytest.mark.parametrize(
    ("shape", "buffers"),
    [
        ((50_000,), [50_000 * 8, radix_sort(50_000, 4, 8, 32, 8)[0]]),
        ((4, 50_000), [200_000 * 8, 200_000 * 8, 200_000 * 4, *radix_sort(200_000, 4, 8, 32, 8), *radix_sort(200_000, 8, 0, 2, 8)]),  # noqa: E501
        ((128, 50_000), [6_400_000 * 8, 6_400_000 * 12 + 511]),
    ],
)  # fmt: skip
def test_longer_rows_are_sorted_beside(shape: tuple[int, ...], buffers: list[int]) -> None:
    assert [size for size in taken(aten.sort.default, torch.empty(shape, device="meta"), -1) if size] == buffers


def test_a_mask_is_summed_as_int64_from_a_copy() -> None:
    mask = torch.empty(8, 1000, dtype=torch.bool, device="meta")
    assert [size for size in taken(aten.cumsum.default, mask, 1) if size] == [8 * 8000]
    assert not any(taken(aten.cumsum.default, mask.float(), 1))


@pytest.mark.parametrize(
    ("shape", "count", "buffers"),
    [
        ((4096, 8), 2, []),
        ((200, 2_999), 2, []),
        # 108 multiprocessors, 6 blocks of 256 threads on each, 4 values a thread: 50 blocks a row
        ((8, 50_257), 2, [8 * 4, 8 * 8, 8 * 8, 400 * 256 * 2, 8 * 256 * 4, 400 * 4, 400 * 4]),
        ((8, 128_000), 2, [8 * 128_000 * 4, 8 * 128_000 * 8, *sizes("row_sort", (8, 128_000, 4, 0, 8))]),
        ((300, 2_000), 1_000, []),
        (
            (21, 9_999),
            5_000,
            [21 * 5_000 * 8, 21 * 5_000 * 4, *sizes("row_sort", (21, 5_000, 4, 0, 8)), 21 * 5_000 * 8],
        ),
    ],
)
def test_topk_takes_by_the_length_of_rows_and_by_how_much_is_wanted(
    shape: tuple[int, ...], count: int, buffers: list[int]
) -> None:
    found = taken(aten.topk.default, torch.empty(shape, device="meta"), count, -1)
    assert [size for size in found if size] == [size for size in buffers if size]


def test_topk_gives_back_what_it_took_on_the_way() -> None:
    recorded = scratch(aten.topk.default, (torch.empty(8, 50_257, device="meta"), 2), A100)
    given_back = [one.position for one in recorded if isinstance(one, GivenBack)]
    assert len(given_back) == len(set(given_back))
    assert all(not isinstance(recorded[position], GivenBack) for position in given_back)


def test_adding_up_by_a_mask_is_assumed() -> None:
    table, mask = torch.empty(10, 4, device="meta"), torch.empty(10, dtype=torch.bool, device="meta")
    assert is_assumed(aten.index_put_.default, (table, [mask], table, True), (8, 0))
    assert not is_assumed(aten.index_put_.default, (table, [mask], table, False), (8, 0))


def test_writing_by_index_sorts_nothing() -> None:
    table, indices = torch.empty(10, 4, device="meta"), torch.empty(8, dtype=torch.int64, device="meta")
    assert not taken(aten.index_put_.default, table, [indices], torch.empty(8, 4, device="meta"), False)


# Profiles


@pytest.mark.parametrize(
    ("torch_version", "gpu", "workspace"),
    [
        ("2.13.0+cpu", "a100-80gb", 8_519_680),
        ("2.13.0+cu130", "h100-80gb", 32 << 20),
        ("2.4.1", "h100-80gb", 32 << 20),
        ("2.4.1", "b200-180gb", 8_519_680),
        ("2.11.0+cu130", "b200-180gb", 8_519_680),
        ("2.11.0+cu130", "rtx-pro-6000-96gb", 8_519_680),
        ("2.13.0", "b200-180gb", 32 << 20),
    ],
)
def test_cublas_workspace_by_version_and_architecture(torch_version: str, gpu: str, workspace: int) -> None:
    assert profile_for(torch_version, find_gpu(gpu)).cublas_workspace_bytes == workspace


@pytest.mark.parametrize(("torch_version", "workspace", "kept"), [("2.4.1", MIB, False), ("2.11.0", MIB, True)])
def test_cublaslt_has_a_workspace_of_its_own_before_2_12(torch_version: str, workspace: int, kept: bool) -> None:
    profile = profile_for(torch_version, find_gpu("h100-80gb"))
    assert (profile.cublaslt_workspace_bytes, profile.keeps_cublaslt_workspace) == (workspace, kept)
    assert profile_for("2.12.0", find_gpu("h100-80gb")).cublaslt_workspace_bytes == 0


def test_the_users_cublaslt_workspace_is_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert profile_for("2.13.0", find_gpu("a100-80gb")).cublaslt_workspace_bytes == 4 * MIB


@pytest.mark.parametrize(("torch_version", "held"), [("2.4.1", 0), ("2.11.0", MIB), ("2.13.0", 0)])
def test_a_product_with_a_bias_takes_cublaslts_workspace(torch_version: str, held: int) -> None:
    gpu = find_gpu("a100-80gb")
    simulated = SimulatedGpu(gpu, profile_for(torch_version, gpu))
    with simulate(simulated) as device, torch.device(device), torch.no_grad():
        layer, x = torch.nn.Linear(64, 64), torch.randn(64, 64)
        before = simulated.allocator.stats.allocated_bytes
        y = layer(x)
        taken = simulated.allocator.stats.allocated_bytes - before
        assert taken == y.nbytes + simulated.profile.cublas_workspace_bytes + held


def test_a_context_that_was_not_measured_on_the_architecture_is_assumed() -> None:
    ada, volta = (profile_for("2.13.0", find_gpu(name)).context_source for name in ("rtx-4090-24gb", "v100-16gb"))
    assert ada.startswith("measured on an RTX 6000 Ada")
    assert volta == f"assumed for sm_70: {ada}; 254 to 656 MiB elsewhere"


def test_the_users_cublas_workspace_is_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert profile_for("2.13.0", find_gpu("a100-80gb")).cublas_workspace_bytes == 32 << 20


def test_a_gpu_whose_multiprocessors_are_not_known_is_taken_for_an_a100_in_them() -> None:
    h200 = find_gpu("h200-141gb")
    assert profile_for("2.11.0", h200).multiprocessors == 132
    assert profile_for("2.11.0", replace(h200, multiprocessors=None)).multiprocessors == 108


def test_the_cublas_workspace_is_called_by_its_name() -> None:
    gpu = trained(MLP, Recipe(), 2, steps=1, gpu=simulated_gpu(unlimited=True))
    operators = {site.operator for site in gpu.finish().site_table}
    assert "cuBLAS workspace" in operators
    assert "aten.device" not in operators


def test_grouped_products_of_any_type_give_rows_of_whole_16_bytes() -> None:
    """As mixtures of experts multiply: tokens sorted by expert, with where each one's end."""
    with on() as (device, _):
        for dtype in (torch.float32, torch.bfloat16):
            tokens = torch.randn(64, 32, device=device, dtype=dtype, requires_grad=True)
            experts = torch.randn(4, 32, 48, device=device, dtype=dtype, requires_grad=True)
            ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32, device=device)
            result = torch._grouped_mm(tokens, experts, offs=ends)
            assert (result.shape, result.dtype, result.stride()) == ((64, 48), dtype, (48, 1))
            result.sum().backward()
            assert experts.grad is not None
            assert experts.grad.shape == experts.shape
