"""How many rows a program keeps where only a GPU's values tell: what a trace takes them for, and between what ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

End = Literal["most", "fewest", "otherwise"]
"""Which end of what is not known a trace takes: masks keep all rows, or few of them and experts equal shares. With
``otherwise`` it takes the most, and another number for each that nothing bounds: is anything sized by it?"""

Kind = Literal["mask", "classes", "differing", "boxes", "count", "place", "loop", "round", "tokens", "number"]
"""The operator that keeps the rows: a mask; masks that together have each row once, as a router's of its experts;
values that differ; a detector's samplers; a count that the program reads; or a place, as of `argmax`, that it reads.
Also whether a loop that may end early continues to its end, or makes one round where nothing else ends it; a text's new
tokens; and a number that nothing bounds."""


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
    def remedy(self) -> str:
        """Say what to type where it is another number."""
        return f"--assume-rows {self.place}=NUMBER gives it" if self.kind == "number" else "--assume-rows takes fewer"

    @property
    def words(self) -> str:
        """Say it in a line."""
        count = f"all {self.rows:,}" if self.rows == self.high else f"{self.rows:,} of {self.high:,}"
        if self.kind == "classes":
            return f"assumes {count} rows kept by one of the masks at {self.place}"
        if self.kind == "loop":
            return f"assumes that the loop does not end early at {self.place}"
        if self.kind == "round":
            return f"assumes one round of the loop at {self.place}"
        if self.kind == "tokens":
            return f"assumes all {self.rows:,} new tokens a text at {self.place}"
        if self.kind == "number":
            return f"assumes a number near {self.rows:,} read at {self.place}"
        if self.kind == "place":
            return f"assumes {self.rows:,} of {self.low:,} to {self.high:,} read at {self.place}"
        noun = {"differing": "different values", "boxes": "boxes"}.get(self.kind, "rows")
        return f"assumes {count} {noun} kept at {self.place}"
