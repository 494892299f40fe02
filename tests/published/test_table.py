"""The table of all that others measured: what it states of a row, and when it fails."""

from __future__ import annotations

import pytest

from gpumem_tui.memory import MIB, Range
from tests.published import __main__ as table


def _printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str) -> tuple[int, list[str]]:
    """Print a table of a row inside its range and of one outside with this cause; return its exit code and lines."""
    rows = [("inside", 100 * MIB, ""), ("outside", 125 * MIB, why)]

    def line(row: tuple[str, int, str]) -> table._Line:
        return table._Line(row[0], "reserved", Range(90 * MIB, 100 * MIB), row[1], 0, row[2])

    part = table._Part(line, "measured", lambda _: rows)
    monkeypatch.setattr(table, "_PARTS", {"made-up": part})
    return table.main([]), capsys.readouterr().out.splitlines()


def test_a_row_outside_without_a_cause_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, [inside, outside, summary, *_] = _printed(monkeypatch, capsys, "")
    assert code == 1
    assert inside.endswith("inside")
    assert outside.endswith("outside -20.000 %  NO CAUSE")
    assert "reserved: 2 rows, 1 inside, 1 outside: 1 without a cause" in summary


def test_a_cause_is_printed_and_what_is_left_of_it_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, [_, outside, summary, *_] = _printed(monkeypatch, capsys, "half of it is a copy; the rest is not explained")
    assert code == 0
    assert outside.endswith("a copy; the rest is not explained")
    assert "0 without a cause, 1 whose cause is not known in whole" in summary
    assert summary.endswith("median 10.000 %, 90th percentile 18.000 %, worst 20.000 %")


def test_every_part_has_rows() -> None:
    assert [name for name, part in table._PARTS.items() if not part.load() and not part.needs] == []


def _never(_: int) -> table._Line:
    raise AssertionError("there are no rows")


def test_a_missing_library_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert table._Part(_never, "measured", lambda _: [1], ("no_such_library",)).load() == ()
    assert "measured: needs no_such_library" in capsys.readouterr().err
