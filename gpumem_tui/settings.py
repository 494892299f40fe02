"""The settings file: TOML, one flat list of keys, each with its default, its bounds and what it does.

The command line goes before the file, the file before the defaults.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from gpumem_tui.errors import OptionError


class SettingsError(OptionError):
    """The file is invalid: one line with every fault, each with the file and the line it is on."""


def _key(default: Any, doc: str, *, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"doc": doc, "low": low, "high": high})


@dataclass(frozen=True)
class Notify:
    """Who is told when an alert begins: the table ``[notify]``."""

    command: tuple[str, ...] = _key(
        (),
        "Run for each alert that begins, which it gets as JSON on its standard input: a program and its arguments, "
        'without a shell, such as "/home/me/tell.sh gpus" or a list of these. Empty: none.',
    )  # fmt: skip
    severity: str = _key("warning", "The least that is told: note, warning or critical.")
    timeout_s: float = _key(10.0, "Seconds after which a command that does not end is killed.", low=0.5, high=600)
    most_a_minute: int = _key(10, "Alerts told in a minute; what is beyond is counted with the next.", low=1, high=600)


_CHOICES = {"severity": ("note", "warning", "critical")}


@dataclass(frozen=True)
class Settings:
    """The settings of a user, from `settings.toml`."""

    interval_s: float = _key(1.0, "Seconds between two readings of the GPUs.", low=0.2, high=3600)
    theme: str = _key("", "Name of a theme, as the command palette (ctrl+p) lists them. Empty: the default one.")
    ascii: bool = _key(False, "Draw with ASCII characters only. A locale without UTF-8 does so anyway.")
    bell: bool = _key(False, "Ring the terminal's bell when an alert begins.")
    read_only: bool = _key(False, "Only watch: end no process, attach to none, search nothing, write no file.")
    mine: bool = _key(False, "List only your own processes and jobs; the key m lists everybody's.")
    near_full_percent: float = _key(95.0, "Memory in use from which a GPU counts as nearly full.", low=1, high=100)
    temperature_margin_c: int = _key(5, "Degrees below the driver's own limit from which a GPU is hot.", low=0, high=50)
    temperature_limit_c: int = _key(90, "The limit of a GPU for which the driver names none.", low=30, high=150)
    history_hours: float = _key(24.0, "How far back the history reaches.", low=0.1, high=24 * 31)
    chart_minutes: float = _key(10.0, "Time that the history chart shows when it opens.", low=0.5, high=24 * 60)
    remote_command: str = _key(
        "",
        "What is called on other hosts, as their shell takes it. Empty: gpumem-tui, found there.",
    )
    hosts: tuple[tuple[str, tuple[str, ...]], ...] = _key(
        (), 'Lists of hosts by name, for --host NAME. As a table: [hosts], then cluster = ["node[01-16]", "me@b:2222"].'
    )
    prices: tuple[tuple[str, float], ...] = _key(
        (),
        "What an hour of one GPU costs you, in US dollars. As a table: [prices], then h100-80gb = 2.10, and so on.",
    )
    notify: Notify = Notify()


def default_path(name: str = "settings.toml") -> Path:
    """Return where a file of the user's is looked for: in the configuration folder, by the XDG rules."""
    from platformdirs import user_config_path

    return user_config_path("gpumem-tui") / name


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
        raise SettingsError(f"{wanted}: cannot be read: {reason}") from error
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
        raise SettingsError(f"{name}: brackets within brackets, deeper than can be read") from error
    faults = [
        (_line_of(key, text), fault)
        for whole, value in values.items()
        for key, fault in (_FAULTS_OF[whole](value) if whole in _FAULTS_OF else [(whole, _fault(whole, value))])
        if fault
    ]
    if faults:
        raise SettingsError("; ".join(f"{name}:{line}: {fault}" for line, fault in sorted(faults)))
    numbers = {spec.name for spec in fields(Settings) if isinstance(spec.default, float)}
    given: dict[str, Any] = {key: float(value) if key in numbers else value for key, value in values.items()}
    if "hosts" in given:
        given["hosts"] = tuple((name, tuple(listed)) for name, listed in given["hosts"].items())
    if "prices" in given:
        given["prices"] = tuple((name, float(price)) for name, price in given["prices"].items())
    if "notify" in given:
        table: dict[str, Any] = given["notify"]
        given["notify"] = Notify(**{**table, **({"command": argv(table["command"])} if "command" in table else {})})
    return Settings(**given)


