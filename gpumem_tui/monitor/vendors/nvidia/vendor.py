"""NVIDIA as a vendor: the words for its driver and its GPUs. Loads no pynvml before a backend is opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_tui.monitor.backend import Market, Vendor
from gpumem_tui.monitor.vendors.nvidia import NO_DRIVER, NO_DRIVER_LOADED
from gpumem_tui.text import file_text

if TYPE_CHECKING:
    from gpumem_tui.monitor.backend import GpuBackend

_PCI_VENDOR, _PCI_DISPLAY = "0x10de", "0x03"


def _open(proc: Path) -> GpuBackend:
    from gpumem_tui.monitor.vendors.nvidia.backend import Nvml  # only here: it loads pynvml

    return Nvml(proc)


def _is_on_bus(root: Path) -> bool:
    if (root / "dev/nvidiactl").exists():
        return True
    return any(
        file_text(device / "vendor").strip() == _PCI_VENDOR and file_text(device / "class").startswith(_PCI_DISPLAY)
        for device in (root / "sys/bus/pci/devices").glob("*")
    )


def _withheld(environ: Mapping[str, str]) -> tuple[str, str]:
    granted = environ.get("NVIDIA_DRIVER_CAPABILITIES")
    if granted is None or {"utility", "all"} & set(granted.split(",")):
        return "", ""
    remedy = "start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    return f"driver capabilities are {granted or 'none'}: no NVML", remedy


def _market(name: str) -> Market:
    if "GeForce" in name or "TITAN" in name:
        return "consumer"
    return "workstation" if "RTX" in name or "Quadro" in name else "datacenter"


NVIDIA = Vendor(
    brand="NVIDIA",
    product_words=("NVIDIA ", "GeForce ", "Tesla ", "Quadro ", "Graphics Device "),
    driver="NVIDIA driver",
    library="NVML",
    runtime="CUDA",
    tool="nvidia-smi",
    orders_by_speed=True,
    open=_open,
    no_driver=NO_DRIVER,
    not_loaded=NO_DRIVER_LOADED,
    no_gpu="the NVIDIA driver runs, but lists no GPU: see `lspci | grep -i nvidia`; a container must be given its GPUs",
    kernel_log="`sudo dmesg | grep -i nvrm`",
    faults_log="`sudo dmesg | grep -i xid`",
    in_containers="start it with its GPUs (docker: --gpus all)",
    device_files=r"nvidia(\d+|ctl|-uvm)",
    device_paths=("/dev/nvidia", "/dev/dxg", "/dev/nvhost", "/dev/nvmap"),  # the second under WSL, the last on Tegra
    sharing_server=("nvidia-cuda-mps", "MPS server: before Volta it holds its clients' memory too"),
    is_on_bus=_is_on_bus,
    withheld=_withheld,
    market=_market,
)
