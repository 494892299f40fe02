"""The pages that visitors get. None of them asks anything of another server: they work without a network."""

from __future__ import annotations

import html
from functools import cache
from pathlib import Path
from string import Template

_SMALLEST_FONT, _LARGEST_FONT = 6, 48
DEFAULT_FONT_PX = 15
_AGAIN_S = 5


def terminal_page(host_name: str, websocket: str, font_px: str) -> str:
    """The terminal, which textual-serve's script draws into: it looks for the class and the two ``data`` attributes.

    Args:
        websocket: the URL that the script connects to, to which it appends ``?width=…&height=…``.
        font_px: as the page's URL asks for it; what is no size gets the usual one.
    """
    size = int(font_px) if font_px.isdecimal() else DEFAULT_FONT_PX
    size = min(max(_SMALLEST_FONT, size), _LARGEST_FONT)
    return _filled("terminal.html", host=html.escape(host_name), websocket=html.escape(websocket), font_size=str(size))


def message_page(title: str, text: str, *, reloads: bool = False) -> str:
    """One thing to say; `reloads`: the browser asks again every few seconds."""
    head = f'<meta http-equiv="refresh" content="{_AGAIN_S}">' if reloads else ""
    return _filled("message.html", head=head, title=html.escape(title), text=html.escape(text))


@cache
def _template(name: str) -> Template:
    return Template(Path(__file__).with_name(name).read_text("utf-8"))


def _filled(name: str, **parts: str) -> str:
    return _template(name).substitute(parts)
