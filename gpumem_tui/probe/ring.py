"""The writing end of a ring."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpumem_tui.launchers import ranks_here
from gpumem_tui.probe import wire
from gpumem_tui.probe.files import Files, Folder, default_directory, start_ticks

_LONGEST_JOB = 100
"""Characters of a job's name that are kept."""


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Ring:
    """Writes records into this process's ring file, which is opened anew each time.

    At two samples a second that costs nothing, and it is what makes the file harmless: no descriptor is held that a
    program which closes "all" descriptors could hand on to one of its own files, and a file that somebody cuts short
    cannot kill this process as a mapped one would. A file that was deleted, cut or replaced is made again.

    Raises:
        OSError, WireError: by every method: the directory cannot be made or reached, is full, or is not private.
    """

    def __init__(self, entry: str) -> None:
        self.files = Files(default_directory(), os.getpid(), start_ticks())
        self._entry = entry
        self._identity = (0, 0, 0)
        self._written = 0
        directory = self.files.directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._folder() as folder:
            for left_over in self.files.all():  # exec keeps the pid and the start: those are of the program before
                folder.remove(left_over.name)
            self._create(folder)

    def append(self, records: Iterable[wire.Record]) -> None:
        """Write records; their sequence numbers are given here."""
        descriptor = self._open()
        try:
            for record in records:
                self._written += 1
                slot = wire.encode_record(replace(record, sequence=self._written))
                os.pwrite(descriptor, slot, wire.slot_offset(self._written))
            offset, counter = wire.written_patch(self._written)
            os.pwrite(descriptor, counter, offset)
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """Say that the interpreter exits."""
        self._patch(*wire.ended_patch(time.time_ns()))

    def looking(self, request: int) -> None:
        """Say which request for a look is being recorded; 0 once none is."""
        self._patch(*wire.looking_patch(request))

    def count(self, heartbeat: wire.Heartbeat) -> None:
        """Say how many steps there are."""
        self._patch(*wire.heartbeat_patch(heartbeat))

    def switch_off(self, reason: str) -> None:
        """Say that nothing more will come, and why; empty: that it comes again."""
        self._patch(*wire.switched_off_patch(reason))

    def _patch(self, offset: int, content: bytes) -> None:
        descriptor = self._open()
        try:
            os.pwrite(descriptor, content, offset)
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        self.files.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._folder() as folder:
            for _ in range(2):
                with suppress(FileNotFoundError):
                    descriptor = folder.open(self.files.ring.name, os.O_WRONLY)
                    found = os.fstat(descriptor)
                    if (found.st_dev, found.st_ino, found.st_size) == self._identity:
                        return descriptor
                    os.close(descriptor)
                self._create(folder)
        raise FileExistsError(f"{self.files.ring} is replaced as often as it is made")

    def _folder(self) -> Folder:
        return Folder(self.files.directory, (os.getuid(),))

    def _create(self, folder: Folder) -> None:
        name = self.files.ring.name
        temporary = f".{name}"
        folder.remove(temporary)
        descriptor = folder.open(temporary, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(descriptor, 0, wire.RING_BYTES)
            os.pwrite(descriptor, wire.encode_header(_this_process(self.files, self._entry)), 0)
            made = os.fstat(descriptor)
            folder.rename(temporary, name)
        except OSError:
            folder.remove(temporary)
            raise
        finally:
            os.close(descriptor)
        self._identity = (made.st_dev, made.st_ino, made.st_size)


def _this_process(files: Files, entry: str) -> wire.Process:
    rank, local_rank, world_size = _ranks()
    return wire.Process(
        pid=files.pid,
        start_ticks=files.start_ticks,
        started_ns=time.time_ns(),
        entry=entry,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        python=".".join(map(str, sys.version_info[:3])),
        torch=str(sys.modules["torch"].__version__),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        command=_command_line(),
        job=_job(world_size),
    )


def _ranks() -> tuple[int | None, int | None, int | None]:
    """Return rank, local rank and world size, as torch.distributed states, else as a launcher's environment does."""
    distributed = sys.modules.get("torch.distributed")
    place = ranks_here(os.environ)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), place.local_rank, distributed.get_world_size()
    return place.rank, place.local_rank, place.world_size


def _job(world_size: int | None) -> str | None:
    """Return the job's name by Slurm (man sbatch) or torchrun (torch.distributed.elastic, "Environment Variables").

    Without a rendezvous that has an id, torchrun writes "none": then ranks are distinguished by where they meet, which
    no other job does at that time.
    """
    slurm, torchrun = os.environ.get("SLURM_JOB_ID"), os.environ.get("TORCHELASTIC_RUN_ID")
    name = f"slurm {slurm}" if slurm else torchrun if torchrun != "none" else None
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not name and (world_size or 1) > 1 and address and port:
        name = f"{os.uname().nodename if address in _LOOPBACK else address}:{port}"
    return name[:_LONGEST_JOB] if name else None


def _command_line() -> tuple[str, ...]:
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]
    return tuple(argument.decode(errors="replace") for argument in arguments)
