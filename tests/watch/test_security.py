"""Other users' files in the probes' folder are refused with a reason, and never followed."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from gpumem_tui.probe.files import Files, WireError, start_ticks
from gpumem_tui.probe.wire import (
    HEADER_BYTES,
    MAX_DOCUMENT_BYTES,
    RING_BYTES,
    SLOT_BYTES,
    LookAnswer,
    PostMortem,
    Trained,
)
from gpumem_tui.system import user_name
from gpumem_tui.watch import reader
from gpumem_tui.watch.documents import read_document
from gpumem_tui.watch.reader import Watcher, most_rings
from tests.attach.loops import NOBODY
from tests.watch.rings import RECORD, RingFile, gone, out_of_memory, this_process

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
UID = os.geteuid()


def reasons(folder: Path) -> list[str]:
    """Why things in the folder are refused; nothing else may be seen of it."""
    watcher = Watcher([folder])
    watched = watcher.processes()
    assert watched == ()
    return [refused.reason for refused in watcher.refused]


@pytest.fixture
def ring(tmp_path: Path) -> RingFile:
    ring = RingFile(tmp_path / "probes", this_process())
    ring.sample(RECORD)
    return ring


@as_root
def test_a_ring_of_another_user(ring: RingFile) -> None:
    os.chown(ring.path, NOBODY, NOBODY)
    assert reasons(ring.files.directory) == [f"{ring.path.name} belongs to user {NOBODY}"]


@as_root
def test_a_folder_under_our_name_that_another_user_made() -> None:
    """Anyone may make /tmp/gpumem-tui-12345 before user 12345 does."""
    folder = Path("/tmp/gpumem-tui-12345")
    ring = RingFile(folder, this_process())
    try:
        os.chown(folder, NOBODY, NOBODY)
        os.chown(ring.path, NOBODY, NOBODY)
        assert reasons(folder) == [f"{folder} belongs to user {NOBODY}"]
    finally:
        ring.path.unlink()
        folder.rmdir()


@as_root
def test_root_sees_what_a_user_publishes_but_not_as_somebody_elses_process(tmp_path: Path) -> None:
    """The folder and the ring are nobody's, the process that the ring names is ours."""
    ring = RingFile(tmp_path / "probes", this_process())
    os.chown(ring.files.directory, NOBODY, NOBODY)
    os.chown(ring.path, NOBODY, NOBODY)
    [process] = Watcher([ring.files.directory]).processes()
    assert (process.pid, process.uid) == (None, NOBODY)


