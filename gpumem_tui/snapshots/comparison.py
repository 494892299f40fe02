"""Two snapshots next to each other: what grew and was freed, by category and source line, and what differs besides.

PyTorch's own comparison (`compare` in torch/cuda/_memory_viz.py) lists the segments that only one file has. Here the
blocks in them are compared by the line that made them, as addresses are the driver's affair.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpumem_tui.memory import format_bytes
from gpumem_tui.snapshots.analysis import Analysis, Part, analyse
from gpumem_tui.snapshots.model import EventHistory, MemorySnapshot
from gpumem_tui.text import shortened

_MOST_NAMED = 3
_WORTH_NAMING = 0.05
"""A line is named in the answer from this share of all that grew on."""
_SAME_TIME_US = 1000
"""The times of an event in two snapshots of a process differ by less: torch measures its clock anew for each
(c10/util/ApproximateClock.cpp, `makeConverter`)."""
_A_FEW = 64
_PLACE = re.compile(r"(.*):(\d+)( .*)?")
_TORCH = re.compile(r"(.*-packages/torch)/")


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """The memory of a category or of a source line in both files.

    Attributes:
        category: of a line, the one that changed most; else "".
    """

    name: str
    category: str
    before_bytes: int
    after_bytes: int
    before_blocks: int
    after_blocks: int

    @property
    def bytes_more(self) -> int:
        """The bytes that the second file has more; negative for what was freed."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class Comparison:
    """One device of two snapshots.

    Attributes:
        before, after: the device in each file, taken apart.
        is_one_run: the last events of the first file are also in the second.
        at_peak: whether the peaks are compared; else what was held when each file was written.
        by_category, by_line: the largest changes first.
        notes: what of the two cannot be compared, or differs besides memory; a sentence each.
    """

    before: Analysis
    after: Analysis
    is_one_run: bool
    at_peak: bool
    by_category: tuple[MemoryChange, ...]
    by_line: tuple[MemoryChange, ...]
    notes: tuple[str, ...]

    @property
    def totals(self) -> tuple[int, int]:
        """The allocated bytes of both, at the moments that are compared."""
        if self.at_peak:
            return self.before.peak_allocated_bytes, self.after.peak_allocated_bytes
        return self.before.end_allocated_bytes, self.after.end_allocated_bytes

    @property
    def moment(self) -> str:
        """The moments that are compared, in words."""
        return "at the peak" if self.at_peak else "when written"

    @property
    def figures(self) -> tuple[tuple[str, int, int], ...]:
        """The bytes of both files that belong to no line: title, before, after."""
        one, other = self.before, self.after
        return (
            ("allocated at the peak", one.peak_allocated_bytes, other.peak_allocated_bytes),
            ("allocated when written", one.end_allocated_bytes, other.end_allocated_bytes),
            ("reserved at most", one.peak_reserved_bytes, other.peak_reserved_bytes),
            ("reserved when written", one.end_reserved_bytes, other.end_reserved_bytes),
            ("free between blocks", one.stranded_bytes, other.stranded_bytes),
            ("in wholly free segments", one.returnable_bytes, other.returnable_bytes),
            ("largest free piece", one.largest_free_bytes, other.largest_free_bytes),
        )

    @property
    def segments(self) -> tuple[int, int]:
        """The segments of both files."""
        return len(self.before.segments), len(self.after.segments)


Taken = tuple[MemorySnapshot, Sequence[Analysis]]
"""A snapshot and its devices, taken apart."""


def compare(before: Taken, after: Taken) -> list[Comparison]:
    """Compare the devices of two snapshots by number, or, where each file has one device, these two."""
    pairs = _pairs(before[1], after[1])
    notes = tuple(_notes(before, after))
    return [_compared(before[0], after[0], one, other, notes) for one, other in pairs]


def answer_words(found: Comparison) -> str:
    """Return what grew and where, in a line, the number first."""
    one, other = found.totals
    between = f"({format_bytes(one)} → {format_bytes(other)} allocated {found.moment})"
    more = other - one
    if not more:
        moved = sum(abs(row.bytes_more) for row in found.by_line) // 2
        return f"No change {between}" + (f", but {format_bytes(moved)} moved to other lines" if moved else "")
    rows = [row for row in found.by_line if row.bytes_more * more > 0]
    total = sum(row.bytes_more for row in rows)
    named = [row for row in rows[:_MOST_NAMED] if row.bytes_more >= total * _WORTH_NAMING or more < 0]
    where = ", ".join(f"{signed(row.bytes_more)} {row.category} at {row.name}" for row in named)
    return f"{signed(more)} {between}: {where}"


def signed(size_bytes: int) -> str:
    """Return a change of bytes with its sign.

    >>> signed(3 << 30), signed(-(1 << 20)), signed(0)
    ('+3.00 GiB', '-1.0 MiB', '0 B')
    """
    sign = "+" if size_bytes > 0 else "-" if size_bytes < 0 else ""
    return f"{sign}{format_bytes(abs(size_bytes))}"


def _pairs(before: Sequence[Analysis], after: Sequence[Analysis]) -> list[tuple[Analysis | None, Analysis | None]]:
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    one, other = ({found.device: found for found in analyses} for analyses in (before, after))
    return [(one.get(device), other.get(device)) for device in sorted(one.keys() | other.keys())]


def _compared(
    before: MemorySnapshot, after: MemorySnapshot, one: Analysis | None, other: Analysis | None, notes: tuple[str, ...]
) -> Comparison:
    first = one or analyse(before, other.device if other else 0)
    second = other or analyse(after, first.device)
    is_one_run = _continues(before.history(first.device), after.history(second.device))
    at_peak = first.is_recorded and second.is_recorded and not is_one_run
    rows = (first.by_line, second.by_line) if at_peak else (first.end_by_line, second.end_by_line)
    lines = _renumbered(_grown(*rows))
    here = tuple(_device_notes(before.name, after.name, first, second, is_one_run=is_one_run))
    return Comparison(first, second, is_one_run, at_peak, _categories(*rows), lines, (*here, *notes))


