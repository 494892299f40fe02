"""The memory of a GPU that a process holds outside PyTorch's allocator, each figure with its source. No torch import.

The CUDA context, kernels, what libraries take as they are first used, and NCCL's buffers: `contexts.json` has the
figures, by architecture and version of CUDA, and shows where they are from.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from gpumem_tui.catalog.shapes import Context, Gpu
from gpumem_tui.memory import MIB
from gpumem_tui.text import minor_of

CUDA_GRAPH = "CUDA graph"
"""Among the libraries that a program uses, once for each graph."""

CUBLAS, _CUDNN = "cuBLAS", "cuDNN"
_OPERATORS = {
    _CUDNN: ("convolution", "convolution_backward", "cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn",
              "_scaled_dot_product_cudnn_attention"),
    "cuFFT": ("_fft_r2c", "_fft_c2r", "_fft_c2c"),
    "cuSOLVER": ("linalg_eigh", "_linalg_eigh", "_linalg_svd", "linalg_qr", "linalg_cholesky_ex", "linalg_inv_ex",
                 "linalg_lu_factor_ex", "_linalg_solve_ex", "_linalg_det", "_linalg_slogdet", "cholesky_inverse"),
    "cuSPARSE": ("_sparse_mm", "sparse mm", "_sparse_addmm"),
}  # fmt: skip
LIBRARY_OF = {operator: library for library, operators in _OPERATORS.items() for operator in operators}
"""Which library of CUDA an operator of torch loads next to cuBLAS (aten/src/ATen/native/cuda, cudnn and
sparse/cuda)."""

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "contexts.json").read_text(encoding="utf-8"))

_FEW = 3
"""With fewer figures of an architecture than this, its context is taken to be as large as any other's at most."""
_ROUNDING_BYTES = 15 * MIB
"""Three figures of two decimals of GiB make each of them, and processes differ by some kernels."""

_HIPBLAS_BYTES, _HIPBLAS_LARGE_BYTES = 32 * MIB, 128 * MIB
_HIPBLAS_LARGE_ON = ("gfx94", "gfx95")
"""PyTorch's notes on HIP, "hipBLAS workspaces" (pytorch/pytorch#138791): 32 MiB, from the MI300 on 128 MiB."""


def cuda_of(torch_version: str) -> int:
    """Return the major version of CUDA that a torch such as ``2.11.0+cu130`` was built for, else that of its wheels."""
    if built_for := re.search(r"\+cu(\d+)\d$", torch_version):
        return int(built_for[1])
    version = minor_of(torch_version)
    return next(int(cuda) for since, cuda in FACTS["cuda"] if version >= minor_of(since))


def cudnn_of(torch_version: str) -> int:
    """Return the version of cuDNN, such as 91900, that comes with a torch such as ``2.11.0+cu130``; 0 if not known."""
    version = minor_of(torch_version)
    known = FACTS["cudnn"].get(str(cuda_of(torch_version)), ())
    return next((cudnn for since, cudnn in known if version >= minor_of(since)), 0)


def context_of(gpu: Gpu, cuda: int, libraries: Sequence[str] | None = None) -> Context:
    """Return what the context takes once a training step's kernels and libraries are loaded.

    The expected figure has cuBLAS and cuDNN, which a step may load at any time.

    Args:
        cuda: the major version of CUDA.
        libraries: those that the program uses, a CUDA graph for each that it has; None where it is not known.
    """
    found = _known(gpu, cuda, libraries)
    graphs = 0 if gpu.arch else (libraries or ()).count(CUDA_GRAPH)
    if not graphs:
        return found
    facts = FACTS["graph"]
    least, expected, most = (size * graphs * MIB for size in facts["mib"])
    source = facts["source"].format("a CUDA graph" if graphs == 1 else f"{graphs} CUDA graphs")
    return together(found, Context(least, expected, most, source))


def nccl_buffers(groups: Sequence[int], gpu: Gpu, cuda: int) -> Context:
    """Return what groups of so many ranks take on each device, from rings alone to rings and trees."""
    alone = FACTS["nccl"]["alone"]
    pool_mib = (_by_library(gpu, cuda) or {}).get("nccl_pool_mib", alone["pool_mib"])
    kernels_bytes = alone["kernels_mib"] * MIB
    pools = [size * len(groups) * MIB for size in pool_mib]
    words = "one group" if len(groups) == 1 else f"{len(groups)} groups"
    several = [ranks for ranks in groups if ranks > 1]
    if not several:
        least, expected, most = (kernels_bytes + size_bytes for size_bytes in pools)
        return Context(least, expected, most, alone["source"].format(f"{words} of a single rank"))
    connected = _connections(several, gpu, words)
    most_bytes = connected.high_bytes + kernels_bytes + pools[-1]
    return Context(connected.low_bytes, connected.expected_bytes + kernels_bytes, most_bytes, connected.source)


def hipblas_workspace_bytes(gpu: Gpu) -> int:
    """Return what hipBLAS takes of a thread's allocator by default."""
    return _HIPBLAS_LARGE_BYTES if gpu.arch.startswith(_HIPBLAS_LARGE_ON) else _HIPBLAS_BYTES


