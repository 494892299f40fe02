"""The pane beside the numbers: worked out away from the screen, the latest request wins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message

from gpumem_tui.plan.answers import TracedAnswer
from gpumem_tui.plan.plan import Plan
from gpumem_tui.tui.kit.background import in_daemon_thread
from gpumem_tui.tui.kit.row_list import RowList
from gpumem_tui.tui.kit.rows import Rows, no_rows
from gpumem_tui.tui.plan.panes import PaneContent, PaneRequest, pane_content
from gpumem_tui.tui.plan.tabs import PaneNames

_SETTLE_S = 0.06
"""The pane follows the numbers by this much, so that it never holds them up."""


class PlanPane(Vertical):
    """Shows what is asked for when it is there; until then what was there before.

    Args:
        known: what a trace says of a plan, where there is one; called from another thread.
    """

    class Worked(Message):
        """The pane is drawn; `step`: memory over a step, to be drawn elsewhere."""

        def __init__(self, step: Rows) -> None:
            super().__init__()
            self.step = step

    def __init__(self, known: Callable[[Plan], TracedAnswer | None]) -> None:
        super().__init__(id="pane-box")
        self._known = known
        self._content = PaneContent(no_rows)
        self._wanted: PaneRequest | None = None
        self._shown: PaneRequest | None = None
        self._working = False

    def compose(self) -> ComposeResult:
        """The panes' names over the one that is shown."""
        yield PaneNames(classes="inner")
        yield RowList(id="pane")

    @property
    def settled(self) -> bool:
        """What was asked for last is what is shown."""
        return self._wanted == self._shown and not self._working

    def want(self, request: PaneRequest) -> None:
        """Show this as soon as it is worked out, unless something else is wanted by then."""
        self._wanted = request
        if not self._working and request != self._shown:
            self._working = True
            self.run_worker(self._work())

    def plan_of(self, key: str) -> Plan | None:
        """The plan that a row of the pane stands for; None where it stands for none."""
        return None if self._shown is None else self._content.plan_of(key, self._shown.plan)

    async def _work(self) -> None:
        try:
            while (wanted := self._wanted) is not None and wanted != self._shown:
                await asyncio.sleep(_SETTLE_S)
                if wanted != self._wanted:
                    continue
                content = await in_daemon_thread(partial(pane_content, wanted, self._known))
                if wanted.pane == self._wanted.pane:
                    self._content = content
                    self.query_one("#pane", RowList).show(content.view)
                    self.post_message(self.Worked(content.step))
                self._shown = wanted
        finally:
            self._working = False
