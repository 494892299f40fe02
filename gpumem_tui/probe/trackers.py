"""Writes the probe's samples to a tracker of experiments: TensorBoard, Weights & Biases, MLflow, OpenTelemetry.

No tracker is imported here: the program hands over the object that it has, and its methods show which one it is. Each
process writes what it holds itself, so in a job of ranks those write that were handed a tracker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Union

from gpumem_tui.probe import wire

PREFIX = "gpumem/"
METRICS = {
    "step": "optimizer steps when the rest was read",
    "parameters_gib": "parameters and buffers",
    "gradients_gib": "gradients, between two steps",
    "optimizer_gib": "optimizer state",
    "other_gib": "allocated besides these, between two steps",
    "allocated_gib": "allocated, between two steps",
    "reserved_gib": "reserved by PyTorch's allocator",
    "peak_allocated_gib": "the most allocated so far",
    "peak_reserved_gib": "the most reserved so far",
    "fragmented_gib": "free parts of segments that are in use elsewhere",
    "fragmentation": "their share of reserved memory, 0 to 1",
    "allocator_retries": "how often the allocator emptied its cache to satisfy a request",
    "allocator_failures": "how often a request for memory failed",
    "host_gib": "host memory of the process",
    "peak_gib/STAGE": "the most allocated in a stage of the run (train, evaluate, save, …), if known",
}
"""All that is written, by name after `PREFIX`, for the GPU with the lowest number that the process uses; for each other
GPU the name has ``cuda1/`` in front. The manual's page `trackers` lists them too. Unknown values are left out."""

_GIB = 1 << 30
_log = logging.getLogger("gpumem_tui")

Values = Mapping[str, float]
Write = Callable[[int, Values], object]


class ScalarWriter(Protocol):
    """TensorBoard's `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one value."""


class WandbRun(Protocol):
    """A run of Weights & Biases, or the module `wandb` with one begun."""

    def define_metric(self, name: str) -> Any:
        """Not used; it tells a run from other objects that have `log`."""

    def log(self, data: dict[str, Any], *, commit: bool) -> Any:
        """Write values, now or with those that the program writes next."""


class Mlflow(Protocol):
    """The module `mlflow`."""

    def active_run(self) -> Any:
        """Return the run that the program has begun."""

    def log_metrics(self, metrics: dict[str, float], step: int, *, synchronous: bool) -> Any:
        """Write values."""


class Meter(Protocol):
    """A meter of OpenTelemetry."""

    def create_gauge(self, name: str, unit: str, description: str) -> Any:
        """Make an instrument whose last value counts."""


Tracker = Union[ScalarWriter, WandbRun, Mlflow, Meter, Write]  # noqa: UP007  Python 3.9
ACCEPTED = "a SummaryWriter, a wandb run, the module mlflow, an OpenTelemetry meter or a function (step, values)"

_writes: list[_Guarded] = []


def add(tracker: Tracker) -> None:
    """Write each sample there from now on. An object of another kind is reported once, by a warning."""
    write = _write_of(tracker)
    if write is None:
        _log.warning("gpumem-tui logs nothing: attach(log=…) takes %s, not %s", ACCEPTED, type(tracker).__name__)
    else:
        _writes.append(_Guarded(write))


def forget() -> None:
    """Write nothing any more, as in a forked child: what was handed over is its parent's."""
    _writes.clear()


def write(records: Iterable[wire.Record], stages: Iterable[wire.StagePeak] = ()) -> bool:
    """Hand a sample and the stages' peaks to each tracker, and return whether one was set up by it. Never raises."""
    new = [one for one in _writes if not one.has_begun]
    if _writes:
        sample = list(records)
        values = values_of(sample, stages)
        for one in _writes:
            one(sample[0].step if sample else 0, values)
    return bool(new)


