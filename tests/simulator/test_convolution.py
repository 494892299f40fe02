"""cuDNN's workspaces: as measured on an H200, layer by layer; elsewhere none at least, and the catalogued most."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.replay import replay
from gpumem_tui.simulator.allocator.rules import TRIED, Computed, Workspace
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.simulator.device.convolution import Pass, passes
from gpumem_tui.simulator.device.gpu import simulate
from tests.simulator.simulated_steps import simulated_gpu

_A100 = profile_for("2.13.0", find_gpu("a100-80gb"))
_V100 = profile_for("2.13.0", find_gpu("v100-16gb"))
_H200 = profile_for("2.11.0", find_gpu("h200-141gb"))
_MEASURED = Path(__file__).parents[1] / "recordings" / "h200" / "convolutions.csv"
"""The workspaces of an H200 with torch 2.11 and cuDNN 9.19: each pass of each layer, what it took, and what was tried
for it."""


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    yield
    cudnn.benchmark, cudnn.allow_tf32 = before


def _images(batch: int, channels: int, side: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(batch, channels, side, side, dtype=dtype, device="meta")


def _forward(images: torch.Tensor, channels: int, side: int, groups: int = 1, profile=_A100) -> Computed | None:  # type: ignore[no-untyped-def]
    weight = torch.empty(channels, images.shape[1] // groups, side, side, dtype=images.dtype, device="meta")
    settings = [1, 1], [side // 2] * 2, [1, 1], False, [0, 0], groups
    result = torch.ops.aten.convolution(images, weight, None, *settings)
    [found] = passes("convolution", (images, weight, None, *settings), result, profile)
    return found.workspace


# As measured on an H200


def _measured() -> Iterator[tuple[dict[str, str], Pass]]:
    """Each row with the pass that it is of."""
    with _MEASURED.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            shapes = [[int(size) for size in row[name].split("x")] for name in ("input", "weight", "result")]
            images, weight, result = (
                torch.empty(shape, dtype=getattr(torch, row["dtype"]), device="meta") for shape in shapes
            )
            if row["order"] == "nhwc":
                images, weight = (one.to(memory_format=torch.channels_last) for one in (images, weight))
            axes = len(shapes[1]) - 2
            stride, padding = [int(row["stride"])] * axes, [int(row["padding"])] * axes
            settings = stride, padding, [1] * axes, bool(int(row["transposed"])), [0] * axes, 1
            if row["pass"] == "result":
                [found] = passes("convolution", (images, weight, None, *settings), result, _H200)
            else:
                wanted = [row["pass"] == "input", row["pass"] == "weight", False]
                args = result, images, weight, None, *settings, wanted
                [found] = passes("convolution_backward", args, (images, weight, None), _H200)
            yield row, found


def test_each_layer_of_the_h200_took_what_is_known() -> None:
    """Partial sums, of at most two tiles a multiprocessor, are the only part of what was measured that is not exact."""
    beside = _H200.multiprocessors * 2 * 64 * 1024
    exact = 0
    for row, found in _measured():
        assert found.workspace is not None
        real = int(row["bytes"])
        least, most = found.workspace.bytes_at("least"), found.workspace.bytes_at("most")
        assert least - beside <= real <= most + 512, row
        exact += abs(found.workspace.size_bytes - real) <= max(MIB, real / 100)
    assert exact >= 555, "of 627 rows"


def test_large_workspaces_of_the_h200_are_exact() -> None:
    """Workspaces of 100 MiB and more, which peaks are made of: to one per cent."""
    for row, found in _measured():
        real = int(row["bytes"])
        assert found.workspace is not None
        if real >= 100 * MIB and row["pass"] != "weight":
            assert found.workspace.size_bytes == pytest.approx(real, rel=0.06 if row["stride"] == "2" else 0.01), row


def test_what_a_benchmark_tried_is_not_more_than_said() -> None:
    for row, found in _measured():
        if tried := int(row["tried_bytes"]):
            assert found.tried is not None
            assert found.tried.size_bytes == 0
            if row["stride"] == "1" or tried > 200 * MIB:
                assert tried <= found.tried.bytes_at("momentary") * 1.001, row
            if tried > 512 * MIB:
                assert found.tried.bytes_at("momentary") <= tried * 1.02, row


def test_the_rule_of_an_h200_is_not_that_of_others() -> None:
    images = _images(64, 128, 56)
    h200 = find_gpu("h200-141gb")
    ours, older, older_cudnn, other = (
        _forward(images, 128, 3, profile=profile)
        for profile in (_H200, profile_for("2.10.0", h200), profile_for("2.11.0+cu128", h200), _A100)
    )
    assert ours is not None
    assert older is not None
    assert other is not None
    assert ours.size_bytes > 2 * images.nbytes
    assert older_cudnn is not None
    assert older.size_bytes == older_cudnn.size_bytes == other.size_bytes == 0
    assert other.bytes_at("least") == 0
    assert other.bytes_at("most") > 2 * images.nbytes


# Elsewhere


def test_a_half_precision_convolution_may_copy_what_it_reads_and_writes() -> None:
    """pytorch/pytorch#123533: 4.02 GiB reserved for an input and an output of 1 GiB each, and their copies."""
    images = torch.empty(1, 256, 2048, 1024, dtype=torch.float16, device="meta")
    found = _forward(images, 256, 3)
    assert found is not None
    assert found.size_bytes == 0
    assert 2 * GIB <= found.bytes_at("most") <= 2.02 * GIB
    assert images.nbytes == GIB


