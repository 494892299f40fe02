"""GPUs that run ROCm: what of them is PyTorch's source, what is a range, and what is listed as unknown."""

from __future__ import annotations

import pytest
import torch

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.simulator.allocator.profile import not_known_of, profile_for
from gpumem_tui.simulator.device.scratch import assumption, is_assumed
from tests.cli.conftest import Program, program

__all__ = ["program"]

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default


@pytest.mark.parametrize(
    ("name", "mib"), [("mi210-64gb", 32), ("mi250x-64gb", 32), ("mi300x-192gb", 128), ("mi325x-256gb", 128)]
)
def test_the_workspace_is_what_pytorch_says_of_hipblas(name: str, mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIPBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    gpu = find_gpu(name)
    profile = profile_for("2.13.0", gpu)
    assert (profile.cublas_workspace_bytes, profile.cublaslt_workspace_bytes) == (mib * MIB, 0)
    assert profile.name == f"torch 2.13 {gpu.arch}"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:1")
    monkeypatch.setenv("HIPBLAS_WORKSPACE_CONFIG", ":4096:2")
    assert profile_for("2.13.0", gpu).cublas_workspace_bytes == 8 * MIB, "as PyTorch, HIP's own variable first"


def test_the_context_is_a_wide_range_that_says_that_nothing_was_measured() -> None:
    profile = profile_for("2.13.0", find_gpu("mi300x-192gb"))
    assert profile.context_range.low_bytes < 300 * MIB < profile.context_bytes
    assert profile.context_range.high_bytes > 4 * GIB
    assert "assumed for gfx942" in profile.context_source
    assert profile.context_source.endswith("nothing was measured on it")


def test_an_architecture_with_hopper_s_numbers_is_not_hopper() -> None:
    """HIP calls a gfx90a 9.0, as CUDA does an H100."""
    mi210, h100 = find_gpu("mi210-64gb"), find_gpu("h100-80gb")
    assert mi210.compute_capability == h100.compute_capability
    assert (mi210.sm, h100.sm) == ("gfx90a", "sm_90")
    ours, theirs = profile_for("2.13.0", mi210), profile_for("2.13.0", h100)
    assert ours.context_source != theirs.context_source
    assert "not known" in not_known_of(mi210)
    assert not not_known_of(h100)


def test_attention_s_scratch_is_an_assumption_there_with_rocm_s_words() -> None:
    assert is_assumed(_ATTENTION, (), (9, 4), "gfx942")
    assert not is_assumed(_ATTENTION, (), (8, 0))
    assert "AOTriton" in assumption("_scaled_dot_product_flash_attention", "gfx942")
    assert "MIOpen" in assumption("native_batch_norm", "gfx942")
    assert "cuDNN" in assumption("native_batch_norm")


def test_a_prediction_is_an_estimate_that_says_so(program: Program) -> None:
    done = program("predict", "--explain", "--model", "mlp", "--gpu", "sim:mi300x-192gb", "--batch-size", "4")
    assert done.code == 0, done.err
    assert done.out.startswith("Batch 4 fits by a wide margin (estimate) on AMD Instinct MI300X: ")
    assert "ROCm context 0." in done.out
    assert "CUDA context" not in done.out
    assert "hipBLAS workspace (" in done.out
    assert "no run on ROCm was compared" in done.out
