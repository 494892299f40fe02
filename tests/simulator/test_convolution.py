"""cuDNN's workspaces: none at least, and at most what its algorithms are known to need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.rules import Computed
from gpumem_tui.simulator.device import convolution

_A100 = profile_for("2.13.0", find_gpu("a100-80gb"))
_V100 = profile_for("2.13.0", find_gpu("v100-16gb"))


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
    args = (images, weight, None, [1, 1], [side // 2] * 2, [1, 1], False, [0, 0], groups)
    found = convolution.forward(args, profile)
    assert all(isinstance(one, Computed) for one in found)
    return found[0] if found else None  # type: ignore[return-value]


def test_a_half_precision_convolution_may_copy_what_it_reads_and_writes() -> None:
    """pytorch/pytorch#123533: 4.02 GiB reserved for an input and an output of 1 GiB each, and their copies."""
    images = torch.empty(1, 256, 2048, 1024, dtype=torch.float16, device="meta")
    found = _forward(images, 256, 3)
    assert found is not None
    assert found.size_bytes == 0
    assert 2 * GIB <= found.most_bytes <= 2.02 * GIB
    assert images.nbytes == GIB


@pytest.mark.parametrize("tensor_cores", [True, False])
def test_in_fp32_only_tensor_cores_need_copies(tensor_cores: bool) -> None:
    torch.backends.cudnn.allow_tf32 = tensor_cores
    images = _images(128, 64, 112)
    found = _forward(images, 64, 3)
    assert found is not None
    copies = 2 * images.nbytes + 64 * 64 * 9 * 4
    tiles = 36 * 4 * (128 * 28 * 28 * 128 + 64 * 64)
    assert found.most_bytes == tiles
    assert found.needed_bytes == (copies if tensor_cores else 128 * MIB)
    older = _forward(images, 64, 3, profile=_V100)
    assert older is not None
    assert older.most_bytes == tiles
    assert older.needed_bytes == 128 * MIB


def test_proposals_of_a_detector_take_what_was_measured_on_v100s() -> None:
    """detectron2's MODEL_ZOO.md: R50-FPN's 2.7 GB, 2.1 of them no workspaces, and R50-C4's 1.5, of them 1.2."""
    for channels, sides, least_gb, most_gb in ((256, (200, 336), 0.5, 0.7), (1024, (50, 84), 0.2, 0.4)):
        found = _forward(torch.empty(2, channels, *sides, device="meta"), channels, 3, profile=_V100)
        assert found is not None
        assert least_gb < found.most_bytes / 1e9 < most_gb


def test_tensors_in_the_kernels_order_are_not_copied() -> None:
    images = _images(64, 64, 112, torch.float16).to(memory_format=torch.channels_last)
    found = _forward(images, 64, 3)
    assert found is not None
    assert found.most_bytes <= 128 * MIB < 2 * images.nbytes


def test_pytorchs_own_depthwise_kernel_takes_none() -> None:
    assert _forward(_images(32, 64, 56), 64, 3, groups=64) is None
    assert _forward(_images(32, 64, 56, torch.float16), 64, 3, groups=64) is not None


def test_benchmark_mode_tries_algorithms_that_take_more() -> None:
    torch.backends.cudnn.allow_tf32 = False
    plain = _forward(_images(8, 512, 14), 512, 7)
    torch.backends.cudnn.benchmark = True
    tried, pointwise = _forward(_images(8, 512, 14), 512, 7), _forward(_images(8, 512, 14), 512, 1)
    assert plain is not None
    assert tried is not None
    assert pointwise is not None
    # 32 x 17 complex positions of 8 x (512 + 512) images and 512 x 512 filters
    assert tried.most_bytes == 8 * 32 * 17 * (8 * 1024 + 512 * 512)
    assert tried.most_bytes > plain.most_bytes
    assert pointwise.arguments[-1] == 0


def test_a_strided_filter_is_unrolled_beside_copies() -> None:
    """The first convolution of a ResNet-50 with 128 images: 1.4 GiB, which others' totals ask for."""
    images, weight = _images(128, 3, 224), torch.empty(64, 3, 7, 7, device="meta")
    [found] = convolution.forward((images, weight, None, [2, 2], [3, 3], [1, 1], False, [0, 0], 1), _A100)
    assert isinstance(found, Computed)
    result_bytes = 128 * 64 * 112 * 112 * 4
    patches_bytes = 128 * 112 * 112 * 3 * 49 * 4
    assert found.most_bytes == images.nbytes + weight.nbytes + result_bytes + patches_bytes


@pytest.mark.parametrize("transposed", [False, True])
def test_the_result_is_as_large_as_torch_makes_it(transposed: bool) -> None:
    images = _images(4, 6, 17)
    weight = torch.empty(6, 3, 5, 5, device="meta") if transposed else torch.empty(9, 3, 5, 5, device="meta")
    settings = ([2, 2], [1, 1], [1, 1], transposed, [1, 1] if transposed else [0, 0], 2)
    result = torch.ops.aten.convolution(images, weight, None, *settings)
    [found] = convolution.forward((images, weight, None, *settings), _A100)
    assert isinstance(found, Computed)
    assert found.arguments[2] == result.nbytes
    gradient = torch.empty_like(result)
    [behind] = convolution.backward((gradient, images, weight, None, *settings[:4], [0, 0], 2, [True] * 3), _A100)
    assert isinstance(behind, Computed)
    assert behind.arguments[:3] == found.arguments[:3]


def test_it_grows_evenly_with_the_batch() -> None:
    torch.backends.cudnn.benchmark = True
    one, two, three = (_forward(_images(batch, 64, 56), 128, 3) for batch in (1, 2, 3))
    assert one is not None
    assert two is not None
    assert three is not None
    steps = [b - a for a, b in zip(one.arguments, two.arguments, strict=True)]
    assert [b + step for b, step in zip(two.arguments, steps, strict=True)] == list(three.arguments)
