"""The largest batch under a cap on reserved bytes: predicted without a GPU, found by running on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import torch

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.run.cuda_recorder import CudaRecorder, is_out_of_memory
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.search.predicting import predict
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.settings import memory_fraction
from gpumem_tui.step.run import Recorder
from gpumem_tui.workload.errors import located
from tests.gpu.forks import Write
from tests.gpu.matrix import Edge
from tests.gpu.sides import hide_gpus
from tests.in_process import as_cuda, followed, workload_of

EDGE_STEPS = 2
MOST_TRIALS = 12

FITS = "fits"
OUT_OF_MEMORY = "out of memory"


class Predicted(msgspec.Struct, frozen=True):
    """By the simulated GPU; `error` instead where it could not."""

    batch_size: int | None
    error: str = ""


@dataclass(frozen=True)
class Found:
    """The largest batch size that ran; None if `tried` did not close in on it."""

    batch_size: int | None
    tried: Mapping[int, str]


def find(start: int, trial: Callable[[int], str]) -> Found:
    """Go up or down from `start`, in strides that double, then halve what is between what fits and what does not.

    Args:
        trial: runs a batch size; `FITS`, `OUT_OF_MEMORY`, or what else happened, which ends the search.
    """
    tried: dict[int, str] = {}
    fits, too_large = 0, None
    batch_size, stride = max(1, start), 1
    while len(tried) < MOST_TRIALS:
        outcome = tried[batch_size] = trial(batch_size)
        if outcome == FITS:
            fits = batch_size
        elif outcome == OUT_OF_MEMORY:
            too_large = batch_size
        else:
            break
        if too_large is None:
            batch_size = fits + stride
        elif too_large - fits == 1:
            return Found(fits, tried)
        elif fits:
            batch_size = (fits + too_large) // 2
        else:
            batch_size = max(1, too_large - stride)
        stride *= 2
    return Found(None, tried)


def predict_edge(edge: Edge, gpu: Gpu, write: Write) -> None:
    """By replay of a trace. Call in a process of its own, which sees no real GPU from then on."""
    hide_gpus()
    config = SearchConfig(edge.workload, Device(gpu, simulated=True), steps=EDGE_STEPS)
    traced = predict(config).prediction.traced
    if isinstance(traced, Traced):
        predicted = Predicted(BatchFinder(traced.trace).largest(traced.capacity_bytes, edge.limit_bytes))
    else:
        predicted = Predicted(None, f"not traced: {traced.reason}")
    write(msgspec.json.encode(predicted))


def try_on_gpu(edge: Edge, batch_size: int, write: Write) -> None:
    """Run one batch size on ``cuda:0`` under the cap. Call in a process that has not touched CUDA."""
    device = torch.device("cuda", 0)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(memory_fraction(edge.limit_bytes, total_bytes), device)
    write(_outcome(edge, batch_size, device, CudaRecorder(device)).encode())


def try_in_rehearsal(edge: Edge, batch_size: int, gpu: Gpu, write: Write) -> None:
    """The counterpart of `try_on_gpu` on the simulated GPU."""
    from gpumem_tui.simulator.device.gpu import SimulatedGpu

    simulated = SimulatedGpu(gpu, profile_for(torch.__version__, gpu), limit_bytes=edge.limit_bytes)
    with as_cuda(simulated):
        write(_outcome(edge, batch_size, torch.device("cuda"), simulated).encode())


def _outcome(edge: Edge, batch_size: int, device: torch.device, recorder: Recorder) -> str:
    try:
        followed(workload_of(edge.workload), batch_size, EDGE_STEPS, recorder)
    except Exception as error:  # noqa: BLE001  any error: it is the outcome
        free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
        return OUT_OF_MEMORY if is_out_of_memory(error, free_bytes) else located(error)
    return FITS
