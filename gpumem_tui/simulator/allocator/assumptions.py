"""How many rows a program keeps where only a GPU's values tell: what a trace takes them for, and between what ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

End = Literal["most", "fewest"]
"""Which end of what is not known a trace takes: masks keep all rows, or few of them and experts equal shares."""

Kind = Literal["mask", "classes", "differing", "boxes", "count", "place"]
"""What keeps the rows: a mask; masks that together have each row once, as a router's of its experts; values that
differ; a detector's samplers; a count that the program reads; or a place, as of `argmax`, that it reads."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """Rows that a trace takes for kept at a place in the program, where unknown values decide that.

    Attributes:
        place: ``file:line``.
        rows: as many as are taken, at most in one call.
        low, high: between which they are.
    """

    place: str
    kind: Kind
    rows: int
    low: int
    high: int

    @property
    def words(self) -> str:
        """Say it in a line."""
        count = f"all {self.rows:,}" if self.rows == self.high else f"{self.rows:,} of {self.high:,}"
        if self.kind == "classes":
            return f"assumes {count} rows kept by one of the masks at {self.place}"
        if self.kind == "place":
            return f"assumes {self.rows:,} of {self.low:,} to {self.high:,} read at {self.place}"
        noun = {"differing": "different values", "boxes": "boxes"}.get(self.kind, "rows")
        return f"assumes {count} {noun} kept at {self.place}"
