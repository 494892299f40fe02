"""A training run on one device, real or simulated: build, then step after step, each phase reported."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpumem_tui.importing import Uncollected
from gpumem_tui.memory import Bucket
from gpumem_tui.step import Phase
from gpumem_tui.step.phases import watch_phases
from gpumem_tui.step.walking import buffers_in, gradients_of, holding_memory, parameters_in, state_of, tensors_in
from gpumem_tui.step.workload import Workload, WorkloadError


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing cycles at a moment that differs between two runs."""
    gc.collect()
    with Uncollected():
        yield


@dataclass(frozen=True)
class MemorySample:
    """The allocator's figures as `phase` of `step` begins, and the live buckets as far as they are known by then."""

    step: int
    phase: Phase
    allocated_bytes: int
    reserved_bytes: int
    buckets: dict[Bucket, int]

    @classmethod
    def of(
        cls, step: int, phase: Phase, allocated_bytes: int, reserved_bytes: int, known: Mapping[Bucket, int]
    ) -> MemorySample:
        """Make a sample of the buckets known by name. What else is allocated was, after forward, kept for backward."""
        buckets = dict(known)
        rest = allocated_bytes - sum(buckets.values())
        if rest > 0:
            buckets[Bucket.ACTIVATIONS if phase is Phase.BACKWARD else Bucket.TEMPORARY] = rest
        return cls(step, phase, allocated_bytes, reserved_bytes, buckets)


class Recorder(Protocol):
    """An object that records a run: phases, buckets and names of modules are told to it."""

    def mark(self, step: int, phase: Phase) -> None:
        """State that the run is in `phase` of `step` from here on."""

    def tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor], part: str = "") -> None:
        """State which bucket these tensors are, and which part of it."""

    def name_modules(self, model: torch.nn.Module) -> None:
        """Call the modules of `model` by their qualified names from now on."""


@dataclass
class StepRun:
    """A model that is built and trained on one device, step by step.

    Attributes:
        report: called with the memory as each phase begins.
    """

    workload: Workload
    batch_size: int
    device: torch.device
    recorder: Recorder
    report: Callable[[MemorySample], None] = lambda _: None

    def __post_init__(self) -> None:
        self._memory: Any = torch.get_device_module(self.device)
        self._model: torch.nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None  # held, so that the end of `run` releases nothing
        self._step = 0
        self._known: dict[Bucket, int] = {}
        self.step_seconds: list[float] = []

    def run(self, steps: int, may_run: threading.Event | None = None) -> None:
        """Build, then train `steps` steps.

        Raises:
            WorkloadError: nothing lies on the device.
        """
        self._enter(Phase.BUILD)
        model, optimizer = self.workload.build(self.device)
        self._model, self._optimizer = model, optimizer
        self.recorder.name_modules(model)
        self._tag(Bucket.PARAMETERS, [*parameters_in(model), *buffers_in(model)])

        optimizers = set() if optimizer is None else {optimizer}  # and what else the step uses

        def stepped(used: torch.optim.Optimizer) -> None:
            optimizers.add(used)
            self._tag(Bucket.OPTIMIZER, [tensor for kept in state_of(optimizers).values() for tensor in kept])

        def entering(phase: Phase) -> None:
            if phase is Phase.OPTIMIZER:
                self.tag_gradients()
            self._enter(phase)

        with watch_phases(model, entering, stepped):
            for self._step in range(1, steps + 1):
                if may_run is not None:
                    may_run.wait()
                self._enter(Phase.BATCH)
                self._known.pop(Bucket.GRADIENTS, None)
                started = time.perf_counter()
                self._one_step(model, optimizer)
                self._memory.synchronize()
                self.step_seconds.append(time.perf_counter() - started)
                if not self._memory.max_memory_allocated(self.device):
                    raise WorkloadError(self._empty(model))
        self._sample(Phase.BATCH)

    def tag_gradients(self) -> None:
        """Tag the gradients; before the optimizer drops them, or when the run ended early."""
        parameters = parameters_in(self._model) if self._model is not None else ()
        self._tag(Bucket.GRADIENTS, gradients_of(parameters))

    def _empty(self, model: torch.nn.Module) -> str:
        places = sorted({parameter.device.type for parameter in parameters_in(model)})
        where = f"the model is on the {places[0].upper()}" if places else "the model has no parameters"
        return (
            f"a step of {self.workload.name} leaves the GPU empty ({where}): "
            "build and make_batch must put model and batch on the `device` they are given"
        )

    def _one_step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        batch = self.workload.make_batch(self.batch_size, self.device)
        self._tag(Bucket.BATCH_DATA, tensors_in(batch))
        self.workload.train_step(model, optimizer, batch)

    def _enter(self, phase: Phase) -> None:
        self._sample(phase)
        self.recorder.mark(self._step, phase)

    def _tag(self, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> None:
        found = [held for tensor in tensors for held in holding_memory(tensor)]
        self.recorder.tag(bucket, found)
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found if t.device == self.device}
        self._known[bucket] = sum(storages.values())

    def _sample(self, phase: Phase) -> None:
        """Report memory as `phase` begins."""
        reserved = self._memory.memory_reserved(self.device)
        allocated = self._memory.memory_allocated(self.device)
        self.report(MemorySample.of(self._step, phase, allocated, reserved, self._known))
