"""A recorded allocator history, replayed: the model must take the same segments and give the same addresses.

The history is one that the simulated GPU made, through the file format, and damaged ones, so that the check fails
where it should. `python -m tests.gpu.record` makes recordings; tests/recordings/test_steps.py holds those of GPUs.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import MIB
from gpumem_tui.simulator.allocator.blocks import Block
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import TimelineRecorder
from tests.gpu import record, sides
from tests.gpu.compare import first_difference, report
from tests.gpu.history import History, HistoryError, pack, unpack, unpack_timeline
from tests.gpu.largest import FITS, OUT_OF_MEMORY, find
from tests.gpu.matrix import configurations, edges
from tests.gpu.placement import Differs, HistoryKeepingAllocator, check
from tests.published.measurements import RecordedEdge, RecordedRun, load_recordings
from tests.sharing import made_once
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.slow

_REHEARSED = "mlp-2048-b64-fp32-adamw|largest-mlp"


def _holds(run: RecordedRun) -> None:
    """The check of one recorded run: placement, and the peaks that the allocator itself counted."""
    placed = check(unpack(run.history), AllocatorSettings.parse(run.machine.facts.get("alloc_conf", "")))
    for figure in ("requested_bytes", "allocated_bytes", "reserved_bytes"):
        assert getattr(placed, figure) == max(getattr(phase, figure) for phase in run.real.phases)


def _record(folder: Path) -> str:
    """Record what is left to be; in a process of its own, as it forks: autograd cannot be used after that."""
    command = [sys.executable, "-m", "tests.gpu.record", "--rehearse", "--out", str(folder), "--only", _REHEARSED]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout


def _without_time(folder: Path) -> str:
    """The line if there is no time for any run."""
    printed = StringIO()
    with redirect_stdout(printed):
        assert record.main(["--rehearse", "--out", str(folder), "--only", _REHEARSED, "--budget", "0"]) == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a largest batch that the recorder made without a GPU."""

    def made() -> dict[str, bytes]:
        _record(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    folder = tmp_path_factory.mktemp("recordings")
    for name, content in made_once(tmp_path_factory, "rehearsed", made).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def run(rehearsed: Path) -> RecordedRun:
    return next(found for found in load_recordings(rehearsed) if isinstance(found, RecordedRun))


def test_the_model_places_every_rehearsed_block_where_the_simulated_gpu_did(run: RecordedRun) -> None:
    """As it does those of the GPUs' recordings that are kept (tests/recordings/test_steps.py)."""
    assert not run.real.error
    assert not run.simulated.error
    _holds(run)


class TestRehearsedRecording:
    def test_is_never_taken_for_a_measurement(self, run: RecordedRun) -> None:
        assert run.machine.origin == "rehearsed"
        assert "simulated" in run.machine.gpu.title

    def test_has_every_phase_of_every_step(self, run: RecordedRun) -> None:
        phases = [(phase.step, phase.phase) for phase in run.real.phases]
        steps = ("batch", "forward", "backward", "optimizer")
        assert phases == [(0, "build"), *((step, phase) for step in (1, 2, 3) for phase in steps)]

    def test_buckets_sum_to_the_peak(self, run: RecordedRun) -> None:
        assert run.real.buckets is not None
        assert sum(run.real.buckets.values()) == run.real.peak_bytes("allocated")

    def test_device_used_is_reserved_and_context(self, run: RecordedRun) -> None:
        assert run.real.peak_bytes("device_used") == run.real.peak_bytes("reserved") + run.real.context_end_bytes

    def test_comparison_finds_no_difference(self, run: RecordedRun) -> None:
        assert list(report(run))[-1] == "first difference: none"

    def test_comparison_names_the_first_event_that_differs(self, run: RecordedRun) -> None:
        real = unpack(run.history).timeline
        sizes = list(real.sizes)
        forward = next(mark.event for mark in real.marks if (mark.step, mark.phase.value) == (2, "forward"))
        event, number = next((e, n) for e, n in enumerate(real.events) if e >= forward and n > 0)
        sizes[number - 1] += 512
        difference = first_difference(replace(real, sizes=tuple(sizes)), unpack_timeline(run.simulated_history))
        assert difference.startswith(f"event {event} (step 2, forward): real allocates {sizes[number - 1]:,} B")
        assert "aten." in difference

    def test_largest_batch_is_the_last_that_ran(self, rehearsed: Path) -> None:
        edge = next(found for found in load_recordings(rehearsed) if isinstance(found, RecordedEdge))
        assert edge.real is not None
        assert edge.real == edge.simulated
        assert (edge.tried[str(edge.real)], edge.tried[str(edge.real + 1)]) == (FITS, OUT_OF_MEMORY)

    def test_recording_again_skips_what_is_there_and_mends_a_line_cut_off(self, rehearsed: Path) -> None:
        path = next(rehearsed.glob("*.jsonl"))
        run, edge = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(edge + run[:-100])
        assert [found.id for found in load_recordings(rehearsed)] == ["largest-mlp-2048-fp32-adamw-1gib"]
        assert "1 of 2 runs to record" in _record(rehearsed)
        assert len(load_recordings(rehearsed)) == 2

    def test_recording_again_repeats_what_came_to_no_answer(self, rehearsed: Path, tmp_path: Path) -> None:
        path = next(rehearsed.glob("*.jsonl"))
        found = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
        for recorded in found:
            recorded["real"] = {"error": "still running after 3 s: killed"} if recorded["event"] == "run" else None
        (tmp_path / path.name).write_bytes(b"".join(msgspec.json.encode(recorded) + b"\n" for recorded in found))
        assert "2 of 2 runs to record" in _without_time(tmp_path)

    def test_figures_are_left_before_the_history_is_taken_apart(self) -> None:
        configuration = next(run for run in configurations() if run.id == "mlp-2048-b64-fp32-adamw")
        bodies: list[bytes] = []
        sides.rehearsed(configuration, find_gpu("h200-141gb"), bodies.append)
        first, last = (msgspec.json.decode(body, type=sides.Sided) for body in bodies)
        assert first.side.phases == last.side.phases
        assert (first.history, set(first.side.unavailable)) == ("", {"buckets", "history"})
        assert last.history
        assert not last.side.unavailable

    def test_stops_at_its_time_budget(self, tmp_path: Path) -> None:
        assert "2 runs left" in _without_time(tmp_path)
        assert not load_recordings(tmp_path)


def test_a_folder_that_cannot_be_made_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert record.main(["--rehearse", "--out", str(tmp_path / "file" / "folder"), "--only", _REHEARSED]) == 2
    assert capsys.readouterr().err == f"--out {tmp_path}/file/folder: Not a directory\n"


class TestDamagedHistory:
    def test_a_segment_of_another_size(self, run: RecordedRun) -> None:
        history = unpack(run.history)
        segments = list(history.segments)
        segments[3] = replace(segments[3], size_bytes=segments[3].size_bytes + 2 * MIB)
        with pytest.raises(Differs, match="in the model"):
            check(replace(history, segments=tuple(segments)))

    def test_a_segment_that_is_missing(self, run: RecordedRun) -> None:
        history = unpack(run.history)
        with pytest.raises(Differs, match="not recorded"):
            check(replace(history, segments=history.segments[:-1]))

    def test_a_segment_too_many(self, run: RecordedRun) -> None:
        history = unpack(run.history)
        last = history.timeline.events.index(len(history.timeline.sizes))
        extra = replace(history.segments[-1], event=last)
        with pytest.raises(Differs, match="did not take"):
            check(replace(history, segments=(*history.segments, extra)))

    def test_a_block_elsewhere(self, run: RecordedRun) -> None:
        history = unpack(run.history)
        addresses = (*history.addresses[:-1], history.addresses[-1] + 512)
        with pytest.raises(Differs, match="in the model at"):
            check(replace(history, addresses=addresses))

    def test_a_request_of_another_size(self, run: RecordedRun) -> None:
        history = unpack(run.history)
        sizes = list(history.timeline.sizes)
        sizes[2] += 64 * MIB
        with pytest.raises(Differs):
            check(replace(history, timeline=replace(history.timeline, sizes=tuple(sizes))))

    def test_a_peak_that_the_replay_does_not_reach(self, run: RecordedRun) -> None:
        phases = [msgspec.structs.replace(p, reserved_bytes=p.reserved_bytes + 2 * MIB) for p in run.real.phases]
        real = msgspec.structs.replace(run.real, phases=tuple(phases))
        with pytest.raises(AssertionError):
            _holds(msgspec.structs.replace(run, real=real))

    @pytest.mark.parametrize("text", ["", "nonsense", "@" * 40])
    def test_text_that_is_no_history(self, text: str) -> None:
        with pytest.raises(HistoryError, match="damaged"):
            unpack(text)


def test_expandable_segments_are_refused() -> None:
    entries = [{"action": "segment_map", "addr": 0, "size": 2 * MIB, "stream": 0}]
    with pytest.raises(HistoryError, match="expandable"):
        History.of(entries, TimelineRecorder().finish())


_SIZES = st.sampled_from([1, 512, 4_000, MIB, MIB + 1, 7 * MIB, 11 * MIB, 40 * MIB])
_MOVES = st.lists(st.tuples(st.sampled_from(["malloc", "free", "empty"]), _SIZES, st.integers(0, 1)), max_size=60)


@given(_MOVES, st.integers(0, 1 << 30))
def test_any_history_survives_its_file_format_and_its_replay(moves: list[tuple[str, int, int]], choice: int) -> None:
    """Two streams, frees in any order, caches emptied: what the allocator keeps of itself is what its replay does."""
    allocator = HistoryKeepingAllocator(1 << 50)
    recorder = TimelineRecorder()
    live: list[tuple[int, Block]] = []
    for action, size_bytes, stream in moves:
        if action == "malloc":
            live.append((recorder.allocate(size_bytes), allocator.malloc(size_bytes, stream)))
        elif action == "free" and live:
            number, block = live.pop(choice % len(live))
            allocator.free(block)
            recorder.release(number)
        elif action == "empty":
            allocator.empty_cache()
    history = History.of(allocator.entries, recorder.finish())
    assert unpack(pack(history)) == history
    placed = check(history)
    stats = allocator.stats
    assert (placed.allocated_bytes, placed.reserved_bytes) == (stats.peak_allocated_bytes, stats.peak_reserved_bytes)


@pytest.mark.parametrize(
    ("largest", "start", "trials"),
    [(5, 5, 2), (5, 4, 4), (5, 6, 2), (5, 7, 4), (0, 1, 1), (0, 2, 2), (50, 5, 12), (5, 50, 11), (73, 83, 8)],
)
def test_edge_is_found_from_near_it(largest: int, start: int, trials: int) -> None:
    found = find(start, lambda batch_size: FITS if batch_size <= largest else OUT_OF_MEMORY)
    assert found.batch_size == largest
    assert len(found.tried) == trials
    assert found.tried[largest + 1] == OUT_OF_MEMORY


def test_edge_that_is_far_away_is_given_up() -> None:
    assert find(5, lambda batch_size: FITS).batch_size is None


def test_an_error_ends_the_search_without_an_answer() -> None:
    found = find(3, lambda batch_size: "RuntimeError: of another kind")
    assert (found.batch_size, len(found.tried)) == (None, 1)


def test_matrix_is_broad_and_its_ids_unique() -> None:
    runs = configurations()
    recipes = [run.workload.recipe for run in runs]
    assert len(runs) >= 60
    ids = [run.id for run in runs] + [edge.id for edge in edges()]
    assert len(set(ids)) == len(ids)
    assert {recipe.precision for recipe in recipes} == {"fp32", "amp-bf16", "amp-fp16", "bf16"}
    assert {recipe.recompute for recipe in recipes} == {"none", "selective", "full"}
    assert {recipe.attention for recipe in recipes} == {"auto", "flash", "efficient", "math"}
    assert {run.workload.shape.family for run in runs if run.workload.shape is not None} == {
        "gpt2",
        "llama",
        "bert",
        "vit",
        "resnet",
        "mlp",
    }
