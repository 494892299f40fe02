"""The contents of a snapshot: memory over time, the parts of the peak, the layout of free memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.simulator.allocator.replay import replay
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.snapshots.analysis import Analysis, Part, analyse
from gpumem_tui.snapshots.model import MemorySnapshot
from gpumem_tui.snapshots.read import read_snapshot
from gpumem_tui.snapshots.recording import record
from gpumem_tui.snapshots.recording import snapshot as as_snapshot
from gpumem_tui.snapshots.report import segment_cells, snapshot_lines
from gpumem_tui.snapshots.states import first_state, last_state
from tests.search.traces import training
from tests.snapshots import files
from tests.snapshots.files import written


def opened(folder: Path, body: dict[str, Any]) -> tuple[MemorySnapshot, Analysis]:
    """A snapshot that was written and read, and its device 0."""
    found = read_snapshot(written(folder, body))
    return found, analyse(found, 0)


def named(parts: tuple[Part, ...]) -> dict[str, int]:
    """MiB by name."""
    return {part.name: part.size_bytes // MIB for part in parts}


def test_the_peak_is_what_was_held_then(tmp_path: Path) -> None:
    _, analysis = opened(tmp_path, files.training())
    assert analysis.peak_allocated_bytes == 100 * MIB
    assert analysis.peak_event == 1
    assert analysis.peak_reserved_bytes == 120 * MIB
    assert named(analysis.by_category) == {"model": 40, "forward": 30, "backward": 30}
    assert named(analysis.by_line) == {
        "ada/train.py:4 <module>": 40,
        "ada/model.py:12 forward": 30,
        "in autograd's thread": 30,
    }
    assert analysis.by_stack[0].frames[-1] == "/home/ada/train.py:4 <module>"
    assert analysis.categories_from == "the stacks"
    assert analysis.duration_s == 0.5


def test_the_peak_of_each_stage_of_the_run(tmp_path: Path) -> None:
    """By the functions that programs and libraries have by these names; a file of training alone has none."""
    body = files.training()
    _, plain = opened(tmp_path, body)
    assert plain.stages == ()
    frames = [{"filename": "/home/ada/train.py", "line": 9, "name": "evaluate"}]
    body["device_traces"][0][1]["frames"] = [*body["device_traces"][0][1].get("frames", ()), *frames]
    snapshot, analysis = opened(tmp_path, body)
    peaks = {name: (size // MIB, event) for name, size, event in analysis.stages}
    assert peaks["evaluate"] == (100, 1)
    assert peaks["train"][0] < 100
    (line,) = (one for one in snapshot_lines(snapshot, [analysis]) if "evaluate  " in one)
    assert line.endswith(f"{'#' * 24} at event 1, the highest")


def test_the_timeline_begins_before_the_first_event_and_sums(tmp_path: Path) -> None:
    _, analysis = opened(tmp_path, files.training())
    assert [point.allocated_bytes // MIB for point in analysis.timeline] == [40, 70, 100, 70, 70, 70, 78, 48, 48]
    assert [point.reserved_bytes // MIB for point in analysis.timeline] == [100] * 5 + [120] * 4
    for point in analysis.timeline:
        assert sum(point.by_category) == point.allocated_bytes
        assert len(point.by_category) == len(analysis.categories)
    assert analysis.difference_bytes == 0


_ALLOCATING = (
    "torch::unwind::unwind()",
    "torch::CapturedTraceback::gather(bool, bool, bool)",
    "torch::cuda::(anonymous namespace)::gather_with_cpp()",
    "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(unsigned long, CUstream_st*)",
    "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate(unsigned long)",
    "at::detail::empty_cuda(c10::ArrayRef<long>, c10::TensorOptions const&)",
)
_ENGINE = ("torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)", "clone")


@pytest.mark.parametrize(
    ("functions", "line", "category"),
    [
        (
            [
                "at::_ops::bmm::call(at::Tensor const&, at::Tensor const&)",
                "torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)",
                *_ENGINE,
            ],
            "backward of bmm",
            "backward",
        ),
        (
            [
                "at::_ops::new_empty_strided::call(at::Tensor const&, c10::ArrayRef<c10::SymInt>)",
                "torch::autograd::utils::clone_obey_contract(at::Tensor const&, at::Tensor const&)",
                "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)",
                *_ENGINE,
            ],
            "backward: gradients that are kept",
            "backward",
        ),
        (
            ["torch::autograd::generated::NativeLayerNormBackward0::apply(std::vector<at::Tensor>&&)", *_ENGINE],
            "backward of native_layer_norm",
            "backward",
        ),
        (list(_ENGINE), "in autograd's thread", "backward"),
        ([], "in autograd's thread", "backward"),
        (["at::_ops::empty_strided::call(int)", "at::_ops::mul_Tensor::call(int)", "main"], "mul_Tensor", "elsewhere"),
        (["my_extension::run()", "main"], "my_extension::run()", "elsewhere"),
    ],
)
def test_what_pythons_frames_do_not_tell(tmp_path: Path, functions: list[str], line: str, category: str) -> None:
    """Frames as PyTorch 2.4 to 2.7 wrote them with `stacks="all"`; none where only Python's were asked for."""
    frames = [{"filename": "??", "line": 0, "name": name} for name in (*_ALLOCATING, *functions) if functions]
    body = files.training()
    body["device_traces"][0][1]["frames"] = frames
    _, analysis = opened(tmp_path, body)
    part = next(part for part in analysis.by_line if part.name == line)
    assert (part.size_bytes, part.categories) == (30 * MIB, ((category, 30 * MIB),))
    assert all("unwind" not in frame and "Alloc" not in frame for one in analysis.by_stack for frame in one.frames)


