"""Runs programs under the probe, as `gpumem-tui run` does, and reads what they published."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumem_tui.probe import wire
from gpumem_tui.probe.files import SITE_DIRECTORY, Files, WireError
from gpumem_tui.watch.documents import Header, decode_header, decode_record
from tests.sharing import WarmPython
from tests.warm import TRAINING

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Published:
    """The files that one process left behind. `documents` by their ending: ``model``, ``look``, ``oom``."""

    header: Header
    records: list[wire.Record]
    documents: dict[str, dict[str, Any]]

    @property
    def last(self) -> wire.Record:
        return self.records[-1]


@dataclass(frozen=True)
class Run:
    """A program that has ended."""

    code: int
    output: str
    errors: str
    published: list[Published]

    @property
    def counts(self) -> list[dict[str, int]]:
        """The output of `counted`, by rank."""
        lines = [line.removeprefix("counted ") for line in self.output.splitlines() if line.startswith("counted ")]
        return sorted((json.loads(line) for line in lines), key=lambda counts: counts["rank"])


def run(
    arguments: Iterable[str | Path],
    directory: Path,
    watched: bool = True,
    more: Mapping[str, str] | None = None,
    python: str = "",
) -> Run:
    """Run ``python ARGUMENTS``; `directory` is where it publishes, `more` goes into its environment.

    Args:
        python: the interpreter; else one that starts with torch imported.
    """
    environment = {**os.environ, "GPUMEM_TUI_DIR": str(directory), "OMP_NUM_THREADS": "1", **(more or {})}
    environment["PYTHONPATH"] = str(SITE_DIRECTORY) if watched else ""
    done = subprocess.run(
        [python or WarmPython.path(TRAINING), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    return Run(done.returncode, done.stdout, done.stderr, published(directory))


def read_ring(data: bytes) -> tuple[Header, list[wire.Record]]:
    """The header and every whole record, oldest first; torn and damaged slots are left out.

    Raises:
        WireError: as `decode_header`.
    """
    header = decode_header(data)
    return header, sorted(_records(data), key=lambda record: record.sequence)


def _records(data: bytes) -> Iterator[wire.Record]:
    for offset in range(wire.HEADER_BYTES, min(len(data), wire.RING_BYTES), wire.SLOT_BYTES):
        with suppress(WireError):
            record = decode_record(data[offset : offset + wire.SLOT_BYTES])
            if wire.slot_offset(record.sequence) == offset:
                yield record


def published(directory: Path) -> list[Published]:
    """The contents of a directory, by rank."""
    found = []
    for ring in directory.glob("*.ring") if directory.is_dir() else ():
        header, records = read_ring(ring.read_bytes())
        files = Files.of_ring(ring)
        documents = {"model": files.model, "look": files.look, "oom": files.oom}
        content = {name: json.loads(path.read_bytes()) for name, path in documents.items() if path.exists()}
        found.append(Published(header, records, content))
    return sorted(found, key=lambda one: one.header.process.rank or 0)
