"""The history of each GPU's memory over the last hours, in bounded memory: the older, the coarser.

Each tier is a ring of buckets aligned to absolute time, so a chart that scrolls keeps its columns. A bucket keeps the
peak and the mean of what fell into it: a short peak is still there when a bucket is a minute wide.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from enum import Enum

from msgspec import Struct

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.probes import Probes
from gpumem_tui.monitor.snapshot import DeviceState, GpuReading, Snapshot

_NONE = -1.0
"""Nothing was read: no value is negative."""
_MOST_GPUS = 64
"""Unplugged and renamed GPUs are forgotten, the longest unseen first, beyond this many."""
_GAP_INTERVALS = 2.5
"""A silence of up to this many intervals is jitter: the last value holds. A longer one is a gap."""


_Asked = tuple[str, int, float]
"""A GPU, how many buckets of it, how many seconds each is wide."""


class Column(Enum):
    """A quantity of a GPU whose past is kept. Bytes, but for the utilization in per cent."""

    USED = "used"
    ALLOCATED = "allocated"
    RESERVED = "reserved"
    UTILIZATION = "utilization"


class Series(Struct, frozen=True):
    """Consecutive buckets of equal width, oldest first; the last one holds now and may still grow.

    Attributes:
        start_s: seconds since the epoch where the first bucket begins: always a multiple of `step_s`.
        peaks, means: one value a bucket for each column, None where nothing was read.
    """

    start_s: float
    step_s: float
    peaks: Mapping[Column, tuple[float | None, ...]]
    means: Mapping[Column, tuple[float | None, ...]]


class History:
    """The past of every GPU.

    Args:
        interval_s: seconds between snapshots, to tell jitter from a gap; may be changed at any time.
        hours: how far back it reaches.
    """

    def __init__(self, interval_s: float = 1.0, hours: float = 24.0) -> None:
        self.interval_s = interval_s
        self._hours = hours
        # (seconds a bucket, buckets): 15 minutes by the second, 2.5 hours by 10 s, the rest by the minute
        self._shape = ((1, 900), (10, 900), (60, max(150, math.ceil(hours * 60)) + 30))
        self._gpus: dict[str, _Gpu] = {}
        self._last: tuple[_Asked, float, Series] | None = None

    def emptied(self) -> History:
        """Make a history of the same kind that remembers nothing."""
        return History(self.interval_s, self._hours)

    def add(self, snapshot: Snapshot, probes: Probes | None = None) -> None:
        """Take in what a snapshot read. Readings that are stale are not taken twice."""
        for gpu in snapshot.gpus:
            if gpu.state is not DeviceState.OK:
                continue
            kept = self._gpus.pop(gpu.uuid, None) or _Gpu(self._shape)
            self._gpus[gpu.uuid] = kept  # at the end: the most lately seen
            kept.add(snapshot.time_s, values_of(gpu, probes or {}), self.interval_s * _GAP_INTERVALS)
        for uuid in list(self._gpus)[: max(0, len(self._gpus) - _MOST_GPUS)]:
            del self._gpus[uuid]

    def series(self, uuid: str, columns: int, span_s: float, now_s: float) -> Series:
        """Return the last `span_s` seconds in `columns` buckets, or more: widths are whole seconds or minutes.

        A bucket covers the same seconds in every call with the same `columns` and `span_s`.
        """
        rings = self._gpus[uuid].rings if uuid in self._gpus else (_Ring(1, 1),)
        ring = next((ring for ring in rings if ring.reaches(columns, span_s)), rings[-1])
        width = ring.width(columns, span_s)
        step_s = float(ring.step_s * width)
        last = math.floor(now_s / step_s)
        first = last - columns + 1
        asked = uuid, columns, step_s
        kept, fresh = self._kept(asked, first, now_s)
        pairs = {column: ring.merged(column, fresh, last, width) for column in Column}
        series = Series(
            start_s=first * step_s,
            step_s=step_s,
            peaks={column: (*kept.peaks[column], *peaks) if kept else peaks for column, (peaks, _) in pairs.items()},
            means={column: (*kept.means[column], *means) if kept else means for column, (_, means) in pairs.items()},
        )
        self._last = asked, now_s, series
        return series

    def _kept(self, asked: _Asked, first: int, now_s: float) -> tuple[Series | None, int]:
        """Return what the last answer has of these buckets that cannot change any more, and the first that can.

        A chart asks every second for the same buckets: only the one that holds now has changed.
        """
        if self._last is None or self._last[0] != asked or now_s < self._last[1]:
            return None, first
        _, before_s, last = self._last
        begin = round(last.start_s / last.step_s)
        fresh = math.floor((before_s - self.interval_s * _GAP_INTERVALS) / last.step_s)
        if not begin <= first < fresh:
            return None, first
        window = slice(first - begin, fresh - begin)
        peaks, means = ({column: one[window] for column, one in each.items()} for each in (last.peaks, last.means))
        return Series(start_s=first * last.step_s, step_s=last.step_s, peaks=peaks, means=means), fresh

    @property
    def size_bytes(self) -> int:
        """Return the memory the values take: constant once every GPU was seen."""
        return sum(ring.size_bytes for gpu in self._gpus.values() for ring in gpu.rings)


def values_of(gpu: GpuReading, probes: Probes) -> dict[Column, float]:
    """Return the known values of a reading that are kept."""
    values: dict[Column, float] = {}
    memory = gpu.visible_memory
    if not isinstance(memory, Unknown):
        values[Column.USED] = memory.used_bytes
    if not isinstance(gpu.telemetry.utilization_percent, Unknown):
        values[Column.UTILIZATION] = gpu.telemetry.utilization_percent
    figures = [figures for (uuid, _), figures in probes.items() if uuid == gpu.uuid]
    if figures:
        values[Column.ALLOCATED] = sum(each.allocated_bytes for each in figures)
        values[Column.RESERVED] = sum(each.reserved_bytes for each in figures)
    return values


class _Gpu:
    def __init__(self, shape: Sequence[tuple[int, int]]) -> None:
        self.rings = tuple(_Ring(step_s, length) for step_s, length in shape)
        self._time_s = -math.inf
        self._values: dict[Column, float] = {}

    def add(self, time_s: float, values: dict[Column, float], gap_s: float) -> None:
        if time_s == self._time_s:
            return  # this snapshot again
        for ring in self.rings:
            bucket = math.floor(time_s / ring.step_s)
            if 0 < time_s - self._time_s <= gap_s:
                for missed in range(math.floor(self._time_s / ring.step_s) + 1, bucket):
                    ring.put(missed, self._values)
            ring.put(bucket, values)
        self._time_s, self._values = time_s, values


class _Kept(Struct):
    """A quantity's values in a ring: by slot, and how many have fallen into the newest bucket."""

    peaks: array[float]
    means: array[float]
    count: int = 0


