"""The documents beside a ring, read: every one is checked, as it may be anybody's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from gpumem_tui.memory import Breakdown
from gpumem_tui.probe.documents import (
    LARGEST,
    MAX_DOCUMENT_BYTES,
    SCHEMA,
    AtLeast,
    Exit,
    LookAnswer,
    PostMortem,
    Trained,
    UncaughtError,
)
from gpumem_tui.probe.files import Files, WireError, read_private
from gpumem_tui.text import cleaned, printable

Document = TypeVar("Document", Trained, LookAnswer, PostMortem, UncaughtError, Exit)


def read_trained(files: Files, uid: int) -> Trained | None:
    """What the process trains; None as long as its probe has not said.

    Raises:
        WireError: not a document that may be trusted; one line.
    """
    return _read(Trained, files.model, uid)


def read_look(files: Files, uid: int) -> LookAnswer | None:
    """The last deep look; None if there was none.

    Raises:
        WireError: as `read_trained`.
    """
    look = _read(LookAnswer, files.look, uid)
    if look is not None:
        for device in look.devices:
            if _total(device.buckets, files.look) != device.peak_bytes:
                raise WireError(f"{files.look.name} is damaged: the buckets do not sum to the peak")
            for held in device.held:
                _total({held.bucket: held.bytes}, files.look)
    return look


def read_post_mortem(files: Files, uid: int) -> PostMortem | None:
    """What was there when memory ran out last; None if it never did.

    Raises:
        WireError: as `read_trained`.
    """
    found = _read(PostMortem, files.oom, uid)
    if found is not None:
        _total(found.buckets, files.oom)
    return found


def read_error(files: Files, uid: int) -> UncaughtError | None:
    """The exception that ended the process; None if its probe saw none.

    Raises:
        WireError: as `read_trained`.
    """
    return _read(UncaughtError, files.error, uid)


def read_exit(files: Files, uid: int) -> Exit | None:
    """How the process ended, where `gpumem-tui run` saw it.

    Raises:
        WireError: as `read_trained`.
    """
    return _read(Exit, files.exit, uid)


def _read(kind: type[Document], path: Path, uid: int) -> Document | None:
    try:
        data = read_private(path, MAX_DOCUMENT_BYTES, {uid})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WireError(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        content: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        if content.get("schema") != SCHEMA:
            raise WireError(f"{path.name} was written by another version (schema {content.get('schema')!r:.40})")
        if isinstance(message := content.get("message"), str):  # PyTorch's goes on for many lines of advice
            content["message"] = next((line for line in message.splitlines() if line.strip()), "")
        document = msgspec.convert(cleaned(content), kind)
        hint: Any = kind
        _bounds(hint)(document)
        return document
    except (msgspec.MsgspecError, RecursionError, _OutOfBounds) as error:
        raise WireError(f"{path.name} is damaged: {printable(str(error))}") from error


def _total(buckets: Mapping[str, int], path: Path) -> int:
    try:
        return Breakdown.from_json(buckets).total_bytes
    except ValueError as error:
        raise WireError(f"{path.name} is damaged: {printable(str(error))}") from error


# The bounds of numbers, which the annotations say and msgspec does not know


class _OutOfBounds(Exception):
    """A number that is too small or too large."""


def _nothing(value: Any) -> None:
    """Accept any value."""


@cache
def _bounds(hint: Any) -> Callable[[Any], None]:
    """What checks that the numbers in a value of a type are within their bounds."""
    if is_dataclass(hint):
        return _bounds_of_fields(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((_at_least(one.value) for one in hint.__metadata__ if isinstance(one, AtLeast)), _nothing)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _each([_bounds(argument) for argument in arguments])
    check = next((found for one in arguments if (found := _bounds(one)) is not _nothing), _nothing)
    if check is _nothing:
        return _nothing
    if origin is dict:
        return lambda value: _all(check, value.values())
    if origin is tuple:
        return lambda value: _all(check, value)
    return lambda value: None if value is None else check(value)


def _bounds_of_fields(kind: Any) -> Callable[[Any], None]:
    hints = get_type_hints(kind, include_extras=True)
    checks = [(field.name, _bounds(hints[field.name])) for field in fields(kind)]
    checked = [(name, check) for name, check in checks if check is not _nothing]

    def check(value: Any) -> None:
        for name, of_field in checked:
            of_field(getattr(value, name))

    return check


def _at_least(least: int) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not least <= value <= LARGEST and not (isinstance(value, float) and value >= least):
            raise _OutOfBounds(f"{value} is not a number from {least} to {LARGEST}")

    return check


def _each(checks: list[Callable[[Any], None]]) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        for of_item, item in zip(checks, value, strict=True):
            of_item(item)

    return check


def _all(check: Callable[[Any], None], values: Any) -> None:
    for value in values:
        check(value)
