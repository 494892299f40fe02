"""The program's own themes: quiet backgrounds on which numbers, marks and verdicts stand out."""

from __future__ import annotations

from textual.theme import Theme

PALETTE = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "batch-data": "#F0E442",
    "temporary": "#CC79A7",
    "other": "#D55E00",
    "cache": "#9AA5B1",
    "free": "#5C6773",
    "process-1": "#7FA9CC",
    "process-2": "#C9A66B",
    "process-3": "#86B08F",
    "process-4": "#B49CC6",
    "history-used": "#5F7D97",
    "history-reserved": "#666F78",
    "history-others": "#3A4753",
}
"""What memory is drawn with: Okabe and Ito's set (2008) for the buckets, which colour-blind readers can tell apart.
Other themes than the program's own take these too."""

_DARK = Theme(
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

_LIGHT = Theme(
    name="gpumem-light",
    primary="#005F9E",
    secondary="#6B7681",
    accent="#9A6200",
    warning="#9A6200",
    error="#B03A26",
    success="#00704F",
    foreground="#1F262D",
    background="#FBFBF9",
    surface="#F0F1EE",
    panel="#E4E6E2",
    dark=False,
    variables={
        "footer-key-foreground": "#005F9E",
        "block-cursor-foreground": "#10161B",
        "block-cursor-background": "#C6DDEC",
        "parameters": "#00568A",
        "gradients": "#3A93C8",
        "optimizer": "#007A58",
        "activations": "#B97C00",
        "batch-data": "#8F8300",
        "temporary": "#A9527F",
        "other": "#B44A00",
        "cache": "#6C7782",
        "free": "#A3ABB3",
        "process-1": "#4C7FA8",
        "process-2": "#9A7533",
        "process-3": "#4F8460",
        "process-4": "#83669B",
        "history-used": "#86A8C4",
        "history-reserved": "#B4BCC4",
        "history-others": "#D3DBE2",
    },
)

_CONTRAST = Theme(
    name="gpumem-contrast",
    primary="#7FD0FF",
    secondary="#C8D0D8",
    accent="#FFC247",
    warning="#FFC247",
    error="#FF8A70",
    success="#4BE3B0",
    foreground="#FFFFFF",
    background="#000000",
    surface="#0A0A0A",
    panel="#1C1C1C",
    dark=True,
    variables={
        "footer-key-foreground": "#7FD0FF",
        "block-cursor-foreground": "#FFFFFF",
        "block-cursor-background": "#005A9C",
        "parameters": "#3FA2E6",
        "gradients": "#9AD8FF",
        "optimizer": "#22D39A",
        "activations": "#FFB733",
        "batch-data": "#FFF36B",
        "temporary": "#FF9FD0",
        "other": "#FF8240",
        "cache": "#C8D0D8",
        "free": "#8A949E",
        "process-1": "#A8D4F7",
        "process-2": "#F5CE8E",
        "process-3": "#A9DDB4",
        "process-4": "#DCC4EE",
        "history-used": "#8FB8DA",
        "history-reserved": "#9AA3AC",
        "history-others": "#56626E",
    },
)

THEMES = (_DARK, _LIGHT, _CONTRAST)
THEME = _DARK
"""The one to open with, unless the settings say another."""
