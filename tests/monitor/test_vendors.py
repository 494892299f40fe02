"""Vendors: each passes the kit, plug-ins are found, and nothing outside of a vendor's folder names one."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import gpumem_tui
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor import vendors
from gpumem_tui.monitor.devices import list_gpus
from gpumem_tui.monitor.sampler import Sampler
from gpumem_tui.monitor.vendors.amd.vendor import AMD
from gpumem_tui.monitor.vendors.nvidia.vendor import NVIDIA
from tests.amdsmi_stub.machine import DRIVER_NOT_LOADED, AmdGpu, AmdMachine, machine_of
from tests.monitor.file_vendor import FILES
from tests.monitor.file_vendor import NO_DRIVER as NO_FILES_DRIVER
from tests.monitor.vendor_kit import KitGpu, VendorKit
from tests.monitor.watching import no_processes, until
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import LIBRARY_NOT_FOUND, Calls, FakeGpu, FakeProcess, Scenario

PACKAGE = Path(gpumem_tui.__file__).parent


class NvmlLab:
    """NVIDIA's machine, by the compiled stand-in for its library."""

    vendor = NVIDIA

    def __init__(self, machine: FakeMachine, proc: Path) -> None:
        self.proc = proc
        self._machine = machine

    def show(self, *gpus: KitGpu) -> None:
        """As the scenario of the fake library."""
        self._machine.show(
            Scenario(
                gpus=[
                    FakeGpu(
                        total_bytes=each.total_bytes,
                        used_bytes=each.used_bytes,
                        temperature_c=each.temperature_c,
                        processes=[FakeProcess(pid, held) for pid, held in (each.processes or {}).items()],
                        lost=each.lost,
                    )
                    for each in gpus
                ]
            )
        )

    def take_driver(self) -> None:
        """As NVML states it where its library is not there."""
        self._machine.show(Scenario(init=LIBRARY_NOT_FOUND))


class AmdLab:
    """AMD's machine, by the compiled stand-in for its library."""

    vendor = AMD

    def __init__(self, machine: AmdMachine) -> None:
        self.proc = machine.proc
        self._machine = machine

    def show(self, *gpus: KitGpu) -> None:
        """As the scenario of the fake library."""
        self._machine.show(
            machine_of(
                [
                    AmdGpu(
                        total_bytes=each.total_bytes,
                        used_bytes=each.used_bytes,
                        temperature_c=each.temperature_c,
                        processes=[FakeProcess(pid, held) for pid, held in (each.processes or {}).items()],
                        lost=each.lost,
                    )
                    for each in gpus
                ]
            )
        )

    def take_driver(self) -> None:
        """As the kernel and the library have it without amdgpu."""
        self._machine.load(driver=False)
        self._machine.show(machine_of([], calls=Calls(errors={"amdsmi_init": DRIVER_NOT_LOADED})))


class FileLab:
    """The third vendor's machine: files."""

    vendor = FILES

    def __init__(self, folder: Path) -> None:
        self.proc = folder
        self._root = folder / "amd"
        self._write("version", "6.12")

    def show(self, *gpus: KitGpu) -> None:
        """As files."""
        shutil.rmtree(self._root / "kfd", ignore_errors=True)
        for index, each in enumerate(gpus):
            device = f"card{index}/device"
            self._write(f"{device}/unique_id", str(1000 + index))
            self._write(f"{device}/mem_info_vram_total", str(each.total_bytes))
            self._write(f"{device}/mem_info_vram_used", str(each.used_bytes))
            self._write(f"{device}/hwmon/temp1_input", str(1000 * each.temperature_c))
            self._write(f"{device}/gpu_busy_percent", "97")
            for pid, held in (each.processes or {}).items():
                self._write(f"kfd/proc/{pid}/vram_{index}", str(held))
            if each.lost:
                (self._root / device / "mem_info_vram_used").unlink()

    def take_driver(self) -> None:
        """Without its module."""
        (self._root / "version").unlink()

    def _write(self, name: str, text: str) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}")
        part.write_text(text)
        part.replace(path)


class TestNvidia(VendorKit):
    @pytest.fixture
    def lab(self, fake_nvml: FakeMachine, tmp_path: Path) -> NvmlLab:
        return NvmlLab(fake_nvml, tmp_path)


class TestAmd(VendorKit):
    @pytest.fixture
    def lab(self, fake_amd: AmdMachine) -> AmdLab:
        return AmdLab(fake_amd)


