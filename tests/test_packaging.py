"""The contents of a wheel: every data file of the package has a pattern in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

import gpumem_tui

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(gpumem_tui.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
_FOR_DEVELOPERS = {PACKAGE / "README.md"}


def _modules() -> set[Path]:
    """Return the Python files that setuptools finds itself: those in folders with an `__init__.py` all the way up."""
    return {
        path
        for path in PACKAGE.rglob("*.py")
        if all((folder / "__init__.py").exists() for folder in path.parents if folder.is_relative_to(PACKAGE))
    }


def test_every_data_file_has_a_pattern() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["gpumem_tui"]
    taken = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert not files - taken - _modules() - _FOR_DEVELOPERS


def test_every_pattern_finds_something() -> None:
    for pattern in PROJECT["tool"]["setuptools"]["package-data"]["gpumem_tui"]:
        assert any(PACKAGE.glob(pattern)), pattern
