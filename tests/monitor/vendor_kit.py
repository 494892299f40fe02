"""The tests that every vendor's backend must pass: subclass `VendorKit` with a lab that plays the vendor's machine.

A plug-in's own tests can do this too: what `GpuBackend` and `Vendor` promise is asked here, not how a vendor keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol

import jsonschema
import pytest
from msgspec import structs

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor import vendors
from gpumem_tui.monitor.alerts import Alerts
from gpumem_tui.monitor.backend import Fault, GpuBackend, GpuHandle, NoSuchGpu, StartFault, Vendor
from gpumem_tui.monitor.devices import list_gpus
from gpumem_tui.monitor.readings import NOT_READ_YET, READINGS
from gpumem_tui.monitor.report import snapshot_json
from gpumem_tui.monitor.sampler import Sampler
from gpumem_tui.monitor.snapshot import DeviceState, Memory, Snapshot
from tests.monitor.schema import MONITOR
from tests.monitor.watching import is_complete, no_processes, until


@dataclass(frozen=True)
class KitGpu:
    """A GPU of the machine that a lab plays: what its driver is to say."""

    total_bytes: int = 16 * GIB
    used_bytes: int = 4 * GIB
    temperature_c: int = 55
    processes: Mapping[int, int] | None = None
    lost: bool = False


class VendorLab(Protocol):
    """A machine of one vendor, played.

    Attributes:
        proc: the folder of the kernel's own files, for `Vendor.open`.
    """

    vendor: Vendor
    proc: Path

    def show(self, *gpus: KitGpu) -> None:
        """Have the driver say this from its next call on."""

    def take_driver(self) -> None:
        """Have no driver of this vendor on the machine."""


class VendorKit:
    """Tests that every backend must pass. Subclasses provide the fixture `lab`."""

    @pytest.fixture(autouse=True)
    def chosen(self, lab: VendorLab, monkeypatch: pytest.MonkeyPatch) -> None:
        """The lab's vendor is the one that is asked first."""
        monkeypatch.setattr(vendors, "_chosen", lab.vendor)

    @pytest.fixture
    def backend(self, lab: VendorLab) -> Iterator[GpuBackend]:
        """A backend of a machine with two GPUs, started."""
        lab.show(KitGpu(processes={4711: GIB, 4712: 2 * GIB}), KitGpu(used_bytes=0))
        opened = lab.vendor.open(lab.proc)
        opened.start()
        yield opened
        opened.stop()

    def test_its_words_say_whose_it_is(self, lab: VendorLab) -> None:
        vendor = lab.vendor
        said = (vendor.driver, vendor.library, vendor.runtime, vendor.tool, vendor.no_gpu, vendor.kernel_log)
        assert all(text and text.isprintable() for text in said)
        assert vendor.brand in vendor.driver
        assert vendor.driver in vendor.no_driver + vendor.no_gpu
        assert vendor.device_paths
        assert vendor.market("anything") in ("consumer", "workstation", "datacenter")

    def test_versions_are_text_or_unknown(self, backend: GpuBackend) -> None:
        for version in (backend.driver_version(), backend.runtime_version()):
            assert isinstance(version, (str, Unknown))
            assert version

    def test_each_gpu_has_a_name_of_its_own_that_stays(self, backend: GpuBackend) -> None:
        assert backend.count() == 2
        uuids = [backend.gpu(index).identity.uuid for index in range(2)]
        assert len(set(uuids)) == 2
        assert uuids == [backend.gpu(index).identity.uuid for index in range(2)]
        assert all(backend.gpu(index).identity.name for index in range(2))

    def test_an_index_that_the_driver_has_not_is_named_so(self, backend: GpuBackend) -> None:
        with pytest.raises(NoSuchGpu):
            backend.gpu(2)

    def test_memory_adds_up(self, backend: GpuBackend) -> None:
        memory = backend.gpu(0).memory()
        assert isinstance(memory, Memory)
        assert memory.used_bytes == 4 * GIB
        assert 0 < memory.used_bytes + memory.free_bytes <= memory.total_bytes == 16 * GIB

    def test_processes_are_those_that_hold_memory(self, backend: GpuBackend) -> None:
        listed = backend.gpu(0).compute_processes()
        assert not isinstance(listed, Unknown)
        assert {process.pid: process.used_bytes for process in listed} == {4711: GIB, 4712: 2 * GIB}
        assert backend.gpu(1).compute_processes() == ()

    def test_a_reading_that_is_asked_for_is_the_only_one(self, backend: GpuBackend) -> None:
        found = structs.asdict(backend.gpu(0).read(["temperature_c"]))
        assert {name for name, value in found.items() if value != NOT_READ_YET} == {"temperature_c"}
        assert found["temperature_c"] == 55

    def test_readings_are_values_or_have_a_reason(self, backend: GpuBackend) -> None:
        for value in structs.asdict(backend.gpu(0).read(READINGS)).values():
            assert isinstance(value, (int, float, tuple, Unknown))
        gpu = backend.gpu(0)
        asked: list[Callable[[], object]] = [gpu.graphics_processes, gpu.process_percents, gpu.divided]
        assert all(ask() is not None for ask in asked)
        assert isinstance(gpu.instances(), tuple)

    def test_calls_are_counted_and_return(self, backend: GpuBackend) -> None:
        before = sum(backend.calls.values())
        backend.gpu(0).memory()
        assert sum(backend.calls.values()) > before
        assert backend.in_progress() is None

    def test_a_gpu_that_is_lost_does_not_answer(self, lab: VendorLab, backend: GpuBackend) -> None:
        lab.show(KitGpu(lost=True), KitGpu())
        with pytest.raises(Fault) as raised:
            backend.gpu(0).memory()
        assert raised.value.reason
        assert isinstance(backend.gpu(1).memory(), Memory)

    def test_stopping_twice_or_before_the_start_does_nothing(self, lab: VendorLab) -> None:
        lab.show(KitGpu())
        opened = lab.vendor.open(lab.proc)
        opened.stop()
        opened.start()
        assert opened.count() == 1
        opened.stop()
        opened.stop()
        assert opened.in_progress() is None

    def test_a_machine_without_its_driver_is_told_apart(self, lab: VendorLab) -> None:
        lab.take_driver()
        with pytest.raises(StartFault) as raised:
            lab.vendor.open(lab.proc).start()
        assert raised.value.no_driver
        assert str(raised.value).startswith(lab.vendor.no_driver)
        assert raised.value.remedy

    def test_the_monitor_shows_it(self, lab: VendorLab) -> None:
        lab.show(KitGpu(processes={4711: GIB}), KitGpu())
        found = self._watched(lab, is_complete)
        assert (found.problem, found.runtime) == ("", lab.vendor.runtime)
        for gpu in found.gpus:
            assert gpu.state is DeviceState.OK
            assert gpu.telemetry.temperature_c == 55
            assert isinstance(gpu.memory, Memory)
            assert not isinstance(gpu.ledger, Unknown)
            assert sum(size for row in gpu.ledger.rows if isinstance(size := row.size_bytes, int)) == 16 * GIB
        body = snapshot_json(found, Alerts().update(found))
        jsonschema.validate(json.loads(json.dumps(body)), MONITOR)

    def test_the_monitor_keeps_a_lost_gpu_by_its_name(self, lab: VendorLab) -> None:
        lab.show(KitGpu(), KitGpu())
        sampler = Sampler(0.05, 0.1, look=no_processes, proc=lab.proc, vendor=lab.vendor)
        sampler.start()
        try:
            uuid = until(sampler, lambda found: len(found.gpus) == 2).gpus[0].uuid
            lab.show(KitGpu(lost=True), KitGpu())
            lost = until(sampler, lambda found: any(each.state is DeviceState.LOST for each in found.gpus))
            assert [each.uuid for each in lost.gpus if each.state is DeviceState.LOST] == [uuid]
        finally:
            sampler.stop()

    def test_a_search_lists_it_or_says_why_not(self, lab: VendorLab, monkeypatch: pytest.MonkeyPatch) -> None:
        lab.show(KitGpu(used_bytes=0))
        opened = lab.vendor.open
        monkeypatch.setattr(vendors, "_chosen", _at(lab.vendor, lambda _proc: opened(lab.proc)))
        found = list_gpus()
        if isinstance(found, Unknown):
            assert found.reason.startswith("no GPU can be read: GPU 0: compute capability: ")
        else:
            assert [gpu.total_bytes for gpu in found] == [16 * GIB]

    @staticmethod
    def _watched(lab: VendorLab, condition: Callable[[Snapshot], bool]) -> Snapshot:
        sampler = Sampler(0.05, 0.1, look=no_processes, proc=lab.proc, vendor=lab.vendor)
        began_s = monotonic()
        sampler.start()
        try:
            return until(sampler, condition)
        finally:
            sampler.stop()
            assert monotonic() > began_s


def _at(vendor: Vendor, opened: Callable[[Path], GpuBackend]) -> Vendor:

    from msgspec import structs

    return structs.replace(vendor, open=opened)


__all__ = ["GpuHandle", "KitGpu", "VendorKit", "VendorLab"]
