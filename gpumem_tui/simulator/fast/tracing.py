"""Traces a workload on the simulated GPU at three batch sizes and finds the affine form through them.

A deep network is traced by shallow ones of the same layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpumem_tui.catalog.shapes import Gpu, ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.weights import frozen_blocks, only_head
from gpumem_tui.simulator.allocator.profile import Profile
from gpumem_tui.simulator.allocator.replay import (
    CHECKED_BATCH_SIZE,
    COMPILED_BATCH_SIZES,
    TRACED_BATCH_SIZES,
    AffineTrace,
    NotAffine,
    replay,
)
from gpumem_tui.simulator.allocator.timeline import Timeline
from gpumem_tui.simulator.compiled.following import forget
from gpumem_tui.simulator.cuda.presented import device_for
from gpumem_tui.simulator.cuda.world import world_of
from gpumem_tui.simulator.device.gpu import SimulatedGpu
from gpumem_tui.simulator.device.shapes import AssumedRows, Untraceable
from gpumem_tui.simulator.fast.layers import LayerPattern, NotRepeating
from gpumem_tui.step.run import StepRun, no_collection
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
    _runs: dict[int, Timeline] = field(default_factory=dict)

    def affine(self) -> AffineTrace:
        """Trace at every batch size.

        Raises (as all methods do):
            NotAffine: it depends on the batch size in other ways than by sizes that grow evenly.
            WorkloadError: the step itself fails.
            Untraceable: it does what cannot be followed without values.
        """
        if self.recipe.compile:  # which takes too long to check a third size
            self._runs = {size: self.at(size) for size in COMPILED_BATCH_SIZES}
            return AffineTrace.fit(*self._runs.items())
        trace, multiple = self.fitted()
        trace.check(CHECKED_BATCH_SIZE * multiple, self.at(CHECKED_BATCH_SIZE * multiple))
        if self.rows_asked_for:
            otherwise = NotAffine.in_parts(self.rows_asked_for)
            size = -(-otherwise.sizes[0] // multiple) * multiple
            if not trace.holds(size, self.at(size)):
                raise otherwise
        return trace

    def fitted(self) -> tuple[AffineTrace, int]:
        """Return the unchecked form through two batch sizes, and what those that the step takes are multiples of."""
        first, second, multiple = self._two()
        try:
            return AffineTrace.fit(first, second), multiple
        except NotAffine:
            # The first run of a process fills caches (DTensor's sharding rules, a user's own) that the next finds full.
            return AffineTrace.fit((first[0], self.at(first[0])), second), multiple

    def with_single(self, trace: AffineTrace) -> AffineTrace:
        """Return the trace with the run of one sample apart, where that is not as larger batches predict."""
        single = self.at(1)
        return trace if trace.holds(1, single) else replace(trace, apart=((1, single),))

    @property
    def traced_layers(self) -> tuple[int, ...]:
        """See `DeepTracer`: it is the network itself that is traced."""
        return ()

    def peaks(self, sizes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Return at each of these batch sizes the highest allocated bytes."""
        return tuple((size, replay(self._runs.get(size) or self.at(size)).peak_allocated_bytes) for size in sizes)

    def _two(self) -> tuple[tuple[int, Timeline], tuple[int, Timeline], int]:
        """Return the runs at two batch sizes that the step takes, and what number those are multiples of."""
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
        """Return the run at one batch size."""
        forget()
        gpu = SimulatedGpu(
            self.gpu, self.profile, unlimited=True, on_backward_error=self.on_backward_error,
            assumed_rows=self.assumed_rows, notes=self.assumed_rows.used,
        )  # fmt: skip
        with world_of(self.recipe), device_for(gpu, user_code=self.user_code) as device, no_collection():
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


# Deep networks by shallow ones of the same layers, which takes a fraction of the time

_FIRST_INNER_AND_LAST = 3
"""Layers alike that a shallow network has at least: what the first and the last do apart is then not taken for what all
do (a sharded layer is gathered before it is needed, by the one before)."""


