"""Drawing styles: themes, a pattern and a colour for every bucket, symbols for outcomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from textual.theme import Theme

from gpumem_tui.memory import ALLOCATED_BUCKETS, Bucket

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


_THEMES = json.loads(Path(__file__).with_name("themes.json").read_bytes())  # in an eighth of the time that TOML takes
PALETTE: dict[str, str] = _THEMES.pop("palette")
LIGHT_PALETTE: dict[str, str] = _THEMES.pop("palette-light")
"""Colours of memory and of load where a theme has none, as Textual's own, on dark and on light backgrounds. Buckets
have Okabe and Ito's set (2008), which colour-blind readers can tell apart."""
THEMES = tuple(Theme(name=name, **colours) for name, colours in _THEMES.items())
"""The program's own: quiet backgrounds on which numbers, marks and verdicts stand out."""
THEME = THEMES[0]
"""The one to open with, unless the settings say another."""
