"""What probes inside training processes add to what NVML tells: per process and GPU, not per device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ProbeFigures:
    """The caching allocator of one process on one GPU.

    Attributes:
        retries: times it gave its whole cache back to satisfy a request, since the process began.
        ooms: requests that failed, since the process began.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int
    ooms: int


Probes = Mapping[tuple[str, int], ProbeFigures]
"""By GPU uuid and pid: a process may use several GPUs."""
