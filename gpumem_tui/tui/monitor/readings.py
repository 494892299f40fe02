"""Readings as the Monitor writes them: short, and of a known width. A reading that is unknown is a dash."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpumem_tui.memory import GIB, Unknown, Value
from gpumem_tui.monitor.alerts import AlertKind
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.snapshot import DeviceState, GpuReading
from gpumem_tui.tui.kit.figures import ABSENT, Span, fit_right
from gpumem_tui.tui.monitor.state import MonitorState

T = TypeVar("T")

_BRANDS = ("NVIDIA ", "GeForce ", "Tesla ", "Quadro ", "Graphics Device ")


def known(reading: Reading[T], write: Callable[[T], str]) -> str:
    """A reading as text, or a dash."""
    return ABSENT if isinstance(reading, Unknown) else write(reading)


def gib(value: Value) -> str:
    """GiB without the unit, for columns that say it; two decimals at most."""
    return ABSENT if isinstance(value, Unknown) else f"{value / GIB:.{2 if value < 1000 * GIB else 0}f}"


def short_name(name: str) -> str:
    """A GPU's name without what every name has.

    >>> short_name("NVIDIA GeForce RTX 4090")
    'RTX 4090'
    """
    for brand in _BRANDS:
        name = name.replace(brand, "")
    return name


def used_share(gpu: GpuReading) -> float | None:
    """What is used of the device, the driver's reserve apart, as a share of its total."""
    memory = gpu.visible_memory
    if isinstance(memory, Unknown) or memory.total_bytes <= 0:
        return None
    return memory.used_bytes / memory.total_bytes


def utilization_span(gpu: GpuReading, width: int = 4) -> Span:
    """ "87%"; what a MIG device says is never 0."""
    return fit_right(known(gpu.utilization_percent, lambda value: f"{value}%"), width), ""


def power_span(gpu: GpuReading, width: int = 5) -> Span:
    """Watts now."""
    return fit_right(known(gpu.power_w, lambda value: f"{value:.0f}W"), width), ""


def temperature_span(state: MonitorState, gpu: GpuReading, width: int = 5) -> Span:
    """Degrees, in warning colours while there is an alert about them."""
    hot = state.warns(gpu, AlertKind.HOT)
    return fit_right(known(gpu.temperature_c, lambda value: f"{value}°C"), width), "bold $warning" if hot else ""


def used_span(state: MonitorState, gpu: GpuReading, width: int) -> Span:
    """ "61.20/79.25", used of total in GiB, in warning colours while there is an alert about them."""
    memory = gpu.visible_memory
    if isinstance(memory, Unknown):
        return fit_right(ABSENT, width), ""
    decimals = 2 if width >= 11 else 1
    text = f"{memory.used_bytes / GIB:.{decimals}f}/{memory.total_bytes / GIB:.{decimals}f}"
    return fit_right(text, width), "bold $warning" if state.warns(gpu, AlertKind.NEAR_FULL) else "bold"


def state_span(gpu: GpuReading) -> Span | None:
    """How a device stands if it does not answer: "stale 4 s", "lost"."""
    if gpu.state is DeviceState.STALE:
        return f"stale {gpu.age_s:.0f} s", "bold $warning"
    if gpu.state is DeviceState.LOST:
        return "lost", "bold $error"
    return None
