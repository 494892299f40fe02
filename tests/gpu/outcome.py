"""The memory of a row's program on a GPU next to its prediction, and the one table of that: text, CSV,
Markdown."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from gpumem_tui.memory import GIB
from gpumem_tui.report import markdown
from gpumem_tui.report.tables import TextColumn, TextTable
from tests.gpu.processes import Ended, TimeIsUp, run
from tests.gpu.rows import ROOT, NotHere, Row

ALLOCATED_PERCENT = 0.1
RESERVED_PERCENT = 1.0
WIDE_PERCENT = 10.0
PREDICT_LIMIT_S = 300.0

_FIGURES = ("requested", "allocated", "reserved", "reserved_at_end", "beside_allocator")


class Real(msgspec.Struct, frozen=True, kw_only=True):
    """The allocator's and the driver's figures of a process, in bytes; `error` instead if it did not end.

    Attributes:
        reserved_at_end: when the program ended, as it may give back on the way.
        beside_allocator: the driver's figure of the process less what was reserved at that moment; 0 where the driver
            does not tell processes apart.
        command: as it ran, with its variables.
    """

    name: str
    command: str = ""
    requested: int = 0
    allocated: int = 0
    reserved: int = 0
    reserved_at_end: int = 0
    beside_allocator: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def device(self) -> int:
        """The highest memory of the process on the GPU; 0 if unknown."""
        return self.reserved + self.beside_allocator if self.beside_allocator else 0


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of `predict`, in bytes; `error` instead if it is missing."""

    allocated: int = 0
    reserved: int = 0
    low: int = 0
    high: int = 0
    fit: str = ""
    seconds: float = 0.0
    error: str = ""


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a row is outside, and by how much it did when that was written down.

    Attributes:
        allocated_percent: the predicted figure against the real one, below zero too little; None: it is inside.
        reserved_percent: likewise.
        device: ``above`` or ``below`` its range; empty: inside.
        error: what stops the prediction; the words it must contain.
    """

    why: str
    allocated_percent: float | None = None
    reserved_percent: float | None = None
    device: str = ""
    error: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A row with both sides, as far as they are there."""

    name: str
    kind: str
    real: Real
    predicted: Predicted
    cause: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether both sides came to figures."""
        return not (self.real.error or self.predicted.error)

    @property
    def allocated_percent(self) -> float:
        """Predicted against real; below zero too little is predicted."""
        return _percent(self.predicted.allocated, self.real.allocated)

    @property
    def reserved_percent(self) -> float:
        """Predicted against real."""
        return _percent(self.predicted.reserved, self.real.reserved)

    @property
    def device(self) -> str:
        """Where the real total is: ``inside``, ``above``, ``below`` the predicted range, or ``unknown``."""
        if not self.real.device:
            return "unknown"
        if self.real.device > self.predicted.high:
            return "above"
        return "below" if self.real.device < self.predicted.low else "inside"

    @property
    def range_percent(self) -> float:
        """How wide the predicted range of the device's total is."""
        return _percent(self.predicted.high, self.predicted.low)

    @property
    def outside(self) -> tuple[str, ...]:
        """Which figures lie outside of what is promised, in words."""
        if not self.is_whole:
            sides = (("real", self.real.error), ("predicted", self.predicted.error))
            return tuple(f"{side}: {error}" for side, error in sides if error)
        found = []
        if abs(self.allocated_percent) > ALLOCATED_PERCENT:
            found.append(f"allocated {self.allocated_percent:+.2f} %")
        if abs(self.reserved_percent) > RESERVED_PERCENT:
            found.append(f"reserved {self.reserved_percent:+.2f} %")
        if self.device in ("above", "below"):
            found.append(f"device {self.device} its range")
        return tuple(found)

    @property
    def is_false_fit(self) -> bool:
        """Whether the process took more than the highest prediction, on a GPU on which it was predicted to fit."""
        return self.is_whole and self.predicted.fit == "fits" and self.device == "above"


def _percent(value: int, of: int) -> float:
    return 100 * (value / of - 1) if of else 0.0


def predict(row: Row, python: str, gpu: str, clones: Path | None, limit_s: float = PREDICT_LIMIT_S) -> Predicted:
    """Ask this checkout's `predict` for a row's program, run by the interpreter `python`."""
    with TemporaryDirectory(prefix="gpumem-predict-") as name:
        folder = Path(name)
        try:
            ended = predicting([python, *row.words(clones)], row, gpu, clones, folder, limit_s)
        except (NotHere, TimeIsUp) as error:
            return Predicted(error=str(error))
    try:
        traced = json.loads(ended.output).get("traced") or {}
        return msgspec.structs.replace(_predicted(traced), seconds=ended.seconds)
    except (ValueError, KeyError, TypeError):
        return Predicted(error=ended.last_line, seconds=ended.seconds)


def predicting(command: Sequence[str], row: Row, gpu: str, clones: Path | None, folder: Path, limit_s: float) -> Ended:
    """Run a command, which is a row's or has it within, by `predict --json`; what it leaves is left in `folder`.

    Raises:
        NotHere: it is of a clone that is not here.
        TimeIsUp: it takes longer.
    """
    share = [] if gpu.startswith("sim:") else ["--share"]
    options = ["--gpu", gpu, *share, "--steps", str(row.steps), "--timeout", f"{limit_s:.0f}", "--json", *row.options]
    words = [sys.executable, "-m", "gpumem_tui", "predict", *options, "--", *command]
    env = {**row.variables(), "PYTHONPATH": str(ROOT)}
    return run(words, folder / "predict", limit_s, env, row.folder(clones) if row.clone else folder)


