"""AMD as a vendor: the words for its driver and its GPUs. Loads no amdsmi before a backend is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_tui.monitor.backend import Market, Vendor
from gpumem_tui.monitor.vendors.amd import NO_DRIVER, NO_LIBRARY

if TYPE_CHECKING:
    from gpumem_tui.monitor.backend import GpuBackend


def _open(proc: Path) -> GpuBackend:
    from gpumem_tui.monitor.vendors.amd.backend import AmdSmi

    return AmdSmi(proc)


def _market(name: str) -> Market:
    if "Instinct" in name or name.startswith("MI"):
        return "datacenter"
    return "workstation" if "PRO" in name.split() or "FirePro" in name else "consumer"


AMD = Vendor(
    brand="AMD",
    product_words=("AMD ", "Instinct ", "Radeon "),
    driver="AMD driver",
    library="AMD SMI",
    runtime="ROCm",
    tool="amd-smi",
    visible="HIP_VISIBLE_DEVICES",
    torch_build="+rocm",
    open=_open,
    no_driver=NO_DRIVER,
    not_loaded=NO_LIBRARY,
    no_gpu="the AMD driver runs, but lists no GPU: see `lspci | grep -i amd`; a container must be given its GPUs",
    kernel_log="`sudo dmesg | grep -i amdgpu`",
    faults_log="`sudo dmesg | grep -i amdgpu`",
    in_containers="start it with its GPUs (docker: --device=/dev/kfd --device=/dev/dri --group-add render)",
    device_files=r"kfd",
    device_paths=("/dev/kfd", "/dev/dri/render"),
    is_on_bus=lambda root: (root / "dev/kfd").exists(),
    market=_market,
)
