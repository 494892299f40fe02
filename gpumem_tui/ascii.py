"""ASCII in the place of every character of ours, for terminals whose locale has no others."""

from __future__ import annotations

import codecs
import locale
import os
import sys
import unicodedata
from collections.abc import Mapping
from functools import cache, lru_cache
from io import TextIOWrapper
from pathlib import Path

_SIGNS = {
    "✓": "+", "✗": "X", "●": "o", "·": "-", "╌": "=", "–": "-", "−": "-", "…": ".", "×": "x", "±": "~",
    "↑": "^", "↓": "v", "→": ">", "←": "<", "▶": ">", "▼": "v", "⏸": "|", "■": "#",
    "█": "#", "▓": "%", "▒": "*", "▚": "@", "▞": "$", "┃": "|", "╱": "/", "╳": "x", "░": ":", "═": "=", "◆": "&",
    "▪": ";", "▔": "-", "▁": "_", "▂": "_", "▃": "_", "▄": "_", "▅": "=", "▆": "#", "▇": "#", "▀": "-",
    "▸": ">", "≈": "~", "≥": ">", "≤": "<", "⚠": "!", "├": "|", "└": "`", "│": "|", "─": "-",
    "▲": "!", "△": "*",  # alerts: critical, warning
    "▾": "-", "▴": "+",  # sorted downwards, upwards: as ps writes its --sort
    "°": " ", "“": '"', "”": '"', "‘": "'", "’": "'", "√": "/", "Σ": "S", "╸": "-", "╺": "-",
}  # fmt: skip

_IN_ASCII = "gpumem_tui_ascii"
"""The name of our ASCII, and of our way to write what an encoding lacks."""
_CHARACTERS = ("LC_ALL", "LC_CTYPE", "LANG")
"""Which variable names the locale of characters: the first that is not empty (POSIX.1-2017, base definitions, 8.2)."""
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")
"""Values that Python gives LC_CTYPE by itself where the locale is C (PEP 538)."""


def wants_ascii(environ: Mapping[str, str]) -> bool:
    """Return whether to use ASCII only: ``GPUMEM_TUI_ASCII=1``, or a locale whose characters are not UTF-8.

    The variables are read as other programs of the terminal read them: Python itself has UTF-8 in the locale C too
    (PEP 540). Without any variable, as in containers, Python decides.
    """
    asked = environ.get("GPUMEM_TUI_ASCII", "")
    if asked:
        return asked != "0"
    named = next((environ[name] for name in _CHARACTERS if environ.get(name)), "")
    found = named or locale.getpreferredencoding(False)
    return not any(name in found.lower().replace("-", "") for name in ("utf8", "cp65001"))


@cache
def is_ascii_only() -> bool:
    """Return `wants_ascii` of the environment in which this process was started, or what the user's settings have."""
    return wants_ascii(_without_coercion(os.environ, _at_start())) or is_chosen()


def is_chosen() -> bool:
    """Return whether the user asks for ASCII, by ``GPUMEM_TUI_ASCII`` or the settings, in any locale."""
    asked = os.environ.get("GPUMEM_TUI_ASCII", "")
    return asked != "0" if asked else _is_set()


def _is_set() -> bool:
    """Return whether the user's settings ask for it; a faulty file asks for nothing: who needs it names its faults."""
    from gpumem_tui.settings import SettingsError, load

    try:
        return load().ascii
    except SettingsError:
        return False


def fit_streams(*, ascii_only: bool) -> None:
    """Have stdout and stderr write characters of ours that they cannot in ASCII, and all of them with `ascii_only`."""
    codecs.register_error(_IN_ASCII, _replaced)
    codecs.register(_found)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # None where whoever started the program closed it
            stream.reconfigure(encoding=_IN_ASCII if ascii_only else None, errors=_IN_ASCII)


def _found(name: str) -> codecs.CodecInfo | None:
    """Return Python's ASCII under our name: click writes UTF-8 to a stream whose encoding is called ASCII."""
    if name != _IN_ASCII:
        return None
    plain = codecs.lookup("ascii")
    return codecs.CodecInfo(
        name=_IN_ASCII,
        encode=plain.encode,
        decode=plain.decode,
        incrementalencoder=plain.incrementalencoder,
        incrementaldecoder=plain.incrementaldecoder,
        streamreader=plain.streamreader,
        streamwriter=plain.streamwriter,
    )


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Return what to write, and where to continue (Python's `codecs.register_error`)."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    if error.object[error.start - 1 : error.start + 2] == " °C":
        return "C ", error.start + 2
    return to_ascii(error.object[error.start : error.end]), error.end


@lru_cache(4096)
def to_ascii(text: str) -> str:
    """Return the text in ASCII characters of the same width; a character without any is left out."""
    return text if text.isascii() else "".join(map(_ascii_of, text.replace(" °C", " C ")))


def _at_start() -> str:
    """Return the environment that the process was started with, a variable after each NUL; empty if it is unknown."""
    try:
        return "\0" + Path("/proc/self/environ").read_text("utf-8", "replace")
    except OSError:
        return ""


def _without_coercion(environ: Mapping[str, str], at_start: str) -> Mapping[str, str]:
    """Return the environment without the LC_CTYPE that Python has set by itself."""
    if environ.get("LC_CTYPE") in _COERCED and at_start and "\0LC_CTYPE=" not in at_start:
        return {name: value for name, value in environ.items() if name != "LC_CTYPE"}
    return environ


def _ascii_of(character: str) -> str:
    if character.isascii():
        return character
    if character in _SIGNS:
        return _SIGNS[character]
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
