"""Settings of every test of a screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.widgets import Input

from gpumem_tui.errors import own_error
from gpumem_tui.tui.kit import background


@pytest.fixture(autouse=True)
def steady_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cursor that blinks is there in one picture and gone in the next."""
    monkeypatch.setattr(Input, "_toggle_cursor", lambda field: None)


@pytest.fixture
def own_errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors that the program has named as its own."""
    named: list[str] = []

    def name(error: BaseException) -> str:
        named.append(own_error(error))
        return named[-1]

    monkeypatch.setattr(background, "own_error", name)
    return named


@pytest.fixture(autouse=True)
def no_error_of_ours(own_errors: list[str], request: pytest.FixtureRequest) -> Iterator[None]:
    """The program continues after an unexpected error; a test does not, unless it asks for `own_errors` itself."""
    yield
    assert "own_errors" in request.node.function.__code__.co_varnames or not own_errors, own_errors


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
