"""What every test of a screen runs with."""

from __future__ import annotations

import pytest
from textual.widgets import Input


@pytest.fixture(autouse=True)
def steady_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cursor that blinks is there in one picture and gone in the next."""
    monkeypatch.setattr(Input, "_toggle_cursor", lambda field: None)
