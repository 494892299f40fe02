"""Which of many rows and combinations are tried each time, and which by `pytest -m slow` or `-m exhaustive`."""

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


def slow_beyond(first: int, rows: Iterable[Any]) -> list[Any]:
    """All rows of a parametrization: the first ones are tried each time, the others that have no mark are `slow`."""
    return [_slow(row) if number >= first else row for number, row in enumerate(rows)]


def _slow(row: Any) -> Any:
    if isinstance(row, type(pytest.param())):
        return row if row.marks else pytest.param(*row.values, marks=pytest.mark.slow, id=row.id)
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_name, value))
    return str(getattr(value, "name", getattr(value, "__name__", value))).strip("_")
