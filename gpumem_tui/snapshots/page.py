"""A snapshot, or two compared, as one HTML file: it has no scripts and refers to nothing, so it opens anywhere.

Charts are SVG that is written here. Every text of a file goes through `html.escape`, and the page's own
Content-Security-Policy allows its styles only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

from gpumem_tui.memory import format_bytes
from gpumem_tui.report.tables import counted
from gpumem_tui.snapshots.analysis import Analysis, Part
from gpumem_tui.snapshots.comparison import Comparison, MemoryChange, signed
from gpumem_tui.snapshots.comparison import answer_words as change_words
from gpumem_tui.snapshots.model import MemorySnapshot, Segment
from gpumem_tui.snapshots.report import answer_words, event_count, line_words, when

_MOST_LINES, _MOST_STACKS, _MOST_SEGMENTS, _MOST_FRAMES = 200, 60, 120, 40
"""Rows of a page, divided among its devices: with these a page stays below 2 MB."""
_COLOURS = 10
_WIDTH, _HEIGHT = 1000, 300
_CELLS = 500
"""Columns of a segment's map."""


def snapshot_page(snapshot: MemorySnapshot, analyses: Sequence[Analysis]) -> str:
    """Return a page of everything about a file, the answer first."""
    facts = f"{snapshot.kind}, {format_bytes(snapshot.size_bytes)}"
    answers = [answer_words(one) for one in analyses]
    body = [part for one in analyses for part in _device(one, len(analyses))]
    return _page(snapshot.name, facts, _answers(answers, [one.device for one in analyses]), body)


def comparison_page(before: MemorySnapshot, after: MemorySnapshot, found: Sequence[Comparison]) -> str:
    """Return a page of how two files differ, the answer first."""
    name = f"{before.name} → {after.name}"
    facts = " → ".join(f"{one.kind}, {format_bytes(one.size_bytes)}" for one in (before, after))
    answers = _answers([change_words(one) for one in found], [one.after.device for one in found])
    return _page(name, facts, answers, [part for one in found for part in _difference(one, len(found))])


def _page(title: str, facts: str, answers: Iterable[str], body: Iterable[str]) -> str:
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head><body>"
    )
    top = f"<h1>{escape(title)}</h1><p class=muted>GPU memory of PyTorch, by gpumem-tui · {escape(facts)}</p>"
    return "\n".join([head, top, *answers, *body, "</body></html>\n"])


def _answers(answers: Sequence[str], devices: Sequence[int]) -> Iterator[str]:
    for device, answer in zip(devices, answers, strict=True):
        yield f"<p><b>{f'cuda:{device}: ' if len(answers) > 1 else ''}{escape(answer)}</b></p>"


# One file


