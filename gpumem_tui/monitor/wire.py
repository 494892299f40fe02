"""Values as lines of JSON: one whole, then of each what has changed; and back, checked, whoever wrote the lines.

Hosts send their snapshots so, and recordings are files of such lines. The types of `monitor.snapshot` are the schema: a
field that a later version adds with a default can be read from older lines, and one that is not known is passed over.
`Unknown` is an object with its reason alone. A patch is ``[value]`` to replace, or an object to descend: by the names
of fields, by the places in a list.

Both ends may be of different programs, and either may be hostile: every field is checked when it is read, and no text
can move the cursor of the terminal that shows it.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from types import NoneType, UnionType
from typing import (
    Annotated,
    Generic,
    Protocol,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    runtime_checkable,
)

import msgspec
from msgspec import Struct, structs

from gpumem_tui import __version__
from gpumem_tui.ledger import Ledger
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.alerts import Alert
from gpumem_tui.monitor.ledger import with_ledgers, without_ledgers
from gpumem_tui.monitor.probes import NOTHING_SAID, Said
from gpumem_tui.monitor.snapshot import GpuReading, Snapshot
from gpumem_tui.text import cleaned, shortened

KEY, VERSION = "gpumem_tui_reports", 1
"""In each whole line of a host: which version of these lines it is."""
FULL, PATCH = "full", "patch"
"""In a line: a value, or what has changed since the one before."""
LONGEST_LINE = 4 << 20
"""Bytes of a host's line, and of all that its patches can come to: 64 GPUs with 100 processes each need half of it."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Patch: TypeAlias = "list[object] | dict[str, Patch]"
"""A changed object; its values are encoded with it."""

_LEAST, _MOST = -(2**63), 2**64 - 1
_WHOLE = Annotated[int, msgspec.Meta(ge=_LEAST, le=2**63 - 1)]
"""Longer ones than 64 bits, as drivers have them, would be read too, and could take very long to write."""
_MOMENT = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]
"""Seconds since the epoch, up to the end of the year 9999: later times have no date."""
_MOMENTS = ("time_s", "since_s")
_ESCAPE = re.compile(rb'\\(?:u([0-9a-fA-F]{4})|["\\/])|\\')
_NOT_FINITE = Unknown("not a number")
_INLINE: Mapping[type, str] = {GpuReading: "telemetry"}
"""A field whose own fields are next to its owner's in recordings before version 3."""
_LONGEST_PLACE, _DEEPEST = 8, 64
"""Digits of a place in a list; brackets within brackets, each of which takes some calls to write."""


class LineError(ValueError):
    """A line or a part of one that is no value of its type; one line gives the reason."""


class NoReport(LineError):
    """A line of a host that is no report at all, such as a greeting of its shell."""


class OtherVersion(LineError):
    """A line of a host whose program writes other lines."""


class HostReport(Struct, frozen=True, dict=True):
    """One machine's state at one moment.

    Attributes:
        snapshot: without the ledgers of its GPUs, which `with_ledgers` has: few ask for them.
        alerts: as the machine judges, by its own settings and with what its probes say.
        probes: where a probe's process trains, its pid, and what it states, as JSON (`watch.report`).
    """

    snapshot: Snapshot
    alerts: tuple[Alert, ...] = ()
    probes: tuple[tuple[str, int, Mapping[str, object]], ...] = ()

    @classmethod
    def of(cls, snapshot: Snapshot, alerts: tuple[Alert, ...] = (), said: Said = NOTHING_SAID.said) -> HostReport:
        """Make a report of a snapshot. The calls of vendors' libraries are nobody's concern elsewhere."""
        drivers = tuple(structs.replace(each, calls={}) for each in snapshot.drivers)
        carried = structs.replace(without_ledgers(snapshot), calls={}, drivers=drivers)
        return cls(carried, alerts, rows_of(said))

    @cached_property
    def with_ledgers(self) -> Snapshot:
        """Return the snapshot with the ledgers of its GPUs."""
        return with_ledgers(self.snapshot)

    @cached_property
    def said(self) -> Said:
        """Return what probes say, by where the process trains and its pid."""
        return {(place, pid): body for place, pid, body in self.probes}


