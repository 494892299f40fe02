"""Traces a deep network by networks of the same layers that are shallow, which takes a fraction of the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.freezing import frozen_blocks, only_head
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.simulator.layers import LayerPattern, NotRepeating
from gpumem_tui.simulator.replay import CHECKED_BATCH_SIZE, TRACED_BATCH_SIZES, AffineTrace, NotAffine, replay
from gpumem_tui.simulator.timeline import Timeline
from gpumem_tui.simulator.tracing import Tracer

_FIRST_INNER_AND_LAST = 3
"""Layers alike that a shallow network has at least: what the first and the last do apart is then not taken for what all
do (a sharded layer is gathered before it is needed, by the one before)."""


def shallow_layers(shape: ModelShape, recipe: Recipe) -> int:
    """How many layers the shallowest network has by which one of this shape is traced; 0 to trace it itself.

    Blocks of transformers are alike, but for the first ones of some mixtures of experts, and for those that are frozen
    before others. It pays from twice as many layers on: three depths are traced.
    """
    if not shape.record.has_attention:
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
        """As `Tracer.affine`.

        Raises:
            NotAffine, WorkloadError, Untraceable: as there.
        """
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
        """As `Tracer.with_single`.

        Raises:
            WorkloadError, Untraceable: as there.
        """
        if not self._is_alike or self._shallow_trace is None:
            return self._whole.with_single(trace)
        if self._shallow_trace.holds(1, self._tracer(self.shallow).at(1)):
            return trace
        return replace(trace, apart=((1, self.at(1)),))

    def peaks(self, sizes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """As `Tracer.peaks`.

        Raises:
            WorkloadError, Untraceable: as there.
        """
        return tuple((size, replay(self.at(size)).peak_allocated_bytes) for size in sizes)

    def at(self, batch_size: int) -> Timeline:
        """As `Tracer.at`.

        Raises:
            WorkloadError, Untraceable: as there.
        """
        if self._is_alike:
            try:
                shallow = AffineTrace.constant(self._tracer(self.shallow).at(batch_size))
                return self._extended(shallow, batch_size, batch_size).at(batch_size)
            except NotRepeating:
                self._is_alike = False
        return self._whole.at(batch_size)

    @property
    def assumed(self) -> Counter[str]:
        """As `Tracer.assumed`."""
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
        """The trace of the whole network from one of the shallowest.

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
