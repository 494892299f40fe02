"""What every test of a screen runs with."""

from __future__ import annotations

from typing import Any

import pytest
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.widgets import Input


@pytest.fixture(autouse=True)
def steady_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cursor that blinks is there in one picture and gone in the next."""
    monkeypatch.setattr(Input, "_toggle_cursor", lambda field: None)


_PARSED: dict[tuple[object, ...], list[RuleSet]] = {}


@pytest.fixture(autouse=True)
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of programs would parse the same style sheets; a stylesheet of Textual 8 keeps what it parsed itself."""
    parse = Stylesheet._parse_rules

    def remembered(sheet: Stylesheet, css: str, *rest: Any, **named: Any) -> list[RuleSet]:
        key = (css, *map(str, rest), *map(str, named.items()), *sheet._variables.items())
        if key not in _PARSED:
            _PARSED[key] = parse(sheet, css, *rest, **named)
        return _PARSED[key]

    monkeypatch.setattr(Stylesheet, "_parse_rules", remembered)
