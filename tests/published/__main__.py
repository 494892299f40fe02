"""All that others measured next to what is predicted of it, in one table: `python -m tests.published [-n N] [PART …]`.

Parts: steps, runs, totals, adapters, diffusion, tuned, litgpt, sharded, compiled, vision, milabench; N of their rows at
once (default 1). `inside`: within the range that is predicted of a device total, or of networks whose peak is at their
largest convolutions, which may have a workspace; of other bytes, which are predicted to the byte, within what the
figure was rounded to. Each row outside has its cause: the exit code is 1 where a row lacks one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from gpumem_tui.memory import GIB, MIB, Range, format_bytes
from tests.published.measurements import DEFAULT_PUBLISHED, Kind, PublishedPeak, load_published

if TYPE_CHECKING:
    from tests.published.adapters import Adapted
    from tests.published.compiled import Row
    from tests.published.measured import Measured
    from tests.published.milabench import Observed
    from tests.published.sharded import Row as ShardedRow
    from tests.published.totals import Total

_UNMEASURED = {
    "detection after proposals": "detectron2's code, which needs torchvision's kernels, takes 2.4 to 3.1 GiB for 3 GB "
    "(Faster R-CNN, R50-FPN), and 4.6 and 4.8 GiB without workspaces for 4.8 and 5.0 (C4, DC5); torchvision's 5.2 GB "
    "of 2019 (torch 1.1), for which 2.2 GiB are traced, are not explained",
    "recurrent networks": "pytorch/pytorch#599, #2895, awd-lstm-lm and PyTorch_GBW_LM are of torch before 1.0",
    "weights of 8 bits": "llama-recipes' 14 GB and others state no lengths; optimizers of 8 bits are among the rows",
    "pipeline parallel": "torchtitan's (405B, 512 GPUs: 82.5 GiB) are compiled, in Float8",
    "tensor parallel": "torchtitan's (70B, 256 GPUs: 71.9 GiB) are compiled, in Float8; its pull request 112, eager, "
    "states no batch size",
    "graph networks": "milabench's PNA takes 24.3 GiB with 3,608 molecules and 35.9 with 3,768: batches whose sizes "
    "change leave blocks unused, and which molecules is not said",
    "vision-language models": "milabench's LLaVA takes between 14.5 and 15.3 GiB of one batch size: the lengths of its "
    "texts decide, and are not said",
}  # fmt: skip
"""Kinds of training of which no measurement is among the rows, and why."""


_NOT_KNOWN = ("not explained", "not resolved", "not known")
"""With these words a cause shows what is left of it."""


@dataclass(frozen=True)
class _Line:
    """One row: bytes; `why` is the cause where it is outside."""

    id: str
    kind: Kind
    predicted: Range
    measured_bytes: int
    rounding_bytes: int
    why: str

    @property
    def error_percent(self) -> float:
        """From the nearest end of what is predicted; 0 inside; below zero too little is predicted."""
        low, high = self.predicted.low_bytes - self.rounding_bytes, self.predicted.high_bytes + self.rounding_bytes
        if low <= self.measured_bytes <= high:
            return 0.0
        nearest = self.predicted.high_bytes if self.measured_bytes > high else self.predicted.low_bytes
        return 100 * (nearest / self.measured_bytes - 1)

    @property
    def text(self) -> str:
        """The row as it is printed."""
        low, high = (format_bytes(size) for size in (self.predicted.low_bytes, self.predicted.high_bytes))
        predicted = low if low == high else f"{low} to {high}"
        where = f"outside {self.error_percent:+.3f} %" if self.error_percent else "inside"
        text = f"{self.id:47} {self.kind:11} {predicted:>24} {format_bytes(self.measured_bytes):>10}  {where:19}"
        return (f"{text}{self.why or 'NO CAUSE'}" if self.error_percent else text).rstrip()


def _exactly(size_bytes: int) -> Range:
    return Range(size_bytes, size_bytes)


def _step(row: Measured) -> _Line:
    return _Line(
        row.id, "allocated", _exactly(row.traced_bytes()), row.measured_bytes, row.rounding_bytes, row.why
    )  # fmt: skip


def _run(peak: PublishedPeak) -> _Line:
    from tests.published.accuracy import published_range, traced_published

    found = published_range(peak) if peak.kind == "device_used" else _exactly(traced_published(peak))
    return _Line(peak.id, peak.kind, found, peak.measured_bytes, 0, peak.why)


def _total(row: Total) -> _Line:
    return _Line(row.id, "device_used", row.predicted(), row.measured_bytes, 0, row.why)


def _adapted(row: Adapted) -> _Line:
    from tests.published import adapters

    found = _exactly(adapters.reserved_bytes(row))
    return _Line(f"peft-{row.id}", "reserved", found, row.measured_bytes, 0, row.why or adapters.WHY)


def _diffused(row: Adapted) -> _Line:
    from tests.published import diffusion

    found = _exactly(diffusion.reserved_bytes(row))
    return _Line(f"flux2-{row.id}", "reserved", found, row.measured_bytes, 0, row.why or diffusion.WHY)


def _command(row: Row, rounding_bytes: int) -> _Line:
    from tests.published.compiled import traced

    kinds: dict[str, Kind] = {"peak_allocated_bytes": "allocated", "peak_reserved_bytes": "reserved"}
    return _Line(
        row.id, kinds[row.what], _exactly(traced(row)[row.what]), round(row.gib * GIB), rounding_bytes, row.why
    )  # fmt: skip


def _tuned(row: Row) -> _Line:
    return _command(row, 0)


def _lit(row: Row) -> _Line:
    from tests.published.litgpt import ROUNDING_BYTES

    return _command(row, ROUNDING_BYTES)


def _compiled(row: Row) -> _Line:
    from tests.published.compiled import WHY

    return _command(replace(row, why=row.why or WHY), GIB // 200)


def _seen(row: Row) -> _Line:
    from tests.published.compiled import traced
    from tests.published.vision import predicted

    rounding_bytes = MIB // 2 if row.program[1] == "video" else 50 * MIB
    return _Line(row.id, "allocated", predicted(row, traced(row)), round(row.gib * GIB), rounding_bytes, row.why)


def _observed(row: Observed) -> _Line:
    return _Line(row.id, "device_used", row.predicted(), row.measured_mib * MIB, MIB, row.why)


def _sharded(row: ShardedRow) -> _Line:
    from gpumem_tui.simulator.allocator.replay import replay
    from tests.published.sharded import SETTINGS, WHY, traced

    found = _exactly(replay(traced(row), settings=SETTINGS[row.settings]).peak_reserved_bytes)
    decimals = len(str(row.reserved_gib).partition(".")[2])
    return _Line(row.id, "reserved", found, round(row.reserved_gib * GIB), GIB // 2 // 10**decimals, WHY)


@dataclass(frozen=True)
class _Part:
    """Rows of one kind: what makes a line of one, the module that has them, the libraries without which none are."""

    line: Callable[[Any], _Line]
    module: str
    rows: Callable[[Any], Sequence[Any]]
    needs: tuple[str, ...] = ()

    def load(self) -> Sequence[Any]:
        """All rows; none if a library is missing, with a note."""
        if missing := [name for name in self.needs if find_spec(name) is None]:
            print(f"{self.module}: needs {', '.join(missing)}, which is not here", file=sys.stderr)
            return ()
        return self.rows(import_module(f"tests.published.{self.module}"))


def _table(module: Any) -> Sequence[Any]:
    return module.load()  # type: ignore[no-any-return]


def _constants(module: Any) -> Sequence[Any]:
    return module.ROWS  # type: ignore[no-any-return]


_PARTS = {
    "steps": _Part(_step, "measured", _table),
    "runs": _Part(_run, "measurements", lambda _: load_published(DEFAULT_PUBLISHED).modelled),
    "totals": _Part(_total, "totals", _table, ("transformers",)),
    "adapters": _Part(_adapted, "adapters", _table, ("transformers", "peft")),
    "diffusion": _Part(_diffused, "diffusion", _table, ("transformers", "peft", "diffusers")),
    "tuned": _Part(_tuned, "tuned", _constants, ("transformers", "peft", "bitsandbytes")),
    "litgpt": _Part(_lit, "litgpt", _constants, ("lightning", "bitsandbytes")),
    "sharded": _Part(_sharded, "sharded", _constants),
    "compiled": _Part(_compiled, "compiled", _constants, ("triton",)),
    "vision": _Part(_seen, "vision", _constants),
    "milabench": _Part(_observed, "milabench", _table, ("transformers", "diffusers")),
}


def _line(place: tuple[str, int]) -> _Line:
    """One row, in a process of its own next to others."""
    name, index = place
    part = _PARTS[name]
    return part.line(part.load()[index])


def _lines(places: Sequence[tuple[str, int]], at_once: int) -> Iterator[_Line]:
    if at_once == 1:
        yield from map(_line, places)
        return
    fresh = multiprocessing.get_context("spawn")  # torch is not to be forked
    with ProcessPoolExecutor(at_once, fresh, initializer=warnings.simplefilter, initargs=("ignore",)) as pool:
        yield from pool.map(_line, places)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print these parts of the table, all without any; return 1 where a row is outside without a cause."""
    parser = argparse.ArgumentParser(prog="python -m tests.published", description=__doc__.partition("\n\n")[0])
    parser.add_argument("-n", type=int, default=1, metavar="N", help="rows at once")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}; all without any")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(_PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}")
    warnings.simplefilter("ignore")
    places = [(name, index) for name in options.parts or _PARTS for index in range(len(_PARTS[name].load()))]
    lines = []
    for line in _lines(places, options.n):
        lines.append(line)
        print(line.text, flush=True)
    for kind in get_args(Kind):
        if found := [line for line in lines if line.kind == kind]:
            print(_summary(kind, found))
    for kind, why in _UNMEASURED.items():
        print(f"{kind}: there is no measurement to compare; {why}")
    return int(any(line.error_percent and not line.why for line in lines))


def _summary(kind: str, lines: Sequence[_Line]) -> str:
    outside = [line for line in lines if line.error_percent]
    unsaid = sum(not line.why for line in outside)
    unsure = sum(any(words in line.why for words in _NOT_KNOWN) for line in outside)
    sizes = sorted(abs(line.error_percent) for line in lines)
    p90 = statistics.quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    return (
        f"{kind}: {len(lines)} rows, {len(lines) - len(outside)} inside, {len(outside)} outside: {unsaid} without a "
        f"cause, {unsure} whose cause is not known in whole; from what is predicted median "
        f"{statistics.median(sizes):.3f} %, 90th percentile {p90:.3f} %, worst {sizes[-1]:.3f} %"
    )


if __name__ == "__main__":
    sys.exit(import_module("tests.published.__main__").main())  # by which name other processes find it
