"""Measurements of GPUs, in a checkout's files: recordings of this project's runs, and what others published."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Literal

import msgspec

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.recipe import Attention, Optimizer, Precision, Recipe, Recompute
from gpumem_tui.workload.spec import WorkloadSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind = Literal["allocated", "reserved", "device_used"]
Origin = Literal["recorded", "rehearsed", "published"]
"""Rehearsed: made by the recorder without a GPU, so it measures nothing."""

_TESTS = Path(__file__).parents[1]
DEFAULT_RECORDINGS = _TESTS / "recordings"
DEFAULT_PUBLISHED = _TESTS / "published" / "peaks.toml"
PUBLISHED_STEPS = 3
"""The third step, made in what the second left cached, can still take segments (ResNet-50 at batch size 8 does)."""


class DataError(ValueError):
    """Measurements that cannot be read; one line naming the file."""


# Recorded on a real GPU


class PhasePeaks(msgspec.Struct, frozen=True):
    """The allocator's highest figures within one phase of one step."""

    step: int
    phase: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one run, on the real or on the simulated GPU.

    Attributes:
        error: why it did not finish, in one line; empty if it did. The figures are those reached until then.
        buckets: the composition at the allocated peak by JSON key; None with the reason in `unavailable`.
        context_bytes: what the process held outside its allocator before its first own allocation (on the simulated
            GPU what is assumed), and `context_end_bytes` after the last step, with all kernels loaded.
        nvml: the driver's own figures after the last step (``used_bytes``, ``driver_reserved_bytes``), where readable.
        unavailable: the name of each figure that could not be had, and why.
    """

    error: str = ""
    phases: tuple[PhasePeaks, ...] = ()
    buckets: dict[str, int] | None = None
    alloc_retries: int = 0
    context_bytes: int = 0
    context_end_bytes: int = 0
    nvml: dict[str, int] = {}
    unavailable: dict[str, str] = {}
    seconds: float = 0.0

    def peak_bytes(self, kind: Kind) -> int:
        """The highest figure of the whole run; for ``device_used`` the reserved peak and the context."""
        name = "allocated_bytes" if kind == "allocated" else "reserved_bytes"
        highest: int = max((getattr(phase, name) for phase in self.phases), default=0)
        return highest + self.context_end_bytes if kind == "device_used" else highest


class Machine(msgspec.Struct, frozen=True):
    """Where a recording was made. A fact that could not be read is absent from `facts`."""

    torch: str
    driver: str
    gpu: Gpu
    facts: dict[str, str]

    @property
    def origin(self) -> Origin:
        """The tolerance of figures from here."""
        return "rehearsed" if "rehearsal" in self.facts else "recorded"


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True, tag="run", tag_field="event"):
    """One configuration, run on the real and on the simulated GPU under the same torch.

    `history` and `simulated_history` hold every allocator event, packed (tests/gpu/history.py); empty if
    missing, and the side's `unavailable` gives the reason.
    """

    id: str
    workload: WorkloadSpec
    batch_size: int
    steps: int
    machine: Machine
    real: Side
    simulated: Side
    history: str = ""
    simulated_history: str = ""


class RecordedEdge(msgspec.Struct, frozen=True, kw_only=True, tag="largest_batch", tag_field="event"):
    """The largest batch under a cap on reserved bytes: predicted, and found by running that size and the next one.

    `real` is None if the edge was not found; `tried` holds the outcome of each batch size that ran.
    """

    id: str
    workload: WorkloadSpec
    limit_bytes: int
    machine: Machine
    simulated: int | None
    real: int | None
    tried: dict[str, str]
    error: str = ""


Recorded = RecordedRun | RecordedEdge


def load_recordings(folder: Path) -> list[Recorded]:
    """Every recording in a folder's ``.jsonl`` files; of one id on one machine the newest. None if it is absent.

    A file that is kept may be gzipped; its name ends with ``.gz`` then.

    Raises:
        DataError: a line that is no recording. A last line that was cut off, as by a kill, does not count.
    """
    found: dict[tuple[str, str, str, str], Recorded] = {}
    for path in (*sorted(folder.glob("*.jsonl.gz")), *sorted(folder.glob("*.jsonl"))):
        body = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for number, line in enumerate(body.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                continue
            try:
                recorded: Recorded = msgspec.json.decode(line, type=Recorded)
            except msgspec.MsgspecError as error:
                raise DataError(f"{path}:{number} is not a recording: {error}") from error
            machine = recorded.machine
            found[recorded.id, machine.gpu.title, machine.torch, machine.driver] = recorded
    return list(found.values())


# Published by others


class PublishedPeak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measurement that a catalog model can stand for.

    Attributes:
        shape: what to override of the catalog's model.
        context_bytes: the CUDA context by the same source; the profile's assumption where the source is silent.
        context_most_bytes: if known as a range only, its other end.
        add_bytes: what that run held beyond what can be traced, and `add` shows what it is; 0 for nothing.
        torch: the version that the run had, by whose rules it is traced; empty for today's.
        tolerance_percent: how far the traced figure may be off, and `why` explains what is left of it; None: the
            figure, of a whole device, is within the range that is predicted.
    """

    id: str
    source: str
    kind: Kind
    measured_bytes: int
    gpu: str
    model: str
    batch_size: int
    precision: Precision
    optimizer: Optimizer
    why: str
    tolerance_percent: float | None = None
    recompute: Recompute = "none"
    attention: Attention = "auto"
    shape: dict[str, int] = {}
    context_bytes: int | None = None
    context_most_bytes: int | None = None
    add_bytes: int = 0
    add: str = ""
    torch: str = ""

    def workload(self) -> WorkloadSpec:
        """What to train."""
        recipe = Recipe(self.precision, self.optimizer, self.recompute, self.attention)
        return WorkloadSpec(recipe, shape=find_model(self.model).overridden(**self.shape))


class NotModelled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Published measurements that no catalog model and recipe can stand for, and why."""

    ids: tuple[str, ...]
    reason: str


class PublishedRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of peaks.toml."""

    modelled: tuple[PublishedPeak, ...]
    not_modelled: tuple[NotModelled, ...] = ()


def load_published(path: Path) -> PublishedRuns:
    """Read peaks.toml.

    Raises:
        DataError: it is not such a file.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), PublishedRuns)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise DataError(f"{path} is not a table of published peaks: {error}") from error
