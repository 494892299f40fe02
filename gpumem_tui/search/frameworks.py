"""The frameworks that people train with: a table of catalog/dialects.toml each, and which of them a command is of."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import msgspec

from gpumem_tui.catalog.loader import toml_tables
from gpumem_tui.catalog.shapes import CatalogError
from gpumem_tui.decoding import decodable
from gpumem_tui.formula.techniques import ADAPTERS, INJECTED, MORE_RANKS, SHARDS
from gpumem_tui.launchers import NAMES
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.text import file_text
from gpumem_tui.workload.command import BATCH, Command

_FILE = "dialects.toml"
AUTOCAST_FP16 = "autocast-fp16"
"""The name of the change that replaces autocast on GPUs without bfloat16."""
_SAYABLE = {*INJECTED, *ADAPTERS, AUTOCAST_FP16} - {*SHARDS, MORE_RANKS}
"""The changes that a framework can have words for; `ranks` starts ranks, `shards` and `zero` have them hold parts."""


class Dialect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to write a change for a framework's programs: a table of dialects.toml, which explains the fields."""

    title: str = ""
    by_program: tuple[str, ...] = ()
    by_text: tuple[str, ...] = ()
    form: str = ""
    after: str = ""
    inside: str = ""
    batch: str = ""
    passes: str = ""
    overrides: bool = False
    globals: bool = False
    shares_passes: bool = False
    ranks: tuple[str, ...] = ("torchrun --nproc-per-node {gpus}",)
    shards: str = ""
    zero: str = ""
    says: Mapping[str, str] = {}

    def is_spoken(self, command: Command, script: str) -> bool:
        """Return whether a command, whose script has that text, is of the framework."""
        programs = {os.path.basename(word) for word in command.words}
        by_program, by_text = programs & set(self.by_program), any(name in script for name in self.by_text)
        both = self.after and self.by_program
        return bool(by_program and by_text) if both else bool(by_program or by_text)

    def words(self, values: str) -> tuple[str, ...]:
        """Return the words of the line for ``name=value …``."""
        said = (
            self.form.format(name=name, dashed=name.replace("_", "-"), value=value) for name, value in pairs(values)
        )
        return tuple(word for one in said for word in one.rstrip("=").split(" "))

    def written(self, values: str) -> Sequence[str]:
        """Return what is written into the program for ``name=value …``."""
        return [self.inside.format(name=name, value=value) for name, value in pairs(values)]


