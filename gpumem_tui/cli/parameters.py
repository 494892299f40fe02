"""Parameters of commands that train: click's options made from the table of options, the command after ``--``."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_tui import launchers
from gpumem_tui.cli.sections import COMMAND, Sectioned, sectioned
from gpumem_tui.cli.types import Decorator, Finite, Typed, Whole
from gpumem_tui.memory import size_from
from gpumem_tui.options.table import DEVICE, WORKLOAD, OptionRow
from gpumem_tui.options.typed import rows_from, tokens_from

if TYPE_CHECKING:
    from gpumem_tui.options.configuration import Options
    from gpumem_tui.search.config import SearchConfig

SIZE = Typed("size", size_from)
TOKENS = Typed("tokens", tokens_from)
_ROWS = Typed("rows", rows_from)


def as_click(option: OptionRow) -> Decorator:
    """Return an option of the table as click takes it."""
    return sectioned(
        option.flag,
        option.name,
        section=option.section,
        is_common=option.common,
        of_commands=option.is_of_commands,
        help=option.help,
        **({"is_flag": True} if option.holds == "flag" else _value_of(option)),
    )


def _value_of(option: OptionRow) -> dict[str, object]:
    return {
        "type": _type_of(option),
        "default": None if option.holds == "rows" else option.default,
        "multiple": option.holds == "rows",
        "show_default": option.tells_default,
        "metavar": option.metavar,
        "callback": (lambda _, __, word: dict(option.aliases).get(word, word)) if option.aliases else None,
    }


def _type_of(option: OptionRow) -> click.ParamType[object]:
    match option.holds:
        case "choice":
            return click.Choice((*option.choices, *dict(option.aliases)))
        case "count":
            return Whole(int(option.low), None if option.high is None else int(option.high))
        case "number":
            return Finite(option.low, option.high, max_open=option.high_open)
        case "size":
            return SIZE
        case "tokens":
            return TOKENS
        case "rows":
            return _ROWS
        case _:
            return click.STRING


def from_table(options: Iterable[OptionRow]) -> list[Decorator]:
    """Return options of the table as click takes them."""
    return [as_click(option) for option in options]


WORKLOAD_OPTIONS = from_table(WORKLOAD)
DEVICE_OPTIONS = from_table(DEVICE)


# The command after --

_PYTHON = re.compile(r"python[\d.]*")


class TakesCommand(Sectioned):
    """A gpumem-tui command that takes a user's training command after its options and ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the words after ``--`` aside, then parse the others."""
        if "--" in args:
            split = args.index("--")
            args, ctx.meta[COMMAND] = args[:split], tuple(args[split + 1 :])
            if not ctx.meta[COMMAND] or not ctx.meta[COMMAND][0]:
                raise click.UsageError("--: no command follows; write it as `-- python train.py --batch-size {batch}`")
            if needs_python(ctx.meta[COMMAND][0]):
                line = with_python(["gpumem-tui", ctx.info_name or "", *args], ctx.meta[COMMAND])
                raise click.UsageError(f"{ctx.meta[COMMAND][0]}: is not a program, but a script: `{line}`")
            apart = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--python=") else [arg])]
            if "--python" in apart[:-1]:
                line = _with_own_python(ctx.info_name or "", apart, ctx.meta[COMMAND])
                raise click.UsageError(f"--python: is for models; a command names its own Python: `{line}`")
            if slip := _slip(ctx.meta[COMMAND]):
                fault, command = slip
                line = with_python(["gpumem-tui", ctx.info_name or "", *args], command)
                raise click.UsageError(f"{ctx.meta[COMMAND][0]}: {fault}: `{line}`")
            return super().parse_args(ctx, args)
        words = tuple(args)  # which click takes apart
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            begins = begins_training(words)
            if begins is None:
                raise
            line = with_python(["gpumem-tui", ctx.info_name or "", *words[:begins]], words[begins:])
            raise click.UsageError(f"{words[begins]}: write -- before your command: `{line}`") from error

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the usage, with the command at its end."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def begins_training(words: Sequence[str]) -> int | None:
    """Return at which word a training command seems to begin; None where there seems to be none."""
    for position, word in enumerate(words):
        name = Path(word).name
        before = words[position - 1] if position else ""
        follows = before.startswith("--") and "=" not in before
        is_python = _PYTHON.fullmatch(name) and before != "--python"
        if is_python or name in launchers.NAMES or (name.endswith(".py") and not follows):
            return position
    return None


def _with_own_python(verb: str, args: Sequence[str], words: Sequence[str]) -> str:
    """Return the line with the value of ``--python`` as the Python of its command, or in the folder of its launcher."""
    at = args.index("--python")
    path, rest = Path(args[at + 1]), (*args[:at], *args[at + 2 :])
    first = str(path if _PYTHON.fullmatch(Path(words[0]).name) else path.with_name(Path(words[0]).name))
    return shlex.join(["gpumem-tui", verb, *rest, "--", first, *words[1:]])


def _slip(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """Return why the first of a command's words is no program, and the words that were meant; None where it is one."""
    first = words[0]
    if shutil.which(first) is not None or Path(first).exists():
        return None
    if re.match(r"[A-Za-z_]\w*=", first):
        return "is a variable, not a program; write env before it", ["env", *words]
    parts = first.split()
    if len(parts) > 1 and (needs_python(parts[0]) or shutil.which(parts[0]) is not None):
        return "is quoted as one word; leave the quotes out", [*parts, *words[1:]]
    near = get_close_matches(first, ("python", "python3", *launchers.NAMES), 1)
    return (f"is no program here; did you mean {near[0]}", [near[0], *words[1:]]) if near else None


def needs_python(word: str) -> bool:
    """Return whether a command's first word is a Python file that the shell would not find as a program."""
    return word.endswith(".py") and shutil.which(word) is None


def with_python(begun: Sequence[str], command: Sequence[str]) -> str:
    """Return a line with ``--`` before a training command, and with Python before a script."""
    python = ("python",) if needs_python(command[0]) else ()
    return shlex.join([*begun, "--", *python, *command])


def typed_with(*words: str) -> str:
    """Return the line that was typed, with further words before the training command."""
    typed = sys.argv[1:]
    split = typed.index("--") if "--" in typed else len(typed)
    return shlex.join(["gpumem-tui", *typed[:split], *words, *typed[split:]])


def trained_command() -> tuple[str, ...]:
    """Return the user's training command of this invocation; empty if none was given."""
    context = click.get_current_context(silent=True)
    words: tuple[str, ...] = () if context is None else context.meta.get(COMMAND, ())
    return words


def asked(values: Mapping[str, object], **set_values: object) -> Options:
    """Return what was typed, with the user's training command if there is one.

    Args:
        values: by name of each option of the table; those that are left out take their defaults.
        set_values: options that the command itself sets.
    """
    from gpumem_tui.options.configuration import asked_by

    return asked_by({"command": trained_command(), **values, **set_values})


def configured(values: Mapping[str, object], **set_values: object) -> tuple[Options, SearchConfig]:
    """Return what was typed, and what is searched by that.

    Args:
        values, set_values: as of `asked`.

    Raises:
        OptionError: the options are wrong, or do not go together.
    """
    from gpumem_tui.options.configuration import configure

    options = asked(values, **set_values)
    return options, configure(options)
