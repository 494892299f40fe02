"""NVIDIA's GPUs, by NVML. Nothing outside this folder imports pynvml or knows a name of its."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_tui.monitor.backend import Vendor

if TYPE_CHECKING:
    from gpumem_tui.monitor.backend import GpuBackend

NO_DRIVER = "no NVIDIA driver on this machine"
NO_DRIVER_LOADED = "the NVIDIA driver is not loaded"
"""With these a snapshot's `problem` begins where there may be no GPU at all: NVML's library comes with many container
images."""


def _open(proc: Path) -> GpuBackend:
    from gpumem_tui.monitor.nvml.backend import Nvml  # only here: it loads pynvml

    return Nvml(proc)


NVIDIA = Vendor(
    driver="NVIDIA driver",
    library="NVML",
    no_gpu="the NVIDIA driver runs, but lists no GPU: see `lspci | grep -i nvidia`; a container must be given its GPUs",
    open=_open,
)