def rows_of(said: Said) -> tuple[tuple[str, int, Mapping[str, object]], ...]:
    """Return what probes say as a report has it."""
    return tuple((place, pid, body) for (place, pid), body in said.items())


# ---- lines

T = TypeVar("T")


class LineWriter(Generic[T]):
    """Makes lines of values: each has a whole one, or what has changed since `last`, which is None before the first."""

    def __init__(self, kind: type[T]) -> None:
        self._shape = _shape_of(kind)
        self.last: T | None = None

    def line(self, value: T, more: Mapping[str, object], *, whole: bool = False) -> bytes:
        """Return the next line, without its end. A value that cannot be encoded is not the last of any line.

        Args:
            more: further fields.
            whole: it does not need the lines before it; the first is always so.
        """
        body = {FULL: value} if whole or self.last is None else {PATCH: self._shape.difference(self.last, value)}
        line = encoded({**body, **more})
        self.last = value
        return line


class LineReader(Generic[T]):
    """Makes values of the bodies of lines."""

    def __init__(self, kind: type[T]) -> None:
        self._kind, self._shape = kind, _shape_of(kind)
        self._last: T | None = None

    def read(self, body: Json) -> T:
        """Return the value of the next line.

        Raises:
            LineError: it is none, or a change of one that has not come.
        """
        match body:
            case {"full": whole}:
                value = self._shape.read(whole)
            case {"patch": None} if self._last is not None:
                value = self._last
            case {"patch": patch} if self._last is not None:
                value = _applied(self._shape, self._last, patch)
            case _:
                raise LineError("neither a value nor a change of one")
        assert isinstance(value, self._kind)
        self._last = value
        return value


def encoded(body: object) -> bytes:
    """Return one line of JSON, without its end; a number that is not finite is null."""
    return msgspec.json.encode(body)


def parsed(line: bytes) -> Json:
    """Return the JSON of a line, every text in it printable; a number that is not finite is null.

    Raises:
        LineError: it is none.
    """
    try:
        if _is_plain(line):
            return _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError):
        pass  # what is wrong, or was only written by an older program, is seen below
    try:
        body = json.loads(line, parse_constant=lambda _word: None, parse_float=_finite)
        return _DECODER.decode(encoded(cleaned(body)))
    except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise LineError("no JSON") from error


def _finite(word: str) -> float | None:
    number = float(word)
    return number if math.isfinite(number) else None


_DECODER: msgspec.json.Decoder[Json] = msgspec.json.Decoder()


def _is_plain(line: bytes) -> bool:
    """Return whether all texts of a line are printable as they are."""
    try:
        shown = b"\x7f" not in line if line.isascii() else line.decode().isprintable()
    except UnicodeDecodeError:
        return False
    return shown and (b"\\" not in line or all(map(_shows, _ESCAPE.finditer(line))))


def _shows(escape: re.Match[bytes]) -> bool:
    """Return whether what is written as an escape is printable."""
    return chr(int(escape[1], 16)).isprintable() if escape[1] else len(escape[0]) > 1


def read(kind: type[T], plain: Json) -> T:
    """Make a value of its JSON.

    Raises:
        LineError: it is none.
    """
    value = _shape_of(kind).read(plain)
    assert isinstance(value, kind)
    return value


# ---- of a host


class ReportWriter:
    """The lines of this machine for a viewer on another one."""

    def __init__(self) -> None:
        self._writer = LineWriter(HostReport)

    def line(self, report: HostReport) -> str:
        """Return the next line."""
        return self._writer.line(report, {} if self._writer.last else {KEY: VERSION, "program": __version__}).decode()


