"""The largest batch on every GPU of the catalog."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_tui.memory import Unknown
from gpumem_tui.plan.by_gpu import LargestOnGpu
from gpumem_tui.plan.plan import Plan
from gpumem_tui.tui.kit.figures import ABSENT, MUTED, ListRow, compact_bytes, fit, heading, paragraph, row

_NAME_WIDTH = 34
_FIGURE_WIDTH = 12
_ROOMY = 52
"""Cells from which the memory has a column."""


def gpu_rows(found: Sequence[LargestOnGpu], plan: Plan, width: int, selected: str) -> list[ListRow]:
    """A line a GPU; the one under the cursor also says what it lacks. The plan's own is marked."""
    columns = 3 if width >= _ROOMY else 2
    name_width = max(8, min(_NAME_WIDTH, width - 2 - columns * _FIGURE_WIDTH))
    kept = f"{100 * plan.headroom:g} % left free"
    heads = ("GiB", "traced", "formula")[-columns:]
    head = f"  {fit('largest batch of one GPU', name_width)}" + "".join(f"{one:>{_FIGURE_WIDTH}}" for one in heads)
    lines = [heading(f"Every GPU, {kept}"), row((head, f"bold {MUTED}"))]
    for one in found:
        lines += _gpu_rows(one, plan, width, name_width, here=one.gpu.name == selected)
    return lines


def _gpu_rows(one: LargestOnGpu, plan: Plan, width: int, name_width: int, *, here: bool) -> list[ListRow]:
    fits = plan.batch_size <= one.largest
    traced = f"{one.traced:,}" if isinstance(one.traced, int) else ABSENT
    mark = "✓ " if fits else "! " if one.lacks else "  "
    line = row(
        (mark, "$text-success" if fits else MUTED),
        (fit(one.gpu.title, name_width), "bold" if one.gpu == plan.gpu else ""),
        (f"{compact_bytes(one.gpu.total_bytes):>{_FIGURE_WIDTH}}" if width >= _ROOMY else "", MUTED),
        (f"{traced:>{_FIGURE_WIDTH}}", "bold" if fits else ""),
        (f"{'≈' + format(one.formula, ','):>{_FIGURE_WIDTH}}", MUTED),
        key=one.gpu.name,
    )
    if not here:
        return [line]
    said = list(one.lacks)
    if isinstance(one.traced, Unknown):
        said.append(one.traced.reason)
    elif one.traced is not None and not one.same_architecture:
        said.append("from the trace of another architecture, with this one's context")
    return [line, *(part for text in said for part in paragraph(text, width, indent=2))]
