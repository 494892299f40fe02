"""Lines of styled text as Textual's widgets take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.content import Content

from gpumem_tui.tui.kit.figures import Span


def assembled(lines: Iterable[Sequence[Span]]) -> Content:
    """The lines below each other."""
    return Content("\n").join(Content.assemble(*line) for line in lines)
