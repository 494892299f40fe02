"""Which failures mean that the GPU is full, in the words of the libraries that say so."""

from __future__ import annotations

import pytest
import torch

from gpumem_tui.memory import GIB, MIB
from gpumem_tui.run.cuda_recorder import NEARLY_FULL_BYTES, is_out_of_memory

PLENTY, NEXT_TO_NOTHING = 10 * GIB, 10 * MIB


@pytest.mark.parametrize("free_bytes", [PLENTY, NEXT_TO_NOTHING])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("NCCL error: unhandled cuda error, 'out of memory'"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_what_says_so_is_believed(error: Exception, free_bytes: int) -> None:
    assert is_out_of_memory(error, free_bytes)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "Unable to find a valid cuDNN algorithm to run convolution",
        "GET was unable to find an engine to execute this computation",
        "CUDA error: unspecified launch failure",
    ],
)
def test_what_may_mean_it_is_believed_on_a_nearly_full_device_only(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message), NEXT_TO_NOTHING)
    assert is_out_of_memory(RuntimeError(message), NEARLY_FULL_BYTES - 1)
    assert not is_out_of_memory(RuntimeError(message), NEARLY_FULL_BYTES)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x16 and 8x16)"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("CUDA out of memory"),
        MemoryError(),
        KeyError("out of memory"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:40],
)
def test_other_failures_are_no_matter_of_size(error: Exception) -> None:
    assert not is_out_of_memory(error, NEXT_TO_NOTHING)
