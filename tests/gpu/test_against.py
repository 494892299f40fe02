"""A recording held against a trace: where they part, and what the difference sums to."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_tui.memory import MIB
from gpumem_tui.snapshots.read import read_snapshot
from gpumem_tui.snapshots.recording import RecordedRun, record, snapshot
from tests.cli.conftest import Program, program
from tests.gpu.against import AllocationRequest, Comparison, compare, main, report, requests_of
from tests.recordings.snapshots import DATA
from tests.scenes.snapshot import training
from tests.sharing import WarmPython
from tests.snapshots.files import written

__all__ = ["program"]


def requests(*sizes: int, place: str = "a.py:1") -> list[AllocationRequest]:
    """Allocations of these sizes; a negative size is a release."""
    return [AllocationRequest(size > 0, abs(size), event, place) for event, size in enumerate(sizes)]


def steps(*extra: int) -> list[int]:
    """Forty allocations of as many sizes and their releases, with others after the tenth."""
    sizes = [512 * number for number in range(1, 41)]
    return [*sizes[:10], *extra, *sizes[10:], *[-size for size in sizes]]


def only(comparison: Comparison) -> list[tuple[bool, int, int]]:
    return [(one.in_file, one.size_bytes, one.count) for one in comparison.differing]


def test_the_same_run() -> None:
    found = compare(requests(*steps()), requests(*steps()))
    assert (found.equal, found.reordered, found.first, found.differing) == (80, 0, None, ())


def test_what_only_the_file_has() -> None:
    found = compare(requests(*steps(4 * MIB, 4 * MIB, MIB)), requests(*steps()))
    assert found.equal == 80
    assert only(found) == [(True, 4 * MIB, 2), (True, MIB, 1)]
    assert (found.bytes_only(in_file=True), found.bytes_only(in_file=False)) == (9 * MIB, 0)
    assert found.first is not None
    file, traced = found.first
    assert file is not None
    assert (file.event, file.size_bytes, traced) == (10, 4 * MIB, None)


def test_what_only_the_trace_has_and_what_is_of_another_size() -> None:
    found = compare(requests(*steps(3 * MIB)), requests(*steps(5 * MIB)))
    assert only(found) == [(False, 5 * MIB, 1), (True, 3 * MIB, 1)]
    assert found.first is not None
    assert [one and one.size_bytes for one in found.first] == [3 * MIB, 5 * MIB]


def test_another_order_is_no_difference() -> None:
    found = compare(requests(*steps(MIB, 2 * MIB, -MIB)), requests(*steps(2 * MIB, -MIB, MIB)))
    assert found.differing == ()
    assert found.equal + found.reordered == 83
    assert found.first is not None


def test_a_recording_that_begins_in_the_middle() -> None:
    whole = steps() + steps(MIB)
    found = compare(requests(*whole[60:]), requests(*whole))
    assert (found.file_start, found.traced_start, found.equal, found.first) == (0, 60, 101, None)


def test_a_recording_with_more_before() -> None:
    found = compare(requests(*[7 * MIB, -7 * MIB] * 30, *steps()), requests(*steps()))
    assert (found.file_start, found.traced_start, found.equal, found.first) == (60, 0, 80, None)


def test_a_whole_recording_is_compared_from_its_first_event() -> None:
    found = compare(requests(7 * MIB, *steps()), requests(*steps()), is_whole=True)
    assert (found.file_start, found.equal, only(found)) == (0, 80, [(True, 7 * MIB, 1)])


def test_nothing_in_common() -> None:
    found = compare(requests(*[MIB] * 50), requests(*[2 * MIB] * 50))
    assert (found.aligned, found.equal) == (False, 0)
    assert not compare([], requests(MIB)).aligned


def test_places_on_both_sides(tmp_path: Path) -> None:
    def requests_of_run(run: RecordedRun) -> list[AllocationRequest]:
        return requests_of(read_snapshot(written(tmp_path, snapshot(run))), 0)

    comparison = compare(requests_of_run(record(training(growth=1))), requests_of_run(record(training())))
    assert comparison.first is not None
    file, traced = comparison.first
    assert file is not None
    assert traced is not None
    assert file.place == traced.place == "model.py:20 forward"
    assert {one.size_bytes for one in comparison.differing if not one.in_file} == {45 * MIB}
    assert list(report(comparison))[2].endswith("model.py:20 forward")


@pytest.mark.slow
def test_a_recording_of_a_real_gpu_against_the_program_it_was_made_of(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three training steps, written anew in `tests/recordings/decoder.py`, as an ordinary script that names CUDA."""
    (recorded,) = DATA.glob("NiuHuangxiaozi*__forward_and_backward_memory_snapshot_100.*")
    script, traced = tmp_path / "train.py", tmp_path / "traced.pickle"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(DATA.parent)!r})\nimport torch, decoder\n"
        "kept = decoder.forward_and_backward(100, torch.device('cuda'))\n"
    )
    options = ("--gpu", "sim:rtx-4090-24gb", "--snapshot", str(traced), "--quiet")
    done = program("predict", *options, "--", WarmPython.path(), str(script))
    assert done.code == 0, done.err
    assert main(recorded, traced) == 0
    said = capsys.readouterr().out
    assert "7,542 agree in order and size, 0 come in another order\nfirst difference: none" in said
    assert said.endswith("only in the file: 0 B\nallocations only in the trace: 0 B\n")
