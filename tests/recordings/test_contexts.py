"""An H200 driver's figures of 30 programs outside their allocators, within our ranges."""

from __future__ import annotations

import csv

import pytest

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import MIB
from gpumem_tui.simulator.allocator.contexts import CUDA_GRAPH
from gpumem_tui.simulator.allocator.profile import Profile, profile_for
from tests.published.measurements import DEFAULT_RECORDINGS

_H200 = find_gpu("h200-141gb")
_TORCH = "2.11.0+cu130"
_WITHOUT_CUDNN = ("t5-adafactor", "gcn-gat", "gpt-flex")
_LIBRARIES = {
    **dict.fromkeys(_WITHOUT_CUDNN, ("cuBLAS",)),
    "unet3d": ("cuDNN",),
    "gpt-reduce-overhead": ("cuBLAS", "cuDNN", CUDA_GRAPH, CUDA_GRAPH),
}
"""Programs that do without one of the two, or have more; a forward and a backward are two graphs."""
_WITH_A_GROUP = ("ddp-bert",)
"""That ended its group before the driver was asked, which gives back NCCL's pool and leaves its kernels."""
_NVML_LEAVES_OUT_BYTES = 9 * MIB
"""The device's loss with a process, by the calibration of the same machine."""


def _beside() -> dict[str, int]:
    with (DEFAULT_RECORDINGS / "h200" / "measured.csv").open(newline="", encoding="utf-8") as file:
        return {row["name"]: int(row["beside_allocator"]) for row in csv.DictReader(file)}


def _profile(name: str) -> Profile:
    groups = (1,) if name in _WITH_A_GROUP else ()
    return profile_for(_TORCH, _H200).using(_H200, groups, _LIBRARIES.get(name, ("cuBLAS", "cuDNN")))


@pytest.mark.parametrize(("name", "beside_bytes"), _beside().items())
def test_a_program_held_what_is_known_of_its_libraries(name: str, beside_bytes: int) -> None:
    known = _profile(name)
    assert beside_bytes in known.context_range
    assert beside_bytes + _NVML_LEAVES_OUT_BYTES in known.context_range
    if name not in (*_WITH_A_GROUP, *_LIBRARIES):
        assert known.context_range.high_bytes - known.context_range.low_bytes < 64 * MIB
        assert abs(known.context_bytes - beside_bytes - _NVML_LEAVES_OUT_BYTES) <= 8 * MIB


@pytest.mark.parametrize(("name", "beside_bytes"), _beside().items())
def test_before_it_is_traced_all_of_them_may_be_loaded(name: str, beside_bytes: int) -> None:
    if name not in (*_WITH_A_GROUP, "gpt-reduce-overhead"):
        assert beside_bytes in profile_for(_TORCH, _H200).context_range


def test_what_a_group_of_one_rank_took_while_it_was_there() -> None:
    """By the calibration: 1,387,069,440 bytes, 804,061,184 of them before the group."""
    nccl = _profile("ddp-bert").nccl
    assert nccl is not None
    assert nccl.expected_bytes == nccl.high_bytes == 1_387_069_440 - 804_061_184


def test_all_kernels_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    assert 2_160_918_528 in profile_for(_TORCH, _H200).context_range


@pytest.mark.parametrize(
    ("torch_version", "cuda"),
    [("2.11.0+cu130", 13), ("2.11.0+cu128", 12), ("2.13.0+cpu", 13), ("2.10.0", 12), ("2.6", 12), ("1.13.1+cu117", 11)],
)
def test_the_version_of_cuda_is_that_of_the_build_or_of_pypis(torch_version: str, cuda: int) -> None:
    assert profile_for(torch_version, _H200).cuda == cuda
