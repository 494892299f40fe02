"""Facts about CUDA that differ by PyTorch version and GPU architecture, each with its source. No torch import."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpumem_tui.catalog.shapes import MULTIPROCESSORS_OF_OTHERS, Context, Gpu
from gpumem_tui.memory import KIB, MIB, Range, format_bytes
from gpumem_tui.simulator.allocator.contexts import (
    FACTS,
    capability_text,
    context_of,
    cuda_of,
    cudnn_of,
    hipblas_workspace_bytes,
    nccl_buffers,
    together,
)
from gpumem_tui.text import minor_of

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


@dataclass(frozen=True, slots=True)
class Profile:
    """The simulator's constants and rules for one torch version on one architecture.

    Attributes:
        name: shown wherever a traced number is shown, e.g. ``torch 2.13 sm_80``.
        version: of torch: major, minor.
        cublas_workspace_bytes: taken from the caching allocator once per cuBLAS handle and stream; the forward and
            the autograd thread have a handle each.
        cublaslt_workspace_bytes: what a product with a bias takes for cuBLASLt next to it; 0 where it shares cuBLAS'.
        keeps_cublaslt_workspace: a thread keeps that, else every such product gives it back at its end.
        context_bytes: what a process holds on the device outside its allocator: CUDA context, kernels, libraries.
        context_source: where `context_bytes` was measured.
        context_range: between what figures it was found to be, once a program's kernels and libraries are loaded.
        cuda: the major version of CUDA.
        nccl: what the context has of NCCL's buffers for groups of ranks, and `groups` how many ranks each of them has.
        libraries: the libraries of CUDA that a program uses; None where it is not known.
        alone: the profile of any program; None where this is it.
        compute_capability: of the architecture.
        cudnn: the version that the wheel brings, such as 91900; 0 on ROCm. Where the wheel's CUDA is not said, that of
            the wheel on PyPI.
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
    cuda: int
    cudnn: int = 0
    nccl: Context | None = None
    groups: tuple[int, ...] = ()
    libraries: tuple[str, ...] | None = None
    alone: Profile | None = None

    @property
    def prefers_cudnn_attention(self) -> bool:
        """Whether attention of 16-bit values takes cuDNN's kernel first."""
        if self.compute_capability not in _CUDNN_ATTENTION_ON or not self.cudnn:
            return False
        older_than = next((cudnn for since, cudnn in reversed(_CUDNN_ATTENTION_SINCE) if self.version >= since), None)
        is_asked_not_to = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
        return older_than is not None and self.cudnn > older_than and not is_asked_not_to

    def with_context(self, context_bytes: int, source: str) -> Profile:
        """Return the same profile with a context that was measured."""
        exactly = Range(context_bytes, context_bytes)
        alone = self.alone or self
        return replace(alone, context_bytes=context_bytes, context_source=source, context_range=exactly)

    def with_others(self, processes: int, each_bytes: int) -> Profile:
        """Return the profile of a process on whose GPU others hold a bare context and so many bytes of tensors each."""
        other = self.alone or self
        more = [
            processes * (size + each_bytes) for size in (other.context_range.low_bytes, other.context_range.high_bytes)
        ]
        return replace(
            self,
            context_bytes=self.context_bytes + processes * (other.context_bytes + each_bytes),
            context_source=f"{self.context_source}; with what {processes} other ranks hold here",
            context_range=self.context_range + Range(*more),
        )

    def using(self, gpu: Gpu, groups: Iterable[int] = (), libraries: Iterable[str] | None = None) -> Profile:
        """Return the profile of a program: with the libraries it uses, and NCCL's buffers for its groups of ranks.

        An exact context, as typed, has them.

        Args:
            groups: how many ranks each group has that communicates; each has its own buffers, one of a single rank too.
            libraries: see `contexts.context_of`; None where they are not known.
        """
        alone, several = self.alone or self, tuple(groups)
        used = None if libraries is None else tuple(libraries)
        if gpu.arch or alone.context_range.is_exact or (not several and used is None):
            return alone
        context = context_of(gpu, self.cuda, used)
        nccl = nccl_buffers(several, gpu, self.cuda) if several else None
        whole = context if nccl is None else together(context, nccl)
        return replace(
            alone, context_bytes=whole.expected_bytes, context_source=whole.source, context_range=whole.between,
            nccl=nccl, groups=several, libraries=used, alone=alone,
        )  # fmt: skip


CUBLAS_WORKSPACE = "cuBLAS workspace"
CUBLASLT_WORKSPACE = "cuBLASLt workspace"
HIPBLAS_WORKSPACE = "hipBLAS workspace"
"""The operators under which a trace has them."""

_Version = tuple[int, ...]

_CUBLAS_BYTES = 4096 * KIB * 2 + 16 * KIB * 8
_CUBLAS_LARGE_BYTES = 32 * MIB
_CUBLAS_SINCE: _Version = (1, 13)
"""cuBLAS took its own memory, outside the allocator, until pytorch/pytorch#83461 (August 2022) had torch give it a
workspace. For 1.13 sources differ: minGPT's peaks of January 2023 hold two of them to the byte (tests/published), a
report of February (#95668) has none."""
_CUBLAS_LARGE_SINCE: dict[int, _Version] = {9: (2, 0), 10: (2, 12), 12: (2, 12)}
"""`parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: `:4096:2:16:8`, and 32 MiB by major compute
capability since a torch version: Hopper (pytorch/pytorch#91564), Blackwell (#175344, merged in February 2026; published
runs of torch 2.11 on a B200 and an RTX PRO 6000 still hold 8,519,680 bytes a thread, tests/published)."""