def _predicted(traced: Mapping[str, Any]) -> Predicted:
    """Read a trace's figures, with what cudnn.benchmark tries for a moment: the measured programs had room for it."""
    ends, settled_reserved = traced["device_used_range"], traced["peak_reserved_bytes"]
    reserved = traced.get("momentary_reserved_bytes") or settled_reserved
    beyond = max(0, reserved - settled_reserved)
    return Predicted(
        allocated=traced.get("momentary_peak_bytes") or traced["peak_allocated_bytes"],
        reserved=max(reserved, settled_reserved),
        low=ends["low_bytes"] + beyond,
        high=ends["high_bytes"] + beyond,
        fit=traced["fit"],
    )


# The table


_TABLE = TextTable(
    TextColumn("row", 24),
    TextColumn("kind", 30, cut=True),
    *(TextColumn(title, 8, ">") for title in ("real", "pred.", "%", "real", "pred.", "%", "real")),
    TextColumn("predicted", 16, ">"),
    TextColumn("outside (cause)"),
)


def header_lines() -> tuple[str, str]:
    """The titles of the table, in two lines."""
    return f"{'':56}{'allocated, GiB':<28}  {'reserved, GiB':<28}  device, GiB", _TABLE.header


def text_line(row: Comparison) -> str:
    """A row of the table for a terminal."""
    return _TABLE.row(*text_row(row))


def text_row(row: Comparison) -> list[str]:
    """A row's cells: GiB, percents, and what is outside with its cause."""
    real, predicted = row.real, row.predicted
    both = row.is_whole
    ends = f"{_gib(predicted.low)} to {_gib(predicted.high)}" if predicted.high else "–"
    said = "; ".join(row.outside) or "inside"
    return [
        row.name,
        row.kind,
        _gib(real.allocated),
        _gib(predicted.allocated),
        f"{row.allocated_percent:+.3f}" if both else "–",
        _gib(real.reserved),
        _gib(predicted.reserved),
        f"{row.reserved_percent:+.2f}" if both else "–",
        _gib(real.device),
        ends,
        f"{said} ({row.cause})" if row.outside and row.cause else said,
    ]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.3f}" if size_bytes else "–"


def summary(rows: Sequence[Comparison]) -> Iterator[str]:
    """Yield what the rows come to."""
    whole = [row for row in rows if row.is_whole]
    inside = [row for row in whole if not row.outside]
    yield f"{len(rows)} rows, {len(whole)} with both sides, {len(inside)} inside in all three figures"
    if whole:
        allocated = sorted(abs(row.allocated_percent) for row in whole)
        reserved = sorted(abs(row.reserved_percent) for row in whole)
        exact = sum(row.predicted.allocated == row.real.allocated for row in whole)
        yield (
            f"allocated: {sum(size <= ALLOCATED_PERCENT for size in allocated)} within {ALLOCATED_PERCENT} %, {exact} "
            f"to the byte, median {statistics.median(allocated):.3f} %, worst {allocated[-1]:.2f} %"
        )
        yield (
            f"reserved: {sum(size <= RESERVED_PERCENT for size in reserved)} within {RESERVED_PERCENT:.0f} %, median "
            f"{statistics.median(reserved):.2f} %, worst {reserved[-1]:.2f} %"
        )
        where = [row.device for row in whole]
        wide = [row.name for row in whole if row.range_percent > WIDE_PERCENT]
        yield (
            f"device: {where.count('inside')} inside, {where.count('above')} above, {where.count('below')} below, "
            f"{where.count('unknown')} unknown; ranges wider than {WIDE_PERCENT:.0f} %: {', '.join(wide) or 'none'}"
        )
    false = [row.name for row in whole if row.is_false_fit]
    yield f"took more than the highest predicted though it was predicted to fit: {', '.join(false) or 'none'}"
    unsaid = [row.name for row in rows if row.outside and not row.cause and not row.real.error]
    yield f"outside without a known cause: {', '.join(unsaid) or 'none'}"


def write_csv(path: Path, rows: Sequence[Comparison]) -> None:
    """Write all figures in bytes, a line a row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        sides = ("predicted_allocated", "predicted_reserved", "predicted_low", "predicted_high", "fit")
        writer.writerow(["name", "kind", "command", *_FIGURES, *sides, "outside", "cause"])
        for row in rows:
            real, predicted = row.real, row.predicted
            writer.writerow(
                [row.name, row.kind, real.command, *(getattr(real, name) or "" for name in _FIGURES)]
                + [getattr(predicted, name.removeprefix("predicted_")) or "" for name in sides]
                + ["; ".join(row.outside), row.cause]
            )


def write_markdown(path: Path, title: str, rows: Sequence[Comparison], more: Sequence[str] = ()) -> None:
    """Write the table for a reader, with its summary above it and `more` parts below."""
    columns = ["row", "kind", "allocated", "predicted", "%", "reserved", "predicted", "%", "device", "predicted", ""]
    cells = [[cell.replace("|", "\\|") for cell in text_row(row)] for row in rows]
    parts = [f"# {title}", markdown.bullets(summary(rows)), "Sizes in GiB.", markdown.table(columns, cells), *more]
    path.write_text(markdown.document(parts), encoding="utf-8")


def read_csv(path: Path) -> dict[str, Real]:
    """The real side of a table that `write_csv` wrote, or of one that has its columns; without what did not end."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["allocated"]]
    texts = ("name", "command")
    return {
        line["name"]: msgspec.convert(
            {**{name: line[name] for name in texts}, **{name: int(line[name] or 0) for name in _FIGURES}}, Real
        )
        for line in lines
    }
