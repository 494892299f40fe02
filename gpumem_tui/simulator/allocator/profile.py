"""Facts about CUDA that differ by PyTorch version and GPU architecture, each with its source. No torch import."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from gpumem_tui.catalog.shapes import MULTIPROCESSORS_OF_OTHERS, Context, Gpu
from gpumem_tui.memory import KIB, MIB, Range

OLDEST_TORCH = (2, 6)
"""The oldest version that the simulated GPU was tried with."""

NEWEST_TORCH = (2, 13)
"""The newest version that the simulated GPU was compared with recordings on; it relies on torch's internals."""


def too_old(torch_version: str) -> str:
    """Say why a version of torch cannot simulate a GPU, and what it can; "" where it can simulate one."""
    if minor_of(torch_version) >= OLDEST_TORCH:
        return ""
    return (
        f"is too old to simulate a GPU: {'.'.join(map(str, OLDEST_TORCH))} or newer is needed; in an environment that "
        f"has one, --torch-version {torch_version.partition('+')[0]} traces as this one would; with this one `run`, "
        "`attach`, `watch`, `look` and a search on a real GPU work"
    )


def newer_than_checked(torch_version: str) -> str:
    """Say what to know of a trace by a version of torch that came out later; "" where it was checked."""
    if minor_of(torch_version) <= NEWEST_TORCH:
        return ""
    newest = ".".join(map(str, NEWEST_TORCH))
    return f"torch {torch_version} is newer than {newest}, the last one that the simulated GPU was checked with"


def followed_as(asked: str, torch_version: str) -> str:
    """Say what of an asked version of torch is followed where another one traces; "" where none was asked for."""
    if not asked or minor_of(asked) == minor_of(torch_version):
        return ""
    return (
        f"as torch {asked} would: its workspaces of cuBLAS, its optimizers' updates, when it drops gradients, what "
        f"autocast casts and whether the compiler orders kernels for a low peak; the compiler otherwise, the kernels, "
        f"what operators keep and the allocator are torch {torch_version}'s"
    )


def minor_of(torch_version: str) -> tuple[int, ...]:
    """Return major and minor of a version such as ``2.13.0+cpu``."""
    return tuple(int(part) for part in re.findall(r"\d+", torch_version)[:2])


@dataclass(frozen=True, slots=True)
class Profile:
    """The simulator's constants and rules for one torch version on one architecture.

    Attributes:
        name: shown wherever a traced number is shown, e.g. ``torch 2.13 sm_80``.
        version: of torch: major, minor.
        cublas_workspace_bytes: taken from the caching allocator once per cuBLAS handle and stream; the forward and
            the autograd thread have a handle each.
        cublaslt_workspace_bytes: what a product with a bias takes for cuBLASLt beside it; 0 where it shares cuBLAS'.
        keeps_cublaslt_workspace: a thread keeps that, else every such product gives it back at its end.
        context_bytes: what a process holds on the device beside its allocator: CUDA context, kernels, libraries.
        context_source: where `context_bytes` was measured.
        context_range: between what figures it was found to be, once a program's kernels and libraries are loaded.
        nccl: what the context has of NCCL's buffers for groups of ranks, and `groups` how many ranks each of them has.
        alone: the profile without them; None where there are none.
        compute_capability: of the architecture.
        cudnn: the version that the wheel brings, such as 91900; 0 on ROCm. Where the wheel's CUDA is not said, that of
            the wheel on PyPI.
        prefers_cudnn_attention: attention of 16-bit values takes cuDNN's kernel first.
        multiprocessors, threads_per_multiprocessor: how far a reduction is split, and so what scratch it takes.
    """

    name: str
    version: tuple[int, ...]
    cublas_workspace_bytes: int
    cublaslt_workspace_bytes: int
    keeps_cublaslt_workspace: bool
    context_bytes: int
    context_source: str
    multiprocessors: int
    threads_per_multiprocessor: int
    context_range: Range
    compute_capability: tuple[int, int]
    cudnn: int = 0
    prefers_cudnn_attention: bool = False
    nccl: Context | None = None
    groups: tuple[int, ...] = ()
    alone: Profile | None = None

    def with_context(self, context_bytes: int, source: str) -> Profile:
        """Return the same profile with a context that was measured."""
        exactly = Range(context_bytes, context_bytes)
        alone = self.alone or self
        return replace(alone, context_bytes=context_bytes, context_source=source, context_range=exactly)

    def among(self, groups: Iterable[int], gpu: Gpu) -> Profile:
        """Return the same profile with NCCL's buffers for groups of so many ranks, each of which has its own.

        An exact context, as typed, has them.
        """
        alone, several = self.alone or self, tuple(ranks for ranks in groups if ranks > 1)
        if not several or gpu.arch or alone.context_range.is_exact:
            return alone
        nccl = _nccl_buffers(several, gpu)
        expected_bytes, both = alone.context_bytes + nccl.expected_bytes, f"{alone.context_source}; {nccl.source}"
        most = alone.context_range + nccl.between
        return replace(
            alone, context_bytes=expected_bytes, context_source=both, context_range=most, nccl=nccl, groups=several,
            alone=alone,
        )  # fmt: skip


