"""A moment of a recording as it is typed: ``03:12``, ``03:12:30``, ``2026-11-22 03:12``."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta

_TIME = re.compile(r"(?:(\d{4})-(\d\d?)-(\d\d?)[ T])?(\d\d?):(\d\d)(?::(\d\d))?")
_BEGUN = re.compile(r"\d{4}-[\d-]*[ T]?[\d:]*|\d{1,2}:[\d:]*")


def is_begun(text: str) -> bool:
    """Whether what is typed may become a moment."""
    return bool(_BEGUN.fullmatch(text.strip()))


def moment_of(text: str, first_s: float, last_s: float) -> float | None:
    """Seconds since the epoch, by the local clock; None if it is no time of day or no date.

    A time without a date is the first such moment of the recording; where it has none, the nearest before its end.

    Args:
        first_s: where the recording begins; `last_s`: where it ends.
    """
    found = _TIME.fullmatch(text.strip())
    if found is None:
        return None
    *date, hour, minute, second = (int(part) if part else 0 for part in found.groups())
    try:
        if found[1]:
            return datetime(date[0], date[1], date[2], hour, minute, second).astimezone().timestamp()
        day = datetime.fromtimestamp(first_s).replace(hour=hour, minute=minute, second=second, microsecond=0)
    except ValueError:
        return None
    moment_s = day.astimezone().timestamp()
    if moment_s < int(first_s):
        tomorrow_s = (day + timedelta(days=1)).astimezone().timestamp()
        return tomorrow_s if tomorrow_s <= last_s else moment_s
    return moment_s


def span(first_s: float, last_s: float) -> str:
    """From when to when, the date once."""
    first, last = time.localtime(first_s), time.localtime(last_s)
    same_day = first[:3] == last[:3]
    return f"{time.strftime('%m-%d %H:%M', first)}–{time.strftime('%H:%M' if same_day else '%m-%d %H:%M', last)}"
