"""Common to every vendor's calls: a count, the call that has not returned, and the reason of a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

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

    def under_way(self, function: str) -> Calls:
        """Count a call, which is in progress until the block that begins with this ends."""
        self.counts[function] += 1
        self._now = (function, monotonic())
        return self

    def __enter__(self) -> None:
        """Begin the block of a call: see `under_way`."""

    def __exit__(self, *_error: object) -> None:
        """End it."""
        self._now = None

    def in_progress(self) -> tuple[str, float] | None:
        """Return the call that has not returned, and for how many seconds; for other threads."""
        now = self._now
        return None if now is None else (now[0], monotonic() - now[1])


Call = TypeVar("Call", bound=Calls)


class Called(Generic[Call]):
    """The part of `GpuBackend` that is about the calls: a base class for backends.

    Args:
        proc: the folder of the kernel's own files, ``/proc``.
    """

    def __init__(self, call: Call, proc: Path) -> None:
        self._call, self._proc = call, proc

    @property
    def calls(self) -> Mapping[str, int]:
        """Count the calls by the library's function."""
        return dict(self._call.counts)

    def in_progress(self) -> tuple[str, float] | None:
        """Return the function that has not returned, and for how many seconds."""
        return self._call.in_progress()

    def begin_pass(self) -> None:
        """Begin as `GpuBackend.begin_pass` has it."""
        self._call.codes.clear()


def refused(fault: Fault) -> Unknown:
    """Return the fault as a missing value.

    Raises:
        Gone: it is that the GPU or the driver is lost, which is not about one value.
    """
    if isinstance(fault, Gone):
        raise fault
    return Unknown(fault.reason)
