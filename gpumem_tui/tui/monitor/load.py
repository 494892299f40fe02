"""How loaded a GPU is, as a colour: green, yellow or red; and which GPUs are free."""

from __future__ import annotations

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.devices import is_free
from gpumem_tui.monitor.snapshot import GpuReading, Memory

_COLOURS = ("$load-light", "$load-moderate", "$load-heavy")
_MEMORY_PERCENT = 10, 80
_BUSY_PERCENT = 10, 75
"""From which percentages on a GPU is moderately and heavily loaded, as nvitop has them: `MEMORY_UTILIZATION_THRESHOLDS`
and `GPU_UTILIZATION_THRESHOLDS` of its `Device` (nvitop 1.7.2, also in its README under "Environment Variables")."""


def memory_colour(gpu: GpuReading) -> str:
    """Return the colour of a GPU's memory in use; empty where that is unknown."""
    memory = gpu.visible_memory
    return "" if isinstance(memory, Unknown) else memory_load(memory)


def busy_colour(gpu: GpuReading) -> str:
    """Return the colour of a GPU's utilization; empty where that is unknown."""
    percent = gpu.telemetry.utilization_percent
    return "" if isinstance(percent, Unknown) else busy_load(percent)


def load_colour(gpu: GpuReading) -> str:
    """Return the colour of what a GPU is loaded with most, memory or utilization; empty if both are unknown."""
    return heavier(memory_colour(gpu), busy_colour(gpu))


def memory_load(memory: Memory) -> str:
    """Return the colour of memory in use, of one GPU or of several."""
    return _colour(memory.shown_percent, _MEMORY_PERCENT)


def busy_load(percent: float) -> str:
    """Return the colour of a utilization, of one GPU or the mean of several."""
    return _colour(percent, _BUSY_PERCENT)


def heavier(*colours: str) -> str:
    """Return the colour of the heaviest of loads; empty ones, which are unknown, do not count."""
    return max((colour for colour in colours if colour), key=_COLOURS.index, default="")


def free_first(gpus: tuple[GpuReading, ...]) -> tuple[GpuReading, ...]:
    """Return the GPUs with those that are free before the others, each by number."""
    return tuple(sorted(gpus, key=lambda gpu: not is_free(gpu)))


def _colour(percent: float, thresholds: tuple[int, int]) -> str:
    return _COLOURS[sum(percent >= least for least in thresholds)]
