"""Which GPU of the machine is a process's cuda:0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.devices import Candidate
from gpumem_tui.monitor.probes import ProbeFigures
from gpumem_tui.watch.collector import gpu_uuid, probe_figures
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import ProbedProcess
from tests.watch.rings import GIB, ON_CPU, RECORD, RingFile, this_process

GPUS = [Candidate(index, f"GPU-{index}{index}", "NVIDIA A100") for index in range(4)]
UNNAMED = replace(RECORD, device_uuid="")


def process(folder: Path, *records: object, visible: str | None = None) -> ProbedProcess:
    ring = RingFile(folder, this_process(visible_devices=visible))
    ring.sample(*records)  # type: ignore[arg-type]
    [found] = Watcher([folder]).processes()
    return found


def test_by_the_uuid_that_the_process_reports(tmp_path: Path) -> None:
    found = process(tmp_path / "probes", RECORD, visible="3")
    assert gpu_uuid(found, found.samples[0], GPUS) == RECORD.device_uuid


def test_by_the_uuid_of_a_mig_instance(tmp_path: Path) -> None:
    divided = [Candidate(0, "GPU-00", "NVIDIA A100", instances=("MIG-aa", f"MIG-{RECORD.device_uuid[4:]}"))]
    found = process(tmp_path / "probes", RECORD)
    assert gpu_uuid(found, found.samples[0], divided) == divided[0].instances[1]


def test_by_its_number_and_its_environment(tmp_path: Path) -> None:
    found = process(tmp_path / "probes", replace(UNNAMED, device=1), visible="3,2")
    assert gpu_uuid(found, found.samples[0], GPUS) == "GPU-22"


@pytest.mark.parametrize(("environ", "uuid"), [({}, "amd-1"), ({"HIP_VISIBLE_DEVICES": "0"}, None)])
def test_a_build_for_rocm_means_amd_s_gpus_by_hip_s_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], uuid: str | None
) -> None:
    """Its own UUIDs are not AMD SMI's, and NVIDIA's GPUs next to them are not meant."""
    monkeypatch.setattr("gpumem_tui.watch.hosts.environ", lambda _folder: environ)
    amd = [Candidate(number, f"amd-{number}", "AMD Instinct MI300X", vendor="AMD") for number in (1, 0)]
    nvidia = [structs.replace(gpu, vendor="NVIDIA") for gpu in GPUS]
    ring = RingFile(tmp_path / "probes", replace(this_process(), torch="2.9.1+rocm6.4"))
    ring.sample(replace(RECORD, device=1))
    [found] = Watcher([tmp_path / "probes"]).processes()
    reason = "cuda:1 is none of the 1 GPUs that its environment lets it see"
    assert gpu_uuid(found, found.samples[0], [*nvidia, *amd]) == (uuid or Unknown(reason))


def test_a_number_beyond_what_it_may_see(tmp_path: Path) -> None:
    found = process(tmp_path / "probes", replace(UNNAMED, device=2), visible="3,2")
    reason = "cuda:2 is none of the 2 GPUs that its environment lets it see"
    assert gpu_uuid(found, found.samples[0], GPUS) == Unknown(reason)


def test_host_memory_is_no_gpu(tmp_path: Path) -> None:
    found = process(tmp_path / "probes", ON_CPU)
    assert gpu_uuid(found, found.samples[0], GPUS) == Unknown("host memory")


def test_the_figures_of_each_process_on_each_gpu(tmp_path: Path) -> None:
    found = process(tmp_path / "probes", ON_CPU, RECORD, replace(UNNAMED, device=1, retries=5), visible="3,2")
    assert found.pid is not None
    assert probe_figures([found], GPUS) == {
        (RECORD.device_uuid, found.pid): ProbeFigures(17 * GIB, 40 * GIB, 0, 0),
        ("GPU-22", found.pid): ProbeFigures(17 * GIB, 40 * GIB, 5, 0),
    }
