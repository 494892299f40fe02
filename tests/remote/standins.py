"""An `ssh` that runs a script of its own for each host instead of connecting anywhere."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.monitor.wire import HostReport, ReportWriter
from gpumem_tui.remote.ssh import SshOptions
from tests.monitor.snapshots import gpu, machine

_SSH = """#!/bin/sh
echo "$@" >> {folder}/called
while [ "$1" != -- ]; do shift; done
exec sh "{folder}/$2" "$3"
"""
UNKNOWN_KEY = "Host key verification failed."
DENIED = "me@a: Permission denied (publickey,password)."
STAYS = "exec sleep 1000"


class Ssh:
    """Hosts in a folder; `program` is the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "ssh"
        self.program.write_text(_SSH.format(folder=shlex.quote(str(folder))))
        self.program.chmod(0o755)

    def host(self, name: str, *script: str) -> None:
        """The events there, as lines of a shell script."""
        scratch = self.folder / f"{name}.new"
        scratch.write_text("\n".join(script) + "\n")
        os.replace(scratch, self.folder / name)

    def prints(self, name: str, snapshots: Sequence[Snapshot], *, then: str = STAYS, before: str = "") -> None:
        """A host that prints these readings."""
        self.writes(name, lines_of(*snapshots), then, before)

    def writes(self, name: str, printed: Sequence[bytes], then: str = STAYS, before: str = "") -> None:
        """A host that prints these lines."""
        lines = self.folder / f"{name}.lines"
        lines.write_bytes(b"".join(line + b"\n" for line in printed))
        self.host(name, before, f"cat {shlex.quote(str(lines))}", then)

    @property
    def called(self) -> list[str]:
        """The words of each call so far."""
        path = self.folder / "called"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def options(self) -> SshOptions:
        """Connections through the stand-in."""
        return SshOptions(ssh=str(self.program))


def line_of(snapshot: Snapshot) -> bytes:
    """The first line as `monitor --wire` prints it."""
    return lines_of(snapshot)[0]


def lines_of(*snapshots: Snapshot) -> list[bytes]:
    """The lines as `monitor --wire` prints them."""
    writer = ReportWriter()
    return [writer.line(HostReport.of(each)).encode() for each in snapshots]


def reading(gpus: int = 1, *, after_s: float = 0.0) -> Snapshot:
    """The report of a host with so many GPUs."""
    return machine([gpu(index) for index in range(gpus)], after_s=after_s)
