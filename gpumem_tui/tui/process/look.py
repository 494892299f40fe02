"""A deep look at one step: how memory went over it, and of what its peak consists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket, format_bytes
from gpumem_tui.probe.wire import LookAnswer, LookedDevice
from gpumem_tui.text import printable
from gpumem_tui.tui.kit.chart import LABEL_WIDTH, Band, Stack, area_rows, ends_row, stacked
from gpumem_tui.tui.kit.figures import MUTED, Row, compact_bytes, fit, joined, ruled, seconds, span_width
from gpumem_tui.tui.kit.shares import bucket_cells
from gpumem_tui.watch.records import device_name, kept_place
from gpumem_tui.watch.report import bucket_words

Place = Literal["module", "source"]

_CHART_HEIGHT = 9
_SIZE_WIDTH = 12
_SHARE_WIDTH = 8
_MOST_PLACES = 60
_MOST_KEPT = 6
_REST = Band("the rest", "$activations")
_STANDING = {
    Bucket.PARAMETERS: Band(Bucket.PARAMETERS.title, "$parameters"),
    Bucket.OPTIMIZER: Band(Bucket.OPTIMIZER.title, "$optimizer"),
}
"""Buckets that are there all through a step, if the step did not make them."""


def step_page(look: LookAnswer, width: int) -> list[Row]:
    """Return how memory went over the step, device by device."""
    rows: list[Row] = []
    for device in look.devices:
        rows += [_device_heading(device, width), *_chart(device, look.step_s, width), []]
        rows += [*_bucket_rows(device, width), []]
    return [*rows, *_kept_rows(look, width), *_reasons(look)]


def place_page(look: LookAnswer, by: Place, width: int) -> list[Row]:
    """Return what the peak consists of by module or source line, the largest first; the bar shows of which buckets."""
    rows: list[Row] = []
    for device in look.devices:
        rows.append(_device_heading(device, width))
        rows += [*_place_rows(device, by, width), []]
    if not any(getattr(held, by) for device in look.devices for held in device.held):
        rows += [[(f"No figures by {by}.", MUTED)]]
    return [*rows, *_reasons(look)]


def look_title(look: LookAnswer) -> str:
    """Return which step was looked at, and how long it took with the recording."""
    return f"step {look.step:,}, recorded in {seconds(look.step_s)}"


def _device_heading(device: LookedDevice, width: int) -> Row:
    left: Row = [(device_name(device.device), "bold $primary")]
    right: Row = [
        ("peak ", MUTED),
        (format_bytes(device.peak_bytes), "bold"),
        (f" at {seconds(device.peak_s)}", MUTED),
    ]
    return ruled(left, right, width)


def _kept_rows(look: LookAnswer, width: int) -> Iterator[Row]:
    """Yield what every step leaves behind: a leak, if there is one."""
    if look.kept is None:
        if look.devices and "kept" not in look.unavailable:
            yield [("Growth per step shows after two more steps.", MUTED)]
        return
    if not look.kept:
        yield [("Every step releases what it makes.", MUTED)]
        return
    yield [("Left behind by every step, and not released two steps later", "bold $warning")]
    for kept in look.kept[:_MOST_KEPT]:
        row: Row = [(f"{format_bytes(kept.bytes):>{_SIZE_WIDTH}}", "bold"), ("  ", "")]
        yield [*row, (fit(printable(kept_place(kept)), max(0, width - span_width(row))), "")]


# The timeline


def _chart(device: LookedDevice, step_s: float, width: int) -> list[Row]:
    if not device.timeline:
        return [[("no timeline", MUTED)]]
    columns = max(1, width - LABEL_WIDTH)
    end_s = max(step_s, device.timeline[-1][0]) or 1.0
    live = _by_column(device, columns, end_s)
    standing = _standing(device)
    stacks = (_stack(size_bytes, device.peak_bytes, standing) for size_bytes in live)
    peak = min(columns - 1, int(device.peak_s / end_s * columns))
    beside = " peak" if len(" peak") < columns - peak else ""
    legend: Row = [(" " * LABEL_WIDTH, "")]
    for band in [*standing, _REST]:
        legend += [("█", band.colour), (f" {band.title}  ", "")]
    return [
        *area_rows(stacks, _CHART_HEIGHT, compact_bytes(device.peak_bytes)),
        [(" " * (LABEL_WIDTH + peak), ""), ("▲", "bold $warning"), (beside, "$warning")],
        *_phase_rows(device, columns, end_s),
        legend,
    ]


def _by_column(device: LookedDevice, columns: int, end_s: float) -> list[int]:
    """Return the most that was live in each column; where nothing changed, what was live before."""
    live: list[int | None] = [None] * columns
    last: dict[int, int] = {}
    for at_s, size_bytes in device.timeline:
        index = min(columns - 1, int(at_s / end_s * columns))
        live[index] = max(live[index] or 0, size_bytes)
        last[index] = size_bytes
    filled = []
    standing = device.timeline[0][1]
    for index, size in enumerate(live):
        filled.append(standing if size is None else max(size, standing))
        standing = last.get(index, standing)
    return filled


def _standing(device: LookedDevice) -> dict[Band, int]:
    """Parameters and optimizer state, if they were there from the first moment on."""
    sizes = {band: device.breakdown[bucket] for bucket, band in _STANDING.items() if device.breakdown[bucket]}
    least = min(size_bytes for _, size_bytes in device.timeline)
    return sizes if sum(sizes.values()) <= least else {}


def _stack(size_bytes: int, top: int, standing: dict[Band, int]) -> Stack:
    edges = zip(accumulate(standing.values()), standing, strict=True)
    return stacked([*edges, (size_bytes, _REST)], top, _CHART_HEIGHT)


def _phase_rows(device: LookedDevice, columns: int, end_s: float) -> Iterator[Row]:
    """Return where each phase begins, with its name where there is room; then the time."""
    line = [" "] * columns
    starts = [(min(columns - 1, int(at_s / end_s * columns)), name) for at_s, name in device.phases]
    ends = [start for start, _ in starts[1:]] + [columns]
    for (start, name), end in zip(starts, ends, strict=True):
        text = f"│{name or 'step'}"[: max(1, end - start)]
        line[start : start + len(text)] = text
    if starts:
        yield [(" " * LABEL_WIDTH + "".join(line), "")]
    yield ends_row(columns, seconds(end_s))


# The composition


def _bucket_rows(device: LookedDevice, width: int) -> Iterator[Row]:
    for bucket in ALLOCATED_BUCKETS:
        size_bytes = device.breakdown[bucket]
        if size_bytes or device.highest.get(bucket.value):
            yield _size_row({bucket: size_bytes}, bucket_words(device, bucket), device.peak_bytes, width)


def _place_rows(device: LookedDevice, by: Place, width: int) -> Iterator[Row]:
    places: defaultdict[str, defaultdict[Bucket, int]] = defaultdict(lambda: defaultdict(int))
    for held in device.held:
        places[held.place(by)][Bucket(held.bucket)] += held.bytes
    ordered = sorted(places.items(), key=lambda pair: -sum(pair[1].values()))
    for name, sizes in ordered[:_MOST_PLACES]:
        yield _size_row(sizes, name, device.peak_bytes, width)
    rest = ordered[_MOST_PLACES:]
    if rest:
        sizes = defaultdict(int)
        for _, more in rest:
            for bucket, size_bytes in more.items():
                sizes[bucket] += size_bytes
        yield _size_row(sizes, f"{len(rest)} smaller places", device.peak_bytes, width)


def _size_row(sizes: dict[Bucket, int], name: str, peak_bytes: int, width: int) -> Row:
    """Size, share, a bar of the share in the patterns of its buckets, and whose it is."""
    total = sum(sizes.values())
    share = total / peak_bytes if peak_bytes else 0.0
    bar_width = max(8, min(40, width // 4))
    shown = [bucket for bucket in ALLOCATED_BUCKETS if sizes.get(bucket)]
    filled = max(len(shown), round(share * bar_width))
    bar = joined(bucket_cells(sizes, min(bar_width, filled)))
    row: Row = [
        (f"{format_bytes(total):>{_SIZE_WIDTH}}", "bold"),
        (f"{share:>{_SHARE_WIDTH}.1%}  ", MUTED),
        *bar,
        (" " * (bar_width - span_width(bar) + 2), ""),
    ]
    return [*row, (fit(name, max(0, width - span_width(row))), "")]


def _reasons(look: LookAnswer) -> Iterator[Row]:
    """Yield how the step was recorded, and what is not known."""
    if look.method:
        yield [(f"recorded by the {look.method}", MUTED)]
    for what, why in look.unavailable.items():
        yield [(f"no {what}: ", "$warning"), (printable(why), MUTED)]
