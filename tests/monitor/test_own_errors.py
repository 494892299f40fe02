"""An error of the program in a thread is named as ours, with its file and line; the thread continues."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gpumem_tui.errors import own_error
from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.alerts import AlertKind, Alerts
from gpumem_tui.monitor.readings import Telemetry
from gpumem_tui.monitor.report import snapshot_json
from gpumem_tui.monitor.sampler import Sampler
from gpumem_tui.monitor.snapshot import DeviceState, Snapshot
from gpumem_tui.monitor.threads import Crew, Worker
from tests.monitor.file_vendor import FILES, FileBackend, FileGpu
from tests.monitor.test_vendors import FileLab
from tests.monitor.vendor_kit import KitGpu
from tests.monitor.watching import no_processes, until
from tests.waiting import wait_until

OURS = "an error of gpumem-tui itself: "


class Broken(FileBackend):
    """A backend with a mistake in what it does when `where` notes this."""

    where = ""

    def driver_version(self) -> Any:
        """As its driver, or a mistake."""
        return dict[str, str]()["version"] if self.where == "driver" else super().driver_version()

    def gpu(self, index: int) -> FileGpu:
        """A card that makes a mistake."""
        return _BrokenGpu(index, self)


class _BrokenGpu(FileGpu):
    def read(self, names: Collection[str]) -> Telemetry:
        """A name that no table has, as in a vendor that was written for a later version."""
        values: dict[str, Any] = {"hotspot_c": 70}
        is_broken = Broken.where == "gpu" or (Broken.where == "slow" and "temperature_c" in names)
        return Telemetry(**values) if is_broken else super().read(names)


@pytest.fixture
def sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A sampler of a card whose backend is broken where `Broken.where` states."""
    FileLab(tmp_path).show(KitGpu())
    monkeypatch.setattr(Broken, "where", "")
    made = Sampler(0.05, 0.1, look=no_processes, proc=tmp_path, vendor=structs.replace(FILES, open=Broken))
    yield made
    made.stop()


def _is_ours(text: str, *words: str) -> bool:
    return text.startswith(OURS) and all(word in text for word in words) and ".py:" in text


def test_a_wrong_name_in_a_backend_is_named_and_the_gpu_comes_back(sampler: Sampler) -> None:
    Broken.where = "gpu"
    sampler.start()
    bad = until(sampler, lambda found: any(OURS in gpu.state_reason for gpu in found.gpus))
    (gpu,) = bad.gpus
    assert gpu.state is DeviceState.STALE
    assert _is_ours(gpu.state_reason, "TypeError", "hotspot_c", "test_own_errors.py:", "monitor/gpu_reader.py:")
    assert gpu.state_reason in json.dumps(snapshot_json(bad, Alerts().update(bad)))
    assert any(gpu.state_reason in alert.message for alert in Alerts().update(bad)), "on the screen's line of alerts"
    Broken.where = ""
    until(sampler, lambda found: all(gpu.state is DeviceState.OK for gpu in found.gpus))


def test_a_mistake_in_what_is_read_slowly_lasts_until_that_is_read(sampler: Sampler) -> None:
    """It is not over whenever the quick readings go well."""
    sampler.start()
    until(sampler, lambda found: bool(found.gpus) and found.gpus[0].state is DeviceState.OK)
    Broken.where = "slow"
    seen = until(sampler, lambda found: found.gpus[0].state is DeviceState.STALE)
    states: list[DeviceState] = []
    while len(states) < 8:
        seen = until(sampler, lambda found, before=seen: found is not before)  # type: ignore[misc]
        states.append(seen.gpus[0].state)
    assert set(states) == {DeviceState.STALE}
    Broken.where = ""
    until(sampler, lambda found: all(gpu.state is DeviceState.OK for gpu in found.gpus))


def test_a_mistake_while_the_driver_starts_is_no_hung_driver(sampler: Sampler) -> None:
    Broken.where = "driver"
    sampler.start()
    bad = until(sampler, lambda found: OURS in found.problem)
    assert _is_ours(bad.problem, "KeyError", "test_own_errors.py:", "monitor/driver.py:")
    assert "has not answered" not in bad.problem
    assert isinstance(bad.driver_version, Unknown)
    assert [alert.kind for alert in Alerts().update(bad)] == [AlertKind.NO_DRIVER]
    Broken.where = ""
    until(sampler, lambda found: not found.problem and bool(found.gpus))


def test_a_mistake_where_snapshots_are_made_is_named_in_the_next_one(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.start()
    until(sampler, lambda found: bool(found.gpus))
    with monkeypatch.context() as broken:
        broken.setattr("gpumem_tui.monitor.vendor_gpus.have_moved", lambda _readers: 1 // 0)
        bad = until(sampler, lambda found: OURS in found.problem)
        assert _is_ours(bad.problem, "ZeroDivisionError", "monitor/vendor_gpus.py:")
        assert bad.gpus, "what was known stays"
    until(sampler, lambda found: not found.problem)


def test_a_mistake_where_processes_are_looked_up_leaves_the_gpus_alone(tmp_path: Path) -> None:
    FileLab(tmp_path).show(KitGpu())
    fails = True

    def look(pids: Any) -> Any:
        if fails:
            raise RuntimeError("no such container")
        return no_processes(pids)

    sampler = Sampler(0.05, 0.1, look=look, proc=tmp_path, vendor=FILES)
    sampler.start()
    try:

        def is_named(found: Snapshot) -> bool:
            said = found.host.cpu_percent
            return bool(found.gpus) and isinstance(said, Unknown) and OURS in said.reason

        assert not until(sampler, is_named).problem
        fails = False
        until(sampler, lambda found: isinstance(found.host.memory_used_bytes, int))
    finally:
        sampler.stop()


def test_a_worker_does_its_next_job_after_one_that_failed() -> None:
    jobs: list[Callable[[], object]] = [lambda: 1 // 0, lambda: None]
    crew = Crew("test")
    worker = Worker(lambda: print(jobs.pop(0)()), lambda: None, crew)
    worker.ask()
    wait_until(lambda: worker.is_idle and worker.error)
    assert _is_ours(worker.error, "ZeroDivisionError")
    worker.ask()
    wait_until(lambda: worker.is_idle and not jobs)
    assert worker.error == ""
    crew.end()


def test_the_place_is_ours_and_where_it_began() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        said = own_error(error)
    assert said.startswith(f"{OURS}JSONDecodeError: ")
    assert "decoder.py:" in said
    code = "from gpumem_tui.errors import own_error\ntry: 1 // 0\nexcept ArithmeticError as e: print(own_error(e))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ZeroDivisionError" in done.stdout
