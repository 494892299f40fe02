"""The run of a deep network from runs of shallow ones, event for event, without running it and without torch.

A network whose layers are alike repeats its work for each of them, in forward, in backward, in the optimizer: its run
is that of a network of one layer less with pieces inserted, each a repetition of what is before it. Two runs that
differ by a layer tell the pieces; a third one, deeper again, tells whether that is all there is to it.

An event's kind is all of it that does not depend on the depth: of an allocation its size, bucket, operator, line, and
module without the layer's number; of a release the kind of what it releases. Next to it is one number that moves with
the depth: an allocation's layer, or which one of its kind is released, counted from the oldest that lives. It is affine
    in the layers
that were added and in the repetition of a piece.
"""

from __future__ import annotations

import re
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile, zip_longest
from operator import eq
from typing import Literal, NamedTuple

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.weights import frozen_blocks, only_head
from gpumem_tui.simulator.allocator.replay import AffineTrace
from gpumem_tui.simulator.allocator.timeline import Mark, Timeline
from gpumem_tui.step import Site

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""A layer's number in a module's qualified name: the first that is there, as in ``blocks.3.mlp.0``."""

_COMPARED = 512
"""So many events after a piece are compared, to tell where it ends."""

_END = -1
"""Stand-in for a kind behind the last entry."""

_FIRST_INNER_AND_LAST = 3
"""Layers alike that a shallow network has at least: what the first and the last do apart is then not taken for what all
do (a sharded layer is gathered before it is needed, by the one before)."""

_What = Literal["allocate", "release", "release in use", "complete", "mark", "empty"]


class NotRepeating(ValueError):
    """Two runs differ by more than repetitions of what both do."""


def shallow_layers(shape: ModelShape, recipe: Recipe) -> int:
    """Return how many layers the shallowest network has that represents this shape; 0 to trace it itself.

    Blocks of transformers are alike, but for the first ones of some mixtures of experts, and for those that are frozen
    before others. It pays from twice as many layers on: three depths are traced. A model compiled as a whole is traced
    as a whole.
    """
    if not shape.record.has_attention or recipe.compile:
        return 0
    dense = shape.dense_layers if shape.experts is not None else 0
    frozen = 0 if only_head(recipe) else frozen_blocks(shape, recipe)
    layers = _FIRST_INNER_AND_LAST + max(dense, frozen)
    return layers if shape.layers > 2 * (layers + 1) else 0


def deepened(trace: AffineTrace, runs: tuple[Timeline, Timeline, Timeline], checked: int, layers: int) -> AffineTrace:
    """Return the trace of a network of so many layers more than the one that `trace` is of.

    Args:
        runs: of that network and of one layer more, both at one batch size; and of two layers more, at the batch size
            `checked`, which must be exactly as the other two predict.

    Raises:
        NotRepeating: layers are not all alike.
    """
    shallow, deeper, deepest = runs
    pattern = LayerPattern.between(shallow, deeper)
    if pattern.extended(trace, 2).at(checked) != deepest:
        raise NotRepeating("the run of the deepest is not what those of fewer layers predict")
    return pattern.extended(trace, layers)


Assumed = tuple[tuple[str, int, str], ...]
"""Operators whose kernels' scratch is not known, how often each ran, and why it is not."""


def deepened_assumed(shallow: Assumed, deeper: Assumed, layers: int) -> Assumed:
    """Return what is assumed of a network of so many layers more than the shallow one; the deeper has one more."""
    before = {operator: times for operator, times, _ in shallow}
    found = []
    for operator, times, why in deeper:
        first = before.get(operator, 0)
        found.append((operator, first + layers * (times - first), why))
    return tuple(found)


class _Entry(NamedTuple):
    """The event at one place of a run: its kind, and what of it moves.

    Attributes:
        kind: what it is, apart from the depth; the same numbers in every run that is read with one table.
        moves: an allocation's layer (-1 for none), or the place of what is released among those of its kind.
        what: what happens. `subject`: the number of the allocation, of the mark, or 0.
        pool: of an allocation or a release the kind of the allocation.
    """

    kind: int
    moves: int
    what: _What
    subject: int
    pool: int