_CUBLASLT_BYTES = 1 * MIB
_CUBLASLT_SINCE: _Version = (1, 12)
_CUBLASLT_KEPT_SINCE: _Version = (2, 9)
_CUBLASLT_SHARED_SINCE: _Version = (2, 12)
"""Products with a bias go through cuBLASLt since pytorch/pytorch#72148, its workspace (`parseCUDABlasLtWorkspaceSize`
there) since #73439, of March 2022: 1 MiB, taken for each product until pytorch/pytorch#156495 (June 2025) gave it
to the thread, and cuBLAS' own since #168175 and #175879 (January to March 2026): with 2.11 an H200 took
its 1 MiB."""

_CUDNN_ATTENTION_SINCE: tuple[tuple[_Version, int], ...] = (((2, 9), 90900), ((2, 10), 91500))
"""`check_prefer_cudnn_attention` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: cuDNN's kernel comes first
where cuDNN is newer than this, since pytorch/pytorch#162073 (for 2.9) and #171627 (2.10). From 2.6 on it was asked for
(#138522)."""
_CUDNN_ATTENTION_ON = ((9, 0), (9, 3), (10, 0), (10, 3))

WARP_SIZE = 32
THREADS_PER_BLOCK = 1024
"""The most threads of a block on every CUDA device so far (CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability")."""

_REGISTERS_PER_MULTIPROCESSOR = 65536
_SHARED_BYTES_PER_BLOCK = 48 << 10


def per_multiprocessor(capability: tuple[int, int]) -> dict[str, int]:
    """Return registers and shared memory (bytes), as `torch.cuda.get_device_properties` names them."""
    shared = FACTS["shared_kib"].get(capability_text(capability), 100) << 10
    kept = 1 << 10 if capability >= (8, 0) else 0
    return {
        "regs_per_multiprocessor": _REGISTERS_PER_MULTIPROCESSOR,
        "shared_memory_per_block": _SHARED_BYTES_PER_BLOCK,
        "shared_memory_per_block_optin": shared - kept,
        "shared_memory_per_multiprocessor": shared,
    }


def profile_for(torch_version: str, gpu: Gpu) -> Profile:
    """Return the profile for a torch version such as ``2.13.0+cpu`` on a GPU of the catalog."""
    version = minor_of(torch_version)
    cublas_bytes, cublaslt_bytes = _cublas_workspace_bytes(version, gpu), _cublaslt_workspace_bytes(version, gpu)
    cuda, cudnn = cuda_of(torch_version), 0 if gpu.arch else cudnn_of(torch_version)
    context = context_of(gpu, cuda)
    return Profile(
        name=f"torch {'.'.join(map(str, version))} {gpu.sm}",
        version=version,
        cublas_workspace_bytes=cublas_bytes,
        cublaslt_workspace_bytes=cublaslt_bytes,
        keeps_cublaslt_workspace=version >= _CUBLASLT_KEPT_SINCE,
        context_bytes=context.expected_bytes,
        context_source=context.source,
        multiprocessors=gpu.multiprocessors or MULTIPROCESSORS_OF_OTHERS,
        threads_per_multiprocessor=FACTS["threads"].get(capability_text(gpu.compute_capability), 2048),
        context_range=context.between,
        compute_capability=gpu.compute_capability,
        cuda=cuda,
        cudnn=cudnn,
    )


def not_known_of(gpu: Gpu) -> str:
    """Say what is not known of a GPU, so that no verdict of a trace is certain; empty for CUDA with its own memory."""
    if gpu.unified:
        return (
            f"{gpu.title} is an estimate: it shares its {format_bytes(gpu.total_bytes)} with the CPU. The system, its "
            "file cache and the program's own Python take a part of it that is not known; `free -h` shows the rest"
        )
    if not gpu.arch:
        return ""
    return (
        f"{gpu.title} is an estimate: no run on ROCm was compared. PyTorch's allocator and its hipBLAS workspaces are "
        "as its sources have them; the ROCm context, hipBLASLt's workspaces, and what MIOpen and the attention kernels "
        "take are not known"
    )


def said_of(asked: str, torch_version: str, gpu: Gpu) -> tuple[str, ...]:
    """Return what every result states of a version of torch, traced as an asked one ("" for none), on a GPU."""
    lines = (newer_than_checked(torch_version), not_known_of(gpu), followed_as(asked, torch_version))
    return tuple(filter(None, lines))


def beside_allocator_bytes(gpu: Gpu) -> int:
    """Return the most that tensors of a step cannot have: the driver's reserve, context, cuBLAS' workspaces.

    The rules are the newest torch's; the forward and the autograd thread have a workspace each.
    """
    profile = profile_for(".".join(map(str, NEWEST_TORCH)), gpu)
    reserve_bytes = gpu.total_bytes - gpu.cuda_total_range.low_bytes
    return reserve_bytes + profile.context_range.high_bytes + 2 * profile.cublas_workspace_bytes


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
        return hipblas_workspace_bytes(gpu)
    since = _CUBLAS_LARGE_SINCE.get(gpu.compute_capability[0])
    return _CUBLAS_LARGE_BYTES if since is not None and torch_version >= since else _CUBLAS_BYTES


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