def shallow_layers(shape: ModelShape, recipe: Recipe) -> int:
    """Return how many layers the shallowest network has that stands for this shape; 0 to trace it itself.

    Blocks of transformers are alike, but for the first ones of some mixtures of experts, and for those that are frozen
    before others. It pays from twice as many layers on: three depths are traced. What is compiled as a whole is traced
    as a whole.
    """
    if not shape.record.has_attention or recipe.compile:
        return 0
    dense = shape.dense_layers if shape.experts is not None else 0
    frozen = 0 if only_head(recipe) else frozen_blocks(shape, recipe)
    layers = _FIRST_INNER_AND_LAST + max(dense, frozen)
    return layers if shape.layers > 2 * (layers + 1) else 0


@dataclass
class DeepTracer:
    """Does what `Tracer` does, for a network of many layers.

    Three shallow networks are traced, of one layer more each: two tell what a layer adds (`LayerPattern`), and the
    third one, at another batch size, must be exactly as these two predict. If it is not, the network is traced itself.

    Attributes:
        tracer_of: gives the tracer of this network with so many layers instead.
        layers: its own.
        shallow: of the shallowest network.
    """

    tracer_of: Callable[[int], Tracer]
    layers: int
    shallow: int
    _tracers: dict[int, Tracer] = field(default_factory=dict)
    _shallow_trace: AffineTrace | None = None
    _is_alike: bool = True

    def affine(self) -> AffineTrace:
        """Trace at every batch size (see `Tracer`)."""
        try:
            trace, multiple = self._tracer(self.shallow).fitted()
            size, checked = TRACED_BATCH_SIZES[0] * multiple, CHECKED_BATCH_SIZE * multiple
            found = self._extended(trace, size, checked)
        except (NotRepeating, NotAffine):
            self._is_alike = False
            return self._whole.affine()
        self._shallow_trace = trace
        return found

    def with_single(self, trace: AffineTrace) -> AffineTrace:
        """Return the trace with the run of one sample apart (see `Tracer`)."""
        if not self._is_alike or self._shallow_trace is None:
            return self._whole.with_single(trace)
        if self._shallow_trace.holds(1, self._tracer(self.shallow).at(1)):
            return trace
        return replace(trace, apart=((1, self.at(1)),))

    def peaks(self, sizes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Return at each of these batch sizes the highest allocated bytes."""
        return tuple((size, replay(self.at(size)).peak_allocated_bytes) for size in sizes)

    def at(self, batch_size: int) -> Timeline:
        """Return the run at one batch size."""
        if self._is_alike:
            try:
                shallow = AffineTrace.constant(self._tracer(self.shallow).at(batch_size))
                return self._extended(shallow, batch_size, batch_size).at(batch_size)
            except NotRepeating:
                self._is_alike = False
        return self._whole.at(batch_size)

    @property
    def assumed(self) -> Counter[str]:
        """Operators whose rows were assumed, with how often, as `Tracer.assumed` counts them."""
        if not self._is_alike:
            return self._whole.assumed
        first, second = (self._tracer(layers).assumed for layers in self._depths[:2])
        added = self.layers - self.shallow
        return Counter({name: first[name] + added * (times - first[name]) for name, times in second.items()})

    @property
    def traced_layers(self) -> tuple[int, ...]:
        """The layers of the networks that were traced, where that were others."""
        return self._depths if self._is_alike else ()

    @property
    def _depths(self) -> tuple[int, int, int]:
        return self.shallow, self.shallow + 1, self.shallow + 2

    @cached_property
    def _whole(self) -> Tracer:
        return self.tracer_of(self.layers)

    def _tracer(self, layers: int) -> Tracer:
        if layers not in self._tracers:
            self._tracers[layers] = self.tracer_of(layers)
        return self._tracers[layers]

    def _extended(self, trace: AffineTrace, size: int, checked: int) -> AffineTrace:
        """Return the trace of the whole network from one of the shallowest.

        Args:
            size: the batch size at which a layer's share is found. `checked`: the one at which that is checked.

        Raises:
            NotRepeating: layers are not all alike.
        """
        shallowest, deeper, deepest = map(self._tracer, self._depths)
        pattern = LayerPattern.between(trace.at(size), deeper.at(size))
        if pattern.extended(trace, 2).at(checked) != deepest.at(checked):
            raise NotRepeating(f"the run of {self._depths[2]} layers is not what those of fewer predict")
        if shallowest.rows_asked_for:
            raise NotRepeating("the step cuts its batch into parts")
        return pattern.extended(trace, self.layers - self.shallow)
