"""Facts about CUDA that differ by PyTorch version and GPU architecture, each with its source. No torch import."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.catalog.speeds import MULTIPROCESSORS_OF_OTHERS
from gpumem_tui.memory import KIB, MIB, Range

OLDEST_TORCH = (2, 10)
"""The first version whose Python backends of a device type the simulated GPU is one of."""

NEWEST_TORCH = (2, 13)
"""The newest version that the simulated GPU was compared with recordings on; it relies on torch's internals."""

_WITH_ANY_TORCH = "with it `run`, `attach`, `watch`, `look` and a search on a real GPU work"


def too_old(torch_version: str) -> str:
    """Why a version of torch cannot simulate a GPU, and what it can; "" where it can simulate one."""
    if _minor(torch_version) >= OLDEST_TORCH:
        return ""
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"is too old to simulate a GPU: {oldest} or newer is needed; {_WITH_ANY_TORCH}"


def newer_than_checked(torch_version: str) -> str:
    """What to know of a trace by a version of torch that came out later; "" where it was checked."""
    if _minor(torch_version) <= NEWEST_TORCH:
        return ""
    newest = ".".join(map(str, NEWEST_TORCH))
    return f"torch {torch_version} is newer than {newest}, the last one that the simulated GPU was checked with"


def _minor(torch_version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch_version)[:2])


@dataclass(frozen=True, slots=True)
class Profile:
    """What the simulator assumes of one torch version on one architecture.

    Attributes:
        name: shown wherever a traced number is shown, e.g. ``torch 2.13 sm_80``.
        cublas_workspace_bytes: taken from the caching allocator once per cuBLAS handle and stream; the forward and
            the autograd thread have a handle each.
        cublaslt_workspace_bytes: what a product with a bias takes for cuBLASLt beside it; 0 where it shares cuBLAS'.
        keeps_cublaslt_workspace: a thread keeps that, else every such product gives it back at its end.
        context_bytes: what a process holds on the device beside its allocator: CUDA context, kernels, libraries.
        context_source: where `context_bytes` was measured.
        context_range: between what figures it was found to be, once a program's kernels and libraries are loaded.
        compute_capability: of the architecture.
        multiprocessors, threads_per_multiprocessor: how far a reduction is split, and so what scratch it takes.
    """

    name: str
    cublas_workspace_bytes: int
    cublaslt_workspace_bytes: int
    keeps_cublaslt_workspace: bool
    context_bytes: int
    context_source: str
    multiprocessors: int
    threads_per_multiprocessor: int
    context_range: Range
    compute_capability: tuple[int, int]

    def with_context(self, context_bytes: int, source: str) -> Profile:
        """The same profile with a context that was measured."""
        exactly = Range(context_bytes, context_bytes)
        return replace(self, context_bytes=context_bytes, context_source=source, context_range=exactly)


CUBLAS_WORKSPACE = "cuBLAS workspace"
CUBLASLT_WORKSPACE = "cuBLASLt workspace"
"""The operators under which a trace has them."""

_Version = tuple[int, ...]

_CUBLAS_BYTES = 4096 * KIB * 2 + 16 * KIB * 8
_CUBLAS_LARGE_BYTES = 32 * MIB
_CUBLAS_LARGE_SINCE: dict[int, _Version] = {9: (2, 0), 10: (2, 12), 12: (2, 12)}
"""`parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: `:4096:2:16:8`, and 32 MiB by major compute
capability since a torch version: Hopper (pytorch/pytorch#91564), Blackwell (#175344, merged in February 2026; published
runs of torch 2.11 on a B200 and an RTX PRO 6000 still hold 8,519,680 bytes a thread, tests/published)."""

_CUBLASLT_BYTES = 1 * MIB
_CUBLASLT_KEPT_SINCE: _Version = (2, 9)
_CUBLASLT_SHARED_SINCE: _Version = (2, 11)
"""`parseCUDABlasLtWorkspaceSize` there: 1 MiB, taken for each product until pytorch/pytorch#156495 (June 2025) gave it
to the thread, and cuBLAS' own since #168175 (January 2026)."""

