"""The stacked bar of the device's memory, drawn with a pattern and a colour for every bucket."""

from __future__ import annotations

from textual.content import Content
from textual.widget import Widget

from gpumem_tui.tui.kit.figures import Row, compact_bytes, proportions, wrapped
from gpumem_tui.tui.kit.glyphs import BAR_ORDER, BUCKET_LOOKS
from gpumem_tui.tui.kit.text import assembled
from gpumem_tui.tui.search.bar import BarView, bar_view
from gpumem_tui.tui.search.state import SearchState

_LEGEND_TITLE_WIDTH = 15
_LEGEND_VALUE_WIDTH = 8
_ROOMY = 100


class MemoryBar(Widget):
    """A heading, the bar, and its legend in numbers as far as the height allows."""

    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__()
        self._view = BarView("", {})

    def show(self, state: SearchState) -> None:
        """Render a state; nothing is drawn again if nothing changed."""
        view = bar_view(state)
        if view != self._view:
            self._view = view
            self.border_title = Content(view.title)
            self.refresh()

    def render(self) -> Content:
        """The bar at the widget's size."""
        width = self.size.width
        shown = [(bucket, self._view.segments[bucket]) for bucket in BAR_ORDER if self._view.segments.get(bucket)]
        cells = proportions([size_bytes for _, size_bytes in shown], width)
        bar: Row = [
            (BUCKET_LOOKS[bucket][0] * count, BUCKET_LOOKS[bucket][1])
            for (bucket, _), count in zip(shown, cells, strict=True)
        ]
        legend = [
            [
                (BUCKET_LOOKS[bucket][0], BUCKET_LOOKS[bucket][1]),
                (f" {bucket.title:<{_LEGEND_TITLE_WIDTH}}", ""),
                (f"{compact_bytes(size_bytes):>{_LEGEND_VALUE_WIDTH}}", "bold"),
            ]
            for bucket, size_bytes in shown
        ]
        return assembled([bar, *wrapped(legend, width, gap=3 if width > _ROOMY else 1)])
