"""The black box. No GPU runs out here: its error is raised, or its allocator's observer called, by hand."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpumem_tui.probe.finding import Holdings
from gpumem_tui.probe.oom import BlackBox
from gpumem_tui.probe.oom import LastState as Known
from gpumem_tui.probe.wire import CPU
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import ProcessState
from tests.probe.looks import as_written
from tests.probe.test_wire import RECORD
from tests.probe.watched import SCRIPTS, run

GIB = 1024**3
STATE = Known(step=12, holdings={1: Holdings(100, 90, 200, 10)}, samples=[RECORD])


@pytest.fixture
def written() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def box(written: list[dict[str, Any]]) -> BlackBox:
    return BlackBox(
        lambda: STATE, lambda document: written.append(as_written(document)), lambda *_: None, lambda work: work()
    )


@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_an_error_that_ends_the_process(steps: int, tmp_path: Path) -> None:
    done = run([SCRIPTS / "out_of_memory.py", str(steps)], tmp_path / "published")
    assert (done.code, done.output) == (1, "")
    lines = done.errors.splitlines()  # Python's own report, with nothing before or after
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.")
    (found,) = done.published
    document = found.documents["oom"]
    assert document["fatal"] is True
    assert document["step"] == steps
    assert (document["device"], document["source"]) == (1, "out_of_memory.py:15")
    assert document["requested_bytes"] == round(2.5 * GIB)
    assert document["requested_is_rounded"] is True
    assert document["device_total_bytes"] == round(79.15 * GIB)
    assert document["device_free_bytes"] == round(1.25 * GIB)
    assert document["message"].startswith("CUDA out of memory. Tried to allocate 2.50 GiB.")
    assert document["allocated_bytes"] is None
    assert [sample["step"] for sample in document["samples"]] == ([1] if steps else [])


@pytest.mark.slow
def test_host_memory_runs_out(tmp_path: Path) -> None:
    done = run([SCRIPTS / "out_of_host_memory.py"], tmp_path / "published")
    assert done.code == 1
    assert "DefaultCPUAllocator" in done.errors
    (found,) = done.published
    document = found.documents["oom"]
    assert document["fatal"] is True
    assert (document["device"], document["step"], document["source"]) == (CPU, 1, "out_of_host_memory.py:11")
    assert (document["requested_bytes"], document["requested_is_rounded"]) == (1 << 48, False)
    assert document["buckets"]["parameters"] == found.last.parameters_bytes == (8 * 8 + 8) * 4
    assert document["device_total_bytes"] is None
    assert 20 << 20 < document["resident_bytes"] < document["limit_bytes"]
    assert document["limit_owner"] in ("its control group", "ulimit -v", "this machine")


@pytest.mark.slow
def test_neither_an_excepthook_of_the_program_nor_another_error_hides_it(tmp_path: Path) -> None:
    done = run([SCRIPTS / "own_excepthook.py"], tmp_path / "published")
    assert (done.code, done.errors) == (1, "own report: the batch is too large\n")
    (found,) = done.published
    document = found.documents["oom"]
    assert (document["fatal"], document["device"], document["source"]) == (True, CPU, "own_excepthook.py:19")
    assert document["requested_bytes"] == 1 << 48
    [process] = Watcher([tmp_path / "published"]).processes()
    assert (process.state, process.step) == (ProcessState.OUT_OF_MEMORY, 3)


def test_any_other_error_of_host_memory(box: BlackBox, written: list[dict[str, Any]]) -> None:
    box.allocation_failed(1, 12345, 80 * GIB, GIB)  # the program went on with a smaller batch
    box.process_failed(MemoryError(), None)
    assert [(document["device"], document["requested_bytes"]) for document in written] == [(1, 12345), (CPU, None)]


def test_what_the_allocator_says_is_exact(box: BlackBox, written: list[dict[str, Any]]) -> None:
    box.allocation_failed(1, 12345, 80 * GIB, GIB)
    (document,) = written
    assert document["requested_bytes"] == 12345
    assert not document["requested_is_rounded"]
    assert (document["device_total_bytes"], document["device_free_bytes"]) == (80 * GIB, GIB)
    assert document["buckets"] == {"parameters": 100, "gradients": 90, "optimizer": 200}
    assert document["source"].startswith("test_oom.py:")
    assert not document["fatal"]
    assert document["samples"] == [RECORD.as_json()]


def test_a_program_that_tries_again_and_again_is_not_slowed(
    box: BlackBox, written: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One document a second, with the newest request."""
    now_s = 1000.0
    monkeypatch.setattr("gpumem_tui.probe.oom.time.monotonic", lambda: now_s)
    for number in range(100):
        box.allocation_failed(1, number, 80 * GIB, GIB)
        now_s += 0.03125
    assert [document["requested_bytes"] for document in written] == [0, 32, 64, 96]


def test_the_error_that_follows_adds_its_message(box: BlackBox, written: list[dict[str, Any]]) -> None:
    box.allocation_failed(1, 12345, 80 * GIB, GIB)
    try:
        raise torch.OutOfMemoryError("Tried to allocate 12.06 KiB. GPU 1 has a total capacity of 80.00 GiB")
    except torch.OutOfMemoryError as error:
        box.process_failed(error, error.__traceback__)
    assert written[-1]["requested_bytes"] == 12345
    assert written[-1]["fatal"]
    assert written[-1]["message"].startswith("Tried to allocate 12.06 KiB")


def test_a_message_that_says_nothing_leaves_it_unknown(box: BlackBox, written: list[dict[str, Any]]) -> None:
    box.process_failed(torch.OutOfMemoryError("HIP error: " + "x" * 5000), None)
    assert written[0]["requested_bytes"] is None
    assert written[0]["device"] is None
    assert len(written[0]["message"]) == 2000