_CONTEXTS = {
    (8, 9): (426 * MIB, "measured on an RTX 6000 Ada, torch 2.10, CUDA 13.0 (unslothai/unsloth-zoo#1053)"),
    (9, 0): (520 * MIB, "measured on an H200, torch 2.7, CUDA 12.8: about 520 MiB (clemsgrs/slide2vec#326)"),
    (10, 0): (612 * MIB, "measured on a B200 by mem_get_info (unslothai/unsloth#8677)"),
}
"""By compute capability: bytes before the first kernel is loaded, and where that was measured."""

_CONTEXTS_MIB = {
    (6, 0): ((303, "a P100, andimarafioti/florence2-finetuning#17"), (818, "a P100, pytorch/pytorch#99699")),
    (7, 5): ((137, "a T4, tsugumi-sys/SA-ConvLSTM-Pytorch#22"), (141, "a T4, FoundationVision/GenerateU#10")),
    (8, 0): (
        (409, "an A100 80 GB, HiDream-ai/VAREdit#6"),
        (498, "an A100 40 GB, pico-lm/pico-train#50"),
        (501, "an A100 40 GB, TianheWu/CoSeR#10"),
        (512, "an A100 80 GB, Tianhao-Qi/Mask2DiT#4"),
        (656, "the most that an A100 80 GB was seen with, torch 2.6 to 2.8"),
    ),
    (8, 6): ((257, "an RTX 3080, bcmi/libcom#54"), (287, "an RTX 3060, FireRedTeam/FireRedTTS2#17")),
    (8, 9): (
        (253, "an RTX 4080, antgroup/echomimic_v2#115"),
        (349, "an RTX 4080, qingze-bai/VSmTrans#3"),
        (429, "an RTX 6000 Ada, DINGYANB/MTVCrafter#21"),
        (473, "an RTX 4090, pinokiofactory/flux-webui#11"),
        (504, "an RTX 4090, 3DTopia/Phidias-Diffusion#8"),
        (507, "an L40, QwenLM/Qwen3-VL#2097"),
    ),
    (9, 0): ((520, "an H200, clemsgrs/slide2vec#326"),),
    (10, 0): (
        (612, "a B200, unslothai/unsloth#8677"),
        (700, "with kernels loaded, as much more as on an RTX 6000 Ada"),
    ),
    (12, 0): ((595, "an RTX 5090, Wan-Video/Wan2.1#465"),),
}
"""By compute capability, with kernels loaded as they are used: what a process held beside its allocator's segments when
it ran out of memory (of torch's own message, its memory in use less what is allocated and what is reserved but
unallocated), and figures of `_CONTEXTS`."""

_CONTEXTS_ELSEWHERE = ((254, "pytorch/pytorch#86509"), (656, "an A100 80 GB"))
_FEW = 3
"""With fewer figures of an architecture than this, its context is taken to be as large as any other's at most."""
_CONTEXT_ROUNDING_BYTES = 15 * MIB
"""Three figures of two decimals of GiB make each of them."""

_EAGER_MOST_MIB = 1451
"""With `CUDA_MODULE_LOADING=EAGER` all kernels are loaded at once: what an A100 held that trained a network of 43
parameters, torch before 2.0 (itu-rad/GPUMemNet, Datasets/MLP/mlp_data_step2.csv). V100: 1,343 MiB with CUDA 11.2."""

_ASSUMED_CONTEXT = (8, 9)
_ELSEWHERE = "254 to 656 MiB elsewhere"
"""Where kernels are loaded as they are used (since torch 1.13): the least is pytorch/pytorch#86509's, on a GPU that it
does not name; the most is what one out-of-memory of an A100 80 GB left to it (torch 2.6 to 2.8)."""

WARP_SIZE = 32
THREADS_PER_BLOCK = 1024
"""Of every CUDA device so far (CUDA C++ Programming Guide, the same table)."""

