"""A third vendor, whose driver reports everything in files as amdgpu does in sysfs: for tests of the seam.

``card0/device/mem_info_vram_total``, ``…_used``, ``gpu_busy_percent``, ``hwmon/temp1_input`` (thousandths of a degree),
``unique_id``; ``kfd/proc/PID/vram_0`` is what a process holds of a card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.backend import Gone, Identity, ListedProcess, NoSuchGpu, StartFault, Vendor
from gpumem_tui.monitor.readings import Reading, Telemetry
from gpumem_tui.monitor.snapshot import Memory

NO_DRIVER = "no Acme driver on this machine"
_NOT_DIVIDED = Unknown("not supported")


class FileBackend:
    """The `GpuBackend` of the files below `proc`/amd."""

    def __init__(self, proc: Path) -> None:
        self._root = proc / "amd"
        self.calls: Counter[str] = Counter()

    def in_progress(self) -> tuple[str, float] | None:
        """Nothing hangs here."""
        return None

    def start(self) -> None:
        """There has to be a driver."""
        if not (self._root / "version").exists():
            raise StartFault(NO_DRIVER, "load it with `sudo modprobe amdgpu`", no_driver=True)

    def stop(self) -> None:
        """Nothing to let go of."""

    def driver_version(self) -> Reading[str]:
        """As modinfo has it."""
        return self._text("version")

    def runtime_version(self) -> Reading[str]:
        """Not told by this driver."""
        return Unknown("not told by the driver")

    def count(self) -> int:
        """The cards."""
        return len(self._cards())

    def gpu(self, index: int) -> FileGpu:
        """By its number."""
        if index >= len(self._cards()):
            raise NoSuchGpu("no such card")
        return FileGpu(index, self)

    def begin_pass(self) -> None:
        """Nothing is collected."""

    def check_answers(self) -> None:
        """Files are there or they are not."""

    def bus(self) -> frozenset[str]:
        """The cards."""
        return frozenset(self._cards())

    def number(self, name: str) -> Reading[int]:
        """A file's number."""
        text = self._text(name)
        return text if isinstance(text, Unknown) else int(text)

    def held(self, index: int) -> tuple[ListedProcess, ...]:
        """By the processes' files."""
        files = sorted((self._root / "kfd/proc").glob(f"*/vram_{index}"))
        return tuple(ListedProcess(int(file.parent.name), int(file.read_text())) for file in files)

    def _cards(self) -> list[str]:
        return sorted(path.name for path in self._root.glob("card*"))

    def _text(self, name: str) -> Reading[str]:
        self.calls["read"] += 1
        try:
            return (self._root / name).read_text().strip()
        except FileNotFoundError:
            return Unknown("not supported")


@dataclass(frozen=True)
class FileGpu:
    """The `GpuHandle` of a card."""

    index: int
    backend: FileBackend

    @property
    def identity(self) -> Identity:
        """Its unique_id is there even if the card has gone."""
        uuid = self._number("unique_id")
        return Identity(uuid=f"X-{uuid}", name="Acme X1")

    def memory(self) -> Reading[Memory]:
        """The driver keeps nothing apart."""
        total, used = self._number("mem_info_vram_total"), self._number("mem_info_vram_used")
        if isinstance(total, Unknown) or isinstance(used, Unknown):
            raise Gone("the card has fallen off the bus")
        return Memory(total, 0, used, total - used)

    def compute_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """KFD's processes."""
        return self.backend.held(self.index)

    def graphics_processes(self) -> Reading[tuple[ListedProcess, ...]]:
        """None."""
        return ()

    def process_percents(self) -> Reading[Mapping[int, int]]:
        """Not told."""
        return Unknown("not told by the driver")

    def read(self, names: Collection[str]) -> Telemetry:
        """Temperature and load."""
        if "temperature_c" in names:
            found = self._number("hwmon/temp1_input")
            return Telemetry(temperature_c=found if isinstance(found, Unknown) else found // 1000)
        if "utilization_percent" in names:
            return Telemetry(utilization_percent=self._number("gpu_busy_percent"))
        return Telemetry()

    def divided(self) -> Reading[bool]:
        """Never."""
        return _NOT_DIVIDED

    def instances(self) -> tuple[()]:
        """None."""
        return ()

    def _number(self, name: str) -> Reading[int]:
        return self.backend.number(f"card{self.index}/device/{name}")


FILES = Vendor(
    brand="Acme",
    product_words=("Acme ",),
    driver="Acme driver",
    library="sysfs",
    runtime="XRT",
    tool="x-smi",
    open=FileBackend,
    no_driver=NO_DRIVER,
    not_loaded="the Acme driver is not loaded",
    no_gpu="the Acme driver runs, but lists no GPU: see `lspci`",
    device_files=r"acme\d",
    device_paths=("/dev/acme",),
)
