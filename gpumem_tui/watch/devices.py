"""Which GPU of the machine a process means by cuda:0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.probes import ProbeFigures, Probes
from gpumem_tui.monitor.readings import Reading
from gpumem_tui.monitor.visible import Candidate, visible_devices
from gpumem_tui.probe.wire import CPU
from gpumem_tui.watch import hosts
from gpumem_tui.watch.records import ProbedProcess, ProbeSample


def gpu_uuid(process: ProbedProcess, sample: ProbeSample, gpus: Sequence[Candidate]) -> Reading[str]:
    """UUID, as NVML writes it, of the device of a sample.

    By the UUID that the process itself reports; where its torch is too old to tell, by the device's number and the
    environment that it was started with.
    """
    record = sample.record
    if record.device == CPU:
        return Unknown("host memory")
    if record.device_uuid:
        return _listed(record.device_uuid, gpus)
    environ = hosts.environ(hosts.PROC / str(process.pid)) if process.pid is not None else {}
    if process.process.visible_devices is not None:
        environ = {**environ, "CUDA_VISIBLE_DEVICES": process.process.visible_devices}
    seen = visible_devices(gpus, environ)
    if isinstance(seen, Unknown):
        return seen
    if record.device >= len(seen):
        return Unknown(f"{sample.device} is none of the {len(seen)} GPUs that its environment lets it see")
    return seen[record.device]


def _listed(uuid: str, gpus: Sequence[Candidate]) -> str:
    """As NVML has it: torch does not tell a MIG instance's UUID from a whole GPU's, which begin differently."""
    instances = [instance for gpu in gpus for instance in gpu.instances]
    return next((instance for instance in instances if _digits(instance) == _digits(uuid)), uuid)


def _digits(uuid: str) -> str:
    return uuid.partition("-")[2]


def probe_figures(processes: Iterable[ProbedProcess], gpus: Sequence[Candidate]) -> Probes:
    """The allocators' figures of all running processes, by GPU and pid, as alerts and histories take them."""
    found = {}
    for process in processes:
        for sample in process.samples if process.pid is not None else ():
            uuid = gpu_uuid(process, sample, gpus)
            figures = (sample.allocated_bytes, sample.reserved_bytes, sample.retries, sample.ooms)
            if not isinstance(uuid, Unknown) and process.pid is not None:
                known = [figure for figure in figures if isinstance(figure, int)]
                if len(known) == len(figures):
                    found[uuid, process.pid] = ProbeFigures(*known)
    return found
