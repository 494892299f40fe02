"""The rows of `programs/rows.toml`: each a training program with its arguments, small enough to end within seconds."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROGRAMS = Path(__file__).with_name("programs")
ROOT = Path(__file__).parents[2]
ANY_CAPABILITY = (0, 0)


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program with its arguments.

    Attributes:
        kind: what sets it apart from others, in a few words.
        command: the script in `programs` (in `clone` where there is one) and its arguments.
        steps: how many steps it makes.
        needs: packages next to torch, by the name that is imported.
        torch: the oldest version that has all it uses.
        capability: the lowest compute capability that can run it.
        environment: variables that are set for it.
        options: of `predict`, what a user adds who reads what it states without them.
        clone: the repository on GitHub whose own script it is; it is in a folder of that name.
    """

    name: str
    kind: str
    command: str
    steps: int = 6
    needs: tuple[str, ...] = ()
    torch: str = "2.6"
    capability: tuple[int, int] = ANY_CAPABILITY
    environment: dict[str, str] = {}
    options: tuple[str, ...] = ()
    clone: str = ""

    def words(self, clones: Path | None) -> list[str]:
        """The script's path and its arguments.

        Raises:
            NotHere: it is of a clone that is not in `clones`.
        """
        script, *arguments = shlex.split(self.command)
        return [str(self.folder(clones) / script), *arguments]

    def folder(self, clones: Path | None) -> Path:
        """Where its script is.

        Raises:
            NotHere: as of `words`.
        """
        if not self.clone:
            return PROGRAMS
        folder = (clones or Path()).absolute() / self.clone.partition("/")[2]
        if clones is None or not folder.is_dir():
            raise NotHere(f"needs a clone of github.com/{self.clone} in --clones DIR")
        return folder

    def variables(self) -> dict[str, str]:
        """The environment to run it in: nothing is downloaded."""
        return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **self.environment}


class NotHere(Exception):
    """A row cannot run here; one line gives the reason."""


@cache
def load_rows() -> tuple[Row, ...]:
    """Every row, in the order of the table, which is that of their worth."""
    tables = tomllib.loads((PROGRAMS / "rows.toml").read_text(encoding="utf-8"))
    return tuple(msgspec.convert({"name": name, **table}, Row) for name, table in tables.items())


_ASK = """
import json, sys
from importlib.util import find_spec
from importlib.metadata import version
print(json.dumps({name: version("torch") if name == "torch" else "" for name in sys.argv[1:] if find_spec(name)}))
"""


class Interpreter:
    """A Python that runs programs, and what it has.

    Args:
        path: to the interpreter.
        capability: of the GPU that it uses.
    """

    def __init__(self, path: str, capability: tuple[int, int]) -> None:
        self.path = os.path.abspath(path) if os.sep in path else path
        self._capability = capability
        names = sorted({"torch", *(name for row in load_rows() for name in row.needs)})
        try:
            asked = subprocess.run([path, "-c", _ASK, *names], capture_output=True, text=True, check=True, timeout=60)
            self._has: dict[str, str] = msgspec.json.decode(asked.stdout, type=dict[str, str])
        except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
            raise NotHere(f"{path}: does not run as a Python: {error}") from error

    def check(self, row: Row) -> None:
        """Find out whether a row can run.

        Raises:
            NotHere: a package, a version or the GPU's capability is lacking.
        """
        if missing := [name for name in ("torch", *row.needs) if name not in self._has]:
            raise NotHere(f"needs {' and '.join(missing)}, which {self.path} has not")
        if _version(self._has["torch"]) < _version(row.torch):
            raise NotHere(f"needs torch {row.torch}, this is {self._has['torch']}")
        if self._capability < row.capability:
            needed, has = (".".join(map(str, each)) for each in (row.capability, self._capability))
            raise NotHere(f"needs compute capability {needed}, this GPU has {has}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


def selected(names: Sequence[str], rows: Iterable[Row]) -> list[Row]:
    """The rows of these names, all without any.

    Raises:
        NotHere: there is no such row.
    """
    rows = list(rows)
    if unknown := set(names) - {row.name for row in rows}:
        raise NotHere(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in rows)}")
    return [row for row in rows if not names or row.name in names]