class ReportReader:
    """The lines of another machine's `ReportWriter` back into its reports."""

    def __init__(self) -> None:
        self._reader = LineReader(HostReport)
        self._unmeasured_bytes = 0

    def read(self, line: bytes) -> HostReport:
        """Return the report of the next line.

        Raises:
            NoReport: it is none at all.
            OtherVersion: it is of a program that writes other lines.
            LineError: it is damaged, or makes a report that is far too large.
        """
        try:
            body = parsed(line)
        except LineError as error:
            raise NoReport(str(error)) from error
        if not isinstance(body, dict) or not (KEY in body or PATCH in body):
            raise NoReport("no report")
        if body.get(KEY, VERSION) != VERSION:
            there = f"{body.get('program')} there writes schema {body.get(KEY)!r:.40}"
            raise OtherVersion(f"{there}, {__version__} here reads schema {VERSION}")
        report = self._reader.read(body)
        self._unmeasured_bytes += len(line)
        if self._unmeasured_bytes > LONGEST_LINE:  # each patch may make it longer
            self._unmeasured_bytes = 0
            if len(encoded(report)) > LONGEST_LINE:
                raise LineError(f"a report of more than {LONGEST_LINE >> 20} MiB")
        return report


# ---- values


class _Shape(ABC):
    """How the values of one type are read, and what has changed between two of them. All raise `LineError`."""

    @abstractmethod
    def read(self, plain: Json) -> object:
        """Make a value of its JSON."""

    @abstractmethod
    def difference(self, old: object, new: object) -> Patch | None:
        """Return what has changed; None for nothing."""

    @abstractmethod
    def patched(self, old: object, patch: Mapping[str, Json]) -> object:
        """Return a value with other parts."""


def _applied(shape: _Shape, old: object, patch: Json) -> object:
    if type(patch) is dict:
        return shape.patched(old, patch)
    if type(patch) is list and len(patch) == 1:
        return shape.read(patch[0])
    raise LineError("a patch that fits nothing")


def _places_patched(old: Sequence[object], patch: Mapping[str, Json], shape: Callable[[int], _Shape]) -> list[object]:
    """Return the values of a list, of which some have changed."""
    made = list(old)
    for key, inner in patch.items():
        place = int(key) if key.isdecimal() and len(key) < _LONGEST_PLACE else len(made)
        if place >= len(made):
            raise LineError(f"a change of {shortened(key)} of {len(made)}")
        made[place] = _applied(shape(place), made[place], inner)
    return made


class _Leaf(_Shape):
    """A value without parts: a number, a text, a word of an `Enum`."""

    def __init__(self, kind: object, name: str) -> None:
        self._kind, self._name = kind, name
        self._is_sure = kind in (bool, float, str)  # as texts are clean and numbers finite by now

    def read(self, plain: Json) -> object:
        if type(plain) is self._kind and (self._is_sure or (type(plain) is int and _LEAST <= plain <= _MOST)):
            return plain
        try:
            return msgspec.convert(plain, _WHOLE if self._kind is int else self._kind)
        except msgspec.ValidationError as error:
            raise LineError(f"{self._name or 'value'}: {error}") from error

    def difference(self, old: object, new: object) -> Patch | None:
        return None if old == new and type(old) is type(new) else [new]

    def patched(self, old: object, patch: Mapping[str, Json]) -> object:
        raise LineError(f"a patch of the parts of {shortened(repr(old))}: {shortened(', '.join(patch))}")


class _Free(_Shape):
    """JSON of any form, such as what a probe reports, with at most so many brackets within each other."""

    def __init__(self, depth: int = _DEEPEST) -> None:
        self._depth = depth

    @cached_property
    def _part(self) -> _Free:
        if not self._depth:
            raise LineError("brackets within brackets, deeper than can be read")
        return _Free(self._depth - 1)

    def read(self, plain: Json) -> object:
        for part in plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ():
            self._part.read(part)
        return plain

    def difference(self, old: object, new: object) -> Patch | None:
        if isinstance(old, Mapping) and isinstance(new, Mapping) and old.keys() == new.keys():
            return _only({str(key): self.difference(old[key], new[key]) for key in new})
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            return _only({str(at): self.difference(*pair) for at, pair in enumerate(zip(old, new, strict=True))})
        return None if old == new and type(old) is type(new) else [new]

    def patched(self, old: object, patch: Mapping[str, Json]) -> object:
        if isinstance(old, list):
            return _places_patched(old, patch, lambda _place: self._part)
        return _members_patched(old, patch, self._part)


