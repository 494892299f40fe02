"""When a GPU will be full, if its memory goes on growing as it did over the last minute."""

from __future__ import annotations

from collections import deque
from itertools import combinations

_WINDOW_S = 60.0
_SHORTEST_S = 15.0
"""Less than this has no trend yet: a model being loaded grows fast and stops."""
_MOST_POINTS = 24
_LONGEST_S = 3600.0
"""Further ahead than this nothing is predicted."""


class Trend:
    """The memory in use over the last minute."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, time_s: float, used_bytes: int) -> None:
        """Take in a reading. A clock that was set back starts afresh."""
        if self._points and time_s <= self._points[-1][0]:
            if time_s == self._points[-1][0]:
                return
            self._points.clear()
        self._points.append((time_s, used_bytes))
        while self._points[0][0] < time_s - _WINDOW_S:
            self._points.popleft()

    def seconds_to(self, size_bytes: int) -> float | None:
        """Seconds until `size_bytes` are in use; None without steady growth, or if it takes more than an hour.

        The growth is the median of the slopes between all pairs of points (Theil 1950, Sen 1968), which a burst or a
        dip of less than 29 % of the points does not move. Growth that stopped within the last quarter is none.
        """
        points = list(self._points)
        if len(points) < 4 or points[-1][0] - points[0][0] < _SHORTEST_S:
            return None
        points = points[:: -max(1, -(-len(points) // _MOST_POINTS))][::-1]
        slope = _slope(points)
        if slope <= 0 or _slope(points[-max(2, len(points) // 4) :]) <= 0:
            return None
        left_s = max(0, size_bytes - points[-1][1]) / slope
        return left_s if left_s <= _LONGEST_S else None


def _slope(points: list[tuple[float, int]]) -> float:
    """Bytes a second."""
    import statistics  # brings decimals and random numbers: not before the first frame

    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2))
