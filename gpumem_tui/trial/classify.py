"""Which errors mean that the GPU's memory ran out. Many libraries raise errors of their own for it."""

from __future__ import annotations

import re

import torch

from gpumem_tui.memory import MIB

_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED"
    r"|NCCL.*out of memory",
    re.IGNORECASE,
)
"""Failures that say so themselves."""

_CAN_MEAN_FULL = re.compile(
    r"CUBLAS_STATUS_NOT_INITIALIZED|CUBLAS_STATUS_INTERNAL_ERROR|CUDNN_STATUS_INTERNAL_ERROR"
    r"|CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_EXECUTION_FAILED|Unable to find a valid cuDNN algorithm"
    r"|cuDNN.*no engine|GET was unable to find an engine"
    r"|CUDA error: unspecified launch failure",
    re.IGNORECASE,
)
"""What cuBLAS, cuDNN and the launcher report when there is no room left for a handle, a workspace or a stack. Believed
only when the device is nearly full."""

NEARLY_FULL_BYTES = 512 * MIB


def is_out_of_memory(error: BaseException, free_bytes: int) -> bool:
    """True if `error`, raised with `free_bytes` left on the device, means that the step does not fit."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if _OUT_OF_MEMORY.search(text):
        return True
    return free_bytes < NEARLY_FULL_BYTES and _CAN_MEAN_FULL.search(text) is not None