class _Unless(_Shape):
    """A value that may be unknown or None."""

    def __init__(self, known: _Shape, *, or_none: bool) -> None:
        self._known, self._or_none = known, or_none

    def read(self, plain: Json) -> object:
        if plain is None:
            return None if self._or_none else _NOT_FINITE
        if type(plain) is dict and len(plain) == 1:
            reason = plain.get("reason", plain.get("unknown"))
            if isinstance(reason, str):
                return _unknown(reason)
        return self._known.read(plain)

    def difference(self, old: object, new: object) -> Patch | None:
        if old is None or new is None or isinstance(old, Unknown) or isinstance(new, Unknown):
            return None if old == new else [new]
        return self._known.difference(old, new)

    def patched(self, old: object, patch: Mapping[str, Json]) -> object:
        if type(old) is Unknown:
            return self._read_reason(patch)
        return self._known.patched(old, patch)

    @staticmethod
    def _read_reason(patch: Mapping[str, Json]) -> Unknown:
        """Return the value with another reason, as recordings before version 3 have it."""
        match patch:
            case {"unknown": [str() as reason]}:
                return _unknown(reason)
            case _:
                raise LineError("a patch of the parts of what is unknown")


@lru_cache(maxsize=4096)
def _unknown(reason: str) -> Unknown:
    """Return the one value of a reason: thousands of readings share one; but a host can think of ever new ones."""
    return Unknown(reason)


class _Many(_Shape):
    """Any number of values of one type."""

    def __init__(self, each: _Shape) -> None:
        self._each = each

    def read(self, plain: Json) -> object:
        return tuple(map(self._each.read, _listed(plain)))

    def difference(self, old: object, new: object) -> Patch | None:
        assert isinstance(old, tuple)
        assert isinstance(new, tuple)
        if len(old) != len(new):
            return [new]
        return _only({str(at): self._each.difference(*pair) for at, pair in enumerate(zip(old, new, strict=True))})

    def patched(self, old: object, patch: Mapping[str, Json]) -> object:
        assert isinstance(old, tuple)
        return tuple(_places_patched(old, patch, lambda _place: self._each))


class _Row(_Shape):
    """A value of each of several types."""

    def __init__(self, parts: Sequence[_Shape]) -> None:
        self._parts = parts

    def read(self, plain: Json) -> object:
        values = _listed(plain)
        if len(values) != len(self._parts):
            raise LineError(f"{len(values)} values instead of {len(self._parts)}")
        return tuple(part.read(value) for part, value in zip(self._parts, values, strict=True))

    def difference(self, old: object, new: object) -> Patch | None:
        assert isinstance(old, tuple)
        assert isinstance(new, tuple)
        triples = enumerate(zip(self._parts, old, new, strict=True))
        return _only({str(at): part.difference(before, now) for at, (part, before, now) in triples})

    def patched(self, old: object, patch: Mapping[str, Json]) -> object:
        assert isinstance(old, tuple)
        return tuple(_places_patched(old, patch, self._parts.__getitem__))


class _Table(_Shape):
    """Values of one type by names."""

    def __init__(self, each: _Shape) -> None:
        self._each = each

    def read(self, plain: Json) -> object:
        return {name: self._each.read(value) for name, value in _members(plain).items()}

    def difference(self, old: object, new: object) -> Patch | None:
        assert isinstance(old, Mapping)
        assert isinstance(new, Mapping)
        if old.keys() != new.keys():
            return [new]
        return _only({name: self._each.difference(old[name], value) for name, value in new.items()})

    def patched(self, old: object, patch: Mapping[str, Json]) -> object:
        return _members_patched(old, patch, self._each)


