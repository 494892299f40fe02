"""Reads the catalog's records: TOML whose values are on one line each, and JSON as well. Standard library only.

A child trains in any Python from 3.10 on, which has no ``tomllib`` there, and without the packages of this program; and
it starts sooner so. What a viewer alone reads (`catalog.loader`) is TOML without that limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

Record = TypeVar("Record")


def read_tables(file_name: str) -> dict[str, dict[str, Any]]:
    """Read a file of this folder: its tables by name, in the file's order.

    Raises:
        ValueError: a line is neither a table's name nor ``key = value``; names the line.
    """
    tables: dict[str, dict[str, Any]] = {}
    table: dict[str, Any] = tables
    for number, line in enumerate(Path(__file__).with_name(file_name).read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        key, _, value = line.partition(" = ")
        try:
            if line.startswith("["):
                table = tables
                for name in line.removeprefix("[").removesuffix("]").split("."):
                    table = table.setdefault(name, {})
            else:
                read = json.loads(value)
                table[key] = tuple(read) if isinstance(read, list) else read
        except ValueError as error:
            raise ValueError(f"{file_name}, line {number}: {key!r} has no value on one line: {error}") from error
    return tables


def records(file_name: str, kind: Callable[..., Record]) -> Mapping[Any, Record]:
    """Read a file of this folder: a record of `kind` for each table, by name, in the file's order.

    Raises:
        ValueError: as `read_tables`, and for a field that the record lacks, or that the table does.
    """
    found = {}
    for name, table in read_tables(file_name).items():
        try:
            found[name] = kind(**table)
        except TypeError as error:
            raise ValueError(f"{file_name}: {name}: {error}") from error
    return MappingProxyType(found)