@pytest.mark.parametrize(("state", "said"), [("inactive", "8.0 MiB more"), ("active_allocated", "")])
def test_a_history_that_is_not_whole_is_said(tmp_path: Path, state: str, said: str) -> None:
    """The optimizer's state is gone at the end, and no event tells so."""
    body = files.training()
    body["segments"][1]["blocks"][0]["state"] = state
    _, analysis = opened(tmp_path, body)
    assert said in " ".join(analysis.notes)
    assert bool(analysis.notes) == bool(said)


def test_segments_as_they_were_at_the_end(tmp_path: Path) -> None:
    _, analysis = opened(tmp_path, files.training())
    assert (analysis.stranded_bytes, analysis.returnable_bytes) == (72 * MIB, 0)
    assert analysis.largest_free_bytes == 60 * MIB
    assert [segment_cells(segment, 10, "#+.") for segment in analysis.segments] == ["####......", "####......"]


def test_a_request_that_no_single_piece_could_serve(tmp_path: Path) -> None:
    _, analysis = opened(tmp_path, files.fragmented())
    (oom,) = analysis.ooms
    assert oom.reason == "fragmented"
    assert (oom.wanted_bytes, oom.device_free_bytes) == (150 * MIB, 50 * MIB)
    assert (oom.cached_bytes, oom.usable_bytes) == (360 * MIB, 360 * MIB)
    assert (oom.largest_free_bytes, oom.pieces) == (45 * MIB, 8)
    assert oom.line == "ada/model.py:12 forward"
    assert [(pin.free_bytes, pin.blocks, pin.lines) for pin in oom.pins] == [
        (90 * MIB, 1, ("ada/model.py:12 forward",))
    ] * 4
    said = " ".join(oom.explanation)
    assert "enough, but not in one piece" in said
    assert "8 pieces, the largest of 45.0 MiB" in said
    assert "expandable_segments:True" in said


def test_a_request_beyond_all_that_was_free(tmp_path: Path) -> None:
    body = files.fragmented()
    body["device_traces"][0][-1] |= {"size": 500 * MIB}
    _, analysis = opened(tmp_path, body)
    assert analysis.ooms[0].reason == "full"
    assert "90.0 MiB too little" in analysis.ooms[0].explanation[0]


def test_a_request_that_a_limit_of_the_process_stopped(tmp_path: Path) -> None:
    body = files.fragmented()
    body["device_traces"][0][-1] |= {"device_free": 400 * MIB}
    _, analysis = opened(tmp_path, body)
    assert analysis.ooms[0].reason == "limited"


def test_free_memory_of_other_streams_is_no_use(tmp_path: Path) -> None:
    body = files.fragmented()
    for segment in body["segments"][1:]:
        segment["stream"] = 7
    _, analysis = opened(tmp_path, body)
    oom = analysis.ooms[0]
    assert (oom.cached_bytes, oom.usable_bytes) == (360 * MIB, 90 * MIB)
    assert "other streams" in " ".join(oom.explanation)


