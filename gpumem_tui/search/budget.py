"""A gate for memory: what a prediction takes, held against a budget and an earlier prediction's figures."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpumem_tui.decoding import decodable
from gpumem_tui.errors import EXIT_NOTHING_FITS, OptionError
from gpumem_tui.memory import Bucket, Range, format_bytes, format_range
from gpumem_tui.report.markdown import bullets, document, sentence, table
from gpumem_tui.report.objects import SCHEMA, JsonObject, encoded
from gpumem_tui.report.tables import TextColumn, TextTable
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.prediction import Traced
from gpumem_tui.search.words import signed

_MOST_PLACES = 12
_CHANGES = TextTable(
    TextColumn("change", 12, ">"), TextColumn("before", 12, ">"), TextColumn("now", 12, ">"), TextColumn("")
)
_TITLES = {bucket.value: bucket.title for bucket in Bucket}


class PlaceTaken(msgspec.Struct, frozen=True):
    """The bytes of a source line at the peak. `source` is ``file:line``; "" without a line of the program."""

    bucket: str
    source: str
    function: str
    size_bytes: int


class Footprint(msgspec.Struct, frozen=True):
    """The memory of a predicted step: the content of a baseline's file.

    Attributes:
        what: command or model, as in the report.
        gpu, batch_size: where and of what; figures of others cannot be compared. 0: a command's own batch.
        device_used_bytes: of the whole device at the peak, at least and at most.
        buckets: bytes at the peak, by key.
    """

    what: str
    gpu: str
    batch_size: int
    torch: str
    device_used_bytes: tuple[int, int]
    peak_allocated_bytes: int
    buckets: dict[str, int]
    places: list[PlaceTaken]
    schema: int = SCHEMA


def footprint(config: SearchConfig, traced: Traced, batch_size: int) -> Footprint:
    """Return what the traced step takes at a batch size."""
    command = config.workload.command
    used, replay = traced.device_used_range(batch_size), traced.at(batch_size)
    places: Counter[tuple[str, str, str]] = Counter()
    for held in traced.held_at_peak(batch_size):
        places[held.bucket.value, held.site.source, held.site.function] += held.size_bytes
    return Footprint(
        what=config.workload.name,
        gpu=config.device.gpu.name,
        batch_size=batch_size if command is None or command.takes_batch else 0,
        torch=traced.ready.torch_version,
        device_used_bytes=(used.low_bytes, used.high_bytes),
        peak_allocated_bytes=replay.peak_allocated_bytes,
        buckets=replay.breakdown.as_json(),
        places=[PlaceTaken(*place, size_bytes) for place, size_bytes in places.most_common()],
    )


def read_baseline(path: Path) -> Footprint | None:
    """Read the figures of an earlier prediction; None where there is no file yet.

    Raises:
        OptionError: it is something else, or cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=decodable(Footprint))
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise OptionError(f"--baseline {path}: is no baseline ({error}); delete it, and it is written anew") from error
    except OSError as error:
        raise OptionError(f"--baseline {path}: {error.strerror}; check the path") from error


@dataclass(frozen=True)
class Change:
    """A bucket or a source line whose bytes at the peak have changed; `before_bytes` or `now_bytes` is 0 for none."""

    name: str
    before_bytes: int
    now_bytes: int

    @property
    def size_bytes(self) -> int:
        """Return by how much it has grown."""
        return self.now_bytes - self.before_bytes