CUBLAS_WORKSPACE = "cuBLAS workspace"
CUBLASLT_WORKSPACE = "cuBLASLt workspace"
HIPBLAS_WORKSPACE = "hipBLAS workspace"
"""The operators under which a trace has them."""

_Version = tuple[int, ...]

_CUBLAS_BYTES = 4096 * KIB * 2 + 16 * KIB * 8
_CUBLAS_LARGE_BYTES = 32 * MIB
_CUBLAS_SINCE: _Version = (1, 13)
"""cuBLAS took its own memory, beside the allocator, until pytorch/pytorch#83461 (August 2022) had torch give it a
workspace. Of 1.13 sources differ: minGPT's peaks of January 2023 hold two of them to the byte (tests/published), a
report of February (#95668) has none."""
_CUBLAS_LARGE_SINCE: dict[int, _Version] = {9: (2, 0), 10: (2, 12), 12: (2, 12)}
"""`parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: `:4096:2:16:8`, and 32 MiB by major compute
capability since a torch version: Hopper (pytorch/pytorch#91564), Blackwell (#175344, merged in February 2026; published
runs of torch 2.11 on a B200 and an RTX PRO 6000 still hold 8,519,680 bytes a thread, tests/published)."""

_HIPBLAS_BYTES, _HIPBLAS_LARGE_BYTES = 32 * MIB, 128 * MIB
_HIPBLAS_LARGE_ON = ("gfx94", "gfx95")
"""PyTorch's notes on HIP, "hipBLAS workspaces" (pytorch/pytorch#138791): 32 MiB, from the MI300 on 128 MiB."""

_CUBLASLT_BYTES = 1 * MIB
_CUBLASLT_SINCE: _Version = (1, 12)
_CUBLASLT_KEPT_SINCE: _Version = (2, 9)
_CUBLASLT_SHARED_SINCE: _Version = (2, 12)
"""Products with a bias go through cuBLASLt since pytorch/pytorch#72148, its workspace (`parseCUDABlasLtWorkspaceSize`
there) since #73439, of March 2022: 1 MiB, taken for each product until pytorch/pytorch#156495 (June 2025) gave it
to the thread, and cuBLAS' own since #168175 and #175879 (January to March 2026): with 2.11 an H200 took
its 1 MiB."""

_CUDNN_OF_CUDA_12: tuple[tuple[_Version, int], ...] = (((2, 6), 90501), ((2, 8), 91002))
_CUDNN_OF_CUDA_13: tuple[tuple[_Version, int], ...] = (
    ((2, 9), 91300), ((2, 10), 91501), ((2, 11), 91900), ((2, 12), 92000),
)  # fmt: skip
"""cuDNN by the torch version since which its wheels bring it (their `Requires-Dist`). Wheels of CUDA 12 stay with an
older one ("CUDA <= 12.9 wheels ship with older cuDNN", sdp_utils.cpp)."""
_CUDA_13_SINCE: _Version = (2, 11)
"""PyPI's wheels are of CUDA 13."""

_CUDNN_ATTENTION_SINCE: tuple[tuple[_Version, int], ...] = (((2, 9), 90900), ((2, 10), 91500))
"""`check_prefer_cudnn_attention` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: cuDNN's kernel comes first
where cuDNN is newer than this, since pytorch/pytorch#162073 (for 2.9) and #171627 (2.10). From 2.6 on it was asked for
(#138522)."""
_CUDNN_ATTENTION_ON = ((9, 0), (9, 3), (10, 0), (10, 3))

_CONTEXTS: dict[str, Any] = json.loads((Path(__file__).parent / "contexts.json").read_text(encoding="utf-8"))
"""What contexts take, by compute capability; the file says what its figures are."""

_FEW = 3
"""With fewer figures of an architecture than this, its context is taken to be as large as any other's at most."""
_CONTEXT_ROUNDING_BYTES = 15 * MIB
"""Three figures of two decimals of GiB make each of them."""

