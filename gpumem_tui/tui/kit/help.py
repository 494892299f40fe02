"""A screen's help, made from its keys' bindings and the tables of its page of the manual."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from gpumem_tui.manual import text as manual_text
from gpumem_tui.memory import Bucket
from gpumem_tui.tui.kit.dialogs import TextScreen
from gpumem_tui.tui.kit.figures import MUTED, Row
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS
from gpumem_tui.tui.kit.main_screen import ActingApp, MainScreen

_NAME_WIDTH = 11
_LONGEST_NAME = 14
_WORDS_WIDTH = 59
"""Cells of an entry of a help: of its name, usually and at most, and of what it states."""


class HelpScreen(TextScreen):
    """The help of a screen.

    Args:
        topic: the page of the manual that `m` opens; "" for none.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("m", "manual", "manual")]

    def __init__(self, lines: Sequence[Row], topic: str = "") -> None:
        super().__init__("Help", lines)
        self._topic = topic

    @classmethod
    def of(cls, screen: MainScreen) -> HelpScreen:
        """Make the help of a screen: its keys, what it states itself, and the tables of its page of the manual."""
        tables = manual_tables(screen.TOPIC, screen.TABLES) if screen.TOPIC else ()
        return cls(
            [*screen.help_first(), *pane_lines(screen), *key_lines(screen), *screen.help_lines(), *tables], screen.TOPIC
        )

    @property
    def keys_offered(self) -> str:
        """The key of the manual."""
        return "m manual · " if self._topic else ""

    async def action_manual(self) -> None:
        """Open the manual at the screen's page."""
        if self._topic:
            await self.app.run_action(f"app.manual({self._topic!r})")


def help_heading(text: str) -> Row:
    """Return the line above a group of entries of a help."""
    return [(text, "bold $primary")]


def help_entry(name: str, what: str) -> Row:
    """Return the line of a key, a column or a mark, and what it means."""
    return [(f"{name:<{_NAME_WIDTH - 1}} ", "bold"), (what, "")]


def help_entries(entries: Iterable[tuple[str, str]]) -> Iterator[Row]:
    """Yield the lines of names and what they mean, broken at words."""
    for name, what in entries:
        first, *rest = textwrap.wrap(what, _WORDS_WIDTH - max(0, len(name) - _NAME_WIDTH + 1)) or [""]
        yield help_entry(name, first)
        yield from (help_entry("", line) for line in rest)


def bucket_lines(buckets: Iterable[Bucket], *, process: str = Bucket.PROCESS.title) -> Iterator[Row]:
    """Yield the lines of a legend of buckets. `process`: how a process is named there."""
    for bucket in buckets:
        pattern, colour = BUCKET_LOOKS[bucket]
        title = process if bucket is Bucket.PROCESS else bucket.title
        yield [(pattern * 2, colour), (f" {title:<17}", ""), (bucket.meaning, MUTED)]


def pane_lines(screen: MainScreen) -> Iterator[Row]:
    """Yield what the pane that has the keys shows; nothing where that is not known."""
    pane = screen.focused
    words = None if pane is None else screen.PANE_HELP.get(pane.id or "") or screen.PANE_HELP.get(type(pane).__name__)
    if pane is None or words is None:
        return
    yield help_heading(f"This pane{f': {pane.border_title}' if pane.border_title else ''}")
    yield from ([(line, "")] for line in textwrap.wrap(words, _NAME_WIDTH + _WORDS_WIDTH))
    yield []


def key_lines(screen: MainScreen) -> Iterator[Row]:
    """Yield a line for each thing that a screen's keys do, from its bindings; keys with the same words share a line."""
    keys: dict[str, dict[str, None]] = {}
    for binding in screen.help_bindings():
        key = binding.key
        plain = key.startswith("ctrl+") or key == "enter"
        shown = binding.key_display or (key if plain else screen.app.get_key_display(binding))
        words = screen.app.tooltip_of(binding) if isinstance(screen.app, ActingApp) else binding.tooltip
        keys.setdefault(words, {}).update(dict.fromkeys(shown.split()))
    yield help_heading("Keys")
    for words, names in keys.items():
        fitting = list(names)
        while len(" ".join(fitting)) > _LONGEST_NAME:
            fitting.pop()
        yield from help_entries([(" ".join(fitting), f"{words[:1].lower()}{words[1:]}")])
    yield from help_entries(screen.more_keys())
    yield []


def manual_tables(topic: str, wanted: Collection[str] = ()) -> Iterator[Row]:
    """Yield the tables of two columns that a page of the manual has, as entries of a help.

    Args:
        wanted: the heads of the tables to take; empty for all.
    """
    table: list[tuple[str, str]] = []
    for line in [*manual_text(topic).splitlines(), ""]:
        cells = [re.sub(r"[`*]", "", cell).strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if len(cells) == 2:
            table.append((cells[0], cells[1]))
        elif table:
            (head, _), _, *entries = table
            if not wanted or head in wanted:
                yield help_heading(f"{head.capitalize()}s")
                yield from help_entries(entries)
                yield []
            table = []
