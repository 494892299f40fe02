"""Allowed imports: the map of gpumem_tui/README.md, and that it names every room."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpumem_tui

PACKAGE = Path(gpumem_tui.__file__).parent
MAP = (PACKAGE / "README.md").read_text()

_ROW = re.compile(r"^\| `(\w+)` \| .* \| (.*) \|$", re.MULTILINE)
ROOMS = {room: set(re.findall(r"`(\w+)`", below)) for room, below in _ROW.findall(MAP)}
"""By room, those that it may import, as the README's table states."""


def imported(file: Path) -> Iterator[str]:
    """The modules of ours that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room_of(module: str) -> str:
    """The room a module's name is in; empty for the root's own, and for what is not ours."""
    parts = module.split(".")
    return parts[1] if parts[0] == "gpumem_tui" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else ""


def test_the_map_names_every_room() -> None:
    assert set(ROOMS) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_what_the_map_says(room: str) -> None:
    found: dict[str, str] = {}
    for file in (PACKAGE / room).rglob("*.py"):
        found.update({other: file.name for module in imported(file) if (other := room_of(module)) not in ("", room)})
    assert found.keys() == ROOMS[room], found


def test_no_circle() -> None:
    above: set[str] = set()
    left = dict(ROOMS)
    while left:
        lowest = {room for room, below in left.items() if below <= above}
        assert lowest, f"a circle among {sorted(left)}"
        above |= lowest
        for room in lowest:
            del left[room]


def test_the_root_imports_no_room() -> None:
    roots = {room_of(module) for file in PACKAGE.glob("*.py") for module in imported(file)} - {""}
    assert roots == {"api", "cli", "probe"}, "of __main__, and of what `import gpumem_tui` offers once it is asked for"


def test_within_the_terminal_program_features_do_not_import_each_other_in_circles() -> None:
    within: dict[str, set[str]] = {}
    for file in (PACKAGE / "tui").glob("*/*.py"):
        feature = within.setdefault(file.parent.name, set())
        for module in imported(file):
            parts = module.split(".")
            if parts[:2] == ["gpumem_tui", "tui"] and len(parts) > 3 and parts[2] != file.parent.name:
                feature.add(parts[2])
    assert within["kit"] == set(), "the kit knows no feature"
    above: set[str] = set()
    while within:
        lowest = {name for name, below in within.items() if below <= above}
        assert lowest, within
        above |= lowest
        for name in lowest:
            del within[name]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:gpumem_tui|tests)/[\w/.]+)`", MAP))))
def test_a_path_that_the_map_names_exists(path: str) -> None:
    assert (PACKAGE.parent / path).exists()


def test_the_monitor_starts_without_what_it_does_not_show() -> None:
    """Its first frame waits for every import: formulas, plans, recordings and other hosts are read in when needed."""
    code = (
        "import sys, gpumem_tui.tui.app, gpumem_tui.tui.monitor.screen, gpumem_tui.watch.live\n"
        "print(*(name for name in sys.modules if name.startswith('gpumem_tui.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "gpumem_tui.tui.monitor.screen" in loaded
    unneeded = ("catalog", "formula", "plan", "remote", "search", "simulator", "recording")
    assert not {name for name in loaded if name.startswith(tuple(f"gpumem_tui.{each}" for each in unneeded))}


def test_the_list_of_commands_starts_without_the_commands() -> None:
    code = (
        "import sys, click; from gpumem_tui.cli.commands import cli; cli.get_help(click.Context(cli));"
        "print(*(name for name in sys.modules if name.startswith('gpumem_tui.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "gpumem_tui.cli.commands" in loaded
    assert {"gpumem_tui.cli.search", "gpumem_tui.cli.schema", "gpumem_tui.doctor.checks"} & {*loaded} == set()


# Within rooms

SUB_ROOMS = {"simulator": ("allocator", "device", "standins", "cuda", "compiled", "fast")}
"""By room its folders, the lowest first: each imports those before it only."""


@functools.cache
def file_of(module: str) -> Path | None:
    """The file that a name imported from the package is in."""
    parts = module.split(".")
    for place in (PACKAGE.parent.joinpath(*parts), PACKAGE.parent.joinpath(*parts[:-1])):
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if parts[0] == "gpumem_tui" and file.is_file():
                return file
    return None


def test_no_circle_of_files() -> None:
    """Wherever in a file an import is, within functions and under TYPE_CHECKING too."""
    below = {
        file: {other for module in imported(file) if (other := file_of(module)) not in (None, file)}
        for file in PACKAGE.rglob("*.py")
    }
    while free := [file for file, others in below.items() if not others & below.keys()]:
        for file in free:
            del below[file]
    left = sorted(str(file.relative_to(PACKAGE)) for file in below)
    assert left == [], "files of a circle, and those that import them"


@pytest.mark.parametrize("room", SUB_ROOMS)
def test_the_folders_of_a_room_lie_in_layers(room: str) -> None:
    folders = SUB_ROOMS[room]
    assert set(folders) == {path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")}
    for place, folder in enumerate(folders):
        for file in (PACKAGE / room / folder).rglob("*.py"):
            reached = {tuple(module.split(".")[1:3]) for module in imported(file)}
            assert not reached & {(room, higher) for higher in folders[place + 1 :]}, file


def test_what_replays_needs_no_torch() -> None:
    """The viewer replays traces, and never imports torch."""
    for file in (PACKAGE / "simulator" / "allocator").rglob("*.py"):
        assert not {module for module in imported(file) if module.split(".")[0] == "torch"}, file
