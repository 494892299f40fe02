"""The settings file: TOML, one flat list of keys, each with its default, its bounds and what it does.

The command line goes before the file, the file before the defaults.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, field

from gpumem_tui.decoding import decodable
from gpumem_tui.errors import OptionError


class SettingsError(OptionError):
    """The file is invalid: one line with every fault, each with the file and the line it is on."""


class Notify(Struct, frozen=True):
    """Who gets a message when an alert begins: the table ``[notify]``."""

    command: Annotated[
        str | tuple[str, ...],
        Meta(
            description="Run for each alert that begins, which it gets as JSON on its standard input: a program and "
            'its arguments, without a shell, such as "/home/me/tell.sh gpus" or a list of these. Empty: none.'
        ),
    ] = ""
    severity: Annotated[
        Literal["note", "warning", "critical"],
        Meta(description="The least to report: note, warning or critical."),
    ] = "warning"
    timeout_s: Annotated[
        float, Meta(ge=0.5, le=600, description="Seconds after which a command that does not end is killed.")
    ] = 10.0
    most_a_minute: Annotated[
        int, Meta(ge=1, le=600, description="Alerts told in a minute; what is beyond is counted with the next.")
    ] = 10

    @property
    def argv(self) -> tuple[str, ...]:
        """The command's program and arguments; a text is taken apart as a shell would, which runs nothing.

        Raises:
            ValueError: a quotation that does not end.
        """
        return tuple(shlex.split(self.command)) if isinstance(self.command, str) else self.command


class GpuTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU that the catalog lacks: a table ``[gpus.NAME]``.

    Attributes:
        memory: as nvidia-smi reports it, such as ``20GiB``.
        arch: such as ``sm_89`` or ``gfx942``; empty for not known.
        multiprocessors: None for not known.
    """

    memory: str
    arch: str = ""
    multiprocessors: Annotated[int, Meta(ge=1, le=10_000)] | None = None


OwnGpu = Annotated[GpuTable, Meta(description='a table with memory = "20GiB" and arch = "sm_89"')]
HostList = Annotated[tuple[str, ...], Meta(description='a list of hosts such as ["a", "me@b:2222"]')]
HourPrice = Annotated[float, Meta(ge=0, lt=1e6, description="the price of one GPU for an hour")]


class Settings(Struct, frozen=True):
    """The settings of a user, from `settings.toml`."""

    interval_s: Annotated[float, Meta(ge=0.2, le=3600, description="Seconds between two readings of the GPUs.")] = 1.0
    theme: Annotated[
        str,
        Meta(
            description="Name of a theme, as the command palette (ctrl+p) lists them. Empty: the default one. "
            "A theme that is chosen there is kept until this is changed."
        ),
    ] = ""
    ascii: Annotated[
        bool, Meta(description="Draw with ASCII characters only. A locale without UTF-8 does so anyway.")
    ] = False
    bell: Annotated[bool, Meta(description="Ring the terminal's bell when an alert begins.")] = False
    read_only: Annotated[
        bool, Meta(description="Only watch: end no process, attach to none, search nothing, write no file.")
    ] = False
    mine: Annotated[bool, Meta(description="List only your own processes and jobs; the key m lists everybody's.")] = (
        False
    )
    near_full_percent: Annotated[
        float, Meta(ge=1, le=100, description="Memory in use from which a GPU counts as nearly full.")
    ] = 95.0
    temperature_margin_c: Annotated[
        int, Meta(ge=0, le=50, description="Degrees below the driver's own limit from which a GPU is hot.")
    ] = 5
    temperature_limit_c: Annotated[
        int, Meta(ge=30, le=150, description="The limit of a GPU for which the driver names none.")
    ] = 90
    history_hours: Annotated[float, Meta(ge=0.1, le=24 * 31, description="How far back the history reaches.")] = 24.0
    chart_minutes: Annotated[
        float, Meta(ge=0.5, le=24 * 60, description="Time that the history chart shows when it opens.")
    ] = 10.0
    remote_command: Annotated[
        str,
        Meta(
            description="The command to call on other hosts, as their shell takes it. Empty: gpumem-tui, found there."
        ),
    ] = ""
    hosts: Annotated[
        Mapping[str, HostList],
        Meta(
            description="Lists of hosts by name, for --host NAME. As a table: [hosts], then "
            'cluster = ["node[01-16]", "me@b:2222"].'
        ),
    ] = field(default_factory=dict)
    prices: Annotated[
        Mapping[str, HourPrice],
        Meta(
            description="Your price of an hour of one GPU, in US dollars. As a table: [prices], then "
            "h100-80gb = 2.10, and so on."
        ),
    ] = field(default_factory=dict)
    gpus: Annotated[
        Mapping[str, OwnGpu],
        Meta(
            description="GPUs that the catalog lacks, for --gpu sim:NAME. As a table each: [gpus.my-card], then "
            'memory = "20GiB" and arch = "sm_89".'
        ),
    ] = field(default_factory=dict)
    notify: Notify = Notify()


