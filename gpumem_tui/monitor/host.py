"""The machine around the GPUs, and the processes behind the pids that NVML lists."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.readings import NOT_READ_YET, Reading
from gpumem_tui.monitor.snapshot import HostProcess, HostReading

Look = Callable[[Iterable[int]], Mapping[int, Reading[HostProcess]]]


class HostReader:
    """Reads what the operating system says of processes and load, for one thread.

    Args:
        look: finds the processes of pids; by default `processes.HostProcesses`.

    Attributes:
        pids: whom to look up at the next `read`.
        processes, reading: of the last one.
        looked_up: whom it looked for; None before the first.
    """

    def __init__(self, look: Look | None = None) -> None:
        self.pids: frozenset[int] = frozenset()
        self.processes: Mapping[int, Reading[HostProcess]] = {}
        self.looked_up: frozenset[int] | None = None
        self.reading = HostReading(socket.gethostname(), NOT_READ_YET, NOT_READ_YET, NOT_READ_YET)
        self._look = look
        self._reads = 0

    def read(self) -> None:
        """Look up the processes and read the machine's load."""
        import psutil  # only here: a fifth of the time until the first frame

        if self._look is None:
            from gpumem_tui.monitor.processes import HostProcesses

            self._look = HostProcesses().look
        pids = self.pids
        self.processes = self._look(pids)
        self.looked_up = pids
        cpu_percent = psutil.cpu_percent()  # since the last call; the first one has nothing to compare with
        memory = psutil.virtual_memory()
        self._reads += 1
        self.reading = HostReading(
            name=self.reading.name,
            cpu_percent=cpu_percent if self._reads > 1 else Unknown("not measured yet"),
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
        )
