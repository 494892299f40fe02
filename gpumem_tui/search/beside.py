"""An inference engine in the same GPU as the training step: what it takes, and the most that the step leaves it.

vLLM takes ``gpu_memory_utilization`` of the *total* that ``cudaMemGetInfo`` reports, and divides it over
weights, activations and the KV cache. How other memory counts differs by version:

- 0.2.6 to 0.4 (``vllm/worker/worker.py``, PR 2031): the share less all memory in use, other processes' included.
- 0.6.5 and later without V1 (``worker.py``, PR 10511): only what this engine added since it started.
- 0.8 with V1 (``vllm/v1/worker/gpu_worker.py`` at 0012cf69, `determine_available_memory`): all that is in use outside
  of torch counts again.
- 0.9.2 and later (``gpu_worker.py`` and ``utils.py``: `MemorySnapshot`, `request_memory`): the engine's own share; it
  refuses to start where less than the share is free.

The first snapshot is taken with CUDA ready, so the CUDA context of the engine's process is not in its share: it is
added here, at the most that is possible. An engine in the trainer's own process (TRL's colocate) has none, and so more
room than stated.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor

from gpumem_tui.catalog.shapes import Gpu, InferenceEngine
from gpumem_tui.errors import OptionError
from gpumem_tui.memory import MIB, Unknown, format_bytes, size_from
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.profile import NEWEST_TORCH, profile_for

_FLAG = "--beside"
_LEFT_BYTES = MIB
"""Left of a GPU that an engine fills: a GPU of no memory is none."""
_HUNDREDTHS = 100


def beside(gpu: Gpu, typed: str) -> Gpu:
    """Return what the engine leaves that ``--beside`` names: a share of the GPU as 0.45, or a size as 30GiB.

    Raises:
        OptionError: it is neither, or the GPU has no more than that.
    """
    share = _share(typed)
    try:
        engine = InferenceEngine(size_from(typed)) if share is None else of_share(gpu, share)
    except ValueError as error:
        raise OptionError(f"{_FLAG} {typed}: {error}; write a share of the GPU below 1, such as 0.45") from error
    if engine.size_bytes + _LEFT_BYTES > gpu.cuda_total_range.low_bytes:
        raise OptionError(
            f"{_FLAG} {typed}: takes {format_bytes(engine.size_bytes)} and the GPU has "
            f"{format_bytes(gpu.cuda_total_bytes)}; give less"
        )
    return gpu.beside(engine)


def _share(typed: str) -> float | None:
    try:
        share = float(typed)
    except ValueError:
        return None
    return share if 0 <= share < 1 else None


def of_share(gpu: Gpu, share: float) -> InferenceEngine:
    """Return an engine that takes a share of the GPU, and the CUDA context of its own process; of 0 nothing."""
    if not share:
        return InferenceEngine(0)
    return InferenceEngine(ceil(share * gpu.cuda_total_bytes) + context_bytes(gpu), share)


def context_bytes(gpu: Gpu) -> int:
    """Return the most that the CUDA context of the engine's process takes."""
    return profile_for(".".join(map(str, NEWEST_TORCH)), gpu).context_range.high_bytes


def as_beside(gpu: Gpu, other: Gpu) -> Gpu:
    """Return a GPU with an engine that takes such a share, or so much, as the one in another GPU."""
    if other.engine is None or gpu.engine is not None:
        return gpu
    engine = of_share(gpu, other.engine.share) if other.engine.share else other.engine
    fits = engine.size_bytes + _LEFT_BYTES <= gpu.cuda_total_range.low_bytes
    return gpu.beside(engine if fits else replace(engine, size_bytes=gpu.cuda_total_range.low_bytes - _LEFT_BYTES))


def largest_share(traced: Traced, batch_size: int) -> float | Unknown:
    """Return the largest ``gpu_memory_utilization``, in hundredths, that leaves the step the memory it needs.

    The step needs what the smallest GPU has that holds it with every unknown at its most: `fit` goes by that too.
    """
    gpu = traced.gpu.whole
    tiny = gpu.beside(InferenceEngine(gpu.cuda_total_range.low_bytes - context_bytes(gpu) - _LEFT_BYTES))
    needed_bytes = tiny.cuda_total_range.low_bytes + traced.on(tiny).missing_bytes(batch_size)
    left_bytes = gpu.cuda_total_range.low_bytes - needed_bytes - context_bytes(gpu)
    share = floor(_HUNDREDTHS * left_bytes / gpu.cuda_total_bytes) / _HUNDREDTHS
    if share <= 0:
        return Unknown(f"the step alone needs {format_bytes(needed_bytes)} of {format_bytes(gpu.cuda_total_bytes)}")
    return share


def share_line(traced: Traced, batch_size: int) -> str:
    """Return the share that vLLM gets at most; empty of a GPU with no engine in it."""
    if traced.gpu.engine is None:
        return ""
    share = largest_share(traced, batch_size)
    if isinstance(share, Unknown):
        return f"no share is left for vLLM: {share.reason}"
    return f"vLLM gets at most gpu_memory_utilization={share:g}"