def test_other_errors_go_where_they_went(box: BlackBox, written: list[dict[str, Any]]) -> None:
    seen: list[BaseException] = []
    before = sys.excepthook
    sys.excepthook = lambda _kind, error, _trace: seen.append(error)
    try:
        box.arm()
        for error in (ValueError("a"), torch.OutOfMemoryError("b"), RuntimeError("no memory"), KeyboardInterrupt()):
            sys.excepthook(type(error), error, None)
    finally:
        sys.excepthook = before
    assert [str(error) for error in seen] == ["a", "b", "no memory", ""]
    assert [document["message"] for document in written] == ["b"]


def test_an_error_that_was_raised_from_an_out_of_memory(box: BlackBox, written: list[dict[str, Any]]) -> None:
    """However it is wrapped: named as the cause, raised while it was handled, or one of a group."""
    ran_out = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full.")
    while_handled, from_none = RuntimeError("a"), RuntimeError("b")
    while_handled.__context__ = ran_out
    from_none.__context__, from_none.__suppress_context__ = MemoryError(), True
    errors: list[BaseException] = [while_handled, from_none]
    try:
        raise ValueError("wrapped") from while_handled
    except ValueError as wrapped:
        errors.append(wrapped)
    if sys.version_info >= (3, 11):
        group = builtins.BaseExceptionGroup
        errors.append(group("tasks", [KeyError("c"), group("inner", [ran_out])]))
    for error in errors:
        box.process_failed(error, None)
    assert [document["device"] for document in written] == [0, CPU, *[0] * (len(errors) - 2)]
    assert all(document["fatal"] for document in written)


def test_a_chain_that_goes_round(box: BlackBox, written: list[dict[str, Any]]) -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    box.process_failed(first, None)
    assert written == []


def test_what_goes_wrong_takes_the_place_of_no_error_of_the_program() -> None:
    def broken() -> Known:
        raise RuntimeError("the probe's own")

    met: list[str] = []
    written: list[dict[str, Any]] = []
    errors: list[tuple[str, ...]] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except RuntimeError as error:
            met.append(str(error))

    box = BlackBox(
        broken, lambda document: written.append(as_written(document)), lambda *told: errors.append(told), guarded
    )
    box.allocation_failed(0, 12345, 80 * GIB, GIB)
    box.process_failed(torch.OutOfMemoryError("CUDA out of memory."), None)
    assert met == ["the probe's own"] * 2
    assert written == []
    assert errors == [("OutOfMemoryError", "CUDA out of memory.", "")], "the end of the program is reported anyway"


# CUDA, of which this replaces what torch calls


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A device that answers, whose allocator keeps no figures: one of the program's own."""

    def no_figures(_device: int) -> dict[str, Any]:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    properties = SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=15 * GIB, uuid=None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", no_figures)
    return monkeypatch


@pytest.mark.usefixtures("cuda")
def test_the_kind_of_device_is_written_down(box: BlackBox, written: list[dict[str, Any]]) -> None:
    box.process_failed(torch.OutOfMemoryError("CUDA out of memory. GPU 1 is full."), None)
    (document,) = written
    assert (document["device_name"], document["compute_capability"]) == ("Tesla T4", [7, 5])
    assert document["device_total_bytes"] == 15 * GIB
    assert document["allocated_bytes"] is None


@pytest.mark.parametrize("fraction", [None, 0.5, 1.0], ids=["older torch", "limit", "no limit"])
def test_the_limit_that_the_process_has_set_itself(
    fraction: float | None, box: BlackBox, cuda: pytest.MonkeyPatch, written: list[dict[str, Any]]
) -> None:
    """The allocator's observer gets the limit instead of the device's size, the message has both."""
    if fraction is None:
        cuda.delattr(torch.cuda, "get_per_process_memory_fraction", raising=False)
    else:
        cuda.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction, raising=False)
    is_limited = fraction != 1
    box.allocation_failed(1, 12345, 15 * GIB // 2 if is_limited else 15 * GIB, 9 * GIB)
    box.process_failed(torch.OutOfMemoryError("CUDA out of memory."), None)
    told = "7.50 GiB allowed; " if is_limited else ""
    text = f"GPU 0 has a total capacity of 15.00 GiB of which 9.00 GiB is free. {told}Of the allocated memory 7.00 GiB"
    fresh = BlackBox(lambda: STATE, lambda one: written.append(as_written(one)), lambda *_: None, lambda work: work())
    fresh.process_failed(torch.OutOfMemoryError(text), None)
    assert {document["device_total_bytes"] for document in written} == {15 * GIB}
    assert {document["device_limit_bytes"] for document in written} == {15 * GIB // 2 if is_limited else None}
    assert {document["device_free_bytes"] for document in written} == {9 * GIB}


def test_an_allocator_that_tells_nobody_does_not_spoil_the_start_of_cuda(
    box: BlackBox, cuda: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(observer: object) -> None:
        asked.append(observer)
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver.")

    cuda.setattr(torch._C, "_cuda_attach_out_of_memory_observer", refuse, raising=False)
    box.watch_allocator()
    box.watch_allocator()
    assert len(asked) == 1


def test_attached_while_cuda_starts_it_does_not_wait_for_itself(box: BlackBox, cuda: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    cuda.setattr(torch._C, "_cuda_attach_out_of_memory_observer", asked.append, raising=False)
    with torch.cuda._initialization_lock:  # as this thread holds it while CUDA starts
        box.watch_allocator()
    assert asked == []
    box.watch_allocator()
    assert len(asked) == 1
