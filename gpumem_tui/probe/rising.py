"""Whether a GPU's memory rises from step to step, so that it is worth a few recorded steps to learn what is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from gpumem_tui.memory import MIB
from gpumem_tui.probe import allocator
from gpumem_tui.probe.wire import UNASKED, Record

if TYPE_CHECKING:
    import torch

    from gpumem_tui.probe.finding import FoundTraining
    from gpumem_tui.probe.look import Look

_LEAST_BYTES = MIB
"""A step's: less is a list of losses, of which a thousand steps make no difference (as the simulated GPU has it)."""
_SAMPLES = 6
"""So many in ascending order are chance in one of 720 programs whose batches differ in size."""
_STEADY = 3.0
"""No rise is so many times another: a larger batch is one jump."""
_SOON = 4
"""Memory that is full after so many samples more leaves no time to wait for them."""
_AGAIN_S = 60.0
"""Between two recordings, twice as long after each."""


class Rising:
    """Follows what each device holds after a step besides parameters, gradients and optimizer state."""

    def __init__(self) -> None:
        self._points: dict[int, list[tuple[int, int]]] = {}
        self._recordings = 0
        self._not_before = 0.0

    def look(
        self, records: Sequence[Record], optimizer: torch.optim.Optimizer, find: Callable[[], FoundTraining]
    ) -> Look | None:
        """Begin to record what the next steps leave behind, where a sample shows that memory rises.

        Args:
            records: the sample's, of devices with an allocator.
            optimizer: whose step has just ended.
            find: as in `Look`.
        """
        if not self.is_due(records, {one.device: allocator.capacity_bytes(one.device) for one in records}):
            return None
        from gpumem_tui.probe.look import KeptLook  # not before it is wanted

        look = KeptLook(UNASKED, records[0].step, optimizer, find)
        return None if look.start([]) else look

    def is_due(self, records: Iterable[Record], capacity_bytes: dict[int, int]) -> bool:
        """Take note of a sample. Return whether the steps that follow should be recorded.

        Args:
            capacity_bytes: what the allocator can reserve, by device.
        """
        rises = [self._rises(record, capacity_bytes[record.device]) for record in records if record.has_allocator]
        if not any(rises) or time.monotonic() < self._not_before:
            return False
        self._not_before = time.monotonic() + _AGAIN_S * 2**self._recordings
        self._recordings += 1
        return True

    def _rises(self, record: Record, capacity_bytes: int) -> bool:
        fixed_bytes = record.parameters_bytes + record.gradients_bytes + record.optimizer_bytes
        points = self._points.setdefault(record.device, [])
        if not points or points[-1][0] < record.step:
            points.append((record.step, record.allocated_bytes - fixed_bytes))
            del points[:-_SAMPLES]
        rates = []
        for place in range(1, len(points)):
            (step_before, bytes_before), (step, held_bytes) = points[place - 1], points[place]
            rates.append((held_bytes - bytes_before) / (step - step_before))
        if not rates or rates[-1] < _LEAST_BYTES:
            return False
        if points[-1][1] - points[-2][1] >= (capacity_bytes - record.allocated_bytes) / _SOON:
            return True
        return len(points) == _SAMPLES and min(rates) >= max(_LEAST_BYTES, max(rates) / _STEADY)
