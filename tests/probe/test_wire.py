"""Data from the probe to viewers: records as they were, and garbage refused with a reason."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.probe import wire
from gpumem_tui.probe.files import (
    Files,
    WireError,
    check_directory,
    default_directory,
    read_private,
    start_ticks,
    write_document,
)
from gpumem_tui.probe.wire import ViewerRequest, decode_request, encode_document
from gpumem_tui.watch.documents import decode_header, decode_record
from tests.probe.watched import read_ring

COUNT = st.integers(-1, 2**63 - 1)
COUNTS = [f.name for f in fields(wire.Record) if f.name.endswith("_bytes") or f.name in ("retries", "ooms")]
PROCESS = wire.Process(12, 34, 56, "run", 1, 0, 2, "3.11.7", "2.13.0", None, ("python", "train.py"))
RECORD = wire.Record(1, 10, 20, 30, 0.5, "optimizer", 0, "", True, *range(15))


def _ring(*records: wire.Record) -> bytearray:
    ring = bytearray(wire.encode_header(PROCESS).ljust(wire.RING_BYTES, b"\0"))
    for record in records:
        offset = wire.slot_offset(record.sequence)
        ring[offset : offset + wire.SLOT_BYTES] = wire.encode_record(record)
    return ring


records = st.builds(
    wire.Record,
    sequence=st.integers(1, 2**63 - 1),
    step=st.integers(0, 2**63 - 1),
    wall_ns=st.integers(0, 2**63 - 1),
    monotonic_ns=st.integers(0, 2**63 - 1),
    step_s=st.floats(0, allow_infinity=False, allow_nan=False),
    phase=st.sampled_from(wire.PHASES),
    device=st.integers(-1, 127),
    device_uuid=st.uuids(allow_nil=False).map(lambda found: f"GPU-{found}"),
    has_allocator=st.booleans(),
    **dict.fromkeys(COUNTS, COUNT),
    dropped=st.integers(0, 2**32 - 1),
    errors=st.integers(0, 2**32 - 1),
)


@given(records)
def test_a_record_is_read_as_it_was_written(record: wire.Record) -> None:
    slot = wire.encode_record(record)
    assert len(slot) == wire.SLOT_BYTES
    assert decode_record(slot) == record


def test_an_unknown_step_time_is_null_in_json() -> None:
    record = decode_record(wire.encode_record(replace(RECORD, step_s=math.nan)))
    assert math.isnan(record.step_s)
    assert record.as_json()["step_s"] is None


def test_a_record_of_a_probe_that_does_not_tell_the_hosts_memory() -> None:
    slot = bytearray(wire.encode_record(RECORD))
    assert RECORD.host_bytes == -1
    assert not any(slot[176 : wire.SLOT_BYTES - 4])  # where earlier versions wrote nothing


@given(st.integers(0, wire.SLOT_BYTES - 1), st.integers(1, 255))
def test_one_changed_byte_spoils_a_slot(position: int, change: int) -> None:
    slot = bytearray(wire.encode_record(RECORD))
    slot[position] ^= change
    with pytest.raises(WireError):
        decode_record(bytes(slot))


@given(st.integers(1, wire.SLOT_BYTES - 1))
def test_a_slot_that_is_half_overwritten_is_left_out(written: int) -> None:
    later = replace(RECORD, sequence=1 + wire.SLOT_COUNT, step=99, allocated_bytes=10**12, errors=7)
    ring = _ring(RECORD, replace(RECORD, sequence=2))
    start = wire.slot_offset(later.sequence)
    ring[start : start + written] = wire.encode_record(later)[:written]
    _, found = read_ring(bytes(ring))
    assert [record.sequence for record in found] in ([2], [1, 2], [2, later.sequence])
    assert all(record in (RECORD, replace(RECORD, sequence=2), later) for record in found)


def test_a_full_ring_is_read_in_order() -> None:
    written = [replace(RECORD, sequence=sequence) for sequence in range(1, wire.SLOT_COUNT + 11)]
    header, found = read_ring(bytes(_ring(*written)))
    assert [record.sequence for record in found] == list(range(11, wire.SLOT_COUNT + 11))
    assert header.process == PROCESS
    assert (header.written, header.ended_ns) == (0, 0)


def test_a_long_command_is_cut() -> None:
    long = replace(PROCESS, command=("python", "x" * 10_000, *("--flag",) * 2000))
    header = decode_header(wire.encode_header(long))
    assert header.process.command[:2] == ("python", "x" * 512)
    assert 2 < len(header.process.command) < 2000
    assert header.switched_off == ""


@pytest.mark.parametrize("reason", ["OSError: é", "é" * 1000])
def test_why_a_probe_switched_itself_off(reason: str) -> None:
    ring = _ring(RECORD)
    offset, content = wire.switched_off_patch(reason)
    ring[offset : offset + len(content)] = content
    header, found = read_ring(bytes(ring))
    assert reason.startswith(header.switched_off)
    assert len(header.switched_off) >= min(len(reason), 100)
    assert (header.process, found) == (PROCESS, [RECORD])


def test_which_look_is_being_recorded() -> None:
    ring = _ring(RECORD)
    assert read_ring(bytes(ring))[0].looking == 0
    for request in (7, 0):
        offset, content = wire.looking_patch(request)
        ring[offset : offset + len(content)] = content
        header, found = read_ring(bytes(ring))
        assert (header.looking, header.switched_off, header.process, found) == (request, "", PROCESS, [RECORD])


@given(st.binary(max_size=wire.HEADER_BYTES + 2 * wire.SLOT_BYTES))
def test_garbage_is_no_ring(data: bytes) -> None:
    with pytest.raises(WireError):
        read_ring(data)
    with pytest.raises(WireError):
        read_ring(wire.MAGIC + data.ljust(wire.HEADER_BYTES, b"\0"))


@pytest.mark.parametrize(
    ("offset", "content", "reason"),
    [
        (0, b"NOTARING", "not a ring"),
        (8, b"\x63", "written by another version (schema 99, this one reads 1)"),
        (12, b"\1", "damaged"),
        (60, b"x", "damaged"),
        (24, b"\xff" * 8, "damaged"),
    ],
)
def test_a_damaged_header_is_refused(offset: int, content: bytes, reason: str) -> None:
    ring = _ring(RECORD)
    ring[offset : offset + len(content)] = content
    with pytest.raises(WireError) as refused:
        read_ring(bytes(ring))
    assert reason in str(refused.value)


@given(st.binary() | st.sampled_from([b"[1]", b"null", b"{}", b"[" * 100_000, b'{"schema": 1, "number": true}']))
def test_garbage_is_no_request(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_request(data)


def test_a_request_and_a_document_are_read_as_they_were_written() -> None:
    assert decode_request(encode_document(ViewerRequest(7, "look"))) == ViewerRequest(7, "look")
    assert json.loads(encode_document({"step": 3})) == {"schema": 1, "step": 3}


# Files


def test_names() -> None:
    files = Files(Path("/tmp/x"), 12, 345)
    assert files.ring == Path("/tmp/x/12-345.ring")
    assert Files.of_ring(files.ring) == files
    for name in ("12.ring", "a-1.ring", "12-345.look.json", "-1.ring", "1-.ring"):
        with pytest.raises(WireError):
            Files.of_ring(Path(name))


def test_the_directory_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUMEM_TUI_DIR", raising=False)
    assert default_directory() == Path(f"/tmp/gpumem-tui-{os.getuid()}")
    monkeypatch.setenv("GPUMEM_TUI_DIR", "/elsewhere")
    assert default_directory() == Path("/elsewhere")


def test_a_process_started_once() -> None:
    assert start_ticks() == start_ticks(os.getpid()) > 0
    with pytest.raises(OSError, match="No such file"):
        start_ticks(2**30)


def test_only_a_private_directory_will_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    check_directory(tmp_path, (os.getuid(),))
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir(mode=0o755)
    for name, reason in (("link", "not a directory"), ("file", "not a directory"), ("open", "open to other users")):
        with pytest.raises(WireError, match=reason):
            check_directory(tmp_path / name, (os.getuid(),))
    with pytest.raises(WireError, match="belongs to user"):
        check_directory(tmp_path, (os.getuid() + 1,))


def test_only_a_private_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_document(file, b"content")
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_private(file, 7, (os.getuid(),)) == b"content"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe")
    for name, limit, owner, reason in (
        ("link", 7, os.getuid(), "is a link"),
        ("pipe", 7, os.getuid(), "not a regular file"),
        ("file", 6, os.getuid(), "7 bytes, more than 6"),
        ("file", 7, os.getuid() + 1, "belongs to user"),
    ):
        with pytest.raises(WireError, match=reason):
            read_private(tmp_path / name, limit, (owner,))
    file.chmod(0o620)
    with pytest.raises(WireError, match="can be written by other users"):
        read_private(file, 7, (os.getuid(),))
