"""Plain English: no sentence begins with "Of …" or "What …", and none is built of the words that hide its verb.

Strings, docstrings, comments, TOML values and Markdown of the package, its tests and the repository are read alike.
Text in backticks, fenced code and PyTorch's out-of-memory message are quotations, so they are left out. A question, and
a heading that asks ("What to run"), may begin with "What". There is no list of exceptions.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpumem_tui

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(gpumem_tui.__file__).parents[1]
_FOLDERS = ("gpumem_tui", "tests", "screenshots", ".github")

_OPENING = re.compile(
    r"(?:\A|[.!?:]\)?\s+|\n\s*\n\s*|\n\s*[-*] |\A[-*#]+ |\| )"
    r"(?P<opening>(?:Of|What|Whatever|That which|That what|The ones? (?:that|which|whose)"
    r"|Those (?:that|which|whose|of))\b(?!-)[^.!?\n|]*)(?P<end>[.!?]?)"
)
_ASKS = re.compile(r"What to \w+( \w+)?\Z")
"""A heading that asks, such as "What to run"."""

_BLOCKS = re.compile(
    r"\b(?:there (?:is|are) none|that there (?:is|are)(?! (?:an?|no|nothing|others)\b)"
    r"|stands|lies|go(?:es|ing)? on|beside|whatever|as such|as many are|all the same|says"
    r"|(?:is|are|was|were) (?:told|said)|who is told|(?:is|are) known"
    r"|the same(?=[.,;:)\"]|\Z| (?:for|in|of|with|at|on|to|and|or|is|are|was|by|from|where|when|without|after|if|twice"
    r"|once|here|again)\b))(?![\w=(])",
    re.IGNORECASE,
)
"""words.md's building blocks: a verb, or the thing itself, says more. "the same" is one where no noun follows."""
_RAW = re.compile(
    r"\b(?:Of|What|Whatever|That which|That what|The ones?|Those)\s|(?i:"
    + _BLOCKS.pattern.replace(" ", r"[\s\"'#f]+")
    + r"|\bthe[\s\"'#f]+same\b)"
)
"""Files without a match need not be parsed."""
_QUOTED = re.compile(r"CUDA out of memory\. Tried.*|``[^`]*``|`[^`\n]*(?:\n[^`\n]+)?`|\{[\w.]*\}", re.DOTALL)
_FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def faults(text: str) -> Iterator[str]:
    """Yield the openings and the building blocks in a text that engineers do not write."""
    text = _QUOTED.sub("`…`", text)
    for found in _OPENING.finditer(text):
        if found["end"] != "?" and not _ASKS.match(found["opening"]):
            yield found["opening"][:60]
    flat = re.sub(r"\s+", " ", text)
    for found in _BLOCKS.finditer(flat):
        yield f"…{flat[max(0, found.start() - 30) : found.end() + 20]}…"


def in_python(source: str) -> Iterator[str]:
    """Yield the prose of Python source: its strings, f-strings with gaps, and runs of comments."""
    inner: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inner.update(id(part) for part in node.values)
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value if " " in node.value else ""
    run: list[str] = []
    for line in [*source.splitlines(), ""]:
        if comment := re.match(r"\s*#:? ?(?!type:|ruff:)(.*)", line):
            run.append(comment[1])
            continue
        yield " ".join(run)
        run = []
        if trailing := re.search(r"  # (?!type:|noqa$|fmt:)(?:noqa: [A-Z0-9, ]+)?(.*)", line):
            yield trailing[1].strip()


def in_toml(source: str) -> Iterator[str]:
    """Yield every value of a TOML file that is a text, and its comments."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for within in value.values():
                yield from texts(within)
        elif isinstance(value, list):
            for within in value:
                yield from texts(within)

    yield from texts(tomllib.loads(source))
    yield from (
        " ".join(re.findall(r"^# ?(.*)", run, re.MULTILINE)) for run in re.findall(r"(?:^#.*\n)+", source, re.MULTILINE)
    )


def in_markdown(source: str) -> Iterator[str]:
    """Yield Markdown without its fenced code."""
    yield _FENCED.sub("", source)


_READERS = {".py": in_python, ".toml": in_toml, ".md": in_markdown}


def _files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.suffix in _READERS)
    for folder in _FOLDERS:
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in _READERS)


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("Of a ResNet, whose blocks differ, all of it.", False),
        ("Return a block. What backward needs is kept.", False),
        ("Those that have experts, where some do.", False),
        ("A ResNet is returned whole.\n\n    What differs is its blocks.", False),
        ("the process goes on unharmed", False),
        ("a class name stands once", False),
        ("None where there is none", False),
        ("the differences that there are", False),
        ("a driver answers that there is no GPU", True),
        ("gdb could do the same, but not as gently", False),
        ("two GPUs of the same vendor", True),
        ("# What would make it fit?", True),
        ("What to run", True),
        ("`{batch}` stands for it", False),
        ("write `goes on` as it is", True),
    ],
)
def test_a_sentence_is_judged(text: str, is_plain: bool) -> None:
    assert (not list(faults(text))) is is_plain


def test_every_kind_of_file_is_read() -> None:
    python = 'x = f"a {y} which stands"\nz = 1  # it goes on\n# first\n# there is none\n'
    assert len([fault for text in in_python(python) for fault in faults(text)]) == 3
    assert len([fault for text in in_toml('# whatever\n[a]\nb = ["it lies"]\n') for fault in faults(text)]) == 2
    assert not [fault for text in in_markdown("```\nit lies\n```\n") for fault in faults(text)]


def test_sentences_are_plain() -> None:
    found = []
    for path in _files():
        source = path.read_text()
        if path != Path(__file__) and _RAW.search(source):
            for text in _READERS[path.suffix](source):
                found += [f"{path.relative_to(ROOT)}: {fault}" for fault in faults(text)]
    assert not found, "\n".join([f"{len(found)} sentences are not plain:", *found[:200]])
