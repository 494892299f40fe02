"""Snapshots as plain data (what JSON can hold) and back, and what changed between two of them.

The types of `snapshot.py` are the schema: a field that a later version adds with a default can be read from an older
recording, and a field that it does not know is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.snapshot import INLINE

Plain = Any
"""None, bool, int, float, str, lists of Plain, and mappings from str to Plain."""

T = TypeVar("T")
_UNKNOWN_KEY = "unknown"


class CodecError(ValueError):
    """Plain data that does not describe the value it should."""


def to_plain(value: object) -> Plain:
    """Return a value of `monitor.snapshot` as plain data."""
    if isinstance(value, Unknown):
        return {_UNKNOWN_KEY: value.reason}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_plain(each) for each in value]
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value):
        plain: dict[str, Plain] = {}
        for field in fields(value):
            inner = to_plain(getattr(value, field.name))
            plain |= inner if field.metadata == INLINE else {field.name: inner}
        return plain
    return value


def from_plain(wanted: type[T], plain: Plain) -> T:
    """Make the value that `to_plain` made the data of.

    Raises:
        CodecError: the data does not describe a `wanted`.
    """
    try:
        read: Callable[[Plain], T] = _reader(cast("Any", wanted))
        return read(plain)
    except CodecError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CodecError(f"no {wanted.__name__}: {error}") from error


def difference(old: Plain, new: Plain) -> Plain | None:
    """Make a patch from `old` to `new`: ``[value]`` to replace, a mapping to descend, None if they are equal."""
    if old == new and type(old) is type(new):
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        patches = {str(key): difference(old[key], new[key]) for key in new}
        return {key: patch for key, patch in patches.items() if patch is not None} or None
    return [new]


def patched(old: Plain, patch: Plain | None) -> Plain:
    """Return what `difference` made the patch for; `old` stays as it is.

    Raises:
        CodecError: the patch is not for `old`.
    """
    if patch is None:
        return old
    if isinstance(patch, list) and len(patch) == 1:
        return patch[0]
    if not isinstance(patch, dict) or not isinstance(old, (dict, list)):
        raise CodecError("a patch that fits nothing")
    try:
        if isinstance(old, list):
            changed = list(old)
            for key, inner in patch.items():
                changed[int(key)] = patched(changed[int(key)], inner)
            return changed
        return {**old, **{key: patched(old[key], inner) for key, inner in patch.items()}}
    except (KeyError, IndexError, ValueError) as error:
        raise CodecError(f"a patch that fits nothing: {error}") from error


@cache
def _reader(wanted: Any) -> Callable[[Plain], Any]:
    """Make the function by which plain data becomes a value of a type."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return _union_reader(arguments)
    if origin is tuple:
        return _tuple_reader(arguments)
    if origin is Mapping:
        return lambda plain: {_checked(str, key): _checked(arguments[1], each) for key, each in plain.items()}
    if is_dataclass(origin or wanted):
        return _dataclass_reader(origin or wanted, arguments)
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return wanted
    return lambda plain: _checked(wanted, plain)


def _union_reader(members: tuple[Any, ...]) -> Callable[[Plain], Any]:
    (value,) = (member for member in members if member not in (Unknown, NoneType))
    read = _reader(value)

    def read_union(plain: Plain) -> Any:
        if plain is None and NoneType in members:
            return None
        if Unknown in members and isinstance(plain, dict) and plain.keys() == {_UNKNOWN_KEY}:
            return Unknown(_checked(str, plain[_UNKNOWN_KEY]))
        return read(plain)

    return read_union


def _tuple_reader(members: tuple[Any, ...]) -> Callable[[Plain], Any]:
    if members[-1] is ...:
        read = _reader(members[0])
        return lambda plain: tuple(read(each) for each in _checked(list, plain))
    readers = [_reader(member) for member in members]
    return lambda plain: tuple(read(each) for read, each in zip(readers, plain, strict=True))


def _dataclass_reader(cls: Any, arguments: tuple[Any, ...]) -> Callable[[Plain], Any]:
    bound = dict(zip(getattr(cls, "__parameters__", ()), arguments, strict=True))
    hints = get_type_hints(cls)
    readers = {field.name: _reader(_bound(hints[field.name], bound)) for field in fields(cls)}
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    inline = {field.name: readers.pop(field.name) for field in fields(cls) if field.metadata == INLINE}

    def read(plain: Plain) -> Any:
        missing = needed - _checked(dict, plain).keys()
        if missing:
            raise CodecError(f"{cls.__name__} without {', '.join(sorted(missing))}")
        own = {name: reader(plain[name]) for name, reader in readers.items() if name in plain}
        return cls(**own, **{name: reader(plain) for name, reader in inline.items()})

    return read


def _bound(hint: Any, bound: Mapping[Any, Any]) -> Any:
    """Return a type with its parameters filled in."""
    if hint in bound:
        return bound[hint]
    parameters = getattr(hint, "__parameters__", ())
    return hint[tuple(bound[parameter] for parameter in parameters)] if parameters and get_origin(hint) else hint


def _checked(wanted: Any, plain: Plain) -> Any:
    if type(plain) is wanted:
        return plain
    if wanted is float and type(plain) is int:
        return float(plain)
    raise CodecError(f"{plain!r} is no {getattr(wanted, '__name__', wanted)}")
