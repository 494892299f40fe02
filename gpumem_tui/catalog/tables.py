"""Reads the catalog's records: TOML whose values are on one line each, and JSON as well. Standard library only.

A child trains in any Python from 3.10 on, which has no ``tomllib`` there, and without the packages of this program; and
it starts sooner so. Tables that only a viewer reads (`catalog.loader`) is TOML without that limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Name = TypeVar("Name", bound=str)
Record = TypeVar("Record")
Changed = TypeVar("Changed", bound="DataclassInstance")


def read_tables(file_name: str) -> dict[str, object]:
    """Read a file of this folder: its tables by name, in the file's order.

    Raises:
        ValueError: a line is neither a table's name nor ``key = value``; names the line.
    """
    tables: dict[str, object] = {}
    table = tables
    for number, line in enumerate(Path(__file__).with_name(file_name).read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        key, _, value = line.partition(" = ")
        try:
            if line.startswith("["):
                table = tables
                for name in line.removeprefix("[").removesuffix("]").split("."):
                    inner = table.setdefault(name, {})
                    if not isinstance(inner, dict):
                        raise ValueError("it is a value already")
                    table = inner
            else:
                read = json.loads(value)
                table[key] = tuple(read) if isinstance(read, list) else read
        except ValueError as error:
            raise ValueError(f"{file_name}, line {number}: {key!r} has no value on one line: {error}") from error
    return tables


def records(file_name: str, kind: Callable[..., Record]) -> Mapping[Name, Record]:
    """Read a file of this folder: a record of `kind` for each table, by name, in the file's order.

    Raises:
        ValueError: as `read_tables`, and for a field that the record lacks, or that the table does.
    """
    found = {}
    for name, table in read_tables(file_name).items():
        try:
            found[name] = made(kind, table)
        except TypeError as error:
            raise ValueError(f"{file_name}: {name}: {error}") from error
    return cast("Mapping[Name, Record]", MappingProxyType(found))


def made(kind: Callable[..., Record], values: object) -> Record:
    """Return a record of `kind` with values by the names of its fields.

    Raises:
        TypeError: a field that the record lacks, or that the values do.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"is no table: {values!r}")
    return kind(**values)


def changed(record: Changed, changes: Mapping[str, object]) -> Changed:
    """Return a record with changes by the names of its fields.

    Raises:
        TypeError: a field that the record lacks.
    """
    return replace(record, **changes)
