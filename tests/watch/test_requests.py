"""Asking for a look, and what can come instead of an answer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpumem_tui.probe.files import start_ticks
from gpumem_tui.probe.wire import decode_request, looking_patch, switched_off_patch
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import ProbedProcess
from gpumem_tui.watch.requests import RECORDING, WAITING, NoAnswer, await_kept, await_look, request_look
from tests.watch.rings import RECORD, RingFile, gone, this_process
from tests.watch.test_report import LOOK


def publish(folder: Path, process: object = None) -> tuple[RingFile, ProbedProcess]:
    ring = RingFile(folder, this_process() if process is None else process)  # type: ignore[arg-type]
    ring.sample(RECORD)
    [found] = Watcher([folder]).processes()
    return ring, found


def test_each_request_has_a_larger_number(tmp_path: Path) -> None:
    ring, process = publish(tmp_path / "probes")
    assert [request_look(process) for _ in range(3)] == [1, 2, 3]
    request = decode_request(ring.files.control.read_bytes())
    assert (request.number, request.kind) == (3, "look")
    assert ring.files.control.stat().st_mode & 0o777 == 0o600


def test_the_answer_is_the_one_to_this_request(tmp_path: Path) -> None:
    ring, process = publish(tmp_path / "probes")
    ring.document(ring.files.look, {**LOOK, "request": 1})  # of an earlier one
    answers = iter([2])

    def wait() -> None:
        ring.document(ring.files.look, {**LOOK, "request": next(answers)})

    assert await_look(process, 2, 30.0, wait=wait).request == 2


def test_an_old_answer_is_not_the_answer_though_the_request_is_gone(tmp_path: Path) -> None:
    ring, process = publish(tmp_path / "probes")
    ring.document(ring.files.look, {**LOOK, "request": 7})
    assert request_look(process) == 8
    ring.files.control.unlink()
    ring.files.look.unlink()
    ring.patch(*looking_patch(9))  # which is still to be answered
    assert request_look(process) == 10


def test_a_probe_that_switched_itself_off_is_not_waited_for(tmp_path: Path) -> None:
    ring, process = publish(tmp_path / "probes")
    ring.patch(*switched_off_patch("OSError: no space"))
    with pytest.raises(NoAnswer, match="switched itself off, and tries again each minute: OSError: no space"):
        await_look(process, 1, 60.0, wait=lambda: pytest.fail("waited"))


def test_what_it_waits_for(tmp_path: Path) -> None:
    """First for a step's end, at which the probe sees the request; then for the step that is recorded."""
    ring, process = publish(tmp_path / "probes")
    stages: list[str] = []

    def wait() -> None:
        if len(stages) == 1:
            ring.patch(*looking_patch(1))
        else:
            ring.document(ring.files.look, {**LOOK, "request": 1})

    assert await_look(process, 1, 30.0, wait=wait, say=stages.append).request == 1
    assert stages == [WAITING, RECORDING]


def test_what_steps_keep_comes_later(tmp_path: Path) -> None:
    ring, process = publish(tmp_path / "probes")
    row = {"device": 0, "operator": "", "module": "head", "source": "train.py:3", "bytes": 8, "allocations": 1}
    unavailable = {name: why for name, why in LOOK["unavailable"].items() if name != "kept"}
    first = {**LOOK, "request": 1, "kept": None, "unavailable": unavailable}
    ring.document(ring.files.look, first)
    look = await_look(process, 1, 30.0)
    assert await_kept(process, look, 0.0) == look
    ring.document(ring.files.look, {**first, "request": 2, "kept": [row]})  # of another request
    assert await_kept(process, look, 0.2) == look
    ring.document(ring.files.look, {**first, "kept": [row]})
    kept = await_kept(process, look, 30.0).kept
    assert kept is not None
    assert [(one.module, one.bytes) for one in kept] == [("head", 8)]
    ring.document(ring.files.look, {**first, "unavailable": {"kept": "it ended"}})
    assert await_kept(process, look, 30.0).unavailable == {"kept": "it ended"}


def test_no_step_finishes(tmp_path: Path) -> None:
    _, process = publish(tmp_path / "probes")
    with pytest.raises(NoAnswer, match=r"no step of PID \d+ \(python train.py\) finished within 0.2 s"):
        await_look(process, 1, 0.2)


def test_the_process_ends_meanwhile(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as program:
        _, process = publish(tmp_path / "probes", this_process(pid=program.pid, start_ticks=start_ticks(program.pid)))
        program.kill()
        program.wait()
        with pytest.raises(NoAnswer, match="has ended"):
            await_look(process, 1, 30.0)


def test_a_damaged_answer(tmp_path: Path) -> None:
    ring, process = publish(tmp_path / "probes")
    device = {**LOOK["devices"][0], "peak_bytes": 1}
    ring.document(ring.files.look, {**LOOK, "devices": [device]})
    with pytest.raises(NoAnswer, match="the buckets do not sum to the peak"):
        await_look(process, 1, 30.0)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    ring, process = publish(tmp_path / "probes", gone())
    ring.path.unlink()
    ring.files.directory.rmdir()
    with pytest.raises(NoAnswer, match="cannot be written: No such file or directory"):
        request_look(process)
