"""Drawing styles: themes, a pattern and a colour for every bucket, symbols for outcomes."""

from __future__ import annotations

import sys
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

BAR_ORDER = (*ALLOCATED_BUCKETS, Bucket.CACHE, Bucket.CONTEXT, Bucket.DRIVER_RESERVED, Bucket.FREE)
"""The buckets of a bar, from left to right."""


_THEMES = tomllib.loads(Path(__file__).with_name("themes.toml").read_text(encoding="utf-8"))
PALETTE: dict[str, str] = _THEMES.pop("palette")
LIGHT_PALETTE: dict[str, str] = _THEMES.pop("palette-light")
"""Colours of memory and of load where a theme has none, on dark and on light backgrounds."""
THEMES = tuple(Theme(name=name, **colours) for name, colours in _THEMES.items())
THEME = THEMES[0]
"""The one to open with, unless the settings say another."""
