"""JSON as the program prints it: schema 1, bytes as whole numbers, what is unknown as null with its reason."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from gpumem_tui.memory import Unknown

T = TypeVar("T")

SCHEMA: Final = 1
"""The version of every object that is printed. Keys of a version stay; new ones may come."""


class JsonObject(msgspec.Struct, frozen=True):
    """An object that is printed as JSON: its fields are the keys, in their order, and its type is the schema.

    Null represents what is unknown or is not there. A field that may be left out is `msgspec.UNSET` then.
    """


def encoded(body: object) -> str:
    """Return one line of JSON.

    Args:
        body: of what JSON has, dataclasses, `msgspec.Struct`, enums, paths and tuples, in any nesting.

    Raises:
        ValueError: a number is not finite: JSON has none such.
    """
    return json.dumps(msgspec.to_builtins(body), allow_nan=False)


def known(value: T | Unknown) -> T | None:
    """Return a value, or None for one that is unknown; for objects that give its reason elsewhere, or not at all."""
    return None if isinstance(value, Unknown) else value


def reason_of(value: object) -> str | None:
    """Return why a value is unknown; None for one known."""
    return value.reason if isinstance(value, Unknown) else None


def picked(source: object, *names: str) -> dict[str, object]:
    """Return the attributes `names` of an object under their own names. None of them may be unknown."""
    return {name: getattr(source, name) for name in names}


class Body:
    """A JSON object under construction. A value that is unknown becomes null, its reason an entry of "unavailable".

    Args:
        values: entries that are always known.
    """

    def __init__(self, **values: object) -> None:
        self._values = values
        self._unavailable: dict[str, str] = {}

    def put(self, key: str, value: object) -> None:
        """Add an entry. A number that is not finite counts as unknown."""
        self._values[key] = self._known(key, value)

    def put_all(self, keys: Iterable[str], whole: object) -> None:
        """Add the attributes `keys` of an object; if it is unknown itself, each is unknown for its reason."""
        for key in keys:
            self.put(key, whole if isinstance(whole, Unknown) else getattr(whole, key))

    def put_each(self, key: str, values: Mapping[str, object]) -> None:
        """Add an object whose values may each be unknown; the reasons stand under "KEY.NAME"."""
        self._values[key] = {name: self._known(f"{key}.{name}", value) for name, value in values.items()}

    def _known(self, key: str, value: object) -> object:
        if isinstance(value, float) and not math.isfinite(value):
            value = Unknown("not a number")
        if isinstance(value, Unknown):
            self._unavailable[key] = value.reason
            return None
        return list(value) if isinstance(value, tuple) else value

    def done(self, **more: object) -> dict[str, object]:
        """Return the object, with "unavailable" after what was put, and `more` entries after that."""
        return {**self._values, "unavailable": self._unavailable, **more}
