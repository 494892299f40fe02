"""The simulator's assumptions on a GPU: the CUDA context and the range of published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, gpus
from gpumem_tui.catalog.shapes import Context
from gpumem_tui.memory import GIB, MIB, Range
from gpumem_tui.simulator.allocator.profile import profile_for


@pytest.mark.parametrize("name", list(gpus()))
def test_the_expected_context_lies_within_its_range(name: str) -> None:
    profile = profile_for("2.13.0", find_gpu(name))
    assert profile.context_bytes in profile.context_range
    assert not profile.context_range.is_exact
    widest = 900 * MIB if find_gpu(name).runtime == "CUDA" else 5 * GIB  # three messages are of ROCm's
    assert profile.context_range.high_bytes < widest
    assert profile.context_source


@pytest.mark.parametrize(
    ("gpu", "found_mib"), [("a100-40gb", (409, 512, 656)), ("rtx-4090-24gb", (426, 504)), ("t4-16gb", (137, 141))]
)
def test_what_others_found_lies_within_it(gpu: str, found_mib: tuple[int, ...]) -> None:
    context = profile_for("2.13.0", find_gpu(gpu)).context_range
    assert all(mib * MIB in context for mib in found_mib)


def test_all_kernels_at_once_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lazily = profile_for("2.13.0", find_gpu("a100-40gb")).context_range
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    eagerly = profile_for("2.13.0", find_gpu("a100-40gb")).context_range
    assert eagerly.low_bytes == lazily.low_bytes
    assert eagerly.high_bytes > 1400 * MIB > lazily.high_bytes


def test_a_context_that_was_measured_has_no_range() -> None:
    profile = profile_for("2.13.0", find_gpu("a100-40gb")).with_context(500 * MIB, "measured")
    assert profile.context_range.is_exact


def test_ranks_add_what_nccl_was_measured_to_take() -> None:
    a100, h100 = find_gpu("a100-80gb"), find_gpu("h100-80gb")
    alone = profile_for("2.13", a100)
    assert alone.using(a100) is alone
    for gpu, ranks, measured_mib in ((a100, 2, 544), (a100, 4, 688), (h100, 8, 540)):
        nccl = profile_for("2.13", gpu).using(gpu, (ranks,)).nccl
        assert nccl is not None
        assert nccl.low_bytes < measured_mib * MIB < nccl.high_bytes
    several = alone.using(a100, (4,))
    assert several.nccl is not None
    assert several.context_bytes - alone.context_bytes == several.nccl.expected_bytes
    assert several.context_range == alone.context_range + Range(several.nccl.low_bytes, several.nccl.high_bytes)


@pytest.mark.parametrize(("gpu", "pool_mib"), [("h200-141gb", 386), ("b200-180gb", 512), ("rtx-3090-24gb", 512)])
def test_a_group_of_one_rank_has_its_pool_and_nccls_kernels(gpu: str, pool_mib: int) -> None:
    """Sizes: the H200's calibration, NVIDIA/nccl#2363 (536,870,912 bytes on a B300) and #2366 (RTX 3090)."""
    there = find_gpu(gpu)
    one, two = (profile_for("2.11.0+cu130", there).using(there, groups).nccl for groups in ((1,), (1, 1)))
    assert one is not None
    assert two is not None
    assert pool_mib * MIB < one.high_bytes == (170 + pool_mib) * MIB
    assert two.high_bytes - one.high_bytes == pool_mib * MIB, "each group has a pool; kernels are loaded once"


def test_each_group_of_ranks_has_buffers_of_its_own() -> None:
    gpu = find_gpu("a100-80gb")
    alone = profile_for("2.13", gpu)
    pairs, four, both = (alone.using(gpu, groups) for groups in ((2,), (4,), (2, 4)))
    assert pairs.nccl is not None
    assert four.nccl is not None
    assert both.nccl is not None
    kernels_bytes = 170 * MIB
    assert both.nccl.expected_bytes == pairs.nccl.expected_bytes + four.nccl.expected_bytes - kernels_bytes
    assert both.nccl.high_bytes == pairs.nccl.high_bytes + four.nccl.high_bytes - kernels_bytes
    assert "2 groups" in both.nccl.source
    assert alone.using(gpu, (8,)).using(gpu, (2,)) == pairs, "what was taken before counts twice"
    assert alone.using(gpu, (8,)).with_context(MIB, "measured") == alone.with_context(MIB, "measured")


def test_nccl_follows_its_variables_and_a_typed_context_has_it_already(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = find_gpu("a100-80gb")
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "2")
    monkeypatch.setenv("NCCL_BUFFSIZE", str(1 * MIB))
    nccl = profile_for("2.13", gpu).using(gpu, (8,)).nccl
    assert nccl is not None
    assert nccl.expected_bytes == (2 * 3 * (8 + 2) + 170) * MIB
    typed = profile_for("2.13", replace(gpu, context=Context(MIB, MIB, MIB, "typed")))
    assert typed.using(gpu, (8,), ("cuBLAS",)) is typed
