"""What stands on the Monitor when there is no GPU to watch: what is wrong, how to fix it, what works meanwhile."""

from __future__ import annotations

import textwrap

from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.tui.figures import MUTED, Span

Row = list[Span]

_WIDEST = 72
_KEY_WIDTH = 22


def is_troubled(snapshot: Snapshot | None) -> bool:
    """There is nothing to draw a ledger of."""
    return snapshot is None or not snapshot.gpus


def trouble_rows(snapshot: Snapshot | None, width: int, height: int, waited_s: float) -> list[Row]:
    """A short text in the middle of `width` × `height` cells."""
    measure = min(_WIDEST, width)
    lines: list[Row] = []
    if snapshot is None:
        lines.append([("Asking the NVIDIA driver", "bold")])
        if waited_s >= 2:
            said = f"It has not answered for {waited_s:.0f} s. The screen goes on as soon as it does."
            lines += _wrapped(said, measure)
    else:
        lines.append([("No GPU to watch", "bold $warning")])
        lines += [[], *_wrapped(snapshot.problem or "The NVIDIA driver lists no GPU on this machine.", measure)]
    lines += [[], *(_pair(key, what, measure) for key, what in _MEANWHILE)]
    if snapshot is not None:
        lines += [
            [],
            *_wrapped("The driver is asked again every few seconds; GPUs show as soon as it answers.", measure),
        ]
    lines = lines[:height]
    left = (width - measure) // 2
    above = max(0, (height - len(lines)) // 3)
    return [*([] for _ in range(above)), *([(" " * left, ""), *line] for line in lines)]


_MEANWHILE = (
    ("2", "Search: the largest batch, on a simulated GPU"),
    ("3", "Plan: what fits, and what would make more fit"),
    ("gpumem-tui run -- CMD", "train under a probe: it shows here, on the CPU too"),
    ("gpumem-tui doctor", "what works here, what does not, and the remedy"),
    ("q", "quit"),
)


def _wrapped(text: str, width: int) -> list[Row]:
    return [[(line, "")] for line in textwrap.wrap(text, width)]


def _pair(key: str, what: str, width: int) -> Row:
    return [(f"{key:<{_KEY_WIDTH}}", "bold $primary"), (what[: max(0, width - _KEY_WIDTH)], MUTED)]
