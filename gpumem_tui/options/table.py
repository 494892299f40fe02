"""Every option of a search, a prediction and a plan, as `options.toml` has them.

Imported by everything that prints `--help`, so it imports next to nothing. An option's name is that of the field that
it sets: of a `ModelShape`, `WorkloadOptions` or `Options`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args, get_type_hints

from gpumem_tui.catalog.tables import made
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.recipe import SHARDING_ALIASES, Recipe
from gpumem_tui.memory import size_from, size_text
from gpumem_tui.options.typed import rows_from, rows_text, tokens_from
from gpumem_tui.search import strategy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Holds = Literal["text", "choice", "count", "number", "size", "tokens", "flag", "rows"]
Group = Literal["workload", "shape", "recipe", "command", "device", "search"]
Trained = Literal["model", "config", "file", "command"]
NETWORKS: tuple[Trained, ...] = ("model", "config")
Section = Literal["What to run", "Which GPU", "The model", "Several GPUs", "CI", "Output"]
SECTIONS: tuple[Section, ...] = get_args(Section)
"""Headings of `--help`, in their order."""
NO, YES = "no", "yes"
"""The words of a flag in a form."""


@dataclass(frozen=True, kw_only=True)
class OptionRow:
    """An option of the command line, which is a field of the form and of the JSON too.

    Attributes:
        name: of the field that it sets, of click's parameter, and of the form's field.
        group: ``shape``, ``recipe`` and ``workload`` say what is trained, ``device`` on what it runs.
        section: the heading of `--help` under which it is.
        common: whether `--help` lists it, or `--help-all` only.
        holds: a ``text``, one word of several (``choice``), a whole number (``count``), a ``number``, bytes (``size``),
            ``tokens``, yes or no (``flag``), or several shares of rows (``rows``).
        help: its sentence in `--help`.
        flag: as it is typed; ``--`` and the name where none is given.
        default: its value where none is typed.
        choices: the words of a choice.
        aliases: other words and what they stand for, on the command line only.
        low: the lower bound of a count or a number.
        high: the upper bound; included, unless on the command line with `high_open`.
        most_typed: the upper bound in a form, where that is another.
        metavar: what `--help` calls the value.
        tells_default: whether `--help` names the default.
        label: what the form calls it; empty for what is not in the form.
        empty: what an empty field of the form means, or an example.
        trained: what is trained when the form shows it; empty for always.
    """

    name: str
    group: Group
    section: Section = "What to run"
    common: bool = False
    holds: Holds
    help: str = ""
    flag: str = ""
    default: object = None
    choices: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    low: int | float = 1
    high: int | float | None = None
    high_open: bool = False
    most_typed: int | float = 1_000_000_000
    metavar: str | None = None
    tells_default: bool = False
    label: str = ""
    empty: str = ""
    trained: tuple[Trained, ...] = ()

    @property
    def is_of_commands(self) -> bool:
        """Whether it does anything for a user's command, which builds its own model."""
        if self.group in ("shape", "recipe"):
            return "command" in self.trained
        return not self.trained or "command" in self.trained

    def read(self, text: str) -> object:
        """Return the value that a text represents; an empty one represents the default.

        Raises:
            OptionError: it matches none; the line names the option.
        """
        if not text:
            return self.default
        try:
            match self.holds:
                case "size":
                    return size_from(text)
                case "tokens":
                    return tokens_from(text)
                case "rows":
                    return tuple(rows_from(word) for word in text.split())
                case "flag":
                    return text == YES
                case "count":
                    return self._checked(int(text), f"{int(text):,}")
                case "number":
                    return self._checked(_number(text), text)
                case _:
                    return text
        except ValueError as error:
            raise OptionError(f"{self.flag}: {error}") from error

    def _checked(self, number: float, shown: str) -> float:
        most = self.most_typed if self.high is None or self.high_open else self.high
        if self.low <= number <= most:
            return number
        if self.holds == "number":
            raise ValueError(f"must be a number from {self.low:g} to {most:g}, not {shown}")
        raise ValueError(f"must be from {self.low:,} to {most:,}, not {shown}")

    def text(self, value: object) -> str:
        """Return a value as it is typed; empty for the default."""
        if self.holds == "flag":
            return YES if value else NO
        if value is None or (value == self.default and self.holds != "choice"):
            return ""
        if isinstance(value, int) and self.holds == "size":
            return size_text(value)
        if isinstance(value, tuple) and self.holds == "rows":
            return rows_text(value)
        return f"{value:g}" if isinstance(value, float) else str(value)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _of_recipe() -> dict[str, dict[str, object]]:
    """Return by name what each option of a recipe holds, its choices and its default, as `Recipe` is annotated."""
    kinds, recipe = get_type_hints(Recipe), Recipe()
    holds = {bool: "flag", int: "count", str: "text"}
    known: dict[str, dict[str, object]] = {
        name: {
            "holds": "choice" if (choices := get_args(kind)) else holds[kind],
            "choices": choices,
            "default": getattr(recipe, name),
        }
        for name, kind in kinds.items()
    }
    known["sharding"]["aliases"] = tuple(SHARDING_ALIASES.items())
    return known


def _loaded() -> Mapping[str, OptionRow]:
    rows = tomllib.loads(Path(__file__).with_name("options.toml").read_text("utf-8"))
    known = _of_recipe()
    known["strategy"] = {"choices": strategy.NAMES, "default": strategy.NAMES[0]}
    known |= {name: {"default": ()} for name in ("command", "assumed_rows")}
    shape = {"holds": "count", "empty": "the model's own", "trained": NETWORKS}
    options = {}
    for name, row in rows.items():
        whole = {
            "name": name,
            "flag": f"--{name.replace('_', '-')}",
            **(shape if row["group"] == "shape" else {}),
            **known.get(name, {}),
            **{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()},
        }
        if whole["holds"] == "choice":
            whole["tells_default"] = True
        options[name] = made(OptionRow, whole)
    return MappingProxyType(options)


OPTIONS = _loaded()
"""Every option by its name, in the order of `--help`."""
BY_FLAG: Mapping[str, OptionRow] = MappingProxyType({option.flag: option for option in OPTIONS.values()})


def _group(*groups: Group) -> tuple[OptionRow, ...]:
    return tuple(option for option in OPTIONS.values() if option.group in groups)


SHAPE = _group("shape")
"""Fields of a `ModelShape` that can be changed."""
WORKLOAD = _group("workload", "shape", "recipe")
"""The workload and its training: fields of `WorkloadOptions` and of its changes."""
DEVICE = _group("device")
"""The device that it runs on: fields of `Options`."""
SEARCH = _group("search")
"""Options of a search only: fields of `Options`."""
COMMAND = OPTIONS["command"]
"""The words after ``--``, which are no option to the command line."""
