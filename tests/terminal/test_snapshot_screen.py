"""A memory snapshot as a user opens it: the real program in a real terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.memory import MIB
from tests.snapshots import files
from tests.snapshots.files import BASE, written
from tests.terminal.terminal import terminal


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (120, 40)])
def test_from_the_file_to_the_screen_and_out(tmp_path: Path, columns: int, lines: int) -> None:
    path = written(tmp_path, files.fragmented())
    with terminal("look", str(path), columns=columns, lines=lines) as screen:
        screen.wait_for("Out of memory: 0.15 GiB wanted", "Categories", "not in one piece")
        screen.press("m")
        screen.wait_for("Segments when it was written", "free between blocks")
        screen.press("l")
        screen.wait_for("ada/model.py:12")
        screen.press("q")
        screen.wait_for(f"{path.name}: Out of memory: 0.15 GiB wanted")
        assert screen.exit_code() == 0


def test_what_is_no_snapshot_opens_no_screen(tmp_path: Path) -> None:
    path = tmp_path / "some.pickle"
    path.write_bytes(b"\x80\x04]\x94")
    with terminal("look", str(path), columns=120, lines=24) as screen:
        screen.wait_for("ends in the middle")
        assert screen.exit_code() == 2


def test_how_far_it_is(tmp_path: Path) -> None:
    frames = [{"filename": f"/home/ada/m{number}.py", "line": number, "name": "f"} for number in range(200)]
    events: list[dict[str, Any]] = []
    for number in range(60_000):
        stack = [frames[(number + depth) % 200] for depth in range(40)]
        events.append(files.event("alloc", BASE, MIB, stack))
        events.append(files.event("free_requested", BASE, MIB, stack))
        events.append(files.event("free_completed", BASE, MIB, stack))
    path = written(tmp_path, files.body(events, []))
    with terminal("look", str(path), "--plain", columns=120, lines=40) as screen:
        seen: set[str] = set()

        def watching(text: str) -> bool:
            seen.update(line.strip() for line in text.splitlines() if line.startswith(("reading ", "analysing ")))
            return "180 k events" in text

        screen.wait_until(watching, "the end")
        assert screen.exit_code() == 0
    assert len(seen) > 3
