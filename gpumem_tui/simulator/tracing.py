"""Traces a workload on the simulated GPU at three batch sizes and finds the affine form through them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.simulator.cuda import device_for
from gpumem_tui.simulator.device import SimulatedGpu
from gpumem_tui.simulator.profile import Profile
from gpumem_tui.simulator.replay import CHECKED_BATCH_SIZE, TRACED_BATCH_SIZES, AffineTrace, NotAffine, replay
from gpumem_tui.simulator.shaped import AssumedRows
from gpumem_tui.simulator.timeline import Timeline
from gpumem_tui.simulator.untraceable import Untraceable
from gpumem_tui.simulator.world import world_of
from gpumem_tui.step.run import StepRun
from gpumem_tui.step.workload import Workload, WorkloadError
from gpumem_tui.workload.errors import located

_MULTIPLES = (1, 8)
"""Of those sizes: a step may take only even ones, or multiples of 4 or 8."""


@dataclass
class Tracer:
    """Runs one workload on a simulated GPU that is never full.

    Attributes:
        load: gives the workload, on the simulated GPU: a user's file may use it while it is imported.
        recipe: whose sharding decides the world that rank 0 lives in.
        steps: training steps a trace has.
        on_backward_error: see `SimulatedGpu`.
        user_code: see `device_for`.
        assumed_rows: see `SimulatedGpu`.
        assumed: the operators met whose kernels take scratch of unknown size, and how often one run met them.
        rows_asked_for: of all traces so far, see `DeviceMode`.
    """

    load: Callable[[], Workload]
    recipe: Recipe
    gpu: Gpu
    profile: Profile
    steps: int
    on_backward_error: Callable[[Exception], None]
    user_code: bool = False
    assumed_rows: AssumedRows = field(default_factory=AssumedRows)
    assumed: Counter[str] = field(default_factory=Counter)
    rows_asked_for: int = 0

    def affine(self) -> AffineTrace:
        """The trace at every batch size.

        Raises:
            NotAffine: it depends on the batch size in other ways than by sizes that grow evenly.
            WorkloadError: the step itself fails.
            Untraceable: it does what cannot be followed without values.
        """
        trace, multiple = self.fitted()
        trace.check(CHECKED_BATCH_SIZE * multiple, self.at(CHECKED_BATCH_SIZE * multiple))
        if self.rows_asked_for:
            otherwise = NotAffine.in_parts(self.rows_asked_for)
            size = -(-otherwise.sizes[0] // multiple) * multiple
            if not trace.holds(size, self.at(size)):
                raise otherwise
        return trace

    def fitted(self) -> tuple[AffineTrace, int]:
        """The form through two batch sizes, which no third one has checked, and of what those the step takes are
        multiples.

        Raises:
            NotAffine, WorkloadError, Untraceable: as `affine`.
        """
        first, second, multiple = self._two()
        try:
            return AffineTrace.fit(first, second), multiple
        except NotAffine:
            # The first run of a process fills caches (DTensor's sharding rules, a user's own) that the next finds full.
            return AffineTrace.fit((first[0], self.at(first[0])), second), multiple

    def with_single(self, trace: AffineTrace) -> AffineTrace:
        """The trace with the run of a batch of one sample apart, where that is not as larger ones predict.

        Raises:
            WorkloadError, Untraceable: as `affine`.
        """
        single = self.at(1)
        return trace if trace.holds(1, single) else replace(trace, apart=((1, single),))

    @property
    def traced_layers(self) -> tuple[int, ...]:
        """See `DeepTracer`: it is the network itself that is traced."""
        return ()

    def peaks(self, sizes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """At each of these batch sizes the highest allocated bytes.

        Raises:
            WorkloadError, Untraceable: as `affine`.
        """
        return tuple((size, replay(self.at(size)).peak_allocated_bytes) for size in sizes)

    def _two(self) -> tuple[tuple[int, Timeline], tuple[int, Timeline], int]:
        """The runs at two batch sizes that the step takes, and of what those are multiples."""
        failure: WorkloadError | None = None
        for multiple in _MULTIPLES:
            try:
                first, second = ((size * multiple, self.at(size * multiple)) for size in TRACED_BATCH_SIZES)
            except WorkloadError as error:
                failure = failure or error
            else:
                return first, second, multiple
        assert failure is not None
        raise failure

    def at(self, batch_size: int) -> Timeline:
        """The run at one batch size.

        Raises:
            WorkloadError, Untraceable: as `affine`.
        """
        gpu = SimulatedGpu(
            self.gpu, self.profile, unlimited=True, on_backward_error=self.on_backward_error,
            assumed_rows=self.assumed_rows, notes=self.assumed_rows.used,
        )  # fmt: skip
        with world_of(self.recipe), device_for(gpu, user_code=self.user_code) as device, _no_collection():
            try:
                run = StepRun(self.load(), batch_size, device, gpu)  # named: what it releases at its end is no step's
                run.run(self.steps)
            except (WorkloadError, Untraceable):
                raise
            except (Exception, SystemExit) as error:
                raise WorkloadError(f"the step fails: {located(error)}") from error
            self.rows_asked_for = max(self.rows_asked_for, gpu.mode.rows_asked_for)
            for operator, times in gpu.mode.assumed.items():
                self.assumed[operator] = max(self.assumed[operator], times)
            return gpu.finish()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing cycles at a moment that differs between two traces."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
