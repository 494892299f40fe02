"""Watch the fake machine with a real sampler, at a tenth of the usual interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.sampler import Sampler
from gpumem_tui.monitor.snapshot import GpuReading, HostProcess, Snapshot
from tests.waiting import DEADLINE_S


def no_processes(pids: Iterable[int]) -> Mapping[int, Reading[HostProcess]]:
    """For tests that are not about the host."""
    return {pid: Unknown(f"pid {pid} is not looked up here") for pid in pids}


@contextmanager
def watching(
    *, interval_s: float = 0.1, slow_interval_s: float = 0.2, proc: Path = Path("/nowhere")
) -> Iterator[Sampler]:
    """A sampler at work."""
    sampler = Sampler(interval_s, slow_interval_s, look=no_processes, proc=proc)
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def until(sampler: Sampler, condition: Callable[[Snapshot], bool]) -> Snapshot:
    """The first snapshot from now on of which the condition holds."""
    deadline = monotonic() + DEADLINE_S
    seen = sampler.latest()
    while monotonic() < deadline:
        seen = sampler.wait(seen, deadline - monotonic())
        if seen is None:
            break
        if condition(seen):
            return seen
    raise AssertionError(f"it did not come to that within {DEADLINE_S:.0f} s; last: {sampler.latest()}")


def gpu(snapshot: Snapshot, index: int) -> GpuReading:
    """The GPU that the driver has at an index, or the lost one that had it."""
    return next(reading for reading in snapshot.gpus if reading.index == index)


def is_complete(snapshot: Snapshot) -> bool:
    """Every GPU has been read, what is slow included."""
    unread = Unknown("not read yet")
    return bool(snapshot.gpus) and all(
        reading.telemetry.pcie_tx_bytes_per_s != unread
        and (isinstance(reading.processes, Unknown) or all(p.sm_percent != unread for p in reading.processes))
        for reading in snapshot.gpus
    )