@pytest.mark.parametrize("tensor_cores", [True, False])
def test_in_fp32_only_tensor_cores_need_copies(tensor_cores: bool) -> None:
    torch.backends.cudnn.allow_tf32 = tensor_cores
    images = _images(128, 64, 112)
    found = _forward(images, 64, 3)
    assert found is not None
    copies = 2 * images.nbytes + 64 * 64 * 9 * 4
    tiles = 36 * 4 * (128 * 28 * 28 * 128 + 64 * 64)
    assert found.bytes_at("most") == tiles
    assert Workspace(*found.arguments).needed_bytes == (copies if tensor_cores else 128 * MIB)
    older = _forward(images, 64, 3, profile=_V100)
    assert older is not None
    assert older.bytes_at("most") == tiles
    assert Workspace(*older.arguments).needed_bytes == 128 * MIB


def test_proposals_of_a_detector_take_what_was_measured_on_v100s() -> None:
    """detectron2's MODEL_ZOO.md: R50-FPN's 2.7 GB, 2.1 of them no workspaces, and R50-C4's 1.5, of them 1.2."""
    for channels, sides, least_gb, most_gb in ((256, (200, 336), 0.5, 0.7), (1024, (50, 84), 0.2, 0.4)):
        found = _forward(torch.empty(2, channels, *sides, device="meta"), channels, 3, profile=_V100)
        assert found is not None
        assert least_gb < found.bytes_at("most") / 1e9 < most_gb


def test_tensors_in_the_kernels_order_are_not_copied() -> None:
    images = _images(64, 64, 112, torch.float16).to(memory_format=torch.channels_last)
    found = _forward(images, 64, 3)
    assert found is not None
    assert found.bytes_at("most") <= 128 * MIB < 2 * images.nbytes


def test_pytorchs_own_depthwise_kernel_takes_none() -> None:
    assert _forward(_images(32, 64, 56), 64, 3, groups=64) is None
    assert _forward(_images(32, 64, 56, torch.float16), 64, 3, groups=64) is not None


def test_benchmark_mode_may_choose_algorithms_that_take_more() -> None:
    torch.backends.cudnn.allow_tf32 = False
    plain = _forward(_images(8, 512, 14), 512, 7)
    torch.backends.cudnn.benchmark = True
    tried, pointwise = _forward(_images(8, 512, 14), 512, 7), _forward(_images(8, 512, 14), 512, 1)
    assert plain is not None
    assert tried is not None
    assert pointwise is not None
    # 32 x 17 complex positions of 8 x (512 + 512) images and 512 x 512 filters
    assert tried.bytes_at("most") == 8 * 32 * 17 * (8 * 1024 + 512 * 512)
    assert tried.bytes_at("most") > plain.bytes_at("most")
    assert pointwise.bytes_at("most") == Workspace(*pointwise.arguments).needed_bytes


def test_a_strided_filter_is_unrolled_beside_copies() -> None:
    """The first convolution of a ResNet-50 with 128 images: 1.4 GiB, which others' totals ask for."""
    images, weight = _images(128, 3, 224), torch.empty(64, 3, 7, 7, device="meta")
    args = images, weight, None, [2, 2], [3, 3], [1, 1], False, [0, 0], 1
    result = torch.empty(128, 64, 112, 112, device="meta")
    [found] = passes("convolution", args, result, _A100)
    assert found.workspace is not None
    patches_bytes = 128 * 112 * 112 * 4 * 49 * 4  # three channels are padded to four
    assert found.workspace.bytes_at("most") == images.nbytes + weight.nbytes + result.nbytes + patches_bytes


