"""Ranks of one job that hold memory on a GPU that is another rank's, told by the driver's lists alone, without a probe.

The usual cause is a CUDA call before ``torch.cuda.set_device``: each rank opens a context on GPU 0
(pytorch/pytorch#49481), or `torch.load` without ``map_location`` puts what rank 0 saved there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.monitor.snapshot import DeviceState, GpuProcess, GpuReading, HostProcess, ProcessKind

_INIT = 1
_TOGETHER_S = 60.0
"""Processes of different parents (a shell for each rank) are one job's only if they start within this time."""
_NUMBER_OF_RANK = (
    r"(?i)((?:(?:^|[\s:])(?:--?)?(?:(?:local|global|node|machine)[-_])?rank|tracker_fd|pipe_handle|_[tpde]p)[=:_ ]?)\d+"
)
"""By what command lines of one job's ranks differ: ``--local_rank=3`` (torch.distributed.launch, DeepSpeed),
``spawn_main(tracker_fd=5, pipe_handle=7)`` (multiprocessing), titles such as ``VLLM::Worker_TP0``. A ``--lora_rank`` is
none of these."""
_NAMES_NO_PROGRAM = ("[", "--multiprocessing-fork")
"""How a command line begins that is not known, or ends that is one of any program's children."""
_PYTHON = r"(?:python|pypy)[\d.]*t?"


class OtherRanks(Struct, frozen=True):
    """The ranks of a job that have their main memory elsewhere, on a GPU that is the main one of another of its ranks.

    Attributes:
        processes: their shares of that GPU.
    """

    gpu: GpuReading
    processes: tuple[GpuProcess, ...]

    def __str__(self) -> str:
        one = len(self.processes) == 1
        sizes = [each.used_bytes for each in self.processes]
        known = [size for size in sizes if isinstance(size, int)]
        held = format_bytes(sum(known)) if len(known) == len(sizes) else "memory"
        return (
            f"{len(sizes)} other rank{'' if one else 's'} {'holds' if one else 'hold'} {held} on GPU {self.gpu.index}"
        )


class _Share(Struct, frozen=True):
    """A process's part of a GPU."""

    gpu: GpuReading
    process: GpuProcess
    others: int

    @property
    def weight(self) -> tuple[int, int]:
        """The heaviest is the process's main one: by bytes; by how few others are there where these are equal."""
        held = self.process.used_bytes
        return 0 if isinstance(held, Unknown) else held, -self.others


class _Rank(Struct, frozen=True):
    """A process and its shares, the main one first."""

    host: HostProcess
    shares: tuple[_Share, ...]


def other_ranks(gpus: Iterable[GpuReading]) -> list[tuple[OtherRanks, ...]]:
    """Return for each job that has such ranks the GPUs that they are on: the one with most first, then by index.

    A process alone may use several GPUs by design (``device_map="auto"``, DataParallel, an inference server), and a
    rank further ones where no rank of its job has its main memory. GPUs that do not answer and MIG are left out.
    """
    ranks = _ranks(gpu for gpu in gpus if gpu.state is DeviceState.OK and not gpu.instances)
    if all(len(rank.shares) == 1 for rank in ranks):
        return []
    return [found for job in _jobs(ranks) if (found := _of_job(job))]


def _ranks(gpus: Iterable[GpuReading]) -> list[_Rank]:
    """Return the processes that compute, as far as known who they are, the oldest first."""
    shares: dict[int, list[_Share]] = {}
    for gpu in gpus:
        holding = [p for p in gpu.all_processes if p.kind is not ProcessKind.GRAPHICS and p.used_bytes != 0]
        for process in holding:
            shares.setdefault(process.pid, []).append(_Share(gpu, process, len(holding) - 1))
    ranks = (
        _Rank(host, tuple(sorted(held, key=lambda share: share.weight, reverse=True)))
        for held in shares.values()
        if not isinstance(host := held[0].process.host, Unknown)
    )
    return sorted(ranks, key=lambda rank: (rank.host.start_time_s, rank.host.pid))


def _jobs(ranks: Sequence[_Rank]) -> list[list[_Rank]]:
    """Return the ranks of each job: those of one launcher; of processes without others of theirs, those alike."""
    launched = _gathered([[rank] for rank in ranks], _have_one_launcher)
    alone = [job for job in launched if len(job) == 1]
    return [*(job for job in launched if len(job) > 1), *_gathered(alone, _are_alike)]


def _gathered(jobs: Sequence[list[_Rank]], are_one: Callable[[HostProcess, HostProcess], bool]) -> list[list[_Rank]]:
    made: list[list[_Rank]] = []
    for job in jobs:
        first = next((known for known in made if are_one(known[0].host, job[0].host)), None)
        if first is None:
            made.append(list(job))
        else:
            first.extend(job)
    return made


def _of_job(job: Sequence[_Rank]) -> tuple[OtherRanks, ...]:
    main = {rank.shares[0].gpu.uuid for rank in job}
    found: dict[str, list[_Share]] = {}
    for rank in job:
        for share in rank.shares[1:]:
            if share.gpu.uuid in main:
                found.setdefault(share.gpu.uuid, []).append(share)
    listed = (OtherRanks(each[0].gpu, tuple(share.process for share in each)) for each in found.values())
    return tuple(sorted(listed, key=lambda each: (-len(each.processes), each.gpu.index)))


def _have_one_launcher(first: HostProcess, second: HostProcess) -> bool:
    if _whose(first) != _whose(second):
        return False
    if first.parent_pid == second.parent_pid > _INIT:
        return len({re.sub(_NUMBER_OF_RANK, r"\1", each.command) for each in (first, second)}) == 1
    words = _program(first)  # Lightning's rank 0 starts the others: its own line, with paths made whole
    return second.parent_pid == first.pid and words != [] and _program(second)[: len(words)] == words


def _are_alike(first: HostProcess, second: HostProcess) -> bool:
    """Return whether a launcher that is gone, or has a shell for each rank, may have started both."""
    if _whose(first) != _whose(second) or not _program(first):
        return False
    return first.command == second.command and abs(first.start_time_s - second.start_time_s) <= _TOGETHER_S


def _whose(host: HostProcess) -> tuple[str, str, str]:
    return host.user, host.container_id or host.container, host.slurm_job


def _program(host: HostProcess) -> list[str]:
    """Return a command line without its interpreter and folders; nothing where it does not say what runs."""
    begins, ends = _NAMES_NO_PROGRAM
    if host.command.startswith(begins) or host.command.endswith(ends):
        return []
    words = [os.path.basename(word) for word in host.command.split()]
    return words[1:] if words and re.fullmatch(_PYTHON, words[0]) else words