def test_free_memory_of_a_private_pool_is_no_use(tmp_path: Path) -> None:
    """As PyTorch writes the pool of a captured CUDA graph: an id of its own, into which others never look."""
    body = files.fragmented()
    body["segments"][0]["segment_pool_id"] = (0, 1)
    _, analysis = opened(tmp_path, body)
    oom = analysis.ooms[0]
    assert (oom.cached_bytes, oom.usable_bytes, oom.pieces) == (360 * MIB, 270 * MIB, 6)


@pytest.mark.parametrize(("device_free", "reason"), [(150 * MIB, "limited"), (150 * MIB - 1, "fragmented")])
def test_the_driver_had_just_enough(device_free: int, reason: str, tmp_path: Path) -> None:
    body = files.fragmented()
    body["device_traces"][0][-1] |= {"device_free": device_free}
    _, analysis = opened(tmp_path, body)
    assert (analysis.ooms[0].segment_bytes, analysis.ooms[0].reason) == (150 * MIB, reason)


def test_expandable_segments_are_not_advised_twice(tmp_path: Path) -> None:
    body = files.fragmented()
    body["allocator_settings"]["expandable_segments"] = True
    _, analysis = opened(tmp_path, body)
    assert "expandable_segments" not in " ".join(analysis.ooms[0].explanation)


SETTINGS = {
    "plain": AllocatorSettings(),
    "expandable": AllocatorSettings(expandable_segments=True),
    "unsplit": AllocatorSettings(max_split_size_bytes=32 * MIB),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
class TestSimulated:
    """A file that was written from a trace shows what the trace reports."""

    def test_peaks_and_buckets_are_those_of_the_replay(self, tmp_path: Path, settings: AllocatorSettings) -> None:
        sizes = {
            Bucket.PARAMETERS: 60 * MIB,
            Bucket.ACTIVATIONS: 333 * MIB,
            Bucket.TEMPORARY: 70 * MIB,
            Bucket.GRADIENTS: 61 * MIB,
            Bucket.OPTIMIZER: 120 * MIB,
        }
        timeline = training(sizes, layers=9)
        _, analysis = opened(tmp_path, as_snapshot(record(timeline, settings=settings)))
        expected = replay(timeline, settings=settings)
        assert analysis.peak_allocated_bytes == expected.peak_allocated_bytes
        assert analysis.peak_reserved_bytes == expected.peak_reserved_bytes
        assert analysis.difference_bytes == 0
        assert analysis.categories_from == "the file"
        found = {part.name: part.size_bytes for part in analysis.by_category}
        slack = found.get("activations", 0) - expected.breakdown[Bucket.ACTIVATIONS]
        assert 0 <= slack <= expected.breakdown[Bucket.OTHER]
        assert found["parameters"] == 60 * MIB
        assert ("step 1 forward" in dict(map(reversed, analysis.marks))) is True  # type: ignore[arg-type]

    def test_the_start_follows_from_the_end(self, tmp_path: Path, settings: AllocatorSettings) -> None:
        """A file that begins in the middle: undone and done again, every block and every segment is in its place."""
        timeline = training({Bucket.PARAMETERS: 60 * MIB, Bucket.ACTIVATIONS: 333 * MIB}, layers=9)
        body: dict[str, Any] = as_snapshot(record(timeline, settings=settings))
        for kept in (3, 17, 40):
            cut = {**body, "device_traces": [body["device_traces"][0][-kept:]]}
            found, analysis = opened(tmp_path, cut)
            state = first_state(found, 0)
            for _ in range(len(found.history(0))):
                state.step()
            held, memory = last_state(found, 0)
            assert {at: block.size_bytes for at, block in state.held.items()} == {
                at: block.size_bytes for at, block in held.items()
            }
            assert {at: one.size_bytes for at, one in state.memory.items()} == {
                at: one.size_bytes for at, one in memory.items()
            }
            assert analysis.difference_bytes == 0


_RECORDINGS = sorted((Path(__file__).parents[1] / "recordings" / "data").glob("*.json.gz"))


@pytest.mark.skipif(not _RECORDINGS, reason="the recordings of real GPUs are not here")
@pytest.mark.parametrize("path", _RECORDINGS, ids=lambda path: path.name[:60])
def test_recordings_of_real_gpus_end_where_they_say(path: Path) -> None:
    """The blocks, their slack and the segments that follow from the events are those that PyTorch wrote at the end."""
    found = read_snapshot(path)
    for device in found.devices:
        state = first_state(found, device)
        for _ in range(len(found.history(device))):
            state.step()
        blocks = {
            block.address: (block.size_bytes, block.is_free)
            for segment in found.segments
            if segment.device == device
            for block in segment.blocks
        }
        free = {address: (size_bytes, True) for address, size_bytes, _ in state.free_ranges()}
        assert {at: (block.size_bytes, False) for at, block in state.held.items()} | free == blocks
        assert analyse(found, device).difference_bytes == 0


# Files that lack something


def _second_gpu_only() -> dict[str, Any]:
    body = files.training()
    marker = files.event("snapshot", 0, 0)
    segments = [{**one, "device": 1} for one in body["segments"]]
    return {**body, "device_traces": [[marker], body["device_traces"][0]], "segments": segments}


def _without_history() -> dict[str, Any]:
    return files.body([], [files.segment(files.BASE, [files.block(files.BASE, 64 * MIB, "active_allocated")])])


def _without_stacks() -> dict[str, Any]:
    return files.body([files.event("alloc", files.BASE, 64 * MIB)], _without_history()["segments"])


def _state_only() -> dict[str, Any]:
    return files.body([files.event("snapshot", 0, 0)], files.training()["segments"])


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (files.body([], []), "The file holds no memory and no events: call torch.cuda.memory._record_memory_history()"),
        (
            _without_history(),
            "64.0 MiB allocated when the file was written; 64.0 MiB reserved; no history was recorded, so the peak and "
            "the source lines are unknown: call torch.cuda.memory._record_memory_history() before the model is made",
        ),
        (
            _state_only(),
            "48.0 MiB allocated when the file was written, most of it model (40.0 MiB); 0.12 GiB reserved; no events "
            "were recorded (enabled='state'), so the peak is unknown: "
            "call torch.cuda.memory._record_memory_history(enabled='all')",
        ),
        (_without_stacks(), "Peak 64.0 MiB allocated, most of it no stack (64.0 MiB); 64.0 MiB reserved"),
    ],
    ids=["nothing", "no history", "state only", "no stacks"],
)
def test_what_was_not_recorded_is_named_with_the_call_that_records_it(
    tmp_path: Path, body: dict[str, Any], answer: str
) -> None:
    snapshot, analysis = opened(tmp_path, body)
    lines = list(snapshot_lines(snapshot, [analysis]))
    assert lines[0].startswith(answer)
    assert sum("_record_memory_history" in line for line in lines) == 1


