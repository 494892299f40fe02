"""How a line of any screen's help is written."""

from __future__ import annotations

from gpumem_tui.tui.kit.figures import Row

_NAME_WIDTH = 11


def heading(text: str) -> Row:
    """Above a group of entries."""
    return [(text, "bold $primary")]


def entry(name: str, what: str) -> Row:
    """A key, a column or a mark, and what it means."""
    return [(f"{name:<{_NAME_WIDTH}}", "bold"), (what, "")]
