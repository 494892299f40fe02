"""Steps that are trained and followed in this process, by the pieces that a process of a command has."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.importing import Uncollected
from gpumem_tui.run.program import Program
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.simulator.cuda.presented import presented_as_cuda
from gpumem_tui.simulator.cuda.world import answer_alone
from gpumem_tui.simulator.device.gpu import SimulatedGpu, register, simulate
from gpumem_tui.step.run import MemorySample, Recorder
from gpumem_tui.step.workload import Workload
from gpumem_tui.workload.spec import WorkloadSpec, split_file
from gpumem_tui.workload.standard import CatalogWorkload
from gpumem_tui.workload.train import train
from gpumem_tui.workload.user_file import load_workload_file

ALONE = Recipe()


class _MadeAllStepsError(Exception):
    """Ends the program as its steps were made."""


@dataclass
class Followed:
    """A program that has made its steps.

    Attributes:
        ended: what has ended it; it holds the model and all else of the program.
    """

    program: Program
    ended: BaseException


@contextmanager
def as_cuda(gpu: SimulatedGpu) -> Iterator[None]:
    """Have a simulated GPU be CUDA's."""
    with simulate(gpu), presented_as_cuda(gpu):
        yield


def workload_of(spec: WorkloadSpec) -> Workload:
    """The training: a model of the catalog, or a file's functions."""
    if spec.shape is not None:
        return CatalogWorkload(spec.shape, spec.recipe)
    assert spec.file is not None
    return load_workload_file(*split_file(spec.file))


def followed(
    workload: Workload,
    batch_size: int,
    steps: int,
    recorder: Recorder,
    report: Callable[[MemorySample], None] = lambda _: None,
) -> Followed:
    """Train on CUDA, be it simulated, and follow it."""

    def made_all() -> None:
        raise _MadeAllStepsError

    memory: Any = torch.cuda
    program = Program(recorder, memory, steps, report, made_all, lambda: None)
    program.start()
    try:
        train(workload, batch_size, steps)
    except _MadeAllStepsError as ended:
        return Followed(program, ended)
    finally:
        program.stop()
    raise AssertionError("it shows when its last step is over")


@contextmanager
def trained(
    workload: Workload, batch_size: int, steps: int, gpu: SimulatedGpu, recipe: Recipe = ALONE
) -> Iterator[Followed]:
    """Train on a simulated GPU; within the context what was trained is still there."""
    register()
    gc.collect()
    with Uncollected(), as_cuda(gpu), world_of(recipe):
        yield followed(workload, batch_size, steps, gpu)


def timeline_of(
    workload: Workload, batch_size: int, steps: int, recipe: Recipe = ALONE, gpu: SimulatedGpu | None = None
) -> Timeline:
    """The run on an A100 that is never full, if no other is given."""
    shape = find_gpu("a100-80gb")
    used = gpu or SimulatedGpu(shape, profile_for(torch.__version__, shape), unlimited=True)
    with trained(workload, batch_size, steps, used, recipe):
        return used.finish()


def world_of(recipe: Recipe) -> AbstractContextManager[None]:
    """The ranks that share what they hold, of which this process is the first."""
    return nullcontext() if recipe.ranks == 1 and recipe.sharding == "none" else world(recipe.ranks)


@contextmanager
def world(ranks: int) -> Iterator[None]:
    """Have this process be the first of so many ranks."""
    answer_alone(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