class TestFiles(VendorKit):
    @pytest.fixture
    def lab(self, tmp_path: Path) -> FileLab:
        return FileLab(tmp_path)


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Installs a package with these entry points of the group."""
    monkeypatch.setattr(vendors, "_chosen", NVIDIA)
    vendors.plugged_in.cache_clear()
    monkeypatch.setattr(vendors, "plugged_in", vendors.plugged_in.__wrapped__)

    def install(**entries: str) -> None:
        folder = tmp_path / "installed/acme_vendors-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme_vendors\nVersion: 1.0\n")
        lines = [f"[{vendors.GROUP}]", *(f"{name} = {value}" for name, value in entries.items())]
        (folder / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(folder.parent))

    return install


def test_a_plug_in_s_gpus_are_watched_where_the_built_in_vendor_has_no_driver(
    fake_nvml: FakeMachine, tmp_path: Path, plugged: Callable[..., None]
) -> None:
    fake_nvml.show(Scenario(init=LIBRARY_NOT_FOUND))
    plugged(files="tests.monitor.file_vendor:FILES")
    FileLab(tmp_path).show(KitGpu())
    sampler = Sampler(0.05, 0.1, look=no_processes, proc=tmp_path)
    sampler.start()
    try:
        found = until(sampler, lambda snapshot: bool(snapshot.gpus))
    finally:
        sampler.stop()
    assert [gpu.name for gpu in found.gpus] == ["Acme X1"]
    assert (found.runtime, found.problem) == ("XRT", "")
    assert vendors.vendor() is FILES, "whose words screens use"


def test_without_any_driver_it_is_the_built_in_vendor_s_that_is_missed(
    fake_nvml: FakeMachine, tmp_path: Path, plugged: Callable[..., None]
) -> None:
    fake_nvml.show(Scenario(init=LIBRARY_NOT_FOUND))
    plugged(files="tests.monitor.file_vendor:FILES", broken="tests.no_such_module:ROCM", text="os:name")
    sampler = Sampler(0.05, 0.1, look=no_processes, proc=tmp_path)
    sampler.start()
    try:
        found = until(sampler, lambda snapshot: bool(snapshot.problem) and "started" not in snapshot.problem)
    finally:
        sampler.stop()
    assert found.problem.startswith(NVIDIA.no_driver)
    assert NO_FILES_DRIVER not in found.problem
    broken = "the vendor “broken” cannot be loaded: an error of gpumem-tui itself: ModuleNotFoundError"
    assert broken in found.problem
    assert "the vendor “text” is no Vendor: os:name" in found.problem
    assert list_gpus() == Unknown(NVIDIA.no_driver)


def test_an_archive_is_looked_into(plugged: Callable[..., None], tmp_path: Path) -> None:
    plugged(files="tests.monitor.file_vendor:FILES")
    archive = shutil.make_archive(str(tmp_path / "acme"), "zip", tmp_path / "installed")
    shutil.rmtree(tmp_path / "installed")
    assert vendors.plugged_in() == ((), ())
    sys.path.insert(0, archive)
    try:
        assert vendors.plugged_in() == ((FILES,), ())
    finally:
        sys.path.remove(archive)


def test_without_a_plug_in_nothing_is_imported_to_find_that_out() -> None:
    script = "import sys; from gpumem_tui.monitor import vendors; before = {*sys.modules}"
    told = f"{script}; print(vendors.plugged_in(), {{*sys.modules}} - before)"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True).stdout == "((), ()) set()\n"


def test_the_built_in_vendors_are_entry_points_as_plug_ins_are() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    listed = text.partition('[project.entry-points."gpumem_tui.vendors"]')[2].partition("\n\n")[0]
    entries = re.findall(r'^\w+ = "([\w.]+):(\w+)"', listed, re.MULTILINE)
    assert {getattr(__import__(module, fromlist=[name]), name) for module, name in entries} == set(vendors.BUILT_IN)


NAMES = re.compile(r"nvidia|nvml|geforce|quadro|amdsmi|amdgpu|\bamd\b|radeon|instinct", re.IGNORECASE)
ROOMS = ("monitor", "recording", "remote", "doctor", "tui/monitor", "tui/hosts", "tui/replay")


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_outside_of_a_vendor_s_folder_names_a_vendor(room: str) -> None:
    found: Mapping[str, list[str]] = {
        str(file.relative_to(PACKAGE)): named
        for file in (PACKAGE / room).rglob("*.py")
        if "vendors" not in file.parts and (named := [text for text in _texts(file) if NAMES.search(text)])
    }
    assert not found


def _texts(file: Path) -> list[str]:
    """The names and texts of a module, but for what is written to explain it."""
    tree = ast.parse(file.read_text())
    explained = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in explained]
    names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return [text for text in (*texts, *names) if isinstance(text, str)]
