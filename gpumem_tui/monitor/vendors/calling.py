"""What every vendor's calls share: they are counted, the one that has not returned is known, a fault is a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.backend import Fault, Gone


class Calls:
    """Counts the calls of one thread, and knows which one has not returned.

    Attributes:
        counts: calls so far, by the library's function.
        missing: functions that this driver turned out not to have.
        codes: what calls returned since whoever owns this emptied it.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.missing: set[str] = set()
        self.codes: set[int] = set()
        self._now: tuple[str, float] | None = None

    @contextmanager
    def under_way(self, function: str) -> Iterator[None]:
        """Count a call, which is in progress until the block ends."""
        self.counts[function] += 1
        self._now = (function, monotonic())
        try:
            yield
        finally:
            self._now = None

    def in_progress(self) -> tuple[str, float] | None:
        """Return the call that has not returned, and for how many seconds; for other threads."""
        now = self._now
        return None if now is None else (now[0], monotonic() - now[1])


def refused(fault: Fault) -> Unknown:
    """Return the fault as a missing value.

    Raises:
        Gone: it is that the GPU or the driver is lost, which is not about one value.
    """
    if isinstance(fault, Gone):
        raise fault
    return Unknown(fault.reason)
