"""The types of what `models`, `gpus` and `doctor` print with ``--json``; loaded where they are printed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from gpumem_tui.catalog.calibration import Calibration
from gpumem_tui.catalog.shapes import Family, Gpu, ModelShape
from gpumem_tui.doctor.checks import Check
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.report.objects import SCHEMA, JsonObject


class _Model(JsonObject, frozen=True):
    name: str
    family: Family
    parameters: int
    source: str


class ModelsObject(JsonObject, frozen=True):
    """The object that `models --json` prints."""

    schema: Literal[1]
    models: tuple[_Model, ...]

    @classmethod
    def of(cls, shapes: Iterable[ModelShape]) -> ModelsObject:
        """List models."""
        models = (
            _Model(name=shape.name, family=shape.family, parameters=count_parameters(shape), source=shape.source)
            for shape in shapes
        )
        return cls(schema=SCHEMA, models=tuple(models))


class _Gpu(JsonObject, frozen=True):
    name: str
    title: str
    total_bytes: int
    sm: str
    source: str


class GpusObject(JsonObject, frozen=True):
    """The object that `gpus --json` prints."""

    schema: Literal[1]
    gpus: tuple[_Gpu, ...]

    @classmethod
    def of(cls, listed: Iterable[Gpu]) -> GpusObject:
        """List GPUs."""
        gpus = (
            _Gpu(name=gpu.name, title=gpu.title, total_bytes=gpu.total_bytes, sm=gpu.sm, source=gpu.source)
            for gpu in listed
        )
        return cls(schema=SCHEMA, gpus=tuple(gpus))


class ChecksObject(JsonObject, frozen=True):
    """The object that `doctor --json` prints."""

    schema: Literal[1]
    checks: tuple[Check, ...]


class CalibrationsObject(JsonObject, frozen=True):
    """The object that `doctor --calibrate --json` prints."""

    schema: Literal[1]
    calibrations: tuple[Calibration, ...]