class _Ring:
    """A tier. Bucket n covers the seconds [n × step, (n + 1) × step) since the epoch, in slot n mod length."""

    def __init__(self, step_s: int, length: int) -> None:
        self.step_s = step_s
        self._length = length
        self._kept: dict[Column, _Kept] = {}  # of a GPU without a probe half of them are never read
        self._newest: int | None = None

    @property
    def size_bytes(self) -> int:
        return sum(2 * kept.peaks.itemsize * len(kept.peaks) for kept in self._kept.values())

    def width(self, columns: int, span_s: float) -> int:
        """Return how many own buckets each of `columns` needs to be at least `span_s` wide together."""
        return max(1, math.ceil(span_s / columns / self.step_s))

    def reaches(self, columns: int, span_s: float) -> bool:
        """Return whether so many columns lie within the ring."""
        return columns * self.width(columns, span_s) <= self._length

    def put(self, bucket: int, values: Mapping[Column, float]) -> None:
        if bucket != self._newest:
            self._turn_to(bucket)
        slot = bucket % self._length
        for column, value in values.items():
            kept = self._kept.get(column)
            if kept is None:
                nothing = array("d", [_NONE]) * self._length
                kept = self._kept[column] = _Kept(nothing, nothing[:])
            kept.count += 1
            if kept.count == 1:
                kept.peaks[slot] = kept.means[slot] = value
            else:
                kept.peaks[slot] = max(kept.peaks[slot], value)
                kept.means[slot] += (value - kept.means[slot]) / kept.count

    def merged(
        self, column: Column, first: int, last: int, width: int
    ) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        """Return peaks and means of the wide buckets `first` to `last`, each of `width` own buckets."""
        kept = self._kept.get(column)
        nothing = (None,) * (last - first + 1)
        if kept is None:
            return nothing, nothing
        peaks = self._window(kept.peaks, first * width, (last + 1) * width)
        starts = range(0, len(peaks), width)
        if max(peaks) < 0:  # no probe, or no driver that has it
            return nothing, nothing
        means = self._window(kept.means, first * width, (last + 1) * width)
        return (
            tuple(_known(max(peaks[start : start + width])) for start in starts),
            tuple(_mean(means[start : start + width]) for start in starts),
        )

    def _window(self, ring: array[float], begin: int, end: int) -> array[float]:
        """Return the values of the buckets [begin, end), in order."""
        newest = begin - 1 if self._newest is None else self._newest
        low = min(max(begin, newest - self._length + 1), end)
        high = max(low, min(end, newest + 1))
        start, stop = low % self._length, low % self._length + high - low
        values = ring[start:stop] + ring[: max(0, stop - self._length)]
        return array("d", [_NONE]) * (low - begin) + values + array("d", [_NONE]) * (end - high)

    def _turn_to(self, bucket: int) -> None:
        """Make a bucket the newest. A clock that was set back takes what is in its future with it."""
        if self._newest is None:
            emptied = range(0)  # it is empty
        elif abs(bucket - self._newest) >= self._length:
            emptied = range(bucket, bucket + self._length)
        elif bucket > self._newest:
            emptied = range(self._newest + 1, bucket + 1)
        else:
            emptied = range(bucket, self._newest + 1)
        for n in emptied:
            for kept in self._kept.values():
                kept.peaks[n % self._length] = kept.means[n % self._length] = _NONE
        for kept in self._kept.values():
            kept.count = 0
        self._newest = bucket


def _known(value: float) -> float | None:
    return None if value < 0 else value


def _mean(values: array[float]) -> float | None:
    known = values if min(values) >= 0 else [value for value in values if value >= 0]
    return sum(known) / len(known) if known else None
