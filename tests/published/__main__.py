"""All that others measured beside what is predicted of it, in one table: `python -m tests.published [PART …]`.

Parts: steps, runs, totals, adapters, diffusion, tuned, sharded, compiled, vision, speech. `inside`: within the range
that is predicted of a device total, or of networks whose peak is at their largest convolutions, which may have a
workspace; of other bytes, which are predicted to the byte, within what the figure was rounded to. Of what lies outside
the cause is said.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, get_args

from gpumem_tui.memory import GIB, MIB, Range, format_bytes
from tests.published.measurements import DEFAULT_PUBLISHED, Kind, load_published

if TYPE_CHECKING:
    from tests.published.compiled import Row

_UNMEASURED = {
    "diffusion by a UNet or a VAE": "reports state no versions or no sizes, milabench's (torch 2.6) was not rebuilt; a "
    "diffusion transformer and networks of Conv3d are among the rows",
    "detection after proposals": "detectron2's code, which needs torchvision's kernels, takes 2.4 to 3.1 GiB for 3 GB "
    "(Faster R-CNN, R50-FPN), and 4.6 and 4.8 GiB without workspaces for 4.8 and 5.0 (C4, DC5); torchvision's 5.2 GB "
    "of 2019 (torch 1.1), for which 2.2 GiB are traced, are not explained",
    "recurrent networks": "pytorch/pytorch#599, #2895, awd-lstm-lm and PyTorch_GBW_LM are of torch before 1.0",
    "weights of 8 bits": "llama-recipes' 14 GB and others state no lengths; optimizers of 8 bits are among the rows",
    "pipeline parallel": "torchtitan's (405B, 512 GPUs: 82.5 GiB) are compiled, in Float8",
    "tensor parallel": "torchtitan's (70B, 256 GPUs: 71.9 GiB) are compiled, in Float8; its pull request 112, eager, "
    "states no batch size",
    "graph networks, vision-language models": "milabench's PNA, DimeNet and LLaVA were not rebuilt",
}  # fmt: skip
"""Kinds of training of which no measurement is among the rows, and why."""


@dataclass(frozen=True)
class _Line:
    """One row: bytes; `why` is the cause where it lies outside."""

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


def _exactly(size_bytes: int) -> Range:
    return Range(size_bytes, size_bytes)


def _steps() -> Iterator[_Line]:
    from tests.published import measured

    for row in measured.load():
        found = _exactly(row.traced_bytes())
        yield _Line(row.id, "allocated", found, row.measured_bytes, row.rounding_bytes, row.why)


def _runs() -> Iterator[_Line]:
    from tests.published.accuracy import published_range, traced_published

    for peak in load_published(DEFAULT_PUBLISHED).modelled:
        found = published_range(peak) if peak.kind == "device_used" else _exactly(traced_published(peak))
        yield _Line(peak.id, peak.kind, found, peak.measured_bytes, 0, peak.why)


def _totals() -> Iterator[_Line]:
    from tests.published import totals

    for row in totals.load():
        if row.network in totals.TRANSFORMERS and find_spec("transformers") is None:
            print(f"{row.id}: needs transformers, which is not here", file=sys.stderr)
            continue
        yield _Line(row.id, "device_used", row.predicted(), row.measured_bytes, 0, row.why)


def _adapters() -> Iterator[_Line]:
    if find_spec("peft") is None:
        print("adapters: need transformers and peft, which are not here", file=sys.stderr)
        return
    from tests.published import adapters

    for row in adapters.load():
        found = _exactly(adapters.reserved_bytes(row))
        yield _Line(f"peft-{row.id}", "reserved", found, row.measured_bytes, 0, row.why)


def _diffusion() -> Iterator[_Line]:
    if find_spec("peft") is None or find_spec("diffusers") is None:
        print("diffusion: needs transformers, peft and diffusers, which are not here", file=sys.stderr)
        return
    from tests.published import diffusion

    for row in diffusion.load():
        found = _exactly(diffusion.reserved_bytes(row))
        yield _Line(f"flux2-{row.id}", "reserved", found, row.measured_bytes, 0, row.why)


def _compiled() -> Iterator[_Line]:
    if find_spec("triton") is None:
        print("compiled: needs triton, which is not here", file=sys.stderr)
        return
    from tests.published.compiled import ROWS

    yield from _of_commands(ROWS, GIB // 200)


def _tuned() -> Iterator[_Line]:
    if find_spec("peft") is None or find_spec("bitsandbytes") is None:
        print("tuned: needs transformers, peft and bitsandbytes, which are not here", file=sys.stderr)
        return
    from tests.published.tuned import ROWS

    yield from _of_commands(ROWS, 0)


def _vision() -> Iterator[_Line]:
    from tests.published.compiled import traced
    from tests.published.vision import ROWS, predicted

    for row in ROWS:
        rounding_bytes = MIB // 2 if row.program[1] == "video" else 50 * MIB
        found = predicted(row, traced(row))
        yield _Line(row.id, "allocated", found, round(row.gib * GIB), rounding_bytes, row.why)


def _speech() -> Iterator[_Line]:
    if find_spec("transformers") is None:
        print("speech: needs transformers, which is not here", file=sys.stderr)
        return
    from tests.published import speech

    for batch_size, mib in speech.MEASURED_MIB.items():
        found = speech.predicted(batch_size)
        yield _Line(f"milabench-whisper-{batch_size}", "device_used", found, mib * MIB, MIB, speech.WHY)


def _of_commands(rows: Sequence[Row], rounding_bytes: int) -> Iterator[_Line]:
    from tests.published.compiled import traced

    kinds: dict[str, Kind] = {"peak_allocated_bytes": "allocated", "peak_reserved_bytes": "reserved"}
    for row in rows:
        found = _exactly(traced(row)[row.what])
        yield _Line(row.id, kinds[row.what], found, round(row.gib * GIB), rounding_bytes, row.why)


def _sharded() -> Iterator[_Line]:
    from gpumem_tui.simulator.allocator.replay import replay
    from tests.published.sharded import ROWS, SETTINGS, traced

    for row in ROWS:
        found = _exactly(replay(traced(row), settings=SETTINGS[row.settings]).peak_reserved_bytes)
        decimals = len(str(row.reserved_gib).partition(".")[2])
        why = "the page states neither its commit nor how the allocator was set"
        yield _Line(row.id, "reserved", found, round(row.reserved_gib * GIB), GIB // 2 // 10**decimals, why)


_PARTS: dict[str, Callable[[], Iterator[_Line]]] = {
    "steps": _steps, "runs": _runs, "totals": _totals, "adapters": _adapters, "diffusion": _diffusion,
    "tuned": _tuned, "sharded": _sharded, "compiled": _compiled, "vision": _vision, "speech": _speech,
}  # fmt: skip


def main(parts: Sequence[str]) -> int:
    """Print these parts of the table, all without any; return 2 for one that there is not."""
    if unknown := set(parts) - set(_PARTS):
        print(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}", file=sys.stderr)
        return 2
    lines = []
    for part in parts or _PARTS:
        for line in _PARTS[part]():
            lines.append(line)
            print(_text(line), flush=True)
    for kind in get_args(Kind):
        if errors := [line.error_percent for line in lines if line.kind == kind]:
            print(_summary(kind, errors))
    for kind, why in _UNMEASURED.items():
        print(f"{kind}: no measurement is known that it could be held against; {why}")
    return 0


def _text(line: _Line) -> str:
    low, high = (format_bytes(size) for size in (line.predicted.low_bytes, line.predicted.high_bytes))
    predicted = low if low == high else f"{low} to {high}"
    where = "inside" if not line.error_percent else f"outside {line.error_percent:+.3f} %"
    text = f"{line.id:44} {line.kind:11} {predicted:>24} {format_bytes(line.measured_bytes):>10}  {where:20}"
    return (text + line.why if line.error_percent else text).rstrip()


def _summary(kind: str, errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    p90 = statistics.quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    return (
        f"{kind}: {len(sizes)} rows, {sum(not size for size in sizes)} inside; from what is predicted median "
        f"{statistics.median(sizes):.3f} %, 90th percentile {p90:.3f} %, worst {sizes[-1]:.3f} %"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
