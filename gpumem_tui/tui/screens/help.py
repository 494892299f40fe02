"""The help: keys, columns, marks."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from gpumem_tui.memory import Bucket
from gpumem_tui.tui.figures import MUTED, Span
from gpumem_tui.tui.glyphs import BUCKET_LOOKS, FIT_MARK, OUTCOME_SYMBOLS
from gpumem_tui.tui.views.bar import ORDER

_KEYS = (
    ("s", "start a search, or start over after its end"),
    ("p", "hold the search after the step that runs; p again goes on"),
    ("c", "cancel: the running trial is killed, what was found stays"),
    ("e", "edit the workload, the GPU and the strategy"),
    ("v", "plot or table, where there is room for one"),
    ("↑ ↓", "look at another trial of the log"),
    ("ctrl+p", "all commands by name"),
    ("q", "leave; a running search is cancelled"),
)
_MEANINGS = {
    Bucket.ACTIVATIONS: "kept by forward for backward",
    Bucket.TEMPORARY: "workspaces, copies, what lives within one phase",
    Bucket.OTHER: "allocated but not attributed, and slack of blocks",
    Bucket.CACHE: "reserved from the device, not allocated now",
    Bucket.CONTEXT: "what CUDA and its libraries take for themselves",
    Bucket.DRIVER_RESERVED: "of the device's total, never given to CUDA",
}


class HelpScreen(ModalScreen[None]):
    """Closed by escape, q or ?.

    Args:
        tried_title: what the third column is called here.
    """

    CSS_PATH = "help.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", "close"),
        Binding("up", "scroll('up')", show=False),
        Binding("down", "scroll('down')", show=False),
    ]

    def __init__(self, tried_title: str) -> None:
        super().__init__()
        self._tried_title = tried_title

    def compose(self) -> ComposeResult:
        """One scrollable text."""
        with VerticalScroll(id="help") as box:
            box.border_title = "Help"
            box.border_subtitle = "esc closes"
            yield Static(Content("\n").join(Content.assemble(*line) for line in self._lines()))

    def _lines(self) -> list[list[Span]]:
        tried = self._tried_title
        ran = "the step on the simulated GPU" if tried == "Simulated" else "the step on this GPU"
        columns = (
            ("Formula", "the textbook's closed form; knows no cache and no context"),
            ("Traced", "a real step recorded without a GPU, replayed at any size"),
            (tried, f"{ran}, in a process of its own"),
            ("error", f"traced − {tried.lower()}, in bytes and of the trial's figure"),
        )
        marks = (
            (FIT_MARK, "a trial that fits, at the memory the device then held"),
            (OUTCOME_SYMBOLS["oom"], "a batch size that was out of memory"),
            (OUTCOME_SYMBOLS["error"], "a trial that failed for another reason"),
        )
        return [
            _heading("Keys"), *(_entry(key, what) for key, what in _KEYS), [],
            _heading("Columns"), *(_entry(name, what) for name, what in columns),
            _entry("", "figures without a unit are GiB; – is unknown, never 0"), [],
            _heading("Chart"), *(_entry(mark, what) for mark, what in marks), [],
            _heading("Buckets"), *(_bucket(bucket) for bucket in ORDER),
        ]  # fmt: skip

    def action_scroll(self, way: str) -> None:
        """A line up or down."""
        box = self.query_one("#help", VerticalScroll)
        box.scroll_relative(y=-1 if way == "up" else 1, animate=False)


def _heading(text: str) -> list[Span]:
    return [(text, "bold $primary")]


def _entry(name: str, what: str) -> list[Span]:
    return [(f"{name:<11}", "bold"), (what, "")]


def _bucket(bucket: Bucket) -> list[Span]:
    pattern, colour = BUCKET_LOOKS[bucket]
    return [(pattern * 2, colour), (f" {bucket.title:<17}", ""), (_MEANINGS.get(bucket, ""), MUTED)]
