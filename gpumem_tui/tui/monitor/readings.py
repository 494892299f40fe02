"""Readings as the Monitor writes them: short, and of a known width. A reading that is unknown is a dash."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rich.cells import cell_len, set_cell_size

from gpumem_tui.memory import GIB, Unknown, Value
from gpumem_tui.monitor.alerts import AlertKind
from gpumem_tui.monitor.snapshot import GpuReading, Reading, State
from gpumem_tui.tui.kit.figures import ABSENT, Span, span_width
from gpumem_tui.tui.monitor.state import MonitorState

T = TypeVar("T")

RULE = "$foreground 25%"
_ELLIPSIS = "…"
_BRANDS = ("NVIDIA ", "GeForce ", "Tesla ", "Quadro ", "Graphics Device ")


def known(reading: Reading[T], write: Callable[[T], str]) -> str:
    """A reading as text, or a dash."""
    return ABSENT if isinstance(reading, Unknown) else write(reading)


def fit(text: str, width: int) -> str:
    """The text in exactly `width` cells: padded, or cut with an ellipsis; control characters are no part of it."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    if text.isascii():
        return text.ljust(width) if len(text) <= width else f"{text[: max(0, width - 1)]}{_ELLIPSIS}"[: max(0, width)]
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(0, width - 1)) + _ELLIPSIS if width > 0 else ""


def fit_right(text: str, width: int) -> str:
    """The text at the right of `width` cells."""
    return text.rjust(width) if len(text) <= width else fit(text, width)


def ruled(left: list[Span], right: list[Span], width: int) -> list[Span]:
    """A heading: a thin line between what stands left and what stands right."""
    gap = width - span_width(left) - span_width(right)
    if gap < 3:
        return [*left, (" " * max(0, gap), ""), *right]
    line = f" {'─' * (gap - 2)} " if right else f" {'─' * (gap - 1)}"
    return [*left, (line, RULE), *right]


def gib(value: Value) -> str:
    """GiB without the unit, for columns that say it; two decimals at most."""
    return ABSENT if isinstance(value, Unknown) else f"{value / GIB:.{2 if value < 1000 * GIB else 0}f}"


def age(seconds: float) -> str:
    """A duration in at most 6 characters, in its largest units, so that it seldom changes.

    >>> age(200000)
    '2d07h'
    """
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 60:
        return f"{whole}s"
    if hours < 1:
        return f"{minutes}m"
    if days < 1:
        return f"{hours}h{minutes % 60:02}m"
    return f"{days}d{hours % 24:02}h" if days < 100 else f"{days}d"


def clock(time_s: float) -> str:
    """The local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


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
    if gpu.state is State.STALE:
        return f"stale {gpu.age_s:.0f} s", "bold $warning"
    if gpu.state is State.LOST:
        return "lost", "bold $error"
    return None