@dataclass(frozen=True)
class Gate:
    """A prediction held against what it may take.

    Attributes:
        budget_bytes: that the device total may reach; None for any.
        before: an earlier prediction; None without one.
        tolerance: the share by which the device total or the allocated peak may grow.
    """

    now: Footprint
    budget_bytes: int | None = None
    before: Footprint | None = None
    tolerance: float = 0.0

    @property
    def faults(self) -> list[str]:
        """Why the gate is closed, a line each; empty where it is open."""
        high, found = self.now.device_used_bytes[1], []
        if self.budget_bytes is not None and high > self.budget_bytes:
            over = format_bytes(high - self.budget_bytes)
            found.append(
                f"over the budget of {format_bytes(self.budget_bytes)}: up to {format_bytes(high)}, {over} more"
            )
        if self.before is not None:
            totals = (
                ("the device total", self.before.device_used_bytes[1], high),
                ("the allocated peak", self.before.peak_allocated_bytes, self.now.peak_allocated_bytes),
            )
            found += [
                f"{name} has grown by {signed(now - before)}, {share(before, now)}: from {format_bytes(before)} to "
                f"{format_bytes(now)}, and {100 * self.tolerance:g} % is tolerated"
                for name, before, now in totals
                if now > before * (1 + self.tolerance)
            ]
        return found

    @property
    def exit_code(self) -> int:
        """Return 3 where the gate is closed, else 0."""
        return EXIT_NOTHING_FITS if self.faults else 0

    @property
    def verdict(self) -> str:
        """Say in a line what is held against what, and that it is within it, or why it is not."""
        if self.faults:
            return "; ".join(self.faults)
        found = [] if self.budget_bytes is None else [f"within the budget of {format_bytes(self.budget_bytes)}"]
        if self.before is not None:
            before, now = self.before.device_used_bytes[1], self.now.device_used_bytes[1]
            found.append(f"{signed(now - before)} against the baseline, {100 * self.tolerance:g} % more is tolerated")
        return "; ".join(found)

    @property
    def buckets(self) -> list[Change]:
        """The buckets that are not empty in both, in the ledger's order."""
        before = self.before.buckets if self.before is not None else {}
        keys = [key for key in _TITLES if self.now.buckets.get(key) or before.get(key)]
        return [Change(_TITLES[key], before.get(key, 0), self.now.buckets.get(key, 0)) for key in keys]

    @property
    def places(self) -> list[Change]:
        """The source lines whose bytes have changed, the largest change first."""
        if self.before is None:
            return []
        return sorted(_moved(self.before, self.now), key=lambda change: (-abs(change.size_bytes), change.name))

    def lines(self) -> Iterator[str]:
        """Yield the gate's lines for a terminal."""
        yield f"gate: {self.verdict}"
        if self.before is None:
            return
        yield from self._notes
        changed = [change for change in self.buckets if change.size_bytes]
        for heading, changes in (("by bucket", changed), ("by source line", self.places[:_MOST_PLACES])):
            if changes:
                yield f"\nwhat has changed at the peak, {heading}"
                yield from _CHANGES.lines((signed(c.size_bytes), *_both(c), c.name) for c in changes)

    @property
    def _notes(self) -> list[str]:
        assert self.before is not None
        if self.before.torch == self.now.torch:
            return []
        return [f"the baseline was traced with torch {self.before.torch}, this with {self.now.torch}"]

    def markdown(self) -> str:
        """Return a comment for a pull request."""
        now, closed = self.now, bool(self.faults)
        low, high = now.device_used_bytes
        parts = [
            f"### GPU memory: {'over' if closed else 'ok'}",
            f"`{now.what}` {_of(now)}: **{format_range(Range(low, high))}** of the device.",
        ]
        if said := self.faults or [self.verdict] * bool(self.verdict):
            parts.append(bullets(map(sentence, said)))
        if self.before is None:
            rows = [(change.name, format_bytes(change.now_bytes)) for change in self.buckets]
            return document([*parts, table(("at the peak", "bytes"), rows)])
        parts += map(sentence, self._notes)
        for head, changes in (("at the peak", self.buckets), ("source line", self.places[:_MOST_PLACES])):
            if changes:
                compared = [(f"`{c.name}`", *_both(c), signed(c.size_bytes)) for c in changes]
                parts.append(table((head, "before", "now", "change"), compared))
        return document(parts)


class _Baseline(JsonObject, frozen=True):
    """An earlier prediction, and what has changed since."""

    tolerance: float
    device_used_bytes: tuple[int, int]
    peak_allocated_bytes: int
    buckets: list[Change]
    sources: list[Change]