WARP_SIZE = 32
THREADS_PER_BLOCK = 1024
"""Of every CUDA device so far (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""

_REGISTERS_PER_MULTIPROCESSOR = 65536
_SHARED_BYTES_PER_BLOCK = 48 << 10


def per_multiprocessor(capability: tuple[int, int]) -> dict[str, int]:
    """Return registers and shared memory (bytes), as `torch.cuda.get_device_properties` names them."""
    shared = _CONTEXTS["shared_kib"].get(_text(capability), 100) << 10
    kept = 1 << 10 if capability >= (8, 0) else 0
    return {
        "regs_per_multiprocessor": _REGISTERS_PER_MULTIPROCESSOR,
        "shared_memory_per_block": _SHARED_BYTES_PER_BLOCK,
        "shared_memory_per_block_optin": shared - kept,
        "shared_memory_per_multiprocessor": shared,
    }


def profile_for(torch_version: str, gpu: Gpu) -> Profile:
    """Return the profile for a torch version such as ``2.13.0+cpu`` on a GPU of the catalog."""
    context_bytes, context_source = _context(gpu)
    version = minor_of(torch_version)
    return Profile(
        name=f"torch {'.'.join(map(str, version))} {gpu.sm}",
        version=version,
        cublas_workspace_bytes=_cublas_workspace_bytes(version, gpu),
        cublaslt_workspace_bytes=_cublaslt_workspace_bytes(version, gpu),
        keeps_cublaslt_workspace=version >= _CUBLASLT_KEPT_SINCE,
        context_bytes=context_bytes,
        context_source=context_source,
        multiprocessors=gpu.multiprocessors or MULTIPROCESSORS_OF_OTHERS,
        threads_per_multiprocessor=_CONTEXTS["threads"].get(_text(gpu.compute_capability), 2048),
        context_range=_context_range(gpu, context_bytes),
        compute_capability=gpu.compute_capability,
        cudnn=_cudnn(torch_version, gpu),
        prefers_cudnn_attention=_prefers_cudnn_attention(torch_version, gpu),
    )


def _cudnn(torch_version: str, gpu: Gpu) -> int:
    """Return the version of cuDNN that comes with a version of torch such as ``2.11.0+cu130``."""
    version = minor_of(torch_version)
    cuda = re.search(r"\+cu(\d\d)\d", torch_version)
    is_newer = int(cuda[1]) >= 13 if cuda else version >= _CUDA_13_SINCE
    known = _CUDNN_OF_CUDA_13 if is_newer else _CUDNN_OF_CUDA_12
    return 0 if gpu.arch else next((number for since, number in reversed(known) if version >= since), 0)


def _prefers_cudnn_attention(torch_version: str, gpu: Gpu) -> bool:
    if gpu.compute_capability not in _CUDNN_ATTENTION_ON or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    version = minor_of(torch_version)
    older_than = next((cudnn for since, cudnn in reversed(_CUDNN_ATTENTION_SINCE) if version >= since), None)
    return older_than is not None and _cudnn(torch_version, gpu) > older_than


def not_known_of(gpu: Gpu) -> str:
    """Say what is not known of a GPU's runtime, so that no verdict of a trace is certain; empty for CUDA."""
    if not gpu.arch:
        return ""
    return (
        f"{gpu.title} is an estimate: no run on ROCm was compared. PyTorch's allocator and its hipBLAS workspaces are "
        "as its sources have them; the ROCm context, hipBLASLt's workspaces, and what MIOpen and the attention kernels "
        "take are not known"
    )


def said_of(asked: str, torch_version: str, gpu: Gpu) -> tuple[str, ...]:
    """Return what every result says of a version of torch, traced as an asked one ("" for none), on a GPU."""
    lines = (newer_than_checked(torch_version), not_known_of(gpu), followed_as(asked, torch_version))
    return tuple(filter(None, lines))


def beside_allocator_bytes(gpu: Gpu) -> int:
    """Return the most that tensors of a step cannot have: the driver's reserve, context, cuBLAS' workspaces.

    Of the newest torch; the forward and the autograd thread have a workspace each.
    """
    profile = profile_for(".".join(map(str, NEWEST_TORCH)), gpu)
    reserve_bytes = gpu.total_bytes - gpu.cuda_total_range.low_bytes
    return reserve_bytes + profile.context_range.high_bytes + 2 * profile.cublas_workspace_bytes


