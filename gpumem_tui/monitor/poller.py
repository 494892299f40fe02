"""Reading one GPU again and again: what is read at which pace, and what happens when it is lost.

Imports pynvml: import this module where it is needed, not at a program's start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import pynvml

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor import fields, mig
from gpumem_tui.monitor.nvml import Caller, Fault, Gone
from gpumem_tui.monitor.snapshot import NOT_READ_YET, Memory, Reading


@dataclass
class Raw:
    """What was read of one GPU, each value the newest there is. The poller's thread writes, others only read.

    Attributes:
        identity: None while the GPU never answered.
        lost: why nothing can be read; empty while it can.
        read_at: when memory and processes were last read (`time.monotonic`); None before.
        sm_percents: by pid, with the sample's time; a process that is not in it did nothing.
        slices: MIG instances, empty without.
    """

    identity: fields.Identity | None = None
    lost: str = ""
    read_at: float | None = None
    memory: Reading[Memory] = NOT_READ_YET
    compute_processes: Reading[tuple[fields.Running, ...]] = NOT_READ_YET
    graphics_processes: Reading[tuple[fields.Running, ...]] = NOT_READ_YET
    sm_percents: Reading[tuple[Mapping[int, int], int]] = NOT_READ_YET
    utilization: Reading[tuple[int, int]] = NOT_READ_YET
    power_w: Reading[float] = NOT_READ_YET
    power_limit_w: Reading[float] = NOT_READ_YET
    temperature_c: Reading[int] = NOT_READ_YET
    temperature_limit_c: Reading[int] = NOT_READ_YET
    fan_percent: Reading[int] = NOT_READ_YET
    sm_clock_mhz: Reading[int] = NOT_READ_YET
    memory_clock_mhz: Reading[int] = NOT_READ_YET
    pcie_generation: Reading[int] = NOT_READ_YET
    pcie_width: Reading[int] = NOT_READ_YET
    pcie_rx_bytes_per_s: Reading[int] = NOT_READ_YET
    pcie_tx_bytes_per_s: Reading[int] = NOT_READ_YET
    ecc_corrected: Reading[int] = NOT_READ_YET
    ecc_uncorrected: Reading[int] = NOT_READ_YET
    performance_state: Reading[int] = NOT_READ_YET
    throttle: Reading[tuple[str, ...]] = NOT_READ_YET
    mig_mode: Reading[bool] = NOT_READ_YET
    slices: tuple[mig.SliceReading, ...] = ()


Read = Callable[[Caller, Any], Any]

_EACH_TIME: dict[str, Read] = {
    "memory": fields.memory,
    "compute_processes": fields.compute_processes,
    "utilization": fields.utilization,
    "power_w": fields.power_w,
}
_SLOWLY: dict[str, Read] = {
    "temperature_c": fields.temperature_c,
    "throttle": fields.throttle,
    "sm_clock_mhz": fields.sm_clock_mhz,
    "graphics_processes": fields.graphics_processes,
}
_SLOWER: dict[str, Read] = {
    "ecc_uncorrected": fields.ecc_uncorrected,
    "ecc_corrected": fields.ecc_corrected,
    "memory_clock_mhz": fields.memory_clock_mhz,
    "performance_state": fields.performance_state,
    "fan_percent": fields.fan_percent,
    "pcie_rx_bytes_per_s": fields.pcie_rx_bytes_per_s,
    "pcie_tx_bytes_per_s": fields.pcie_tx_bytes_per_s,
}
_RARELY: dict[str, Read] = {
    "power_limit_w": fields.power_limit_w,
    "temperature_limit_c": fields.temperature_limit_c,
    "pcie_generation": fields.pcie_generation,
    "pcie_width": fields.pcie_width,
}
_SLOWER_EVERY = 3
_RARELY_EVERY = 12
"""In slow intervals."""
_NOT_IN_MIG = ("compute_processes", "utilization", "graphics_processes")
"""NVML has these for the instances, or not at all; asking the whole GPU needs privileges or gives a false 0."""


class GpuPoller:
    """Reads whichever GPU the driver has at one index, in a thread that its owner provides.

    Args:
        index: the driver's.
        slow_every: in how many passes the slow values are read once.
        tell: called when the values that are read each time are there.
    """

    def __init__(self, index: int, slow_every: int, tell: Callable[[], None]) -> None:
        self.index = index
        self.call = Caller()
        self.raw = Raw()
        self.absent = False
        """The driver has no GPU at this index any more."""
        self._slow_every = slow_every
        self._tell = tell
        self._handle: Any = None
        self._stale_handle = False
        self._pass = 0
        self._in_mig = False
        self._slices: tuple[mig.Slice, ...] = ()

    def look_again(self) -> None:
        """Another GPU may have this index now: find out at the next pass. For other threads."""
        self._stale_handle = True

    def read(self) -> None:
        """One pass. Faults become unknown values, or a lost GPU."""
        self.call.codes.clear()
        try:
            if self._handle is None or self._stale_handle:
                self._take_handle()
            self._read_fast()
            self._tell()
            self._read_slow()
            self._pass += 1
        except Fault as fault:
            self._lose(fault)

    def _take_handle(self) -> None:
        self._stale_handle = False
        handle = self.call("nvmlDeviceGetHandleByIndex", self.index)
        identity = fields.identity(self.call, handle)
        if self.raw.identity is None or self.raw.identity.uuid != identity.uuid:
            self.raw = Raw(lost=self.raw.lost)
        self.raw.identity = identity
        self.call.missing.clear()
        self._handle, self._pass = handle, 0
        self._read_mig()

    def _lose(self, fault: Fault) -> None:
        self.absent = fault.code == pynvml.NVML_ERROR_INVALID_ARGUMENT
        self.raw.lost = fault.reason
        self._handle = None

    def _read_fast(self) -> None:
        self._read_fields(_EACH_TIME)
        self.raw.slices = tuple(mig.read(self.call, instance) for instance in self._slices)
        if pynvml.NVML_SUCCESS not in self.call.codes and pynvml.NVML_ERROR_UNKNOWN in self.call.codes:
            raise Gone(pynvml.NVML_ERROR_UNKNOWN, "the driver answers nothing but errors")
        self.raw.lost = ""
        self.raw.read_at = monotonic()

    def _read_slow(self) -> None:
        slow_pass, rest = divmod(self._pass, self._slow_every)
        if rest and not self._slices_vanished():
            return
        self._read_mig()
        self._read_fields(_SLOWLY)
        if slow_pass % _RARELY_EVERY == 0:
            self._read_fields(_RARELY)
        if slow_pass % _SLOWER_EVERY == 0:
            self._read_fields(_SLOWER)
        if not self._in_mig:
            since_us = self.raw.sm_percents[1] if isinstance(self.raw.sm_percents, tuple) else 0
            self.raw.sm_percents = fields.sm_percents(self.call, self._handle, since_us)

    def _read_fields(self, names: Mapping[str, Read]) -> None:
        for name, read in names.items():
            if not (self._in_mig and name in _NOT_IN_MIG):
                setattr(self.raw, name, read(self.call, self._handle))

    def _read_mig(self) -> None:
        mode = fields.mig_mode(self.call, self._handle)
        found = mig.layout(self.call, self._handle) if mode is True else ()
        layout = () if isinstance(found, Unknown) else found
        if layout != self._slices:
            self._slices = layout
            self.raw.slices = tuple(mig.read(self.call, instance) for instance in layout)
        was_in_mig, self._in_mig = self._in_mig, mode is True
        if was_in_mig and not self._in_mig:
            self._read_fields(_EACH_TIME)  # what was not read meanwhile, before it is said to be of now
        self.raw.mig_mode = mode

    def _slices_vanished(self) -> bool:
        """An instance that was there does not answer: MIG was switched off, or divided anew."""
        return any(isinstance(read.memory, Unknown) for read in self.raw.slices)