def test_a_gpu_that_has_nothing_is_no_device_of_the_file(tmp_path: Path) -> None:
    found = read_snapshot(written(tmp_path, _second_gpu_only()))
    assert (found.devices, found.unused_devices) == ([1], [0])
    analysis = analyse(found, 1)
    assert analysis.peak_allocated_bytes == 100 * MIB
    assert analysis.notes == ("nothing of cuda:0 is in the file: no memory held, no events",)


_WINDOWS = "C:\\Users\\ada\\AppData\\Local\\Programs\\Python\\Python311\\Lib"


@pytest.mark.parametrize(
    ("innermost", "line", "category"),
    [
        (f"{_WINDOWS}\\site-packages\\torch\\nn\\modules\\module.py", "proj/net.py:12 forward", "forward"),
        (f"{_WINDOWS}\\site-packages\\torch\\optim\\adamw.py", "proj/net.py:12 forward", "optimizer"),
        (f"{_WINDOWS}\\threading.py", "proj/net.py:12 forward", "elsewhere"),
        ("C:\\tools\\miniconda3\\envs\\a\\Lib\\contextlib.py", "proj/net.py:12 forward", "elsewhere"),
        ("D:\\proj\\Lib\\blocks.py", "Lib/blocks.py:5 _call_impl", "elsewhere"),
        ("\\\\server\\share\\blocks.py", "share/blocks.py:5 _call_impl", "elsewhere"),
        ("src\\blocks.py", "src/blocks.py:5 _call_impl", "elsewhere"),
        ("/home/a\\b/blocks.py", "a\\b/blocks.py:5 _call_impl", "elsewhere"),
    ],
)
def test_paths_of_windows(tmp_path: Path, innermost: str, line: str, category: str) -> None:
    frames = [
        {"filename": innermost, "line": 5, "name": "_call_impl"},
        {"filename": "D:\\proj\\net.py", "line": 12, "name": "forward"},
        {"filename": f"{_WINDOWS}\\runpy.py", "line": 86, "name": "_run_code"},
    ]
    body = files.training()
    body["device_traces"][0][1]["frames"] = frames
    _, analysis = opened(tmp_path, body)
    part = next(part for part in analysis.by_line if part.name == line)
    assert part.categories == ((category, 30 * MIB),)