def test_a_link_in_the_place_of_a_ring(ring: RingFile, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    ring.path.rename(elsewhere)
    ring.path.symlink_to(elsewhere)
    assert reasons(ring.files.directory) == [f"{ring.path.name} is a link"]


def test_a_link_in_the_place_of_the_folder(ring: RingFile, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(ring.files.directory)
    assert reasons(link) == [f"{link} is not a directory"]


def test_something_that_would_block_the_reader(ring: RingFile) -> None:
    ring.path.unlink()
    os.mkfifo(ring.path, 0o600)
    assert reasons(ring.files.directory) == [f"{ring.path.name} is not a regular file"]


def test_folders_under_the_names_of_files_keep_no_descriptor(ring: RingFile) -> None:
    """Anyone may make them, and a viewer that is root looks once a second."""
    ring.files.model.mkdir()
    folder = ring.files.directory
    Files(folder, gone().pid, gone().start_ticks).ring.mkdir()
    watcher = Watcher([folder])
    [process] = watcher.processes()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        watcher.processes()
        with pytest.raises(WireError, match="is not a regular file"):
            read_document(Trained, process.files, UID)
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_user_with_too_many_rings(ring: RingFile) -> None:
    watcher = Watcher([ring.files.directory])
    assert len(watcher.processes()) == 1
    for ticks in range(300):
        os.link(ring.path, Files(ring.files.directory, gone().pid, ticks).ring)
    watched = watcher.processes()
    assert [process.pid for process in watched] == [os.getpid()]
    told = f"showing the newest 256 of user {user_name(UID)}, who has 301"
    assert told in [refused.words for refused in watcher.refused]


def test_of_another_user_the_newest_are_read_and_no_more(ring: RingFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files cost the viewer as much as a few."""
    folder = ring.files.directory
    for ticks in range(3000):
        os.link(ring.path, Files(folder, gone().pid, ticks).ring)
    assert (most_rings(UID), most_rings(UID + 1)) == (256, 64)
    monkeypatch.setattr("gpumem_tui.watch.reader.most_rings", lambda _uid: most_rings(UID + 1))
    watcher = Watcher([folder])
    watcher.processes()
    read = {Path(each.path).name for each in watcher.refused if each.path.startswith("/")}
    assert read == {f"{gone().pid}-{ticks}.ring" for ticks in range(2937, 3000)}, "as ours is the newest"
    assert watcher.refused[-1].words == f"showing the newest 64 of user {user_name(UID)}, who has 3,001"


def test_a_folder_with_too_many_files(ring: RingFile) -> None:
    for number in range(4096):
        (ring.files.directory / str(number)).touch()
    assert reasons(ring.files.directory) == [f"{ring.files.directory} holds more than 4096 files"]


def test_many_living_processes_leave_descriptors_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ends are found in /proc if no descriptor of them is held."""
    monkeypatch.setattr(reader, "_HELD_SHARE_OF_A_USER", 8 / resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(12)]
    try:
        for one in sleepers:
            RingFile(tmp_path / "probes", this_process(pid=one.pid, start_ticks=start_ticks(one.pid))).sample(RECORD)
        watcher = Watcher([tmp_path / "probes"])
        before = len(os.listdir("/proc/self/fd"))
        assert [process.is_running for process in watcher.processes()] == [True] * 12
        assert len(os.listdir("/proc/self/fd")) - before == 8
    finally:
        for one in sleepers:
            one.kill()
            one.wait()
    assert [process.is_running for process in watcher.processes()] == [False] * 12
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_ring_that_others_may_write(ring: RingFile, mode: int) -> None:
    ring.path.chmod(mode)
    assert reasons(ring.files.directory) == [f"{ring.path.name} can be written by other users (mode {mode:o})"]


def test_a_folder_that_others_may_enter(ring: RingFile) -> None:
    ring.files.directory.chmod(0o711)
    [reason] = reasons(ring.files.directory)
    assert reason.endswith("is open to other users (mode 711, wanted 700)")


def test_a_ring_that_is_too_large(ring: RingFile) -> None:
    os.truncate(ring.path, RING_BYTES + 1)
    assert "bytes, more than" in reasons(ring.files.directory)[0]


@pytest.mark.parametrize("size_bytes", [0, 17, HEADER_BYTES - 1])
def test_a_ring_that_is_cut_short(ring: RingFile, size_bytes: int) -> None:
    os.truncate(ring.path, size_bytes)
    assert "less than its header" in reasons(ring.files.directory)[0]


def test_a_ring_that_lost_its_samples_only(ring: RingFile) -> None:
    os.truncate(ring.path, HEADER_BYTES + SLOT_BYTES // 2)
    [process] = Watcher([ring.files.directory]).processes()
    assert (process.samples, process.problem) == ((), "samples lost to damage: 1")


@pytest.mark.parametrize("name", ["x.ring", "1.ring", "-1-2.ring", "1-2-3.ring", "1-².ring"])
def test_names_that_are_no_rings(ring: RingFile, name: str) -> None:
    ring.path.rename(ring.files.directory / name)
    assert reasons(ring.files.directory) == [f"{name} is no name of a ring"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_ring_of_garbage_is_refused_or_read_but_never_harms(data: st.DataObject, ring: RingFile) -> None:
    """Bytes are overwritten anywhere: what is then shown passed every check."""
    before = ring.path.read_bytes()
    try:
        offset = data.draw(st.integers(0, HEADER_BYTES + 2 * SLOT_BYTES))
        ring.patch(offset, data.draw(st.binary(min_size=1, max_size=64)))
        watcher = Watcher([ring.files.directory])
        watched = watcher.processes()
        assert len(watched) + len(watcher.refused) == 1
        for process in watched:
            assert all(sample.record.sequence == 1 for sample in process.samples)
    finally:
        ring.path.write_bytes(before)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_documents_of_garbage_are_refused(content: bytes, ring: RingFile) -> None:
    for path, kind in (
        (ring.files.model, Trained),
        (ring.files.look, LookAnswer),
        (ring.files.oom, PostMortem),
    ):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(WireError) as caught:
            read_document(kind, ring.files, UID)
        assert path.name in str(caught.value)
        assert "\n" not in str(caught.value)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(sorted(out_of_memory())), value=_JSON)
def test_a_document_with_a_wrong_field_is_refused_or_still_makes_sense(
    field: str, value: object, ring: RingFile
) -> None:
    ring.document(ring.files.oom, out_of_memory(**{field: value}))
    try:
        found = read_document(PostMortem, ring.files, UID)
    except WireError:
        return
    assert found is not None
    assert found.breakdown.total_bytes >= 0


def test_documents_of_another_version_or_size_or_user(ring: RingFile) -> None:
    ring.files.oom.write_bytes(b'{"schema": 2}')
    ring.files.oom.chmod(0o600)
    with pytest.raises(WireError, match="was written by another version"):
        read_document(PostMortem, ring.files, UID)
    os.truncate(ring.files.oom, MAX_DOCUMENT_BYTES + 1)
    with pytest.raises(WireError, match="more than"):
        read_document(PostMortem, ring.files, UID)
    with pytest.raises(WireError, match=f"belongs to user {UID}"):
        read_document(PostMortem, ring.files, UID + 1)
    ring.files.oom.unlink()
    ring.files.oom.symlink_to("/etc/passwd")
    with pytest.raises(WireError, match="is a link"):
        read_document(PostMortem, ring.files, UID)


def test_a_damaged_black_box_does_not_hide_the_process(tmp_path: Path) -> None:
    ring = RingFile(tmp_path / "probes", gone())
    ring.files.oom.write_bytes(b"garbage")
    ring.files.oom.chmod(0o600)
    [process] = Watcher([ring.files.directory]).processes()
    assert "is damaged" in process.problem


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202eevil\n"


def texts(value: object) -> Iterator[str]:
    """Every text in a value that panels get."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts(one)
    elif is_dataclass(value):
        yield from texts([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, Struct):
        yield from texts(structs.astuple(value))


def test_what_a_ring_says_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Root reads the rings of others too."""
    told = {"entry": HOSTILE, "python": HOSTILE, "torch": HOSTILE, "visible_devices": HOSTILE}
    ring = RingFile(tmp_path / "probes", this_process(**told, command=("python", HOSTILE)))
    ring.sample(RECORD)
    (process,) = Watcher([ring.files.directory]).processes()
    shown = list(texts(process.process))
    assert any("evil" in text for text in shown)
    assert all(text.isprintable() for text in [*shown, process.title, process.problem])


def test_what_documents_say_cannot_steer_the_terminal(tmp_path: Path) -> None:
    ring = RingFile(tmp_path / "probes", this_process())
    parameter = {"name": HOSTILE, "shape": [1], "dtype": HOSTILE, "trained": True}
    model = {"name": HOSTILE, "parameters": [parameter], "truncated": False}
    optimizer = {"name": HOSTILE, "parameters": 1, "options": {HOSTILE: [HOSTILE]}}
    ring.document(ring.files.model, {"models": [model], "optimizers": [optimizer]})
    ring.document(ring.files.oom, out_of_memory(source=HOSTILE, message=f"{HOSTILE}second line"))
    found = [read_document(Trained, ring.files, UID), read_document(PostMortem, ring.files, UID)]
    shown = list(texts(found))
    assert any("evil" in text for text in shown)
    assert not any("second line" in text for text in shown)
    assert all(text.isprintable() for text in shown)


PLACE = {"device": 0, "operator": "", "module": "", "source": "", "allocations": 1}
PARAMETER = {"name": "weight", "shape": [1], "dtype": "float32", "trained": True}
LOOKED = {
    "device": 0,
    "device_uuid": "",
    "peak_bytes": 0,
    "buckets": {},
    "held": [],
    "timeline": [[0.5, 1]],
    "phases": [],
    "peak_s": 0.0,
}


def _model(**changes: object) -> dict[str, Any]:
    parameter = {**PARAMETER, **changes}
    return {"models": [{"name": "M", "parameters": [parameter], "truncated": False}], "optimizers": []}


def _look(**changes: object) -> dict[str, Any]:
    device = {**LOOKED, **changes}
    return {"request": 1, "step": 1, "step_s": 0.5, "method": "", "devices": [device], "unavailable": {}}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (PostMortem, out_of_memory(step=-1)),
        (PostMortem, out_of_memory(step=2**63)),
        (PostMortem, out_of_memory(allocated_bytes=-1)),
        (PostMortem, out_of_memory(compute_capability=[7, -5])),
        (PostMortem, out_of_memory(buckets={"parameters": 2**63})),
        (Trained, _model(shape=[4, -1])),
        (LookAnswer, _look(device=-2)),
        (LookAnswer, _look(timeline=[[0.0, 1], [-0.5, 1]])),
        (LookAnswer, _look(timeline=[[0.0, -1]])),
        (LookAnswer, {**_look(), "kept": [{**PLACE, "bytes": 1}, {**PLACE, "bytes": -1}]}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_number_out_of_its_bounds_is_damage(
    kind: type[Trained | LookAnswer | PostMortem], content: dict[str, Any], ring: RingFile
) -> None:
    """Wherever in a document it is; those within them are read."""
    path = {Trained: ring.files.model, LookAnswer: ring.files.look, PostMortem: ring.files.oom}[kind]
    ring.document(path, {Trained: _model(), LookAnswer: _look(), PostMortem: out_of_memory()}[kind])
    assert read_document(kind, ring.files, UID) is not None
    ring.document(path, content)
    with pytest.raises(WireError, match=r"is damaged: .* is not a number from -?\d to 9223372036854775807"):
        read_document(kind, ring.files, UID)
