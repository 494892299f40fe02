"""Peaks that others measured on steps and layers, and the simulated GPU's: `python -m tests.published.measured`.

`steps_and_layers.csv` holds them: where each was published, the torch version and the GPU of it (where the source is
silent, of that time), the equivalent program here with its arguments, and to what the figure was rounded
(Liger's table holds MiB as floats of 32 bits).
"""

from __future__ import annotations

import csv
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from tests.published import operators, steps
from tests.published.operators import Step

_PROGRAMS: dict[str, Callable[..., Step]] = {
    "attention": operators.attention,
    "course": steps.course,
    "cross_entropy": operators.cross_entropy,
    "geglu": operators.geglu,
    "group_norm": operators.group_norm,
    "kl_div": operators.kl_div,
    "language_head": operators.language_head,
    "layer_norm": operators.layer_norm,
    "mingpt": steps.mingpt,
    "rms_norm": operators.rms_norm,
    "total_variation": operators.total_variation,
}
_TABLE = Path(__file__).with_name("steps_and_layers.csv")
_STEPS = 2
"""From the second on gradients and optimizer states are there."""


@dataclass(frozen=True)
class Measured:
    """One row. `tolerance_percent` is how far the traced peak may be off beyond the rounding; `why`: the reason."""

    id: str
    source: str
    torch: str
    gpu: str
    program: str
    arguments: str
    measured_bytes: int
    rounding_bytes: int
    tolerance_percent: float
    why: str

    def traced_bytes(self) -> int:
        """The highest allocated bytes of the second step."""
        gpu = find_gpu(self.gpu)
        simulated = SimulatedGpu(gpu, profile_for(self.torch, gpu), unlimited=True)
        arguments = [int(argument) if argument.isdigit() else argument for argument in self.arguments.split()]
        gc.collect()
        with simulate(simulated) as device, torch.device(device):
            step = _PROGRAMS[self.program](*arguments)
            for _ in range(_STEPS):
                simulated.allocator.stats.reset_peaks()
                step()
            del step
        return simulated.allocator.stats.peak_allocated_bytes

    def error_percent(self, traced_bytes: int) -> float:
        """Traced against measured, 0 within what the figure was rounded to; below zero the prediction is too low."""
        apart = traced_bytes - self.measured_bytes
        return 0.0 if abs(apart) <= self.rounding_bytes else 100 * apart / self.measured_bytes


def load() -> list[Measured]:
    """All rows of the table."""
    with _TABLE.open(newline="", encoding="utf-8") as file:
        return [
            Measured(
                **{
                    **row,
                    "measured_bytes": int(row["measured_bytes"]),
                    "rounding_bytes": int(row["rounding_bytes"]),
                    "tolerance_percent": float(row["tolerance_percent"]),
                }  # type: ignore[arg-type]
            )
            for row in csv.DictReader(file)
        ]


def main(arguments: Sequence[str]) -> int:
    """Print every row whose id contains an argument (all without any), and the distribution of their errors."""
    errors = []
    for row in load():
        if arguments and not any(argument in row.id for argument in arguments):
            continue
        traced_bytes = row.traced_bytes()
        error = row.error_percent(traced_bytes)
        errors.append(abs(error))
        print(f"{row.id:42} {traced_bytes:>15,} {row.measured_bytes:>15,} {error:+9.4f} %", flush=True)
    p90 = statistics.quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0]
    print(
        f"{len(errors)} rows: {sum(error == 0 for error in errors)} exact as far as published; error median "
        f"{statistics.median(errors):.4f} %, 90th percentile {p90:.4f} %, worst {max(errors):.4f} %"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