class GateObject(JsonObject, frozen=True):
    """The gate, as `predict --json` prints it."""

    is_open: bool
    faults: list[str]
    budget_bytes: int | None
    high_bytes: int
    baseline: _Baseline | None

    @classmethod
    def of(cls, gate: Gate) -> GateObject:
        """Say what a prediction is held against."""
        before, baseline = gate.before, None
        if before is not None:
            baseline = _Baseline(
                tolerance=gate.tolerance,
                device_used_bytes=before.device_used_bytes,
                peak_allocated_bytes=before.peak_allocated_bytes,
                buckets=[change for change in gate.buckets if change.size_bytes],
                sources=gate.places,
            )
        return cls(
            is_open=not gate.faults,
            faults=gate.faults,
            budget_bytes=gate.budget_bytes,
            high_bytes=gate.now.device_used_bytes[1],
            baseline=baseline,
        )


def _both(change: Change) -> tuple[str, str]:
    return format_bytes(change.before_bytes), format_bytes(change.now_bytes)


def share(before: int, now: int) -> str:
    """Write by what share a figure has grown."""
    return f"{100 * (now - before) / before:+.1f} %" if before else "from nothing"


def _moved(before: Footprint, now: Footprint) -> Iterator[Change]:
    """Yield the source lines that hold more or less than before.

    A line keeps its name where the file has grown above it: what has no partner of its own line is matched, in order,
    with what has none of the same function.
    """
    alone: defaultdict[tuple[str, str, str], tuple[list[PlaceTaken], list[PlaceTaken]]] = defaultdict(lambda: ([], []))
    were, are = _by_line(before), _by_line(now)
    for key in were.keys() | are.keys():
        if key in were and key in are:
            yield from _changed(were[key], are[key])
        else:
            place = were.get(key) or are[key]
            alone[place.bucket, re.sub(r":\d+$", "", place.source), place.function][key in are].append(place)
    for old_places, new_places in alone.values():
        old_places, new_places = sorted(old_places, key=_line_number), sorted(new_places, key=_line_number)
        for old, new in zip(old_places, new_places, strict=False):
            yield from _changed(old, new)
        for old in old_places[len(new_places) :]:
            yield Change(_place_name(old), old.size_bytes, 0)
        for new in new_places[len(old_places) :]:
            yield Change(_place_name(new), 0, new.size_bytes)


def _by_line(found: Footprint) -> Mapping[tuple[str, str, str], PlaceTaken]:
    return {(place.bucket, place.source, place.function): place for place in found.places}


def _changed(old: PlaceTaken, new: PlaceTaken) -> Iterator[Change]:
    if old.size_bytes != new.size_bytes:
        yield Change(_place_name(new), old.size_bytes, new.size_bytes)


def _line_number(place: PlaceTaken) -> int:
    number = place.source.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _place_name(place: PlaceTaken) -> str:
    line = " ".join(filter(None, (place.source, place.function))) or "no line of the program"
    return f"{line} ({_TITLES.get(place.bucket, place.bucket)})"


@dataclass(frozen=True)
class GateTerms:
    """The limits that a prediction is held against: see `Gate`. `baseline` is a file of earlier figures."""

    budget_bytes: int | None
    baseline: Path | None
    tolerance_percent: float

    @property
    def is_any(self) -> bool:
        """Return whether it is to be held against anything."""
        return self.budget_bytes is not None or self.baseline is not None

    def held(self, now: Footprint) -> Gate:
        """Hold a footprint against it; a baseline's file is written if missing.

        Raises:
            OptionError: the file is of another GPU or batch size, is no baseline, or cannot be written.
        """
        path = self.baseline
        before = None if path is None else read_baseline(path)
        if before is not None and (before.gpu, before.batch_size) != (now.gpu, now.batch_size):
            raise OptionError(f"--baseline {path}: is {_of(before)}, not {_of(now)}: name another file")
        if path is not None and before is None:
            try:
                path.write_text(encoded(now) + "\n")
            except OSError as error:
                raise OptionError(
                    f"--baseline {path}: cannot be written: {error.strerror}; name a file elsewhere"
                ) from error
        return Gate(now, self.budget_bytes, before, self.tolerance_percent / 100)


def _of(found: Footprint) -> str:
    return f"{f'of batch size {found.batch_size:,} ' if found.batch_size else ''}on a simulated {found.gpu}"
