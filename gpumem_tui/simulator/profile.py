"""Facts about CUDA that differ by PyTorch version and GPU architecture, each with its source. No torch import."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from gpumem_tui.catalog.loader import gpus
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.memory import KIB, MIB


@dataclass(frozen=True, slots=True)
class Profile:
    """What the simulator assumes of one torch version on one architecture.

    Attributes:
        name: shown wherever a traced number is shown, e.g. ``torch 2.13 sm_80``.
        cublas_workspace_bytes: taken from the caching allocator once per cuBLAS handle and stream; the forward and
            the autograd thread have a handle each.
        context_bytes: what a process holds on the device beside its allocator: CUDA context, kernels, libraries.
        context_source: where `context_bytes` was measured.
        multiprocessors, threads_per_multiprocessor: how far a reduction is split, and so what scratch it takes.
    """

    name: str
    cublas_workspace_bytes: int
    context_bytes: int
    context_source: str
    multiprocessors: int
    threads_per_multiprocessor: int

    def with_context(self, context_bytes: int, source: str) -> Profile:
        """The same profile with a context that was measured."""
        return replace(self, context_bytes=context_bytes, context_source=source)


_CUBLAS_DEFAULT_BYTES = 4096 * KIB * 2 + 16 * KIB * 8
_CUBLAS_LARGE_BYTES = 32 * MIB
"""aten/src/ATen/cuda/CublasHandlePool.cpp: `:4096:2:16:8`, and 32 MiB on Hopper; later on Blackwell too (assumed: since
torch 2.9)."""

_CONTEXTS = {
    (8, 9): (426 * MIB, "measured on an RTX 6000 Ada, torch 2.10, CUDA 13.0 (unslothai/unsloth-zoo#1053)"),
}
"""By compute capability: bytes before the first kernel is loaded, and where that was measured. No other published
figure names GPU, torch and CUDA since torch loads kernels as they are used (1.13): pytorch/pytorch#86509 saw 254 MiB so
and 616 MiB with all loaded, on a GPU that it does not name."""

_ASSUMED_CONTEXT = (8, 9)

_MULTIPROCESSORS = {
    "gtx-1660-ti-6gb": 24, "rtx-2060-6gb": 30, "rtx-2080-ti-11gb": 68, "rtx-3060-12gb": 28, "rtx-3070-8gb": 46,
    "rtx-3080-10gb": 68, "rtx-3090-24gb": 82, "rtx-4070-12gb": 46, "rtx-4070-ti-super-16gb": 66, "rtx-4080-16gb": 76,
    "rtx-4080-super-16gb": 80, "rtx-4090-24gb": 128, "rtx-5060-ti-16gb": 36, "rtx-5070-ti-16gb": 70,
    "rtx-5080-16gb": 84, "rtx-5090-32gb": 170, "titan-v-12gb": 80, "titan-rtx-24gb": 72, "rtx-a4000-16gb": 48,
    "rtx-a5000-24gb": 64, "rtx-a6000-48gb": 84, "rtx-6000-ada-48gb": 142, "rtx-pro-6000-96gb": 188, "p100-16gb": 56,
    "v100-16gb": 80, "v100-32gb": 80, "t4-16gb": 40, "a10-24gb": 72, "a10g-24gb": 80, "a30-24gb": 56, "a40-48gb": 84,
    "a100-40gb": 108, "a100-80gb": 108, "l4-24gb": 58, "l40-48gb": 142, "l40s-48gb": 142, "rtx-pro-4500-32gb": 82,
    "h20-96gb": 78, "h100-80gb": 132, "h100-nvl-94gb": 132, "gh200-96gb": 132, "h200-141gb": 132, "b200-180gb": 148,
}  # fmt: skip
"""As `torch.cuda.get_device_properties` or deviceQuery print it in public logs. Where none was found, CUDA cores by
cores a multiprocessor in NVIDIA's data sheets: 1,920/64 (RTX 2060), 5,888/128 (RTX 3070 and 4070), 4,608/128 (RTX 5060
Ti), 8,960/128 (RTX 5070 Ti), 21,760/128 (RTX 5090), 5,120/64 (TITAN V), 6,144/128 (A4000), 24,064/128 (PRO 6000),
3,584/64 (A30), 7,424/128 (L4), 18,176/128 (L40), 10,496/128 (PRO 4500), 9,984/128 (H20), 16,896/128 (H100 NVL). The
H100 80 GB is the SXM module; a PCIe card has 114."""

_MULTIPROCESSORS_OF_OTHERS = 108
"""An A100's, assumed for a GPU that is like none in the catalog."""

_LIKE_PERCENT = 2
"""How far the memory of one kind of GPU differs, with the driver and error correction."""

_THREADS_PER_MULTIPROCESSOR = {
    (7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536,
}  # fmt: skip
"""CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; 2,048 on all others."""


def profile_for(torch_version: str, gpu: Gpu) -> Profile:
    """The profile for a torch version such as ``2.13.0+cpu`` on a GPU of the catalog."""
    measured = gpu.compute_capability in _CONTEXTS
    context_bytes, context_source = _CONTEXTS[gpu.compute_capability if measured else _ASSUMED_CONTEXT]
    if not measured:
        context_source = f"assumed for {gpu.sm}: {context_source}"
    major_minor = ".".join(torch_version.split("+")[0].split(".")[:2])
    return Profile(
        name=f"torch {major_minor} {gpu.sm}",
        cublas_workspace_bytes=_cublas_workspace_bytes(tuple(map(int, major_minor.split("."))), gpu),
        context_bytes=context_bytes,
        context_source=context_source,
        multiprocessors=_multiprocessors(gpu),
        threads_per_multiprocessor=_THREADS_PER_MULTIPROCESSOR.get(gpu.compute_capability, 2048),
    )


def _multiprocessors(gpu: Gpu) -> int:
    """Those of the catalog's GPU; of one that this machine holds, what the catalog's of its kind agree on."""
    if gpu.name in _MULTIPROCESSORS:
        return _MULTIPROCESSORS[gpu.name]
    alike = {
        _MULTIPROCESSORS[known.name]
        for known in gpus().values()
        if known.compute_capability == gpu.compute_capability
        and abs(known.total_bytes - gpu.total_bytes) * 100 <= known.total_bytes * _LIKE_PERCENT
    }
    return alike.pop() if len(alike) == 1 else _MULTIPROCESSORS_OF_OTHERS


def _cublas_workspace_bytes(torch_version: tuple[int, ...], gpu: Gpu) -> int:
    """What the user set in `CUBLAS_WORKSPACE_CONFIG` (pairs of ``:KIB:COUNT``), else torch's default."""
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * KIB * int(count) for size, count in pairs)
    large = gpu.compute_capability == (9, 0) or (torch_version >= (2, 9) and gpu.compute_capability[0] in (9, 10, 12))
    return _CUBLAS_LARGE_BYTES if large else _CUBLAS_DEFAULT_BYTES
