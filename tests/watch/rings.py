"""Rings and documents as probes write them, of processes that run, have ended, or never were."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumem_tui.probe.files import Files, start_ticks, write_document
from gpumem_tui.probe.wire import (
    RING_BYTES,
    Process,
    Record,
    encode_document,
    encode_header,
    encode_record,
    ended_patch,
    slot_offset,
    written_patch,
)

GIB = 1 << 30
GONE_PID, GONE_TICKS = 4_000_000, 12_345
"""A process that is not: pids end at 2²², and this one did not start then."""

RECORD = Record(
    sequence=1,
    step=1,
    wall_ns=1_700_000_000_000_000_000,
    monotonic_ns=0,
    step_s=0.25,
    phase="optimizer",
    device=0,
    device_uuid="GPU-01234567-89ab-cdef-0123-456789abcdef",
    has_allocator=True,
    parameters_bytes=4 * GIB,
    gradients_bytes=4 * GIB,
    optimizer_bytes=8 * GIB,
    buffers_bytes=0,
    batch_bytes=-1,
    allocated_bytes=17 * GIB,
    reserved_bytes=40 * GIB,
    peak_allocated_bytes=30 * GIB,
    peak_reserved_bytes=40 * GIB,
    retries=0,
    ooms=0,
    inactive_split_bytes=GIB,
    requested_bytes=17 * GIB,
    dropped=0,
    errors=0,
)
ON_CPU = replace(
    RECORD,
    device=-1,
    device_uuid="",
    has_allocator=False,
    allocated_bytes=-1,
    reserved_bytes=-1,
    peak_allocated_bytes=-1,
    peak_reserved_bytes=-1,
    retries=-1,
    ooms=-1,
    inactive_split_bytes=-1,
    requested_bytes=-1,
)


def this_process(**changes: Any) -> Process:
    """This very process, as the writer of a ring."""
    values = {"pid": os.getpid(), "start_ticks": start_ticks(), **changes}
    return Process(
        **{
            "started_ns": time.time_ns(),
            "entry": "run",
            "rank": None,
            "local_rank": None,
            "world_size": None,
            "python": "3.11.7",
            "torch": "2.13.0",
            "visible_devices": None,
            "command": ("python", "train.py"),
            **values,
        }
    )


def gone(**changes: Any) -> Process:
    """A process that has ended."""
    return this_process(**{"pid": GONE_PID, "start_ticks": GONE_TICKS, **changes})


class RingFile:
    """A ring that a test writes."""

    def __init__(self, directory: Path, process: Process) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self.files = Files(directory, process.pid, process.start_ticks)
        self.path = self.files.ring
        self.path.write_bytes(encode_header(process).ljust(RING_BYTES, b"\0"))
        self.path.chmod(0o600)
        self.written = 0

    def sample(self, *records: Record) -> None:
        """Write records of one moment, now unless they say when."""
        now_ns = time.monotonic_ns()
        for record in records:
            self.written += 1
            stamped = replace(record, sequence=self.written, monotonic_ns=record.monotonic_ns or now_ns)
            self.patch(slot_offset(self.written), encode_record(stamped))
        self.patch(*written_patch(self.written))

    def end(self) -> None:
        """The process leaves in good order."""
        self.patch(*ended_patch(time.time_ns()))

    def patch(self, offset: int, content: bytes) -> None:
        """Write bytes into the ring."""
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(content)

    def document(self, path: Path, content: dict[str, Any]) -> None:
        """Write a document next to the ring."""
        write_document(path, encode_document(content))


def out_of_memory(**changes: Any) -> dict[str, Any]:
    """An out-of-memory document: 80 GiB, of which a request for 4 GiB found 1 GiB free."""
    return {
        "step": 11,
        "wall_ns": time.time_ns(),
        "device": 0,
        "device_uuid": RECORD.device_uuid,
        "requested_bytes": 4 * GIB,
        "requested_is_rounded": False,
        "device_total_bytes": 80 * GIB,
        "device_free_bytes": GIB,
        "source": "train.py:34",
        "message": "CUDA out of memory. Tried to allocate 4.00 GiB.",
        "buckets": {"parameters": 4 * GIB, "gradients": 4 * GIB, "optimizer": 8 * GIB},
        "allocated_bytes": 70 * GIB,
        "reserved_bytes": 77 * GIB,
        "peak_allocated_bytes": 71 * GIB,
        "peak_reserved_bytes": 77 * GIB,
        "retries": 1,
        "ooms": 1,
        "inactive_split_bytes": 5 * GIB,
        "requested_live_bytes": 69 * GIB,
        "fatal": True,
        "samples": [],
        **changes,
    }
