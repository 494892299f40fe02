"""Two memory snapshots, as lines: what grew and was freed, by category and source line, and what else differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.geometry import Size

from gpumem_tui.memory import format_bytes
from gpumem_tui.snapshots.comparison import Comparison, MemoryChange, answer_words, signed
from gpumem_tui.snapshots.model import MemorySnapshot
from gpumem_tui.snapshots.report import line_words
from gpumem_tui.tui.kit.dialogs import TextScreen
from gpumem_tui.tui.kit.figures import MUTED, ListRow, Row, compact_bytes, fit, header_line, paragraph, row
from gpumem_tui.tui.kit.main_screen import MainScreen
from gpumem_tui.tui.kit.row_list import FixedRows, RowList
from gpumem_tui.tui.snapshot.screen import look_of

_SIZE = 8
_MOST_ROWS = 300
_TICK_S = 20.0


def header_row(
    before: MemorySnapshot, after: MemorySnapshot, found: Comparison, among: str, time: str, width: int
) -> ListRow:
    """Return both files, and which of their devices."""
    facts = [f"cuda:{found.after.device}{among}", f"compared {found.moment}"]
    name = f"{before.name} → {after.name}"
    return row(*header_line((name, "bold"), [(fact, "") for fact in facts], [(time, MUTED), (" ", "")], width))


def verdict_rows(found: Comparison, width: int) -> list[ListRow]:
    """Return the answer in as many lines as it takes."""
    one, other = found.totals
    mark, style = ("▲ ", "$warning") if other > one else ("▼ ", "$text-success") if other < one else ("= ", "")
    lines = paragraph(answer_words(found), width, "bold", indent=2)
    return [row((mark, style), (lines[0].text[2:], "bold")), *lines[1:]]


def figure_rows(found: Comparison, width: int) -> list[ListRow]:
    """Return allocated, reserved and free memory of both, then the categories, then what else differs."""
    name = max(8, width - 3 * _SIZE)
    lines = [row((f"{fit('', name)}{'before':>{_SIZE}}{'after':>{_SIZE}}{'change':>{_SIZE}}", f"bold {MUTED}"))]
    lines += [_figure(title, one, other, name) for title, one, other in found.figures]
    one, other = found.segments
    lines.append(row((f"{fit('segments', name)}{one:>{_SIZE},}{other:>{_SIZE},}{other - one:>+{_SIZE},}", "")))
    lines += [row(), row((fit(f"by category, {found.moment}", width), f"bold {MUTED}"))]
    for change_row in found.by_category:
        pattern, colour = look_of(change_row.name)
        figures = _figure(change_row.name, change_row.before_bytes, change_row.after_bytes, name - 2)
        lines.append(row((f"{pattern} ", colour), *figures.spans))
    for text in found.notes:
        lines += [row(), *paragraph(text, width)]
    return lines


def _figure(title: str, before_bytes: int, after_bytes: int, name: int) -> ListRow:
    more = after_bytes - before_bytes
    sizes = f"{compact_bytes(before_bytes):>{_SIZE}}{compact_bytes(after_bytes):>{_SIZE}}"
    return row((fit(title, name), ""), (sizes, MUTED), (f"{_change(more):>{_SIZE}}", _style(more)))


def _change(more: int) -> str:
    return f"{'+' if more > 0 else '-' if more < 0 else ''}{compact_bytes(abs(more))}" if more else "0"


def _style(more: int) -> str:
    return "$text-warning" if more > 0 else "$text-success" if more < 0 else MUTED


def line_rows(lines: Sequence[MemoryChange], width: int) -> list[ListRow]:
    """Return every line that changed: by how much, a bar of it, and the line."""
    bar = max(4, min(16, width // 8))
    found = [row((fit(f"{'change':>{_SIZE}}  {fit('', bar)} source line", width), f"bold {MUTED}"))]
    most = max((abs(line.bytes_more) for line in lines), default=0) or 1
    for number, line in enumerate(lines[:_MOST_ROWS]):
        cells = max(1, round(abs(line.bytes_more) / most * bar)) if line.bytes_more else 0
        pattern, colour = look_of(line.category)
        found.append(
            row(
                (f"{_change(line.bytes_more):>{_SIZE}}  ", f"bold {_style(line.bytes_more)}"),
                (pattern * cells, colour),
                (" " * (bar - cells + 1), ""),
                (fit(line_words(line), max(4, width - _SIZE - bar - 3)), ""),
                key=str(number),
            )
        )
    if rest := lines[_MOST_ROWS:]:
        found.append(row((f"{len(rest):,} smaller changes", MUTED)))
    return found


def line_details(line: MemoryChange) -> tuple[str, list[Row]]:
    """Return a line's bytes and blocks in both files."""
    return line.name, [
        [(f"{signed(line.bytes_more)} {line.category}", "bold")],
        [],
        [(f"{format_bytes(line.before_bytes):>11} in {line.before_blocks:,} blocks before", "")],
        [(f"{format_bytes(line.after_bytes):>11} in {line.after_blocks:,} blocks after", "")],
    ]