_Table = type[Settings] | type[Notify]


def default_path(name: str = "settings.toml") -> Path:
    """Return where a file of the user's is looked for: in the configuration folder, by the XDG rules."""
    return _users_file("config", "~/.config", name)


def _users_file(kind: Literal["config", "state"], usual: str, name: str) -> Path:
    """Return a file in the user's folder of a kind, by the XDG rules; `usual` is it without a variable."""
    if os.uname().sysname == "Linux":  # as platformdirs does there, which takes long to import
        folder = os.environ.get(f"XDG_{kind.upper()}_HOME", "").strip() or os.path.expanduser(usual)
        return Path(folder, "gpumem-tui", name)
    import platformdirs

    of_kind = platformdirs.user_config_path if kind == "config" else platformdirs.user_state_path
    return of_kind("gpumem-tui") / name


class _KeptTheme(Struct, frozen=True):
    """A theme that was chosen in the program, and the one that the settings had then."""

    chosen: str
    settings: str = ""


def theme_of(settings: Settings) -> str:
    """Return the theme to open with: the one chosen last in the program, unless the settings were changed since."""
    try:
        kept = msgspec.json.decode(_theme_path().read_bytes(), type=decodable(_KeptTheme))
    except (OSError, msgspec.MsgspecError):
        return settings.theme
    return kept.chosen if kept.settings == settings.theme else settings.theme


def keep_theme(settings: Settings, chosen: str) -> None:
    """Keep the theme that was chosen in the program for the next time.

    Raises:
        OSError: it cannot be written.
    """
    path = _theme_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(_KeptTheme(chosen, settings.theme)))


def _theme_path() -> Path:
    """Return where the chosen theme is kept."""
    return _users_file("state", "~/.local/state", "theme.json")


def load(path: Path | None = None) -> Settings:
    """Read the settings of a file; of the default one, which need not exist, if `path` is None.

    Raises:
        SettingsError: no such file, no TOML, unknown keys, wrong types, values out of bounds.
    """
    wanted = path or default_path()
    try:
        text = wanted.read_text("utf-8")
    except FileNotFoundError as error:
        if path is None:
            return Settings()
        raise SettingsError(f"{path}: there is no such file; `gpumem-tui settings` prints one") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingsError(f"{wanted}: cannot be read: {reason}; check that file") from error
    return parse(text, wanted.name)


def parse(text: str, name: str = "settings.toml") -> Settings:
    """Read the settings that a file's text describes; `name` is what errors call the file.

    Raises:
        SettingsError: as `load`.
    """
    if sys.version_info >= (3, 11):  # here: most have no settings file
        import tomllib
    else:
        import tomli as tomllib
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = place[1] if place else len(text.splitlines())  # "at end of document"
        raise SettingsError(f"{name}:{line}: {str(error).partition(' (at ')[0]}") from error
    except RecursionError as error:
        raise SettingsError(f"{name}: too many nested brackets; `gpumem-tui settings` prints a valid file") from error
    faults = [(_line_of(key, text), fault) for key, fault in _faults(values, Settings) if fault]
    if faults:
        raise SettingsError("; ".join(f"{name}:{line}: {fault}" for line, fault in sorted(faults)))
    return msgspec.convert(values, decodable(Settings))


