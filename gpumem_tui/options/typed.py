"""Values as a user types them, on the command line and in a form."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

_TOKEN_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def rows_text(rows: Iterable[tuple[str, float]]) -> str:
    """Return shares, or numbers, of rows as they are typed, with a space between two."""
    return " ".join(f"{place}={share:.15g}" if place else f"{share:.15g}" for place, share in rows)


def rows_from(text: str) -> tuple[str, float]:
    """Return a share, or FILE:LINE=SHARE or FILE:LINE=NUMBER for one place, as (place, share or number).

    Raises:
        ValueError: it is neither; one line names what to type.
    """
    place, _, share = text.rpartition("=")
    try:
        found = float(share)
    except ValueError:
        found = -1.0
    if not 0 <= found <= (sys.maxsize if place else 1) or (place and not re.search(r":\d+$", place)):
        raise ValueError(f"{text!r} is not a share from 0 to 1 such as 0.25, or FILE:LINE=SHARE or FILE:LINE=NUMBER")
    return place, found


def tokens_from(text: str) -> int:
    """Return a number of tokens: 2000000000, 2,000,000,000, 2B or 1.5T.

    Raises:
        ValueError: it is none; one line names what to type.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.replace(",", ""), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a number of tokens such as 2000000000, 2B or 1.5T")
    return round(float(match[1]) * _TOKEN_UNITS[match[2].upper()])