def _context(gpu: Gpu) -> tuple[int, str]:
    """Return what the context is expected to take, and where that is from."""
    if gpu.context is not None:
        return gpu.context.expected_bytes, gpu.context.source
    if gpu.arch:
        found = _CONTEXTS["rocm"]["expected"]
        return found["mib"] * MIB, f"assumed for {gpu.sm}: {found['source']}; nothing was measured on it"
    capability = _text(gpu.compute_capability)
    if capability in _CONTEXTS["expected"]:
        found = _CONTEXTS["expected"][capability]
        return found["mib"] * MIB, found["source"]
    if capability in _CONTEXTS["loaded"]:
        every = sorted(_CONTEXTS["loaded"][capability], key=itemgetter("mib"))
        found = every[(len(every) - 1) // 2]
        return found["mib"] * MIB, f"measured on {found['source']}, as it ran out of memory"
    assumed = _CONTEXTS["expected"][_CONTEXTS["assumed"]]
    return assumed["mib"] * MIB, f"assumed for {gpu.sm}: {assumed['source']}; 254 to 656 MiB elsewhere"


def _context_range(gpu: Gpu, expected_bytes: int) -> Range:
    """Return what the context was found between on this architecture, or on any other where it was not looked at."""
    if gpu.context is not None:
        return gpu.context.between
    if gpu.arch:
        found_mib = [found["mib"] for found in _CONTEXTS["rocm"]["loaded"]]
        more_bytes = 2 * _hipblas_workspace_bytes(gpu)  # as much again for hipBLASLt, of both threads
        return Range(min(found_mib) * MIB - _CONTEXT_ROUNDING_BYTES, max(found_mib) * MIB + more_bytes)
    elsewhere = _CONTEXTS["elsewhere"]
    found_mib = [found["mib"] for found in _CONTEXTS["loaded"].get(_text(gpu.compute_capability), elsewhere)]
    if len(found_mib) < _FEW:
        found_mib.append(elsewhere[-1]["mib"])
    if os.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER":
        found_mib.append(_CONTEXTS["all_kernels_mib"])
    around = min(found_mib) * MIB - _CONTEXT_ROUNDING_BYTES, max(found_mib) * MIB + _CONTEXT_ROUNDING_BYTES
    return Range.of((*around, expected_bytes))


def _nccl_buffers(groups: Sequence[int], gpu: Gpu) -> Context:
    """Return what groups of so many ranks take on each device, from rings alone to rings and trees."""
    known, has_nvlink = _CONTEXTS["nccl"], gpu.speed is not None and bool(gpu.speed.nvlink)
    said = {name: int(set_) for name in known["set"] if (set_ := os.environ.get(f"NCCL_{name}", "")).isdecimal()}
    channels = known["channels"]["nvlink" if has_nvlink else "pcie"]
    limits = said.get("MIN_NCHANNELS", 0), said.get("MAX_NCHANNELS", channels[1])
    fewest, most = (max(limits[0], min(limits[1], number)) for number in channels)
    received_bytes = said.get("BUFFSIZE", known["simple_mib"] * MIB) + known["others_mib"] * MIB
    one_bytes = math.ceil(received_bytes / (2 * MIB)) * 2 * MIB + known["sent_mib"] * MIB
    all_bytes = sum(one_bytes * (2 if ranks == 2 else 3) for ranks in groups)
    source = known["source"].format("one group" if len(groups) == 1 else f"{len(groups)} groups")
    least_bytes = fewest * one_bytes * len(groups) if has_nvlink else 0
    return Context(least_bytes, fewest * all_bytes, most * all_bytes, source)


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _cublas_workspace_bytes(torch_version: _Version, gpu: Gpu) -> int:
    """Return what the user set in `CUBLAS_WORKSPACE_CONFIG` (pairs of ``:KIB:COUNT``), else torch's default."""
    chosen = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    if gpu.arch:
        chosen = os.environ.get("HIPBLAS_WORKSPACE_CONFIG", chosen)
    if torch_version < _CUBLAS_SINCE:
        return 0
    pairs = re.findall(r":(\d+):(\d+)", chosen)
    if pairs:
        return sum(int(size) * KIB * int(count) for size, count in pairs)
    if gpu.arch:
        return _hipblas_workspace_bytes(gpu)
    since = _CUBLAS_LARGE_SINCE.get(gpu.compute_capability[0])
    return _CUBLAS_LARGE_BYTES if since is not None and torch_version >= since else _CUBLAS_BYTES


def _hipblas_workspace_bytes(gpu: Gpu) -> int:
    return _HIPBLAS_LARGE_BYTES if gpu.arch.startswith(_HIPBLAS_LARGE_ON) else _HIPBLAS_BYTES


def _cublaslt_workspace_bytes(torch_version: _Version, gpu: Gpu) -> int:
    """Return what the user set in `CUBLASLT_WORKSPACE_SIZE` (KiB), else torch's default; 0 if cuBLAS' own serves."""
    if gpu.arch:
        return 0  # hipBLASLt's is not known: it is in the range of the context
    if torch_version < _CUBLASLT_SINCE:
        return 0
    shares = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", str(int(torch_version >= _CUBLASLT_SHARED_SINCE)))
    if shares == "1":
        return 0
    chosen = re.match(r"\d+", os.environ.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return int(chosen[0]) * KIB if chosen else _CUBLASLT_BYTES