_THREADS_PER_MULTIPROCESSOR = {
    (7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536,
}  # fmt: skip
"""CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; 2,048 on all others."""


def profile_for(torch_version: str, gpu: Gpu) -> Profile:
    """The profile for a torch version such as ``2.13.0+cpu`` on a GPU of the catalog."""
    context_bytes, context_source = _context(gpu)
    major_minor = ".".join(torch_version.split("+")[0].split(".")[:2])
    version = tuple(map(int, major_minor.split(".")))
    return Profile(
        name=f"torch {major_minor} {gpu.sm}",
        cublas_workspace_bytes=_cublas_workspace_bytes(version, gpu),
        cublaslt_workspace_bytes=_cublaslt_workspace_bytes(version),
        keeps_cublaslt_workspace=version >= _CUBLASLT_KEPT_SINCE,
        context_bytes=context_bytes,
        context_source=context_source,
        multiprocessors=gpu.multiprocessors or MULTIPROCESSORS_OF_OTHERS,
        threads_per_multiprocessor=_THREADS_PER_MULTIPROCESSOR.get(gpu.compute_capability, 2048),
        context_range=_context_range(gpu, context_bytes),
        compute_capability=gpu.compute_capability,
    )


def beside_allocator_bytes(gpu: Gpu) -> int:
    """The most that is known to be out of the reach of a step's tensors: driver's reserve, context, cuBLAS' workspaces.

    Of the newest torch; the forward and the autograd thread have a workspace each.
    """
    profile = profile_for(".".join(map(str, NEWEST_TORCH)), gpu)
    reserve_bytes = gpu.total_bytes - gpu.cuda_total_range.low_bytes
    return reserve_bytes + profile.context_range.high_bytes + 2 * profile.cublas_workspace_bytes


def _context(gpu: Gpu) -> tuple[int, str]:
    """What the context is expected to take, and where that is from."""
    capability = gpu.compute_capability
    if capability in _CONTEXTS:
        return _CONTEXTS[capability]
    if capability in _CONTEXTS_MIB:
        found = sorted(_CONTEXTS_MIB[capability])
        mib, where = found[(len(found) - 1) // 2]
        return mib * MIB, f"measured on {where}, as it ran out of memory"
    context_bytes, source = _CONTEXTS[_ASSUMED_CONTEXT]
    return context_bytes, f"assumed for {gpu.sm}: {source}; {_ELSEWHERE}"


def _context_range(gpu: Gpu, expected_bytes: int) -> Range:
    """Between what figures the context was found on this architecture, or any other where it was not looked at."""
    found_mib = [mib for mib, _ in _CONTEXTS_MIB.get(gpu.compute_capability, _CONTEXTS_ELSEWHERE)]
    if len(found_mib) < _FEW:
        found_mib.append(_CONTEXTS_ELSEWHERE[-1][0])
    if os.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER":
        found_mib.append(_EAGER_MOST_MIB)
    low, high = min(found_mib) * MIB - _CONTEXT_ROUNDING_BYTES, max(found_mib) * MIB + _CONTEXT_ROUNDING_BYTES
    return Range.of((low, expected_bytes, high))


def _cublas_workspace_bytes(torch_version: _Version, gpu: Gpu) -> int:
    """What the user set in `CUBLAS_WORKSPACE_CONFIG` (pairs of ``:KIB:COUNT``), else torch's default."""
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * KIB * int(count) for size, count in pairs)
    since = _CUBLAS_LARGE_SINCE.get(gpu.compute_capability[0])
    return _CUBLAS_LARGE_BYTES if since is not None and torch_version >= since else _CUBLAS_BYTES


def _cublaslt_workspace_bytes(torch_version: _Version) -> int:
    """What the user set in `CUBLASLT_WORKSPACE_SIZE` (KiB), else torch's default; 0 if cuBLAS' own serves."""
    shares = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", str(int(torch_version >= _CUBLASLT_SHARED_SINCE)))
    if shares == "1":
        return 0
    chosen = re.match(r"\d+", os.environ.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return int(chosen[0]) * KIB if chosen else _CUBLASLT_BYTES
