"""Drawing styles: themes, a pattern and a colour for every bucket, symbols for outcomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from textual.color import Color
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

FORMULA_COLOUR = "$plot-formula"
TRACED_COLOUR = "$plot-traced"
TRIED_COLOUR = "$foreground"
CAPACITY_COLOUR = "$load-heavy"

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
"""Colours of memory, of load and of plots where a theme has none, as Textual's own, on dark and on light backgrounds.
Buckets have Okabe and Ito's set (2008), which colour-blind readers can tell apart."""
THEMES = tuple(Theme(name=name, **colours) for name, colours in _THEMES.items())
"""The program's own: quiet backgrounds on which numbers, marks and verdicts stand out."""
THEME = THEMES[0]
"""The one to open with, unless the settings say another."""
LEAST_CONTRAST = 3.0
"""Large text and figures need so much (WCAG 2.2, 1.4.3 and 1.4.11)."""


def contrast(one: Color, other: Color) -> float:
    """Return how well a colour is seen on another: the ratio of WCAG 2.2 ("contrast ratio"), 1 to 21."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: Color) -> float:
    """Return the "relative luminance" of WCAG 2.2, 0 to 1."""
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour.normalized
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def see_cursor(colours: dict[str, str]) -> None:
    """Give the text under a theme's cursor the theme's background as its colour, where it can hardly be seen."""
    text, ground = colours["block-cursor-foreground"], Color.parse(colours["block-cursor-background"])
    if not text.startswith("auto") and contrast(Color.parse(text), ground) < LEAST_CONTRAST:
        colours["block-cursor-foreground"] = colours["background"]
