"""Whether the memory in use rises steadily, and when it fills the device. Time is the snapshots' own."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

_KEPT_S = 900.0
_PART_S, _PARTS = 60.0, 4
"""A rise is seen over so many parts of at least this length: what loads a model, or fills its cache, stops before."""
_SEEN, _LEAST_IN_PART = 0.95, 3
_STEADY = (0.3, 3.0)
"""Each part rises by so many times the mean: one jump is no growth."""
_FALL_SHARE = 0.02
"""Memory that falls by this share of the device was emptied: a smaller fall is noise."""
_LONGEST_OUTLOOK_S = 3600.0
"""Further ahead than this nothing is predicted."""

_Point = tuple[float, float]


class Trend:
    """The memory in use over the last quarter of an hour, one point a second at most."""

    def __init__(self) -> None:
        self._times_s = array("d")
        self._used_bytes = array("d")  # to the byte, up to 8 PiB

    def add(self, time_s: float, used_bytes: int) -> None:
        """Take in a reading. A clock that was set back starts afresh."""
        if self._times_s and time_s < self._times_s[-1]:
            self.clear()
        if self._times_s and time_s - self._times_s[-1] < 1.0:
            self._used_bytes[-1] = max(self._used_bytes[-1], used_bytes)
            return
        self._times_s.append(time_s)
        self._used_bytes.append(used_bytes)
        old = bisect_left(self._times_s, time_s - _KEPT_S)
        del self._times_s[:old], self._used_bytes[:old]

    def clear(self) -> None:
        """Forget what was: a process has ended, and what others hold begins anew."""
        del self._times_s[:], self._used_bytes[:]

    def seconds_to(self, size_bytes: int) -> float | None:
        """Return seconds until `size_bytes` are in use; None without steady growth, or if it takes over an hour.

        For memory that is emptied now and then each part is as long as the longest time between two such moments:
        only what rises from one such period to the next grows. Lowest, median and highest of each part must rise.
        """
        points = list(zip(self._times_s, self._used_bytes, strict=True))
        if not points:
            return None
        part_s = max(_PART_S, _longest_period_s(points, round(_FALL_SHARE * size_bytes)))
        parts = _last_parts(points, part_s)
        if points[-1][0] - points[0][0] < _SEEN * _PARTS * part_s or min(map(len, parts)) < _LEAST_IN_PART:
            return None
        ordered = [sorted(part) for part in parts]
        medians = [part[len(part) // 2] for part in ordered]
        mean = (medians[-1] - medians[0]) / (_PARTS - 1)
        least, most = _STEADY
        if mean <= 0 or not all(least * mean <= rise <= most * mean for rise in _rises(medians)):
            return None
        lowest, highest = [part[0] for part in ordered], [part[-1] for part in ordered]
        if min(*_rises(lowest), *_rises(highest)) < least * mean or highest[-1] == medians[-1]:
            return None  # the last is of growth that has stopped
        left_s = max(0, size_bytes - highest[-1]) * part_s / mean
        return left_s if left_s <= _LONGEST_OUTLOOK_S else None


def _rises(levels: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(levels)]


def _last_parts(points: Sequence[_Point], part_s: float) -> list[list[float]]:
    """Divide the newest points among parts of one length, the oldest part first."""
    end_s = points[-1][0]
    parts: list[list[float]] = [[] for _ in range(_PARTS)]
    for time_s, used_bytes in points:
        place = int((end_s - time_s) / part_s)
        if place < _PARTS:
            parts[_PARTS - 1 - place].append(used_bytes)
    return parts


def _longest_period_s(points: Sequence[_Point], fall_bytes: int) -> float:
    """Return the longest time from one fall to the next, or up to now; 0 where memory was never emptied.

    A fall from a level far below today's does not count: the memory held now was never emptied.
    """
    falls: list[_Point] = []
    peak = low = points[0][1]
    is_falling = False
    for time_s, used_bytes in points:
        if is_falling:
            low = min(low, used_bytes)
            if used_bytes > low + fall_bytes:
                is_falling, peak = False, used_bytes
        elif used_bytes < peak - fall_bytes:
            falls.append((time_s, peak))
            is_falling, low = True, used_bytes
        else:
            peak = max(peak, used_bytes)
    now_s = points[-1][0]
    level = max(used_bytes for time_s, used_bytes in points if time_s > now_s - _PART_S)
    times = [points[0][0], *(time_s for time_s, _ in falls)]
    periods = [after - before for (before, after), (_, peak) in zip(pairwise(times), falls, strict=True)
               if peak > level - fall_bytes]  # fmt: skip
    if falls and falls[-1][1] > level - fall_bytes:
        periods.append(now_s - falls[-1][0])
    return max(periods, default=0.0)
