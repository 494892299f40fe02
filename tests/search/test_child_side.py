"""Code in the user's interpreter needs only the standard library and torch, and its owner needs no torch."""

from __future__ import annotations

import subprocess
import sys

CHILD = (
    "changes", "command_server", "command_trial", "events", "lengths", "libraries", "program", "replacements",
    "stand_ins",
)  # fmt: skip
OWNER = ("children", "control", "interpreters")
OURS = ("click", "msgspec", "platformdirs", "prometheus_client", "psutil", "rich", "textual")
"""Packages of the viewer's environment that a user's may lack."""

IMPORT = """
import importlib, sys
{before}
for name in {names}:
    importlib.import_module("gpumem_tui.run." + name)
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({looked_for})))
"""


def _imported(names: tuple[str, ...], looked_for: tuple[str, ...], *, missing: tuple[str, ...] = ()) -> list[str]:
    before = "\n".join(f"sys.modules[{name!r}] = None" for name in missing)
    code = IMPORT.format(before=before, names=names, looked_for=looked_for)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_childs_side_does_without_what_the_viewer_has() -> None:
    assert _imported(CHILD, ("torch",), missing=OURS) == ["torch"]


def test_the_owners_side_does_without_torch() -> None:
    assert _imported(OWNER, ("torch", "numpy")) == []
