"""Combinations of three values, of which every two together are enough to be tried each time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairwise(
    firsts: Iterable[Any], seconds: Sequence[Any], thirds: tuple[Any, Any], mark: pytest.MarkDecorator | None = None
) -> list[Any]:
    """All combinations of three: those that have every two of them together get a mark, the others are `exhaustive`."""
    return [
        pytest.param(
            first,
            second,
            third,
            marks=([] if mark is None else mark) if (row + column + place) % 2 == 0 else pytest.mark.exhaustive,
            id="-".join(_name(one) for one in (first, second, third)),
        )
        for row, first in enumerate(firsts)
        for column, second in enumerate(seconds)
        for place, third in enumerate(thirds)
    ]


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_name, value))
    return str(getattr(value, "name", getattr(value, "__name__", value))).strip("_")
