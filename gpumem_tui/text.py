"""Text from outside (names, messages) made safe to show. Used where it is read, so that no panel need do it.

Standard library only.
"""

from __future__ import annotations

from typing import Any


def printable(text: str) -> str:
    """A text that cannot move the cursor, colour the terminal or break the line, whoever wrote it."""
    return text if text.isprintable() else "".join(character if character.isprintable() else " " for character in text)


def shortened(text: str, length: int = 60) -> str:
    """A printable text of at most so many characters."""
    clean = printable(text)
    return clean if len(clean) <= length else clean[: length - 1] + "…"


def cleaned(value: Any) -> Any:
    """Decoded JSON with every text in it printable, the keys too."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned(one) for key, one in value.items()}
    if isinstance(value, list):
        return [cleaned(one) for one in value]
    return value
