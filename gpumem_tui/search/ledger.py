"""The ledger of one batch size as plain lines."""

from __future__ import annotations

from gpumem_tui.catalog.shapes import Gpu
from gpumem_tui.formula.predict import FormulaPrediction
from gpumem_tui.memory import ALLOCATED_BUCKETS, Breakdown, Bucket, format_bytes
from gpumem_tui.search.comparison import compared
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.prediction import Prediction, Traced
from gpumem_tui.trial.events import TrialDone


def ledger_lines(config: SearchConfig, prediction: Prediction, result: TrialDone | None, batch_size: int) -> list[str]:
    """Formula | Traced | Simulated or Measured | error of the compared prediction, a line a bucket."""
    counted = prediction.formula.at(batch_size)
    formula = counted.breakdown if isinstance(counted, FormulaPrediction) else None
    replay = prediction.traced.at(batch_size) if isinstance(prediction.traced, Traced) else None
    tried = result.breakdown if result is not None else None
    third = config.device.measured_title
    against = compared(config, prediction.traced)
    said = ("formula", "traced").index(against)
    lines = [
        f"{f'at {config.workload.batch_words(batch_size)}':<20} {'Formula':>11}{'Traced':>12}"
        + (f"{third:>12}{f'{against} error':>16}" if result else "")
    ]

    def line(title: str, *values: int | None) -> str:
        cells = [format_bytes(value) for value in values]
        text = f"{title:<20}" + "".join(f" {cell:>11}" for cell in cells)
        if result is None:
            return text
        predicted, ran = values[said], values[2]
        return f"{text}{'–' if predicted is None or ran is None else signed(predicted - ran):>16}"

    def values(bucket: Bucket | None) -> list[int | None]:
        columns: list[int | None] = [
            _of(formula, bucket) if bucket is not Bucket.OTHER else None,
            _of(replay.breakdown if replay is not None else None, bucket),
        ]
        return columns + ([_of(tried, bucket)] if result is not None else [])

    lines += [line(bucket.title, *values(bucket)) for bucket in ALLOCATED_BUCKETS]
    lines.append(line("= allocated", *values(None)))
    reserved: list[int | None] = [None, replay.peak_reserved_bytes if replay is not None else None]
    used = [None, prediction.traced.device_used_bytes(batch_size) if isinstance(prediction.traced, Traced) else None]
    if result is not None:
        reserved.append(result.peak_reserved_bytes)
        used.append(result.device_used_bytes)
    lines += [line("reserved", *reserved), line("device used", *used)]
    return lines


def signed(size_bytes: int) -> str:
    """A difference of bytes with its sign."""
    if size_bytes == 0:
        return "±0"
    return f"{'+' if size_bytes > 0 else ''}{format_bytes(size_bytes)}"


def _of(breakdown: Breakdown | None, bucket: Bucket | None) -> int | None:
    if breakdown is None:
        return None
    return breakdown.total_bytes if bucket is None else breakdown[bucket]


def reserve_words(gpu: Gpu) -> str:
    """What the driver keeps for itself, and between what figures that moves from one driver to the next."""
    said = format_bytes(gpu.reserve_bytes)
    if not gpu.reserves:
        return said
    sizes = [gpu.reserve_bytes, *(size_bytes for _, size_bytes in gpu.reserves)]
    first, last = gpu.reserves[0][0], gpu.reserves[-1][0]
    return f"{said}; {format_bytes(min(sizes))} to {format_bytes(max(sizes))} by driver ({first} to {last}, and others)"
