"""Drawing styles: themes, a pattern and a colour for every bucket, symbols for outcomes, their ASCII."""

from __future__ import annotations

import locale
import sys
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from textual.theme import Theme

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from gpumem_tui.run.events import Outcome


PROGRAM = "gpumem-tui"
"""At the left of every header."""

OUTCOME_SYMBOLS: dict[Outcome, str] = {"fit": "✓", "oom": "✗", "error": "!"}

FORMULA_MARK = "·"
TRACED_MARK = "⠤"
CAPACITY_MARK = "╌"
FIT_MARK = "●"

FORMULA_COLOUR = "#E69F00"
TRACED_COLOUR = "#56B4E9"
TRIED_COLOUR = "#F0F0F0"
CAPACITY_COLOUR = "#D55E00"

Look = tuple[str, str]
"""A pattern and a colour of the theme. The patterns tell things apart without any colour."""

BUCKET_LOOKS: dict[Bucket, Look] = {bucket: (bucket.pattern, f"${bucket.colour}") for bucket in Bucket}

PROCESS_LOOKS: tuple[Look, ...] = (("█", "$process-1"), ("▓", "$process-2"), ("▒", "$process-3"), ("▚", "$process-4"))
"""In turn for the processes of a GPU whose share is not divided, the largest first: quieter than the buckets."""

EIGHTHS = " ▁▂▃▄▅▆▇█"

_ASCII = {
    "✓": "+", "✗": "X", "●": "o", "·": "-", "╌": "=", "–": "-", "−": "-", "…": ".", "×": "x", "±": "~",
    "↑": "^", "↓": "v", "→": ">", "←": "<", "▶": ">", "▼": "v", "▲": "^", "⏸": "|", "■": "#",
    "█": "#", "▓": "%", "▒": "*", "▚": "@", "▞": "p", "┃": "|", "╱": "/", "╳": "x", "░": ":", "═": "=", "◆": "&",
    "▪": "r", "▔": "-", "▁": "_", "▂": "_", "▃": "_", "▄": "_", "▅": "=", "▆": "#", "▇": "#", "▀": "-",
    "▸": ">", "▾": "v", "≈": "~", "⚠": "!", "°": "o", "├": "|", "└": "`", "│": "|", "─": "-",
}  # fmt: skip


def wants_ascii(environ: Mapping[str, str]) -> bool:
    """Draw with ASCII only: ``GPUMEM_TUI_ASCII=1``, or a locale whose characters are not UTF-8."""
    asked = environ.get("GPUMEM_TUI_ASCII", "")
    if asked:
        return asked != "0"
    return locale.getpreferredencoding(False).lower().replace("-", "") not in ("utf8", "cp65001")


@lru_cache(4096)
def to_ascii(text: str) -> str:
    """Return the text in ASCII characters of the same width; a character without any is left out."""
    return text if text.isascii() else "".join(map(_ascii_of, text))


def _ascii_of(character: str) -> str:
    if character.isascii():
        return character
    if character in _ASCII:
        return _ASCII[character]
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):  # accents of their own, joiners
        return ""
    code = ord(character)
    if 0x2800 <= code <= 0x28FF:  # braille dots: the traced line
        return ":" if code > 0x2800 else " "
    if 0x2500 <= code <= 0x257F:
        name = unicodedata.name(character)
        if "HORIZONTAL" in name and "VERTICAL" not in name:
            return "-"
        return "|" if "VERTICAL" in name and "HORIZONTAL" not in name else "+"
    if 0x2580 <= code <= 0x259F:
        return "|" if "LEFT" in unicodedata.name(character) or "RIGHT" in unicodedata.name(character) else "#"
    plain = unicodedata.normalize("NFKD", character)[0]
    wide = unicodedata.east_asian_width(character) in ("W", "F")
    if plain.isascii():
        return f"{plain} " if wide else plain
    return "??" if wide else "?"


BAR_ORDER = (*ALLOCATED_BUCKETS, Bucket.CACHE, Bucket.CONTEXT, Bucket.DRIVER_RESERVED, Bucket.FREE)
"""The buckets of a bar, from left to right."""


_THEMES = tomllib.loads(Path(__file__).with_name("themes.toml").read_text(encoding="utf-8"))
PALETTE: dict[str, str] = _THEMES.pop("palette")
"""Colours of memory, where a theme has none."""
THEMES = tuple(Theme(name=name, **colours) for name, colours in _THEMES.items())
THEME = THEMES[0]
"""The one to open with, unless the settings say another."""