class _Reader:
    """Reads timelines into runs, with one table of kinds for all of them."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...], int] = {}

    def read(self, timeline: Timeline) -> list[_Entry]:
        """Return a timeline with its marks and all else in one order."""
        run: list[_Entry] = []
        kind_of = self._allocation_kinds(timeline)
        in_use = {number for _, number in timeline.completions}
        live: dict[int, list[int]] = defaultdict(list)
        pending: dict[int, list[int]] = defaultdict(list)
        layers = [layer_of(site) for site in timeline.site_table]
        between = _between(timeline)
        for event, number in enumerate((*timeline.events, 0)):
            for what, subject in between.get(event, ()):
                if what == "complete":
                    pool = kind_of[subject]
                    place = pending[pool].index(subject)
                    del pending[pool][place]
                    run.append(_Entry(self._number(what, pool), place, what, subject, pool))
                else:
                    detail = timeline.marks[subject] if what == "mark" else None
                    step_and_phase = (detail.step, detail.phase) if detail else None
                    run.append(_Entry(self._number(what, step_and_phase), 0, what, subject, 0))
            if number > 0:
                pool = kind_of[number]
                live[pool].append(number)
                layer = layers[timeline.sites[number - 1]] if timeline.sites else -1
                run.append(_Entry(pool, layer, "allocate", number, pool))
            elif number < 0:
                pool = kind_of[-number]
                place = live[pool].index(-number)
                del live[pool][place]
                what = "release"
                if -number in in_use:
                    what = "release in use"
                    insort(pending[pool], -number)
                run.append(_Entry(self._number(what, pool), place, what, -number, pool))
        return run

    def _allocation_kinds(self, timeline: Timeline) -> list[int]:
        """Return by number of an allocation its kind."""
        places = [self._number("place", _at_layer(site, 0)) for site in timeline.site_table]
        computed = dict(timeline.computed)
        kinds = [0]
        entries = zip_longest(timeline.sizes, timeline.buckets, timeline.sites, timeline.streams, fillvalue=0)
        for number, (size_bytes, bucket, site, stream) in enumerate(entries, 1):
            place = places[site] if places else 0
            kinds.append(self._number("allocate", size_bytes, bucket, place, stream, computed.get(number)))
        return kinds

    def _number(self, *kind: object) -> int:
        return self._kinds.setdefault(kind, len(self._kinds))


def layer_of(site: Site) -> int:
    """Return the layer's number in a site's module; -1 for none."""
    found = _LAYER.search(site.module)
    return int(found[0]) if found else -1


def _at_layer(site: Site, layer: int) -> Site:
    return replace(site, module=_LAYER.sub(str(layer), site.module, count=1))


def _between(timeline: Timeline) -> dict[int, list[tuple[_What, int]]]:
    """Return what a timeline has between its events, by the event that follows."""
    found: dict[int, list[tuple[_What, int]]] = defaultdict(list)
    for index, mark in enumerate(timeline.marks):
        found[mark.event].append(("mark", index))
    for event in timeline.emptied:
        found[event].append(("empty", 0))
    for event, number in timeline.completions:
        found[event].append(("complete", number))
    return found


@dataclass(frozen=True)
class _Piece:
    """The entries that one layer more inserts before entry number `at` of the shallow run: those before it once more.

    Attributes:
        steps: by entry, what its number moves by with each repetition.
    """

    at: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class LayerPattern:
    """The change that one layer more makes to the run of a network."""

    _run: list[_Entry]
    _growth: list[int]
    """By entry of the run, what its number moves by with each layer that is added."""
    _pieces: tuple[_Piece, ...]

    @classmethod
    def between(cls, shallow: Timeline, deeper: Timeline) -> LayerPattern:
        """Return what a run has beyond that of a network of one layer less.

        Raises:
            NotRepeating: it has more, or has something else.
        """
        reader = _Reader()
        one, other = reader.read(shallow), reader.read(deeper)
        growth: list[int] = []
        pieces = []
        at = inserted = 0
        for until, length in [*_insertions([e.kind for e in one], [e.kind for e in other]), (len(one), 0)]:
            growth += [other[entry + inserted].moves - one[entry].moves for entry in range(at, until)]
            if length:
                first = until + inserted
                repeated = zip(other[first - length : first], other[first : first + length], strict=True)
                pieces.append(_Piece(until, tuple(after.moves - before.moves for before, after in repeated)))
            at, inserted = until, inserted + length
        return cls(one, growth, tuple(pieces))

    def extended(self, trace: AffineTrace, layers: int) -> AffineTrace:
        """Return the trace of a network of so many layers more, where `trace` is of the shallow run.

        Its runs at sizes `apart` are not taken along: the pattern is not theirs.

        Raises:
            NotRepeating: more is released than there is.
        """
        program = _Program()
        for entry, moves in self._entries(layers):
            program.follow(self._run[entry], moves, trace.at_none.marks)
        return program.trace_from(trace)

    def _entries(self, layers: int) -> Iterator[tuple[int, int]]:
        """Yield the entries of the extended run in order: which of the shallow run's it is, and its number."""
        moves = [start.moves + grows * layers for start, grows in zip(self._run, self._growth, strict=True)]
        at = 0
        for piece in self._pieces:
            yield from enumerate(moves[at : piece.at], at)
            at, before = piece.at, piece.at - len(piece.steps)
            for repetition in range(1, layers + 1):
                for entry, step in enumerate(piece.steps, before):
                    yield entry, moves[entry] + step * repetition
        yield from enumerate(moves[at:], at)