class ComparisonScreen(MainScreen):
    """The screen of two snapshots, one device at a time.

    Args:
        found: their devices, compared; at least one. It opens on the one that changed most.
        clock: the time of day.
    """

    CSS_PATH = "comparison.tcss"
    SMALLEST = (60, 18)
    TOPIC = "snapshots"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012  as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "device", "device", tooltip="The next device of the files"),
        Binding("question_mark", "app.help", "help", key_display="?", tooltip="The keys and what the marks mean"),
        Binding("q", "app.quit", "quit", tooltip="Leave"),
    ]

    def __init__(
        self,
        before: MemorySnapshot,
        after: MemorySnapshot,
        found: Sequence[Comparison],
        *,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        super().__init__()
        self._files = before, after
        self._found = found
        self._clock = clock
        self._at = max(range(len(found)), key=lambda at: abs(found[at].totals[1] - found[at].totals[0]))

    @property
    def comparison(self) -> Comparison:
        """The device that is shown."""
        return self._found[self._at]

    def compose_parts(self) -> ComposeResult:
        """Yield header, verdict, and the figures next to the lines that changed."""
        yield FixedRows(id="header")
        yield FixedRows(id="verdict")
        with Horizontal(id="body"):
            yield FixedRows(id="figures", title="Memory")
            yield RowList(id="lines", title="More (+) and freed (-), by source line")

    def on_mount(self) -> None:
        """Everything is there already."""
        self.set_interval(_TICK_S, self._draw)
        self.query_one("#lines", RowList).focus()

    def laid_out(self, size: Size) -> None:
        """Draw for another size of the terminal."""
        self._draw_verdict(size.width)
        self.call_after_refresh(self._draw)

    def parting_lines(self) -> Iterable[str]:
        """Return the answer for the device that is shown."""
        return (f"{self._files[0].name} → {self._files[1].name}: {answer_words(self.comparison)}",)

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Offer only what does something."""
        return len(self._found) > 1 if action == "device" else True

    def action_device(self) -> None:
        """Show the next device."""
        self._at = (self._at + 1) % len(self._found)
        self.query_one("#lines", RowList).begin()
        self._draw_verdict(self.size.width)
        self.call_after_refresh(self._draw)

    @on(RowList.Chosen)
    def _open(self, message: RowList.Chosen) -> None:
        self.app.push_screen(TextScreen(*line_details(self._changed()[int(message.key)])))

    def _changed(self) -> list[MemoryChange]:
        return [line for line in self.comparison.by_line if line.bytes_more]

    def _draw_verdict(self, width: int) -> None:
        panel = self.query_one("#verdict", RowList)
        panel.styles.height = len(verdict_rows(self.comparison, width))
        panel.show(lambda width, _: verdict_rows(self.comparison, width))

    def _draw(self) -> None:
        found, now = self.comparison, f"{self._clock():%H:%M}"
        among = f" ({self._at + 1} of {len(self._found)}, d)" if len(self._found) > 1 else ""
        self.query_one("#header", RowList).show(lambda width, _: [header_row(*self._files, found, among, now, width)])
        self.query_one("#figures", RowList).show(lambda width, _: figure_rows(found, width))
        self.query_one("#lines", RowList).show(lambda width, _: line_rows(self._changed(), width))