# Trials of a benchmark


def test_what_is_tried_takes_as_much_as_there_is_room_for() -> None:
    """Conv_v8.cpp, `generate_and_filter_plans`: half as much as often as that does not fit, never out of memory."""
    size = 64 * MIB
    timeline = Timeline(
        events=(1, 2, -2, -1),
        sizes=(size, 0),
        buckets=(0, 0),
        marks=(),
        computed=((2, Computed(TRIED, 0, (16 * size,))),),
    )
    assert replay(timeline, 2 * size).peak_allocated_bytes == size
    tried = timeline.at_level("momentary")
    assert replay(tried).peak_allocated_bytes == 17 * size
    found = replay(tried, 10 * size)
    assert found.fits
    assert found.peak_allocated_bytes == 9 * size


def _emptied(layer: nn.Module, sides: Sequence[int], *, benchmark: bool = True) -> list[tuple[bool, bool]]:
    """Whether a cache of 64 MiB was given back in forward, and in backward, with images of these sides in turn."""
    torch.backends.cudnn.benchmark = benchmark
    gpu = simulated_gpu(unlimited=True)

    def empties(work: Callable[[], Any]) -> tuple[bool, Any]:
        torch.empty(64 * MIB, dtype=torch.uint8)
        result = work()
        return gpu.allocator.stats.reserved_bytes < 64 * MIB, result

    found = []
    with simulate(gpu) as device, torch.device(device):
        layer.to(device)
        for side in sides:
            images = torch.empty(1, 8, side, side)
            in_forward, result = empties(partial(layer, images))
            in_backward, _ = empties(result.sum().backward)
            found.append((in_forward, in_backward))
    return found


def test_the_benchmark_empties_the_cache_after_it_tried_a_convolution() -> None:
    always, never = (True, True), (False, False)
    assert _emptied(nn.Conv2d(8, 8, 3), (16, 16, 24, 16)) == [always, never, always, never]
    assert _emptied(nn.Conv2d(8, 8, 3), (16, 24), benchmark=False) == [never, never]
    assert _emptied(nn.Conv2d(8, 8, 3, groups=8), (16, 24)) == [never, never], "PyTorch's own kernel is not tried"


def test_a_gradient_is_allocated_before_it_is_tried() -> None:
    torch.backends.cudnn.benchmark = True
    gpu = simulated_gpu(unlimited=True)
    with simulate(gpu) as device, torch.device(device):
        images, weight, gradient = torch.empty(1, 64, 210, 210), torch.empty(64, 64, 1, 1), torch.empty(1, 64, 210, 210)
        settings = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        torch.empty(64 * MIB, dtype=torch.uint8)
        found = torch.ops.aten.convolution_backward(gradient, images, weight, None, *settings, [True, True, False])
        assert found[0] is not None
    assert gpu.allocator.stats.reserved_bytes >= 64 * MIB, "it is in the segment that was cached"


@pytest.mark.parametrize("transposed", [False, True])
def test_both_gradients_are_worked_out_one_after_the_other(transposed: bool) -> None:
    images, weight = _images(4, 256, 16), torch.empty(256, 256, 2, 2, device="meta")
    settings = [2, 2], [0, 0], [1, 1], transposed, [0, 0], 1
    result = torch.ops.aten.convolution(images, weight, None, *settings)
    args = torch.empty_like(result), images, weight, None, *settings, [True, True, False]
    found = list(passes("convolution_backward", args, (images, weight, None), _H200))
    assert [one.position for one in found] == [0, 1]
    copies = images.nbytes + weight.nbytes + result.nbytes
    for one in found:
        assert one.workspace is not None
        assert copies <= one.workspace.size_bytes <= copies + 4 * MIB


def test_it_grows_evenly_with_the_batch() -> None:
    torch.backends.cudnn.benchmark = True
    for profile in (_A100, _H200):
        for side in (1, 3):
            one, two, three = (_forward(_images(batch, 64, 56), 128, side, profile=profile) for batch in (1, 2, 3))
            assert one is not None
            assert two is not None
            assert three is not None
            steps = [b - a for a, b in zip(one.arguments, two.arguments, strict=True)]
            assert [b + step for b, step in zip(two.arguments, steps, strict=True)] == list(three.arguments)