def capability_text(capability: tuple[int, int]) -> str:
    """Return a compute capability as the file has it."""
    return ".".join(map(str, capability))


def together(first: Context, second: Context) -> Context:
    """Return two parts of what a process holds as one."""
    return Context(
        first.low_bytes + second.low_bytes,
        first.expected_bytes + second.expected_bytes,
        first.high_bytes + second.high_bytes,
        f"{first.source}; {second.source}",
    )


def _known(gpu: Gpu, cuda: int, libraries: Sequence[str] | None) -> Context:
    if gpu.context is not None:
        return gpu.context
    if gpu.arch:
        return _rocm(gpu)
    stages = _by_library(gpu, cuda)
    return _published(gpu) if stages is None else _of_stages(stages, libraries)


def _by_library(gpu: Gpu, cuda: int) -> dict[str, Any] | None:
    stages: dict[str, Any] | None = FACTS["by_library"].get(capability_text(gpu.compute_capability), {}).get(str(cuda))
    return stages


def _of_stages(stages: dict[str, Any], libraries: Sequence[str] | None) -> Context:
    """Return a context of which each library's part was measured."""
    parts = [stages[CUBLAS], stages[_CUDNN]]
    used = [stages[name][0] for name in libraries or () if name in (CUBLAS, _CUDNN)]
    others = len({*(libraries or ())} & {*FACTS["other_libraries"]})
    least_mib = stages["context"][0] + sum(used)
    most_mib = stages["context"][1] + sum(most for _, most in parts) + others * max(most for _, most in parts)
    if _loads_all():
        most_mib = max(most_mib, stages["all_kernels_mib"])
    low_bytes, high_bytes = least_mib * MIB - _ROUNDING_BYTES, most_mib * MIB + _ROUNDING_BYTES
    return Context(low_bytes, stages["expected"] * MIB, high_bytes, stages["source"])


def _published(gpu: Gpu) -> Context:
    """Return what others found on this architecture, or on those nearest to it where it was not looked at."""
    capability = capability_text(gpu.compute_capability)
    near = FACTS["like"].get(capability, [])
    found = FACTS["loaded"].get(capability) or [
        *FACTS["elsewhere"],
        *(one for like in near for one in FACTS["loaded"][like]),
    ]
    if capability in FACTS["expected"]:
        expected = FACTS["expected"][capability]
        source = expected["source"]
    elif capability in FACTS["loaded"]:
        expected = sorted(found, key=itemgetter("mib"))[(len(found) - 1) // 2]
        source = f"measured on {expected['source']}, as it ran out of memory"
    else:
        alike = next((like for like in near if like in FACTS["expected"]), FACTS["assumed"])
        expected = FACTS["expected"][alike]
        least, *_, most = sorted(one["mib"] for one in found)
        source = f"assumed for {gpu.sm}: {expected['source']}; {least} to {most} MiB elsewhere"
    sizes = [one["mib"] for one in found]
    if len(sizes) < _FEW:
        sizes.append(FACTS["elsewhere"][-1]["mib"])
    if _loads_all():
        sizes.append(FACTS["all_kernels_mib"])
    low_bytes, high_bytes = min(sizes) * MIB - _ROUNDING_BYTES, max(sizes) * MIB + _ROUNDING_BYTES
    expected_bytes = expected["mib"] * MIB
    return Context(min(low_bytes, expected_bytes), expected_bytes, max(high_bytes, expected_bytes), source)


def _rocm(gpu: Gpu) -> Context:
    facts = FACTS["rocm"]
    found_mib = [one["mib"] for one in facts["loaded"]]
    more_bytes = 2 * hipblas_workspace_bytes(gpu)  # as much again for hipBLASLt, of both threads
    low_bytes, high_bytes = min(found_mib) * MIB - _ROUNDING_BYTES, max(found_mib) * MIB + more_bytes
    source = f"assumed for {gpu.sm}: {facts['expected']['source']}; nothing was measured on it"
    return Context(low_bytes, facts["expected"]["mib"] * MIB, high_bytes, source)


def _connections(groups: Sequence[int], gpu: Gpu, words: str) -> Context:
    """Return the buffers of connections between ranks of groups of several."""
    known, has_nvlink = FACTS["nccl"], gpu.speed is not None and bool(gpu.speed.nvlink)
    said = {name: int(set_) for name in known["set"] if (set_ := os.environ.get(f"NCCL_{name}", "")).isdecimal()}
    channels = known["channels"]["nvlink" if has_nvlink else "pcie"]
    limits = said.get("MIN_NCHANNELS", 0), said.get("MAX_NCHANNELS", channels[1])
    fewest, most = (max(limits[0], min(limits[1], number)) for number in channels)
    received_bytes = said.get("BUFFSIZE", known["simple_mib"] * MIB) + known["others_mib"] * MIB
    one_bytes = math.ceil(received_bytes / (2 * MIB)) * 2 * MIB + known["sent_mib"] * MIB
    all_bytes = sum(one_bytes * (2 if ranks == 2 else 3) for ranks in groups)
    least_bytes = fewest * one_bytes * len(groups) if has_nvlink else 0
    return Context(least_bytes, fewest * all_bytes, most * all_bytes, known["source"].format(words))


def _loads_all() -> bool:
    return os.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"
