"""Markdown, for a person to read or to paste into an issue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def document(parts: Iterable[str]) -> str:
    """Return a text whose parts (headings, paragraphs, tables) have an empty line between them."""
    return "\n\n".join(parts) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows under their column headings."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """Return a list, an entry a line."""
    return "\n".join(f"- {line}" for line in lines)


def shell(command: str) -> str:
    """Return a command as a block of shell code."""
    return f"```sh\n{command}\n```"


def sentence(text: str) -> str:
    """Return a line as a sentence: with a capital letter and a full stop.

    >>> sentence("it fits")
    'It fits.'
    """
    return f"{text[:1].upper()}{text[1:]}."