def default_file() -> str:
    """Return a settings file with every key at its default, each explained and commented out."""
    blocks = ["# Settings of gpumem-tui. Remove the # before a key to change it.\n"]
    blocks += [_explained(spec) for spec in fields(Settings) if spec.name != "notify"]
    blocks.append("# Who is told when an alert begins. Remove the # of this line too.\n# [notify]\n")
    blocks += [_explained(spec) for spec in fields(Notify)]
    return "\n".join(blocks)


def _explained(spec: Field[Any]) -> str:
    bounds = "" if spec.metadata["low"] is None else f" {spec.metadata['low']:g} to {spec.metadata['high']:g}."
    default = '""' if spec.name == "command" else _toml(spec.default)
    return f"# {spec.metadata['doc']}{bounds}\n# {spec.name} = {default}\n"


def argv(command: str | list[str]) -> tuple[str, ...]:
    """Return a command's program and arguments; a text is taken apart as a shell would, which runs nothing.

    Raises:
        ValueError: a quotation that does not end.
    """
    import shlex

    return tuple(shlex.split(command) if isinstance(command, str) else command)


def _faults_of_notify(value: object) -> Iterator[tuple[str, str]]:
    """Yield what is wrong in ``[notify]``, each with the key that it is about."""
    if not isinstance(value, dict):
        yield "notify", f"notify must be a table, not {_toml(value)}"
        return
    for key, given in value.items():
        if key == "command":
            yield key, _fault_of_command(given)
        elif key in _CHOICES and given not in _CHOICES[key]:
            yield key, f"notify.{key} must be one of {', '.join(_CHOICES[key])}, not {_toml(given)}"
        else:
            yield key, _fault(key, given, Notify)


def _fault_of_command(value: object) -> str:
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
        return f"notify.command must be a text in quotes or a list of them, not {_toml(value)}"
    try:
        argv(value)
    except ValueError as error:
        return f"notify.command: {error}"
    return ""


def _fault(key: str, value: object, table: type = Settings) -> str:
    """Return what is wrong with one entry of the file or of a table in it; empty if nothing is."""
    spec = next((spec for spec in fields(table) if spec.name == key), None)
    if spec is None:
        import difflib

        near = difflib.get_close_matches(key, [spec.name for spec in fields(table)], n=1)
        remedy = f"did you mean {near[0]}?" if near else "`gpumem-tui settings` lists the keys"
        return f"unknown key {key!r}; {remedy}"
    if spec.name == "hosts":
        return _fault_of_hosts(value)
    wanted, low, high = type(spec.default), spec.metadata["low"], spec.metadata["high"]
    if not (type(value) is wanted or (wanted is float and type(value) is int)):
        words = {bool: "true or false", str: "a text in quotes", int: "a whole number", float: "a number"}
        return f"{key} must be {words[wanted]}, not {_toml(value)}"
    if isinstance(value, (int, float)) and low is not None and not low <= value <= high:
        return f"{key} must be {low:g} to {high:g}, not {_toml(value)}"
    return ""


def _fault_of_hosts(value: object) -> str:
    if not isinstance(value, dict):
        return f"hosts must be a table, not {_toml(value)}"
    for name, listed in value.items():
        if not isinstance(listed, list) or not all(isinstance(host, str) for host in listed):
            return f'hosts.{name} must be a list of hosts such as ["a", "me@b:2222"], not {_toml(listed)}'
    return ""


def _faults_of_prices(value: object) -> Iterator[tuple[str, str]]:
    """Yield what is wrong in ``[prices]``, each with the GPU that it is about."""
    if not isinstance(value, dict):
        yield "prices", f"prices must be a table, not {_toml(value)}"
        return
    for name, price in value.items():
        if type(price) not in (int, float) or not 0 <= price < 1e6:
            yield name, f"prices.{name} must be the price of one GPU for an hour, not {_toml(price)}"


_FAULTS_OF = {"notify": _faults_of_notify, "prices": _faults_of_prices}


def _line_of(key: str, text: str) -> int:
    """Return an entry's line in the file, which TOML readers do not give."""
    quoted = re.escape(key)
    entry = re.compile(rf"\s*\[*\s*([\"']?){quoted}\1\s*[=.\]]")
    return next((number for number, line in enumerate(text.splitlines(), 1) if entry.match(line)), 1)


def _toml(value: object) -> str:
    """Return a value as a user would have written it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value == ():
        return "{}"
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    return f'"{value}"' if isinstance(value, str) else f"{value}"
