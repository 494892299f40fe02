"""What a plan can be solved for, and how long that may take. No import that costs time: the command line needs it."""

from __future__ import annotations

from typing import Literal, get_args

Quantity = Literal["batch-size", "seq-len", "gpus", "accumulation"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)

AT_ONE_SIZE: frozenset[Quantity] = frozenset({"seq-len", "gpus"})
"""Those that traces of the plan's own batch size alone answer."""

TRACE_LIMIT_S = 45.0
"""So long are traces waited for without a screen, unless told otherwise: the formula answers at once."""