def pairs(values: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each part of ``name=value …``; the value is empty if missing."""
    for each in values.split():
        name, _, value = each.partition("=")
        yield name, value


@cache
def dialects() -> Mapping[str, Dialect]:
    """Return every framework's, by name."""
    return read_dialects(toml_tables(_FILE))


def read_dialects(tables: Mapping[str, Mapping[str, object]]) -> Mapping[str, Dialect]:
    """Return the dialects that tables of dialects.toml describe.

    Raises:
        CatalogError: a table has an unknown key, a value of another type, a change or a launcher that is none, or
            nothing that gives the framework away; the message names the file, the table and the key.
    """
    return {name: _read(name, table, tables) for name, table in tables.items()}


def _read(name: str, table: Mapping[str, object], tables: Mapping[str, Mapping[str, object]]) -> Dialect:
    like = table.get("like")
    if like is not None and like not in tables:
        raise CatalogError(f"{_FILE}: {name}: like: there is no table {like!r}")
    own = {key: value for key, value in table.items() if key != "like"}
    try:
        dialect = msgspec.convert({**tables.get(str(like), {}), **own}, decodable(Dialect))
    except msgspec.ValidationError as error:
        raise CatalogError(f"{_FILE}: {name}: {error}") from error
    if fault := next(_faults(dialect), ""):
        raise CatalogError(f"{_FILE}: {name}: {fault}")
    return dialect


def _faults(dialect: Dialect) -> Iterator[str]:
    """Yield what is wrong in a table, each with its key first."""
    if not dialect.by_program and not dialect.by_text:
        yield "by_program, by_text: nothing gives its programs away"
    if dialect.batch and not dialect.form:
        yield "batch: the line has no form to say it in"
    for key in dialect.says:
        if key not in _SAYABLE:
            close = get_close_matches(key, sorted(_SAYABLE), 1)
            yield f"`says.{key}` is no known change{f'; did you mean {close[0]}?' if close else ''}"
    for form, text in (("form", dialect.form), ("inside", dialect.inside)):
        try:
            text.format(name="", dashed="", value="")
        except (KeyError, IndexError, ValueError) as error:
            yield f"{form}: {error} means nothing; {{name}}, {{dashed}} and {{value}} do"
    for way in dialect.ranks:
        first = way.partition(" ")[0]
        if first != "env" and not first.startswith("-") and first not in NAMES:
            yield f"ranks: {first} is no launcher of gpumem_tui/launchers.py"


@cache
def dialect_of(command: Command) -> Dialect:
    """Return the dialect of a command's framework; an empty one if the framework is unknown."""
    script = next(iter(scripts_of(command)), "")
    return next((one for one in dialects().values() if one.is_spoken(command, script)), Dialect())


@cache
def scripts_of(command: Command) -> Sequence[str]:
    """Return the texts of the Python files that a command's line names: the program, and perhaps its settings."""
    return [file_text(Path(command.cwd, word)) for word in _script_names(command)]


def _script_names(command: Command) -> Sequence[str]:
    """Return the Python files of a line, of a module that Python or a launcher runs by ``-m`` too."""
    named = []
    for before, word in zip(("", *command.words), command.words, strict=False):
        parts = word.replace(".", "/")
        if word.endswith(".py"):
            named.append(word)
        elif before in ("-m", "--module"):
            places = (f"{parts}.py", f"{parts}/__main__.py")
            named += [place for place in places if Path(command.cwd, place).is_file()][:1]
    return named


def with_batch(command: Command) -> Command | None:
    """Return the command with ``{batch}`` as its batch size; None where its words do not show how to write that."""
    if text := command.shell_text:
        return _with_batch_in_shell(command, text)
    proposal, dialect, script = command.proposal, dialect_of(command), next(iter(scripts_of(command)), "")
    if proposal is not None:
        before, after = command.words[: proposal.at], command.words[proposal.at + len(proposal.given.split(" ")) :]
        return replace(command, words=(*before, *proposal.proposed.split(" "), *after))
    if dialect.batch and (command.files or not script):
        return replace(command, words=(*command.words, *dialect.words(f"{dialect.batch}={BATCH}")))
    if option := command.option_in(script) or _hydra_key(command, script):
        words = (option, BATCH) if option.startswith("-") else (f"{option}={BATCH}",)
        return replace(command, words=(*command.words, *words))
    name = next(iter(_script_names(command)), "")
    return command.with_variable(script) or (command.with_argument(script, name) if name else None)


def _with_batch_in_shell(command: Command, text: str) -> Command | None:
    """Return the command with ``{batch}`` in the text that its shell runs, where that is one line of one program."""
    try:
        inner = replace(command, words=tuple(shlex.split(text)))
    except ValueError:
        return None
    if not inner.words:
        return None
    proposal = inner.proposal
    if proposal is not None:
        is_once = text.count(proposal.given) == 1
        return command.with_shell_text(text.replace(proposal.given, proposal.proposed)) if is_once else None
    filled = with_batch(inner) if not set(text) & set(";|&<>$()`\n") else None
    return command.with_shell_text(filled.text) if filled is not None else None


_HYDRA = re.compile(r"@hydra\.main\(([^)]*)\)")
_YAML_LINE = re.compile(r"^( *)(- )?([\w-]+): *([\w./-]*)", re.MULTILINE)
_NOT_TRAINED = re.compile("eval|val|test|infer|predict")


def _hydra_key(command: Command, script: str) -> str:
    """Return the key of Hydra's configuration that has the batch size, in dots; empty where none is found."""
    if (main := _HYDRA.search(script)) is None:
        return ""
    given = dict(re.findall(r"(config_\w+)\s*=\s*[\"']([^\"']+)[\"']", main[1]))
    folder = Path(command.cwd, _script_names(command)[0]).parent / given.get("config_path", ".")
    first = folder / f"{given.get('config_name', 'config').removesuffix('.yaml')}.yaml"
    text = file_text(first)
    groups = [(f"{name}.", file_text(folder / name / f"{chosen}.yaml")) for name, chosen in _defaults(text)]
    keys = [before + key for before, each in (("", text), *groups) for key in _batch_keys(each)]
    return next((key for key in keys if not _NOT_TRAINED.search(key)), "")


def _defaults(text: str) -> Iterator[tuple[str, str]]:
    """Yield the groups of Hydra's list of defaults, each with the file that is chosen."""
    for _, dash, name, chosen in _YAML_LINE.findall(text):
        if dash and chosen:
            yield name, chosen


def _batch_keys(text: str) -> Iterator[str]:
    """Yield the keys of a YAML mapping, in dots, that have a number for a batch size."""
    above: list[tuple[int, str]] = []
    for indent, dash, name, value in _YAML_LINE.findall(text):
        if dash:
            continue
        above = [one for one in above if one[0] < len(indent)]
        if value.isdecimal() and Command((name, f"{name}={value}"), ".").proposal is not None:
            yield ".".join([*(key for _, key in above), name])
        above.append((len(indent), name))


def line_for_any_batch(config: SearchConfig, verb: str, *options: str) -> str:
    """Return the complete line to type that has ``{batch}`` in the place of the command's batch size.

    Where no line alone does that, what is to be changed in a file comes first.

    Args:
        options: of the verb, besides those that were typed.
    """
    given = config.workload.command
    assert given is not None, "a model has its batch size as an option"
    command = with_batch(given)
    line = f"`{_typed(config, verb, *options)} -- {(command or given).text}`"
    if command is not None:
        return line
    if (written := given.batch_written) is not None:
        sed, copy = written
        first = f"{sed} && " if sed else ""
        return f"`{first}{_typed(config, verb, *options)} -- {given.with_file(given.batch_file, copy).text}`"
    if given.batch_file:
        return f"write {BATCH} in {given.batch_file} as the batch size, then {line}"
    asking = given.with_shell_text(f"{text} --batch-size {BATCH}") if (text := given.shell_text) else None
    words = (*given.words, "--batch-size", BATCH)
    line = (asking or replace(given, words=words)).text
    return f"give the program an option for its batch size, then `{_typed(config, verb, *options)} -- {line}`"


def _typed(config: SearchConfig, verb: str, *options: str) -> str:
    return shlex.join(["gpumem-tui", verb, *options, *config.typed])
