"""What attention kernels take for themselves, by PyTorch's own expressions, and what is owned up to as unknown."""

from __future__ import annotations

import pytest
import torch

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.simulator.profile import profile_for
from gpumem_tui.simulator.scratch import UNKNOWN_SCRATCH, scratch_bytes


def _heads(batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(batch, heads, tokens, width, dtype=dtype, device="meta")


def test_flash_backward_rounds_rows_to_128_and_width_to_32() -> None:
    query = _heads(2, 12, 1000, 40, torch.bfloat16)
    sizes = scratch_bytes("_scaled_dot_product_flash_attention_backward", [query, query, query, query])
    assert sizes == [2 * 12 * 1024 * 4, 2 * 1024 * 12 * 64 * 4]


def test_flash_backward_expands_grouped_keys_and_values() -> None:
    query, key = _heads(2, 32, 128, 128, torch.bfloat16), _heads(2, 8, 128, 128, torch.bfloat16)
    sizes = scratch_bytes("_scaled_dot_product_flash_attention_backward", [query, query, key, key])
    assert sizes[2:] == [2 * 128 * 32 * 128 * 2] * 2


def test_efficient_backward_multiplies_in_full_size_only_in_fp32() -> None:
    operator = "_scaled_dot_product_efficient_attention_backward"
    single, half = _heads(2, 12, 1024, 64, torch.float32), _heads(2, 12, 1024, 64, torch.float16)
    assert scratch_bytes(operator, [single] * 4) == [single.numel() * 4, 2 * 12 * 1024 * 4]
    assert scratch_bytes(operator, [half] * 4) == [2 * 12 * 1024 * 4]


def test_unknown_scratch_gives_its_reason() -> None:
    assert "cuDNN" in UNKNOWN_SCRATCH["convolution_backward_overrideable"]
    assert scratch_bytes("addmm", []) == []


@pytest.mark.parametrize(
    ("torch_version", "gpu", "workspace"),
    [
        ("2.13.0+cpu", "a100-80gb", 8_519_680),
        ("2.13.0+cu130", "h100-80gb", 32 << 20),
        ("2.4.1", "h100-80gb", 32 << 20),
        ("2.4.1", "b200-180gb", 8_519_680),
        ("2.13.0", "b200-180gb", 32 << 20),
    ],
)
def test_cublas_workspace_by_version_and_architecture(torch_version: str, gpu: str, workspace: int) -> None:
    assert profile_for(torch_version, find_gpu(gpu)).cublas_workspace_bytes == workspace


def test_the_users_cublas_workspace_is_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert profile_for("2.13.0", find_gpu("a100-80gb")).cublas_workspace_bytes == 32 << 20
