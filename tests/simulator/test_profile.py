"""What the simulator assumes of a GPU: the CUDA context and between what figures it was found."""

from __future__ import annotations

import pytest

from gpumem_tui.catalog.loader import find_gpu, gpus
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.simulator.allocator.profile import profile_for


@pytest.mark.parametrize("name", list(gpus()))
def test_the_expected_context_lies_within_its_range(name: str) -> None:
    profile = profile_for("2.13.0", find_gpu(name))
    assert profile.context_bytes in profile.context_range
    assert not profile.context_range.is_exact
    widest = 900 * MIB if find_gpu(name).runtime == "CUDA" else 5 * GIB  # three messages are known of ROCm's
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
