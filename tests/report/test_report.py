"""Tables, JSON and the driver that every report is printed by."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from enum import Enum
from math import inf, nan

import pytest

from gpumem_tui.memory import Unknown
from gpumem_tui.report import markdown
from gpumem_tui.report.objects import Body, encoded, known, picked, reason_of
from gpumem_tui.report.output import Printer, Progress, interrupts, so_far, written
from gpumem_tui.report.tables import TextColumn, TextTable, ago, counted, cut_to, largest_first


def test_cells_are_aligned_and_cut_only_where_the_column_says_so() -> None:
    table = TextTable(
        TextColumn("GPU", 3, ">"), TextColumn("Name", 4, cut=True), TextColumn("Size", 6, ">"), TextColumn("Note")
    )
    assert list(table.lines([("0", "NVIDIA", "1", ""), ("10", "A", "1234567", "long note")])) == [
        "GPU  Name    Size  Note",
        "  0  NVID       1",
        " 10  A     1234567  long note",
    ]


def test_the_rest_of_a_long_list_is_one_line() -> None:
    assert list(largest_first([3, 2, 1], 2, str, lambda rest: f"{len(rest)} more")) == ["3", "2", "1 more"]
    assert list(largest_first([3, 2], 2, str, lambda rest: f"{len(rest)} more")) == ["3", "2"]


def test_lines_are_cut_to_the_terminal() -> None:
    assert list(cut_to(["12345", "123456"], 5)) == ["12345", "1234…"]


def test_words() -> None:
    assert [counted(1, "trial"), counted(2000, "trial")] == ["1 trial", "2,000 trials"]
    assert [ago(-1), ago(119), ago(120), ago(7200), ago(2 * 86400)] == [
        "0 s ago", "119 s ago", "2 min ago", "2 h ago", "2 d ago",
    ]  # fmt: skip


def test_what_is_unknown_is_null_with_its_reason() -> None:
    body = Body(name="GPU 0")
    body.put("power_w", Unknown("not supported"))
    body.put("clock", nan)
    body.put_all(("a", "b"), Unknown("gone"))
    body.put_each("ledger", {"free": 5, "process": Unknown("no permission")})
    assert body.done(instances=[]) == {
        "name": "GPU 0",
        "power_w": None,
        "clock": None,
        "a": None,
        "b": None,
        "ledger": {"free": 5, "process": None},
        "unavailable": {
            "power_w": "not supported", "clock": "not a number", "a": "gone", "b": "gone",
            "ledger.process": "no permission",
        },
        "instances": [],
    }  # fmt: skip
    assert (known(Unknown("x")), known(3), reason_of(Unknown("x")), reason_of(3)) == (None, 3, "x", None)


class _Kind(Enum):
    ONE = "one"


@dataclass
class _Row:
    size_bytes: int
    kind: _Kind
    pair: tuple[int, int]


def test_records_are_encoded_and_numbers_are_finite() -> None:
    row = _Row(1 << 40, _Kind.ONE, (1, 2))
    assert encoded({"row": row}) == '{"row": {"size_bytes": 1099511627776, "kind": "one", "pair": [1, 2]}}'
    assert picked(row, "size_bytes") == {"size_bytes": 1 << 40}
    with pytest.raises(ValueError, match="not JSON compliant"):
        encoded(inf)


def test_the_same_results_as_lines_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        output = Printer(as_json=as_json)
        output.show(lines=lambda: ["begins"])
        for _ in range(31):
            output.show_row(body=lambda: {"row": 1}, header="head", line=lambda: "row")
        output.show(body=lambda: {"end": True}, lines=lambda: ["ends", "here"])
        lines = capsys.readouterr().out.splitlines()
        if as_json:
            assert [json.loads(line) for line in lines] == [{"row": 1}] * 31 + [{"end": True}]
        else:
            assert lines == ["begins", "head", *["row"] * 30, "head", "row", "ends", "here"]


def test_progress_is_nothing_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output = Printer(as_json=False)
    output.progress.say("working")
    output.progress.clear()
    assert capsys.readouterr().err == ""


def test_an_interrupt_while_writing_is_an_ordinary_end() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert written(interrupted) == 130
    assert written(lambda: None) == 0


def test_an_interrupt_cancels_only_within_the_context() -> None:
    before, calls = signal.getsignal(signal.SIGINT), []
    with interrupts(lambda: calls.append(1)):
        os.kill(os.getpid(), signal.SIGINT)
    assert calls == [1]
    assert signal.getsignal(signal.SIGINT) is before


def test_markdown() -> None:
    parts = ["# Title", markdown.table(("a", "b"), [("1", "2")]), markdown.bullets(["x", "y"]), markdown.shell("ls")]
    assert markdown.document(parts) == (
        "# Title\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n- x\n- y\n\n```sh\nls\n```\n"
    )
    assert markdown.sentence("it fits") == "It fits."


def test_how_long_something_takes_is_shown_until_it_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = Progress()
    with progress.during("tracing …", 10):
        pass
    assert "tracing … 0 s, about 10 s left" in capsys.readouterr().err
    assert so_far(12, 10) == "12 s, about 1 s left"
    assert so_far(12, 0) == "12 s"
