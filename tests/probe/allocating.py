"""CUDA's caching allocator for a program on the CPU: it writes down what PyTorch's does, and no more than that.

Autograd's own threads run no Python, so there are no frames of what they allocate: none has any in the histories of 30
programs on an H200 (torch 2.11). Only Python code that backward calls has, such as a checkpoint's forward.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpumem_tui.probe import allocator
from gpumem_tui.step import sites
from gpumem_tui.step.sites import SiteFinder, callers
from gpumem_tui.step.walking import host_memory_of, tensors_in

DEVICE_BYTES, LIMIT_BYTES = 140 << 30, 8 << 30
_BLOCK_BYTES = 512


class Allocating(TorchDispatchMode):
    """Follows every storage from the operator that makes it until it goes.

    Attributes:
        lines: of each allocation while it records. `SiteFinder` finds them, as on the simulated GPU: in backward the
            line of the forward.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sites = SiteFinder()
        self.lines: list[str] = []
        self._live: dict[int, int] = {}
        self._trace: list[dict[str, Any]] = []
        self._records = False
        self._counts = Counter({"allocated": 0, "freed": 0})

    @property
    def allocated_bytes(self) -> int:
        return sum(self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        site = self._sites.site(f"aten.{func._opname}")
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            for storage in host_memory_of(tensor):
                if storage.nbytes() and storage.data_ptr() not in self._live:
                    self._made(storage, site.source)
        return result

    def _made(self, storage: torch.UntypedStorage, line: str) -> None:
        address, size_bytes = storage.data_ptr(), storage.nbytes()
        self._counts["allocated"] += 1
        self._live[address] = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        if self._records:
            self.lines.append(line)
        self._write("alloc", address, size_bytes, frames=_frames())
        weakref.finalize(storage, self._gone, address, size_bytes)

    def _gone(self, address: int, size_bytes: int) -> None:
        if self._live.pop(address, None) is not None:
            self._counts["freed"] += 1
            self._write("free_requested", address, size_bytes)
            self._write("free_completed", address, size_bytes)

    def _write(self, action: str, address: int, size_bytes: int, **more: Any) -> None:
        if self._records:
            self._trace.append({"action": action, "addr": address, "size": size_bytes, **more})

    def record(self, enabled: str | None = "all", **_: Any) -> None:
        """`torch.cuda.memory._record_memory_history`."""
        self._records = enabled is not None
        self._trace = self._trace if self._records else []

    def snapshot(self) -> dict[str, Any]:
        """`torch.cuda.memory._snapshot`."""
        blocks = [{"address": address, "size": size_bytes, "state": "active_allocated"}
                  for address, size_bytes in self._live.items()]  # fmt: skip
        segments = [{"device": 0, "address": block["address"], "blocks": [block]} for block in blocks]
        return {"segments": segments, "device_traces": [list(self._trace)]}

    def statistics(self, _: object = None) -> dict[str, Any]:
        """`torch.cuda.memory_stats_as_nested_dict`, without what nobody asks for."""
        return {"allocation": {"all": dict(self._counts)}}

    def figures(self, _: int) -> dict[str, int]:
        """`allocator.figures`."""
        return {**allocator.UNKNOWN, "allocated_bytes": self.allocated_bytes, "reserved_bytes": self.allocated_bytes}

    @property
    def is_recording(self) -> bool:
        return self._records


def _frames() -> list[dict[str, Any]]:
    """Return this thread's frames as the allocator has them: within backward those of autograd's own thread alone."""
    frames = list(callers(sys._getframe(3)))
    engine = [place for place, frame in enumerate(frames) if _starts_engine(frame)]
    own = frames[: engine[-1]] if engine else frames
    return [{"filename": one.f_code.co_filename, "line": one.f_lineno, "name": one.f_code.co_name} for one in own]


def _starts_engine(frame: FrameType) -> bool:
    return frame.f_code is torch.autograd.graph._engine_run_backward.__code__


@contextmanager
def allocating(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocating]:
    """Have what runs here allocate on a CUDA device 0, as far as the probe can see."""
    found = Allocating()
    monkeypatch.setattr(sites, "_NOT_THE_PROGRAM", (*sites._NOT_THE_PROGRAM, __file__))
    monkeypatch.setattr("gpumem_tui.probe.recorders.memory_of", _memory_of)
    monkeypatch.setattr("gpumem_tui.probe.look.memory_of", _memory_of)
    monkeypatch.setattr("gpumem_tui.probe.finding.memory_of", _memory_of)
    device = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=DEVICE_BYTES, uuid=None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda _: LIMIT_BYTES / DEVICE_BYTES, raising=False
    )
    for name, answer in {
        "is_running": lambda: True,
        "devices_in_use": lambda _: [0],
        "figures": found.figures,
        "device_uuid": lambda _: "",
    }.items():
        monkeypatch.setattr(allocator, name, answer)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", found.statistics)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", found.record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", found.snapshot)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: found.is_recording, raising=False)
    with found:
        yield found


def _memory_of(tensor: torch.Tensor) -> list[tuple[int, torch.UntypedStorage]]:
    return [(0, storage) for storage in host_memory_of(tensor)]
