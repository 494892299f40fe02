"""The GPUs of the catalog: the public names, and figures that could be a real device's."""

from __future__ import annotations

import re

import pytest

from gpumem_tui.catalog.loader import find_gpu, gpus, multiprocessors_of, speed_of
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import KIB, MIB
from gpumem_tui.simulator.allocator.profile import not_known_of, profile_for

PUBLIC_NAMES = [
    "t4-16gb",
    "v100-16gb",
    "rtx-3090-24gb",
    "rtx-4090-24gb",
    "l40s-48gb",
    "a100-40gb",
    "a100-80gb",
    "h100-80gb",
    "h200-141gb",
    "b200-180gb",
]
ALL_GPUS = [pytest.param(gpu, id=name) for name, gpu in gpus().items()]


def test_has_the_public_names_and_a_useful_choice() -> None:
    assert gpus().keys() >= set(PUBLIC_NAMES)
    assert len(gpus()) >= 30
    assert {gpu.kind for gpu in gpus().values()} == {"consumer", "workstation", "datacenter"}


def test_titles_tell_the_gpus_apart() -> None:
    assert len({gpu.title for gpu in gpus().values()}) == len(gpus())


def test_reads_mib_as_bytes() -> None:
    a100 = find_gpu("a100-80gb")
    assert a100.name == "a100-80gb"
    assert a100.total_bytes == 81920 * MIB
    assert a100.cuda_total_bytes == 81049 * MIB
    assert a100.sm == "sm_80"


@pytest.mark.parametrize("gpu", ALL_GPUS)
def test_total_is_the_size_in_the_name(gpu: Gpu) -> None:
    match = re.search(r"-(\d+)gb$", gpu.name)
    assert match, "a GPU's name ends with its size"
    assert gpu.total_bytes == pytest.approx(int(match[1]) * 10**9, rel=0.15)


@pytest.mark.parametrize("gpu", ALL_GPUS)
def test_the_driver_keeps_a_little_of_it(gpu: Gpu) -> None:
    reserve_bytes = gpu.total_bytes - gpu.cuda_total_bytes
    assert reserve_bytes == 0 if gpu.arch or gpu.unified else 100 * MIB < reserve_bytes < 1200 * MIB


@pytest.mark.parametrize("gpu", ALL_GPUS)
def test_says_what_it_is_and_where_the_figures_come_from(gpu: Gpu) -> None:
    assert gpu.title.startswith("AMD " if gpu.arch else "NVIDIA ")
    assert gpu.source
    assert (6, 0) <= gpu.compute_capability <= (12, 1)


ARCHITECTURES = {gpu.compute_capability: gpu for gpu in gpus().values() if not gpu.arch}


@pytest.mark.parametrize("gpu", ARCHITECTURES.values(), ids=lambda gpu: gpu.sm)
def test_what_is_not_known_of_an_architecture_is_a_range(gpu: Gpu) -> None:
    profile = profile_for("2.13.0", gpu)
    between = profile.context_range
    assert 100 * MIB < between.low_bytes <= profile.context_bytes <= between.high_bytes < 1200 * MIB
    assert between.high_bytes - between.low_bytes >= 30 * MIB
    assert profile.context_source
    large = gpu.compute_capability[0] in (9, 10, 12)
    assert profile.cublas_workspace_bytes == (32 * MIB if large else 8320 * KIB), "CublasHandlePool.cpp of torch 2.13"


@pytest.mark.parametrize(("unknown", "near"), [((8, 7), (8, 6)), ((10, 3), (10, 0)), ((12, 1), (12, 0))])
def test_an_architecture_that_nobody_measured_may_take_what_its_nearest_does(
    unknown: tuple[int, int], near: tuple[int, int]
) -> None:
    wide, known = (profile_for("2.13.0", ARCHITECTURES[of]).context_range for of in (unknown, near))
    assert wide.low_bytes <= known.low_bytes
    assert wide.high_bytes >= known.high_bytes


@pytest.mark.parametrize("gpu", ALL_GPUS)
def test_a_gpu_without_memory_of_its_own_says_what_that_means(gpu: Gpu) -> None:
    said = not_known_of(gpu)
    assert gpu.unified == ("shares its" in said and "with the CPU" in said)
    assert gpu.unified == (gpu.title.startswith("NVIDIA Jetson") or gpu.name.startswith("gb10"))


def test_a_reserve_that_moves_with_the_driver_is_told_by_driver() -> None:
    reserves = dict(find_gpu("h100-80gb").reserves)
    assert (reserves[545], reserves[565]) == (328 * MIB, 454 * MIB)
    for gpu in gpus().values():
        assert all(abs(size_bytes - gpu.reserve_bytes) < 200 * MIB for _, size_bytes in gpu.reserves)


def test_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        gpus()["mine"] = find_gpu("t4-16gb")  # type: ignore[index]


def test_a_gpu_of_some_machine_has_the_multiprocessors_of_its_kind() -> None:
    h200, h100, h20 = (find_gpu(name) for name in ("h200-141gb", "h100-80gb", "h20-96gb"))
    assert multiprocessors_of(h200.total_bytes * 99 // 100, (9, 0)) == 132
    assert multiprocessors_of(h200.total_bytes, (8, 0)) is None
    assert multiprocessors_of(h100.total_bytes // 2, (9, 0)) is None
    assert multiprocessors_of(h20.total_bytes, (9, 0)) is None, "as large as two that differ"


class TestSpeed:
    @pytest.mark.parametrize("gpu", ALL_GPUS)
    def test_rates_are_in_the_order_that_they_must_be(self, gpu: Gpu) -> None:
        if gpu.speed is None:
            assert gpu.no_speed, f"{gpu.name} has neither `speed` nor `no_speed`, which gives the reason"
            return
        assert not gpu.no_speed
        assert gpu.speed.source
        assert gpu.speed.fp32 <= (gpu.speed.tf32 or gpu.speed.fp32) <= (gpu.speed.half or float("inf"))
        assert gpu.speed.pcie < gpu.speed.memory
        came = gpu.compute_capability == (9, 4) if gpu.arch else gpu.compute_capability >= (8, 0)
        assert (gpu.speed.tf32 is not None) == came, "TF32 came with Ampere; CDNA 3 alone has XF32"

    @pytest.mark.parametrize(
        ("title", "gib", "half"),
        [("NVIDIA A100-SXM4-80GB", 80, 312.0), ("NVIDIA A100-SXM4-40GB", 40, 312.0),
         ("NVIDIA A100 80GB PCIe", 80, None), ("NVIDIA H100 80GB HBM3", 79.65, 989.4),
         ("NVIDIA H100 PCIe", 79.65, None),
         ("Tesla T4", 15, 65.0),
         ("NVIDIA GeForce RTX 4090", 23.99, 165.2), ("NVIDIA GeForce RTX 4070 Ti", 11.99, 80.2),
         ("NVIDIA GeForce RTX 4060 Ti", 7.996, 44.1), ("NVIDIA GB10", 121.69, None),
         ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None), ("Tesla V100-SXM2-16GB", 16, 125.0)],
    )  # fmt: skip
    def test_of_a_gpu_by_the_name_that_its_driver_gives(self, title: str, gib: float, half: float | None) -> None:
        found = speed_of(title, int(gib * 2**30))
        assert (None if found is None else found.half) == half
