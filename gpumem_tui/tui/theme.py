"""The program's own colours: a quiet dark ground on which only numbers, marks and verdicts stand out."""

from __future__ import annotations

from textual.theme import Theme

THEME = Theme(
    name="gpumem",
    primary="#56B4E9",
    secondary="#7A8794",
    accent="#E69F00",
    warning="#E69F00",
    error="#D9634C",
    success="#2FB48A",
    foreground="#D8DEE4",
    background="#14181D",
    surface="#1A1F26",
    panel="#222932",
    dark=True,
    variables={
        "footer-key-foreground": "#56B4E9",
        "block-cursor-foreground": "#FFFFFF",
        "block-cursor-background": "#2C4A5E",
    },
)
