"""How large things may be: a cap for a file, one name for one public class."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import gpumem_tui

PACKAGE = Path(gpumem_tui.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
_FILE_LINES = 600
_SMALL_LINES = 60


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[str]:
    """Yield every name of the package that a file imports, modules and what is taken from them alike."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_a_file_is_read_in_one_sitting() -> None:
    assert {path.name: _lines(path) for path in FILES if _lines(path) > _FILE_LINES} == {}


def test_a_small_file_with_one_reader_belongs_to_its_reader() -> None:
    readers: dict[str, set[Path]] = defaultdict(set)
    for path in FILES:
        for name in set(_imports(path)):
            readers[name].add(path)
    alone = {}
    for path in FILES:
        if _lines(path) >= _SMALL_LINES or path.name in ("__init__.py", "__main__.py", "sitecustomize.py"):
            continue
        found = readers[_module(path)] - {path}
        if len(found) == 1 and next(iter(found)).parent == path.parent:
            alone[str(path.relative_to(PACKAGE))] = next(iter(found)).name
    assert alone == {}


def test_a_public_class_name_stands_once() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}