@dataclass
class _Program:
    """The run of the deep network as it is put together."""

    events: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    """By allocation, the number of the one in the shallow run that it is like."""
    layers: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    emptied: list[int] = field(default_factory=list)
    completions: list[tuple[int, int]] = field(default_factory=list)
    _live: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _pending: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def follow(self, entry: _Entry, moves: int, marks: Sequence[Mark]) -> None:
        """Add what an entry of the shallow run, whose `marks` these are, becomes with `moves` instead of its own."""
        _, _, what, subject, pool = entry
        if what == "allocate":
            self.sources.append(subject)
            self.layers.append(moves)
            self._live[pool].append(len(self.sources))
            self.events.append(len(self.sources))
        elif what == "mark":
            self.marks.append(replace(marks[subject], event=len(self.events)))
        elif what == "empty":
            self.emptied.append(len(self.events))
        elif what == "complete":
            self.completions.append((len(self.events), _taken(self._pending[pool], moves)))
        else:
            number = _taken(self._live[pool], moves)
            self.events.append(-number)
            if what == "release in use":
                insort(self._pending[pool], number)

    def trace_from(self, trace: AffineTrace) -> AffineTrace:
        """Return the trace, with sizes and all else of each allocation from the one that it is like."""
        shallow = trace.at_none
        by_rule = {one: (size, steps) for (one, size), steps in zip(shallow.computed, trace.rule_slopes, strict=True)}
        computed = [(number, *by_rule[source]) for number, source in enumerate(self.sources, 1) if source in by_rule]
        table: dict[Site, int] = {}
        at_layer: dict[tuple[int, int], int] = {}
        sites = []
        for source, layer in zip(self.sources, self.layers, strict=True) if shallow.sites else ():
            key = shallow.sites[source - 1], layer
            if key not in at_layer:
                site = shallow.site_table[key[0]]
                at_layer[key] = table.setdefault(site if layer < 0 else _at_layer(site, layer), len(table))
            sites.append(at_layer[key])
        at_none = Timeline(
            events=tuple(self.events),
            sizes=tuple(shallow.sizes[source - 1] for source in self.sources),
            buckets=tuple(shallow.buckets[source - 1] for source in self.sources),
            marks=tuple(self.marks),
            sites=tuple(sites),
            site_table=tuple(table),
            computed=tuple((number, size) for number, size, _ in computed),
            emptied=tuple(self.emptied),
            streams=tuple(shallow.stream_of(source) for source in self.sources) if shallow.streams else (),
            completions=tuple(self.completions),
        )
        slopes = tuple(trace.slopes[source - 1] for source in self.sources)
        return AffineTrace(at_none, slopes, tuple(steps for _, _, steps in computed))


def _taken(pool: list[int], place: int) -> int:
    """Take what is at a place."""
    if not 0 <= place < len(pool):
        raise NotRepeating("a release of what is not there")
    return pool.pop(place)


def _insertions(shallow: Sequence[int], deeper: Sequence[int]) -> list[tuple[int, int]]:
    """Return where, and how much, is inserted into one sequence to give another: repetitions of what is before.

    Raises:
        NotRepeating: other things are, too.
    """
    shallow, deeper = [*shallow, _END], [*deeper, _END]
    found = []
    at = inserted = since = 0
    while at < len(shallow):
        if shallow[at] == deeper[at + inserted]:
            at += 1
            continue
        length = _length_of_insertion(shallow, deeper, at, inserted)
        found.append((_centred(shallow, at, length, since), length))
        inserted, since = inserted + length, at
    return found


def _length_of_insertion(shallow: Sequence[int], deeper: Sequence[int], at: int, inserted: int) -> int:
    """Return how much is inserted at a place: as much as lets most that follows agree again, the least of several."""
    start = at + inserted
    following = shallow[at : at + _COMPARED]
    best, best_agrees = 0, -1
    for length in range(1, min(start, len(deeper) - len(shallow) - inserted) + 1):
        end = start + length
        if deeper[end] != following[0]:
            continue
        if deeper[start:end] != deeper[start - length : start]:
            continue
        agrees = sum(1 for _ in takewhile(bool, map(eq, following, deeper[end : end + len(following)])))
        if agrees > best_agrees:
            best, best_agrees = length, agrees
    if not best:
        raise NotRepeating(f"entry {at} of the shallow run has no like in the deeper one")
    return best


def _centred(shallow: Sequence[int], at: int, length: int, since: int) -> int:
    """Return the place in the middle of the repetitions that end at `at`.

    Away from the first and the last layer, which may release what others do not.
    """
    start = at - length
    while start > since and shallow[start - 1] == shallow[start - 1 + length]:
        start -= 1
    return at - max(0, at - length - start) // 2
