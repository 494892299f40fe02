"""Reading `PYTORCH_CUDA_ALLOC_CONF`: what PyTorch takes and what it refuses, in one line."""

from __future__ import annotations

import pytest
import torch

from gpumem_tui.catalog.loader import gpus
from gpumem_tui.errors import OptionError
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.simulator.allocator.settings import AllocatorSettings, memory_fraction


def test_nothing_set_is_pytorchs_default() -> None:
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings().large_segment_bytes == 20 * MIB


def test_every_option_that_changes_bytes_is_read() -> None:
    settings = AllocatorSettings.parse(
        "expandable_segments:True, max_split_size_mb : 128,max_non_split_rounding_mb:32,"
        "garbage_collection_threshold:0.8,large_segment_size_mb:32"
    )
    assert settings == AllocatorSettings(
        expandable_segments=True,
        max_split_size_bytes=128 * MIB,
        max_non_split_rounding_bytes=32 * MIB,
        garbage_collection_threshold=0.8,
        large_segment_bytes=32 * MIB,
    )


def test_options_that_change_no_bytes_are_accepted() -> None:
    assert AllocatorSettings.parse("backend:native,pinned_use_background_threads:True") == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", {5 * 1024: 4, 1 * MIB: 4, 64 * GIB: 4}),
        ("[256:1,512:2,1024:4,>:8]", {MIB: 1, 256 * MIB: 1, 512 * MIB: 2, 1536 * MIB: 4, 2 * GIB: 8, 64 * GIB: 8}),
        ("[4:2]", {MIB: 2, 4 * MIB: 2, 8 * MIB: 0}),
        ("[4:0,>:8]", {MIB: 0, 4 * MIB: 0, 8 * MIB: 8}),
        ("[]", {MIB: 0}),
    ],
)
def test_divisions_by_size(text: str, expected: dict[int, int]) -> None:
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{text}")
    assert {size: settings.divisions_for(size) for size in expected} == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("expandable_segments", "not written as option:value"),
        ("expandable_segments:true", "must be True or False, not 'true'"),
        ("max_split_size_mb:19", "must be at least 20, not 19"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "max_split_size_mb must be at least 40, not 30"),
        ("max_non_split_rounding_mb:19", "must be at least 20, not 19"),
        ("large_segment_size_mb:10", "must be at least 11, not 10"),
        ("max_split_size_mb:lots", "must be a whole number, not 'lots'"),
        ("garbage_collection_threshold:1.0", "must lie between 0 and 1, not '1.0'"),
        ("garbage_collection_threshold:nan", "must lie between 0 and 1, not 'nan'"),
        ("garbage_collection_threshold:half", "must lie between 0 and 1, not 'half'"),
        ("roundup_power2_divisions:3", "takes powers of two, not '3'"),
        ("roundup_power2_divisions:0", "takes powers of two, not '0'"),
        ("roundup_power2_divisions:[300:2]", "takes powers of two, not '300'"),
        ("roundup_power2_divisions:[256]", "must be a whole number, not ''"),
        ("roundup_power2_divisions:[256:4", "lacks the closing bracket"),
    ],
)
def test_what_pytorch_refuses_is_refused_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(OptionError) as caught:
        AllocatorSettings.parse(text)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("PYTORCH_CUDA_ALLOC_CONF: ")
    assert "\n" not in str(caught.value)
    with pytest.raises((ValueError, RuntimeError)):
        torch._C._accelerator_setAllocatorSettings(f"large_segment_size_mb:20,{text}")


@pytest.mark.parametrize("limit_bytes", [512 * MIB, 1024 * MIB, 4096 * MIB + 1])
def test_a_memory_fraction_allows_the_limit_to_the_byte(limit_bytes: int) -> None:
    """CUDACachingAllocator.cpp, `setMemoryFraction`: the fraction of the device's total, cut off."""
    for gpu in gpus().values():
        assert int(memory_fraction(limit_bytes, gpu.cuda_total_bytes) * gpu.cuda_total_bytes) == limit_bytes, gpu.name


def test_a_memory_fraction_is_at_most_the_whole_device() -> None:
    assert memory_fraction(2 * MIB, MIB) == 1.0


def test_the_cuda_variable_wins_over_the_general_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert AllocatorSettings.from_environment().max_split_size_bytes == 64 * MIB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert AllocatorSettings.from_environment() == AllocatorSettings(expandable_segments=True)