def _continues(before: EventHistory, after: EventHistory) -> bool:
    """Return whether the other has the last event too, at the same time, and the same events before it."""
    if not len(before) or not before.times_us[-1]:
        return False
    last, time_us = (before.addresses[-1], before.sizes[-1]), before.times_us[-1]
    events = enumerate(zip(after.addresses, after.sizes, after.times_us, strict=True), 1)
    ends = (end for end, (*found, at) in events if abs(at - time_us) <= _SAME_TIME_US and tuple(found) == last)
    return any(_ends_alike(before, after, end, _A_FEW) and _ends_alike(before, after, end, end) for end in ends)


def _ends_alike(before: EventHistory, after: EventHistory, end: int, most: int) -> bool:
    """Return whether the last events of one are those of the other up to an end, as many as both have or `most`."""
    count = min(most, end, len(before))
    columns = (
        (before.actions, after.actions), (before.addresses, after.addresses), (before.sizes, after.sizes)
    )  # fmt: skip
    return all(one[len(one) - count :] == other[end - count : end] for one, other in columns)


def _grown(before: Iterable[Part], after: Iterable[Part]) -> list[MemoryChange]:
    """Return every line of either, with the category that changed most."""
    one, other = ({part.name: part for part in parts} for parts in (before, after))
    found = []
    for name in dict.fromkeys((*other, *one)):
        first, second = one.get(name, Part(name, 0, 0)), other.get(name, Part(name, 0, 0))
        changes = defaultdict(int, second.categories)
        for category, size_bytes in first.categories:
            changes[category] -= size_bytes
        category = max(changes, key=lambda key: abs(changes[key]), default="")
        found.append(MemoryChange(name, category, first.size_bytes, second.size_bytes, first.blocks, second.blocks))
    return found


def _renumbered(lines: Sequence[MemoryChange]) -> tuple[MemoryChange, ...]:
    """Join a line that only the first file has with one of the same function that only the second has: it has moved."""
    gone: defaultdict[tuple[str, str], list[MemoryChange]] = defaultdict(list)
    new: defaultdict[tuple[str, str], list[MemoryChange]] = defaultdict(list)
    for line in lines:
        place = _PLACE.fullmatch(line.name)
        if place and place[3] and not (line.before_bytes and line.after_bytes):
            (gone if line.before_bytes else new)[place[1], place[3]].append(line)
    moved = {found[0].name: new[place][0] for place, found in gone.items() if len(found) == len(new[place]) == 1}
    joined = {line.name for line in moved.values()}
    found = []
    for line in lines:
        if other := moved.get(line.name):
            file, number, function = _PLACE.fullmatch(other.name).groups()  # type: ignore[union-attr]
            old = _PLACE.fullmatch(line.name)[2]  # type: ignore[index]
            name = f"{file}:{old}→{number}{function}"
            found.append(
                MemoryChange(
                    name, other.category, line.before_bytes, other.after_bytes, line.before_blocks, other.after_blocks
                )
            )
        elif line.name not in joined:
            found.append(line)
    return tuple(sorted(found, key=lambda line: (-abs(line.bytes_more), -line.after_bytes, line.name)))


def _categories(before: Iterable[Part], after: Iterable[Part]) -> tuple[MemoryChange, ...]:
    sums: tuple[defaultdict[str, int], defaultdict[str, int]] = defaultdict(int), defaultdict(int)
    for found, parts in zip(sums, (before, after), strict=True):
        for part in parts:
            for category, size_bytes in part.categories:
                found[category] += size_bytes
    names = dict.fromkeys((*sums[1], *sums[0]))
    rows = [MemoryChange(name, "", sums[0][name], sums[1][name], 0, 0) for name in names]
    return tuple(sorted(rows, key=lambda row: (-abs(row.bytes_more), -row.after_bytes, row.name)))


# Differences besides memory


def _device_notes(before: str, after: str, one: Analysis, other: Analysis, *, is_one_run: bool) -> Iterator[str]:
    if one.device != other.device:
        yield f"{before} is of cuda:{one.device}, {after} of cuda:{other.device}"
    if is_one_run:
        yield "one run: the second file continues the first, so what was held when each was written is compared"
    elif one.is_recorded and other.is_recorded:
        yield "two recordings: their peaks are compared"
    if one.categories_from != other.categories_from:
        yield (
            f"categories come from {one.categories_from} in {before} and from {other.categories_from} in {after}: "
            "compare the lines"
        )
    for name, analysis in ((before, one), (after, other)):
        for text in analysis.missing:
            yield f"{name}: {text}"


def _notes(before: Taken, after: Taken) -> Iterator[str]:
    one, other = before[0], after[0]
    keys = sorted(one.settings.keys() & other.settings.keys())
    pairs = {key: (str(one.settings[key]), str(other.settings[key])) for key in keys}
    changed = [f"{key} {' → '.join(values)}" for key, values in pairs.items() if values[0] != values[1]]
    if changed:
        yield f"allocator settings differ: {shortened(', '.join(changed), 300)}"
    places = [_torch_of(snapshot) for snapshot in (one, other)]
    if all(places) and places[0] != places[1]:
        yield f"torch is another one: {places[0]} → {places[1]}; what it allocates on its own may differ"


def _torch_of(snapshot: MemorySnapshot) -> str:
    """Return the folder that torch was loaded from; "" where no frame tells."""
    return next((found[1] for frame in snapshot.stacks.frames if (found := _TORCH.match(frame.file))), "")