def default_file() -> str:
    """Return a settings file with every key at its default, each explained and commented out."""
    blocks = ["# Settings of gpumem-tui. Remove the # before a key to change it.\n"]
    blocks += _explained(Settings())
    blocks.append("# Who gets a message when an alert begins. Remove the # of this line too.\n# [notify]\n")
    blocks += _explained(Notify())
    return "\n".join(blocks)


def _explained(table: Settings | Notify) -> Iterator[str]:
    for key, kind in _kinds(type(table)).items():
        if kind is not Notify:
            (known,) = kind.__metadata__
            bounds = "" if known.ge is None else f" {known.ge:g} to {known.le:g}."
            yield f"# {known.description}{bounds}\n# {key} = {_toml(getattr(table, key))}\n"


def _kinds(table: _Table) -> dict[str, Any]:
    """Return the types of a table's keys, with their bounds and what they do."""
    return get_type_hints(table, include_extras=True)


def _faults(
    values: dict[str, Any], table: type[Settings] | type[Notify], within: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield each key of a table and what is wrong with it; "" for nothing.

    Args:
        within: what is before the key in words, such as ``notify.``.
    """
    kinds = _kinds(table)
    for key, value in values.items():
        kind = kinds.get(key)
        if kind is None:
            yield key, _unknown(key, list(kinds))
        elif kind is not Notify and get_origin(kind.__origin__) is not Mapping:
            yield key, _fault(f"{within}{key}", value, kind, _words(kind, value))
        elif not isinstance(value, dict):
            yield key, f"{key} must be a table, not {_toml(value)}"
        elif kind is Notify:
            yield from _faults(value, Notify, "notify.")
        else:
            _, entry = get_args(kind.__origin__)
            for name, one in value.items():
                yield name, _fault(f"{key}.{name}", one, entry, entry.__metadata__[0].description)


def _unknown(key: str, keys: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(key, keys, n=1)
    return f"unknown key {key!r}; {f'did you mean {near[0]}?' if near else '`gpumem-tui settings` lists the keys'}"


def _fault(key: str, value: object, kind: Any, words: str) -> str:
    """Return what is wrong with a value; empty if nothing is. `words`: what it must be."""
    try:
        found = msgspec.convert(value, kind)
        if key == "notify.command":
            _ = Notify(found).argv
    except msgspec.ValidationError:
        return f"{key} must be {words}, not {_toml(value)}"
    except ValueError as error:
        return f"{key}: {error}"
    return ""


_WORDS = {bool: "true or false", str: "a text in quotes", int: "a whole number", float: "a number"}


def _words(kind: Any, value: object) -> str:
    """Say what a key takes: its bounds where the value is a number of that kind, else its kind."""
    base, (known,) = kind.__origin__, kind.__metadata__
    if get_origin(base) is Literal:
        return f"one of {', '.join(get_args(base))}"
    if known.ge is not None and type(value) in (int, base):
        return f"{known.ge:g} to {known.le:g}"
    return _WORDS.get(base, "a text in quotes or a list of them")


def _line_of(key: str, text: str) -> int:
    """Return an entry's line in the file, which TOML readers do not give."""
    quoted = re.escape(key)
    entry = re.compile(rf"\s*(?:\[+\s*[\w-]+\s*\.)?\[*\s*([\"']?){quoted}\1\s*[=.\]]")
    return next((number for number, line in enumerate(text.splitlines(), 1) if entry.match(line)), 1)


def _toml(value: object) -> str:
    """Return a value as a user would have written it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value == {}:
        return "{}"
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    return f'"{value}"' if isinstance(value, str) else f"{value}"