def _device(analysis: Analysis, devices: int) -> Iterator[str]:
    colours = _colours(analysis.categories)
    lasted = "" if analysis.duration_s is None else f" in {analysis.duration_s:.3g} s"
    yield f"<h2>cuda:{analysis.device} · {event_count(analysis.events)}{lasted}</h2>"
    yield from (f"<p class=muted>{escape(note)}</p>" for note in analysis.notes)
    for oom in analysis.ooms[-1:]:
        yield f"<h3 class=failed>Out of memory at event {oom.event:,}, {escape(oom.line)}</h3>"
        yield from (f"<p>{escape(line)}</p>" for line in oom.explanation)
    if analysis.is_recorded:
        yield f"<h3>Memory over the events, the peak {when(analysis.peak_event)}</h3>"
        yield _course(analysis, colours, max(analysis.peak_reserved_bytes, analysis.peak_allocated_bytes, 1))
    moment = "at the peak" if analysis.is_recorded else "when written"
    total = analysis.peak_allocated_bytes
    yield f"<h3>By category, {moment} (from {analysis.categories_from})</h3>"
    yield from _parts(analysis.by_category, total, colours)
    yield f"<h3>By source line, {moment}</h3>"
    yield from _parts(analysis.by_line[: _MOST_LINES // devices], total, colours)
    yield from _rest(analysis.by_line[_MOST_LINES // devices :])
    yield from _stacks(analysis, moment, _MOST_STACKS // devices)
    yield from _segments(analysis, _MOST_SEGMENTS // devices)


def _colours(categories: Iterable[str]) -> Mapping[str, str]:
    return {name: f"c{number % _COLOURS}" for number, name in enumerate(categories)}


def _course(analysis: Analysis, colours: Mapping[str, str], top: int) -> str:
    """Return memory over the events as areas on each other, the cache behind them."""
    points, last = analysis.timeline, max(1, analysis.events)
    across = [round((point.event + 1) * _WIDTH / last) for point in points] + [_WIDTH]
    levels = [list(accumulate(point.by_category)) for point in points]
    areas = [
        _area("cache", "reserved", across, [max(point.reserved_bytes, point.allocated_bytes) for point in points], top)
    ]
    for index in reversed(range(len(analysis.categories))):
        name = analysis.categories[index]
        areas.append(_area(colours[name], name, across, [level[index] for level in levels], top))
    peak = round((analysis.peak_event + 1) * _WIDTH / last)
    areas.append(f'<line class=peak x1="{peak}" x2="{peak}" y1="0" y2="{_HEIGHT}"/>')
    chart = f'<svg class=course viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">{"".join(areas)}</svg>'
    names = {**colours, "reserved, not allocated": "cache"}
    legend = " ".join(f'<span><i class="legend {colour}"></i>{escape(name)}</span>' for name, colour in names.items())
    return f"{chart}<p class=muted>0 to {format_bytes(top)}; the dashed line is the peak · {legend}</p>"


def _area(colour: str, name: str, across: Sequence[int], heights: Sequence[int], top: int) -> str:
    """Return the area below steps: a height holds from its point to the next."""
    path, level = [f"M0 {_HEIGHT}"], -1
    for start, height in zip(across, heights, strict=False):
        at = _HEIGHT - round(height * _HEIGHT / top)
        if at != level:
            path.append(f"H{start}V{at}")
            level = at
    return f'<path class="{colour}" d="{"".join(path)}H{_WIDTH}V{_HEIGHT}Z"><title>{escape(name)}</title></path>'


def _parts(parts: Sequence[Part], total: int, colours: Mapping[str, str]) -> Iterator[str]:
    yield "<div class=scroll><table><tr><th class=size>size<th class=size>share<th><th>what<th class=size>blocks</tr>"
    for part in parts:
        share = part.size_bytes / total if total else 0.0
        colour = colours.get(part.categories[0][0], "c9") if part.categories else "c9"
        yield (
            f"<tr><td class=size>{format_bytes(part.size_bytes)}<td class=size>{share:.1%}"
            f'<td class=bar><i class="{colour}" style="width:{share:.2%}"></i>'
            f"<td>{escape(part.name)}<td class=size>{part.blocks:,}</tr>"
        )
    yield "</table></div>"


def _rest(parts: Sequence[Part]) -> Iterator[str]:
    if parts:
        size = format_bytes(sum(part.size_bytes for part in parts))
        yield f"<p class=muted>{size} in {len(parts):,} smaller ones</p>"


def _stacks(analysis: Analysis, moment: str, most: int) -> Iterator[str]:
    stacks = [part for part in analysis.by_stack if part.frames]
    if stacks:
        yield f"<h3>By stack, {moment}, the innermost frame first</h3>"
    for part in stacks[:most]:
        frames = escape("\n".join(part.frames[:_MOST_FRAMES]))
        title = f"{format_bytes(part.size_bytes)} · {escape(part.name)}"
        yield f"<details><summary>{title}</summary><pre>{frames}</pre></details>"
    yield from _rest(stacks[most:])


def _segments(analysis: Analysis, most: int) -> Iterator[str]:
    yield f"<h3>{counted(len(analysis.segments), 'segment')} when written</h3>"
    yield (
        f"<p>{format_bytes(analysis.stranded_bytes)} free between blocks, {format_bytes(analysis.returnable_bytes)} in "
        f"wholly free segments, the largest free piece {format_bytes(analysis.largest_free_bytes)}</p>"
    )
    yield (
        "<div class=scroll><table><tr><th class=size>size<th class=size>free<th>blocks in use<th class=size>pieces</tr>"
    )
    for segment in analysis.segments[:most]:
        yield (
            f"<tr><td class=size>{format_bytes(segment.size_bytes)}<td class=size>{format_bytes(segment.free_bytes)}"
            f'<td style="width:65%">{_map(segment)}<td class=size>{len(segment.free_sizes):,}</tr>'
        )
    yield "</table></div>"
    if rest := analysis.segments[most:]:
        yield f"<p class=muted>{len(rest):,} smaller segments, {format_bytes(sum(one.size_bytes for one in rest))}</p>"


def _map(segment: Segment) -> str:
    """Return a segment as a bar with its holes; runs closer than a cell are drawn as one."""
    runs: list[list[int]] = []
    for offset, length in segment.taken:
        start = offset * _CELLS // segment.size_bytes
        end = max(start + 1, round((offset + length) * _CELLS / segment.size_bytes))
        if runs and start <= runs[-1][1]:
            runs[-1][1] = max(end, runs[-1][1])
        else:
            runs.append([start, end])
    path = "".join(f"M{start} 0h{end - start}v9h-{end - start}z" for start, end in runs)
    return f'<svg class=segment viewBox="0 0 {_CELLS} 9" preserveAspectRatio="none"><path d="{path}"/></svg>'


# Two files


def _difference(found: Comparison, devices: int) -> Iterator[str]:
    categories = dict.fromkeys((*found.after.categories, *found.before.categories))
    colours = _colours(categories)
    yield f"<h2>cuda:{found.after.device} · compared {found.moment}</h2>"
    yield from (f"<p class=muted>{escape(note)}</p>" for note in found.notes)
    yield "<div class=scroll><table><tr><th>memory<th class=size>before<th class=size>after<th class=size>change</tr>"
    for title, one, other in found.figures:
        yield f"<tr><td>{escape(title)}{_change(one, other)}</tr>"
    one, other = found.segments
    yield (
        f"<tr><td>segments<td class=size>{one:,}<td class=size>{other:,}"
        f"<td class=size>{other - one:+,}</tr></table></div>"
    )
    yield "<h3>By category</h3>"
    yield from _changes(found.by_category, colours)
    for title, sign in (("More, by source line", 1), ("Freed, by source line", -1)):
        rows = [row for row in found.by_line if row.bytes_more * sign > 0]
        if rows:
            yield f"<h3>{title}</h3>"
            yield from _changes(rows[: _MOST_LINES // devices], colours)
    top = max(1, *(one.peak_reserved_bytes for one in (found.before, found.after)))
    for title, analysis in (("Before", found.before), ("After", found.after)):
        if analysis.is_recorded:
            yield f"<h3>{title}: memory over {event_count(analysis.events)}</h3>"
            yield _course(analysis, colours, max(top, analysis.peak_allocated_bytes))


def _change(before_bytes: int, after_bytes: int) -> str:
    more = after_bytes - before_bytes
    style = " more" if more > 0 else " less" if more < 0 else ""
    return (
        f"<td class=size>{format_bytes(before_bytes)}<td class=size>{format_bytes(after_bytes)}"
        f'<td class="size{style}">{signed(more)}'
    )


def _changes(rows: Sequence[MemoryChange], colours: Mapping[str, str]) -> Iterator[str]:
    most = max((max(row.before_bytes, row.after_bytes) for row in rows), default=0) or 1
    yield (
        "<div class=scroll><table><tr><th>what<th>before, after<th class=size>before<th class=size>after"
        "<th class=size>change</tr>"
    )
    for row in rows:
        colour = colours.get(row.category or row.name, "c9")
        bars = "".join(
            f'<i class="{colour}" style="width:{size / most:.2%}"></i>' for size in (row.before_bytes, row.after_bytes)
        )
        yield f"<tr><td>{escape(line_words(row))}<td class=bar>{bars}{_change(row.before_bytes, row.after_bytes)}</tr>"
    yield "</table></div>"
