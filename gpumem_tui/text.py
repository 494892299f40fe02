"""Text that others wrote, made fit to be shown. Standard library only."""

from __future__ import annotations


def printable(text: str) -> str:
    """A text that cannot move the cursor, colour the terminal or break the line, whoever wrote it."""
    return text if text.isprintable() else "".join(character if character.isprintable() else " " for character in text)


def shortened(text: str, length: int = 60) -> str:
    """A printable text of at most so many characters."""
    clean = printable(text)
    return clean if len(clean) <= length else clean[: length - 1] + "…"
