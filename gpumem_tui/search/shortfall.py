"""What an out-of-memory message comes down to."""

from __future__ import annotations

import re

from gpumem_tui.memory import format_bytes
from gpumem_tui.search.events import TrialDone

_SIZE = r"([\d.]+ (?:[KMGT]iB|bytes))"
_WANTED = re.compile(rf"Tried to allocate {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free|{_SIZE} of it free")
"""PyTorch's own words, and the simulated GPU's."""


def shortfall(result: TrialDone, limit_bytes: int | None = None) -> str:
    """ "wanted 9.78 GiB, 9.02 GiB free" of a trial that was out of memory; what it said, where that names no sizes or
    it failed for another reason; empty for one that fits.

    Args:
        limit_bytes: a user's cap on reserved bytes: memory beyond it is free, but cannot be used.
    """
    wanted, free = _WANTED.search(result.detail), _FREE.search(result.detail)
    if result.outcome != "oom" or wanted is None:
        return result.detail
    line = f"wanted {wanted[1]}"
    if free is not None:
        line += f", {free[1] or free[2]} free"
    return line if limit_bytes is None else f"{line}, limited to {format_bytes(limit_bytes)}"