def values_of(records: Iterable[wire.Record], stages: Iterable[wire.StagePeak] = ()) -> dict[str, float]:
    """Return a sample by the names of `METRICS`, with `PREFIX`. Host memory counts where no GPU is in use."""
    records = list(records)
    records = [one for one in records if one.device != wire.CPU] or records
    lowest = min((one.device for one in records), default=0)
    values: dict[str, float] = {}
    for record in records:
        place = PREFIX if record.device == lowest else f"{PREFIX}cuda{record.device}/"
        own = (one for one in stages if one.device == record.device and one.least_bytes == one.most_bytes)
        values.update({f"{place}peak_gib/{one.stage.replace(' ', '_')}": one.least_bytes / _GIB for one in own})
        values.update({place + name: value for name, value in _figures(record).items() if value is not None})
    return values


def _figures(record: wire.Record) -> dict[str, float | None]:
    sizes = {
        "parameters": record.parameters_bytes,
        "gradients": record.gradients_bytes,
        "optimizer": record.optimizer_bytes,
        "allocated": record.allocated_bytes,
        "reserved": record.reserved_bytes,
        "peak_allocated": record.peak_allocated_bytes,
        "peak_reserved": record.peak_reserved_bytes,
        "fragmented": record.inactive_split_bytes,
        "host": record.host_bytes,
    }
    figures: dict[str, float | None] = {
        f"{name}_gib": None if size < 0 else size / _GIB for name, size in sizes.items()
    }
    named = record.parameters_bytes + record.gradients_bytes + record.optimizer_bytes
    known, reserved = record.allocated_bytes >= 0, max(record.reserved_bytes, 0)
    figures["step"] = record.step
    figures["other_gib"] = max(record.allocated_bytes - named, 0) / _GIB if known else None
    figures["fragmentation"] = record.inactive_split_bytes / reserved if reserved and known else None
    figures["allocator_retries"] = record.retries if record.retries >= 0 else None
    figures["allocator_failures"] = record.ooms if record.ooms >= 0 else None
    return figures


class _Guarded:
    """A tracker of which no failure reaches the program; the first one is a warning."""

    def __init__(self, write: Write) -> None:
        self._write, self._has_failed, self.has_begun = write, False, False

    def __call__(self, step: int, values: Values) -> None:
        self.has_begun = True
        try:
            self._write(step, dict(values))
        except Exception as error:  # noqa: BLE001  any error: the training continues
            if not self._has_failed:
                self._has_failed = True
                _log.warning("gpumem-tui cannot log to a tracker: %s: %s", type(error).__name__, error)


def _write_of(tracker: Any) -> Write | None:
    """Return what writes to a tracker; None for an object that is none."""

    def to_tensorboard(step: int, values: Values) -> None:
        for name, value in values.items():
            tracker.add_scalar(name, value, step)

    def to_wandb(_: int, values: Values) -> None:
        tracker.log(dict(values), commit=False)  # its steps are the program's: with the next values that this commits

    def to_mlflow(step: int, values: Values) -> None:
        if tracker.active_run() is not None:  # else mlflow would begin a run that nobody ends
            tracker.log_metrics(dict(values), step=step, synchronous=False)

    gauges: dict[str, Any] = {}

    def to_opentelemetry(_: int, values: Values) -> None:
        for name, value in values.items():
            words = METRICS.get(name.rpartition("/")[2], METRICS["peak_gib/STAGE"])
            if name not in gauges:
                gauges[name] = tracker.create_gauge(name, "GiBy" if "_gib" in name else "1", words)
            gauges[name].set(value)

    kinds: list[tuple[tuple[str, ...], Write]] = [
        (("add_scalar",), to_tensorboard),
        (("define_metric", "log"), to_wandb),
        (("active_run", "log_metrics"), to_mlflow),
        (("create_gauge",), to_opentelemetry),
    ]
    for methods, write in kinds:
        if all(hasattr(tracker, method) for method in methods):
            return write
    return tracker if callable(tracker) else None