class _Record(_Shape):
    """A struct."""

    def __init__(self, kind: type[Struct], parts: Mapping[str, _Shape], needed: frozenset[str]) -> None:
        self._kind, self._parts, self._needed = kind, parts, needed
        self._inline = _INLINE.get(kind, "")

    def read(self, plain: Json) -> object:
        given = _members(plain)
        if self._inline and self._inline not in given:
            given = {**given, self._inline: plain}
        if missing := self._needed - given.keys():
            raise LineError(f"{self._kind.__name__} without {', '.join(sorted(missing))}")
        values = {name: part.read(given[name]) for name, part in self._parts.items() if name in given}
        return _made(self._kind, values)

    def difference(self, old: object, new: object) -> Patch | None:
        if old is new:
            return None
        return _only(
            {name: part.difference(getattr(old, name), getattr(new, name)) for name, part in self._parts.items()}
        )

    def patched(self, old: object, patch: Mapping[str, Json]) -> object:
        assert isinstance(old, Struct)
        parts, changed = self._parts, dict[str, object]()
        for name, inner in patch.items():
            part = parts.get(name)
            if part is None:  # of a later version, or in recordings before version 3
                if self._inline:
                    before = changed.get(self._inline, getattr(old, self._inline))
                    changed[self._inline] = parts[self._inline].patched(before, {name: inner})
            elif type(inner) is dict:
                changed[name] = part.patched(getattr(old, name), inner)
            elif type(inner) is list and len(inner) == 1:
                changed[name] = part.read(inner[0])
            else:
                raise LineError("a patch that fits nothing")
        return _made(partial(structs.replace, old), changed)


def _made(make: Callable[..., object], values: Mapping[str, object]) -> object:
    try:
        made = make(**values)
    except ValueError as error:
        raise LineError(str(error)) from error
    if isinstance(made, Ledger) and any(isinstance(row.size_bytes, int) and row.size_bytes < 0 for row in made.rows):
        raise LineError("a ledger with a negative row")
    return made


def _only(differences: Mapping[str, Patch | None]) -> Patch | None:
    """Return the differences."""
    return {name: each for name, each in differences.items() if each is not None} or None


def _listed(plain: Json) -> list[Json]:
    if not isinstance(plain, list):
        raise LineError("no list where one belongs")
    return plain


def _members(plain: Json) -> dict[str, Json]:
    if not isinstance(plain, dict):
        raise LineError("no object where one belongs")
    return plain


def _members_patched(old: object, patch: Mapping[str, Json], each: _Shape) -> dict[object, object]:
    """Return an object's members, of which some have changed; no others can come."""
    if not isinstance(old, Mapping) or not patch.keys() <= old.keys():
        raise LineError("a patch of the parts of what has none")
    return {**old, **{name: _applied(each, old[name], inner) for name, inner in patch.items()}}


_SHAPES: dict[tuple[object, str], _Shape] = {}


def _shape_of(hint: object, name: str = "") -> _Shape:
    """Return how the values of a type are read.

    Args:
        name: of the field that has them.
    """
    found = _SHAPES.get((hint, name))
    if found is None:
        found = _SHAPES[hint, name] = _new_shape(hint, name)
    return found


def _new_shape(hint: object, name: str) -> _Shape:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (value,) = (member for member in arguments if member not in (Unknown, NoneType))
        return _Unless(_shape_of(value, name), or_none=NoneType in arguments)
    if origin is tuple:
        return _Many(_shape_of(arguments[0])) if arguments[-1] is ... else _Row(list(map(_shape_of, arguments)))
    if origin is Mapping:
        return _Table(_shape_of(arguments[1]))
    if hint is object:
        return _Free()
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Struct):
        bound = dict(zip(getattr(kind, "__parameters__", ()), arguments, strict=True))
        declared = structs.fields(kind)
        parts = {each.name: _shape_of(_bound(each.type, bound), each.name) for each in declared}
        return _Record(kind, parts, frozenset(each.name for each in declared if each.required))
    return _Leaf(_MOMENT if hint is float and name in _MOMENTS else hint, name)


@runtime_checkable
class _Open(Protocol):
    """A type with parameters that are yet to be filled in."""

    __parameters__: tuple[object, ...]

    def __getitem__(self, arguments: tuple[object, ...]) -> object: ...


def _bound(hint: object, bound: Mapping[object, object]) -> object:
    """Return a type with its parameters filled in."""
    if hint in bound:
        return bound[hint]
    if isinstance(hint, _Open) and not isinstance(hint, type) and hint.__parameters__:
        return hint[tuple(bound[each] for each in hint.__parameters__)]
    return hint
