"""`predict --snapshot`: the file is what PyTorch would have written, and its own viewers take it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.memory import MIB, Bucket
from gpumem_tui.simulator.allocator.replay import replay
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.simulator.allocator.timeline import TimelineRecorder
from gpumem_tui.snapshots.model import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP
from gpumem_tui.snapshots.recording import RecordedRun, record, write_snapshot
from gpumem_tui.snapshots.recording import snapshot as as_snapshot
from gpumem_tui.step import Phase, Site
from tests.cli.conftest import Program, program
from tests.search.traces import training
from tests.sharing import WarmPython

__all__ = ["program"]

SETTINGS = {
    "plain": AllocatorSettings(),
    "expandable": AllocatorSettings(expandable_segments=True),
    "unsplit": AllocatorSettings(max_split_size_bytes=32 * MIB),
}
WORKLOAD = """
import torch

def build(device):
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def make_batch(batch_size, device):
    return torch.randn(batch_size, 256, device=device)

def train_step(model, optimizer, batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SCRIPT = """
import torch
model = torch.nn.Linear(256, 512).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(64, 256).to("cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def step(activations_mib: int = 300) -> RecordedRun:
    """A training run on a device of 1 GiB."""
    sizes = {
        Bucket.PARAMETERS: 60 * MIB,
        Bucket.ACTIVATIONS: activations_mib * MIB,
        Bucket.TEMPORARY: 70 * MIB,
        Bucket.GRADIENTS: 60 * MIB,
        Bucket.OPTIMIZER: 120 * MIB,
    }
    return record(training(sizes, layers=7), 1024 * MIB)


def live_after(entries: list[dict[str, Any]]) -> tuple[dict[int, int], int]:
    """The live blocks after a history by address, and the most live bytes."""
    live: dict[int, int] = {}
    peak = 0
    for entry in entries:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
            peak = max(peak, sum(live.values()))
        elif entry["action"] == "free_requested":
            assert live.pop(entry["addr"]) == entry["size"]
    return live, peak


def snapshot(recording: RecordedRun) -> dict[str, Any]:
    """The contents of the file, to be looked into."""
    return as_snapshot(recording)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
class TestRecording:
    def test_history_and_segments_agree(self, settings: AllocatorSettings) -> None:
        timeline = training({Bucket.PARAMETERS: 60 * MIB, Bucket.ACTIVATIONS: 333 * MIB + 7}, layers=9)
        body = snapshot(record(timeline, settings=settings))
        live, peak = live_after(body["device_traces"][0])
        blocks = [block for segment in body["segments"] for block in segment["blocks"]]
        in_use = {block["address"]: block["requested_size"] for block in blocks if block["state"] != "inactive"}
        assert in_use == live
        assert peak == sum(timeline.sizes[abs(number) - 1] for number in [1, *range(2, 11)])

    def test_reserves_what_the_replay_reserves(self, settings: AllocatorSettings) -> None:
        timeline = training({Bucket.PARAMETERS: 60 * MIB, Bucket.ACTIVATIONS: 333 * MIB + 7}, layers=9)
        signs = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}
        reserved = peak = 0
        recording = record(timeline, settings=settings)
        for action, size_bytes in zip(recording.events.actions, recording.events.sizes, strict=True):
            reserved += signs.get(action, 0) * size_bytes
            peak = max(peak, reserved)
        assert peak == replay(timeline, settings=settings).peak_reserved_bytes
        assert reserved == sum(segment.size_bytes for segment in recording.segments)

    def test_segments_are_filled_by_their_blocks(self, settings: AllocatorSettings) -> None:
        timeline = training({Bucket.PARAMETERS: 60 * MIB, Bucket.ACTIVATIONS: 333 * MIB}, layers=9)
        for segment in snapshot(record(timeline, settings=settings))["segments"]:
            address = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == address
                address += block["size"]
            assert address == segment["address"] + segment["total_size"]


def test_ends_where_memory_ran_out() -> None:
    recording = step(activations_mib=2000)
    last = snapshot(recording)["device_traces"][0][-1]
    assert not recording.fits
    assert last["action"] == "oom"
    reserved = sum(segment.size_bytes for segment in recording.segments)
    assert last["device_free"] == 1024 * MIB - reserved
    assert last["size"] > last["device_free"]


def test_what_ends_with_the_program_is_no_part_of_it() -> None:
    recorder = TimelineRecorder()
    recorder.mark(0, Phase.BUILD)
    parameters = recorder.allocate(MIB, bucket=Bucket.PARAMETERS)
    recorder.mark(1, Phase.FORWARD)
    activation = recorder.allocate(MIB)
    recorder.release(activation)
    recorder.release(parameters)
    live, _ = live_after(snapshot(record(recorder.finish()))["device_traces"][0])
    assert list(live.values()) == [MIB]


def test_the_program_empties_the_cache() -> None:
    recorder = TimelineRecorder()
    recorder.mark(1, Phase.FORWARD)
    kept = recorder.allocate(30 * MIB)
    recorder.release(recorder.allocate(40 * MIB))
    recorder.empty_cache()
    recorder.release(recorder.allocate(40 * MIB))
    recording = record(recorder.finish())
    segments = [action for action in recording.events.actions if action in (SEGMENT_ALLOC, SEGMENT_FREE)]
    assert segments == [SEGMENT_ALLOC, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_ALLOC]
    assert kept == 1


def test_addresses_are_exact_in_a_browser() -> None:
    """JavaScript's numbers are, up to 2**53."""
    assert all(0 < address < 1 << 53 for address in step().events.addresses)


def test_places_and_categories() -> None:
    recorder = TimelineRecorder()
    recorder.mark(1, Phase.FORWARD)
    recorder.allocate(MIB, site=Site("aten.addmm", "blocks.0", "model.py:12", "forward"), bucket=Bucket.ACTIVATIONS)
    body = snapshot(record(recorder.finish()))
    made = body["device_traces"][0][-1]
    frames = [
        {"filename": "", "line": 0, "name": "aten.addmm"},
        {"filename": "model.py", "line": 12, "name": "forward"},
    ]
    assert made["frames"] == frames
    assert (made["category"], made["user_metadata"]) == ("activations", "blocks.0")
    assert body["segments"][0]["blocks"][0]["frames"] == frames
    assert [note["name"] for note in body["external_annotations"]] == ["step 1 forward"] * 2


def test_an_older_file_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "run.pickle"
    path.write_text("older")
    write_snapshot(step(), path)
    with path.open("rb") as file:
        assert set(pickle.load(file)) >= {"segments", "device_traces", "allocator_settings"}
    assert list(tmp_path.iterdir()) == [path]


def accepted(path: Path) -> dict[str, Any]:
    """The snapshot in a file, once PyTorch's own viewers have taken it."""
    from torch.cuda import _memory_viz

    with path.open("rb") as file:
        body: dict[str, Any] = pickle.load(file)
    assert f"{len(body['device_traces'][0])} entries" in _memory_viz.trace(body)
    assert f"segments: {len(body['segments'])}" in _memory_viz.segsum(body)
    for plot in (_memory_viz.trace_plot(body), _memory_viz.trace_plot(body, plot_segments=True)):
        assert "snapshot.pickle" in plot
    assert "snapshot.pickle" in _memory_viz.segment_plot(body)
    return body


class TestProgram:
    @pytest.mark.slow
    def test_a_step_of_a_file(self, program: Program, tmp_path: Path) -> None:
        (tmp_path / "work.py").write_text(WORKLOAD)
        path = tmp_path / "file.pickle"
        options = ("--workload", str(tmp_path / "work.py"), "--batch-size", "32", "--gpu", "sim:t4-16gb", "--json")
        done = program("predict", *options, "--snapshot", str(path))
        assert done.code == 0, done.err
        body = accepted(path)
        entries = body["device_traces"][0]
        made = [entry for entry in entries if entry["action"] == "alloc"]
        parameters = sum(entry["size"] for entry in made if entry["category"] == "parameters")
        assert parameters == 4 * (2 * 256 * 512 + 512 + 256)
        rounded = [{**entry, "size": -(-entry["size"] // 512) * 512} for entry in entries if "addr" in entry]
        assert live_after(rounded)[1] == json.loads(done.out)["traced"]["peak_allocated_bytes"]
        frame = next(frame for entry in made for frame in entry["frames"] if frame["filename"] == "work.py")
        assert (frame["line"], frame["name"]) == (5, "build")

    def test_a_command(self, program: Program, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(SCRIPT)
        path = tmp_path / "command.pickle"
        options = ("--gpu", "sim:t4-16gb", "--quiet", "--snapshot", str(path))
        done = program("predict", *options, "--", WarmPython.path(), str(tmp_path / "train.py"))
        assert done.code == 0, done.err
        made = [entry for entry in accepted(path)["device_traces"][0] if entry["action"] == "alloc"]
        data = [entry["size"] for entry in made if entry["category"] == "batch_data"]
        assert data == [4 * 64 * 256] * 3
        assert "gpumem-tui look" in done.err

    def test_a_model_that_does_not_fit(self, program: Program, tmp_path: Path) -> None:
        path = tmp_path / "model.pickle"
        options = ("--model", "mlp", "--batch-size", "4096", "--gpu", "sim:t4-16gb", "--limit", "64MiB")
        done = program("predict", *options, "--snapshot", str(path))
        assert done.code == 0, done.err
        assert accepted(path)["device_traces"][0][-1]["action"] == "oom"
        assert "no longer fit" in done.err

    @pytest.mark.parametrize("name", ["", "missing/run.pickle"])
    def test_a_place_where_nothing_can_be_written(self, program: Program, tmp_path: Path, name: str) -> None:
        done = program("predict", "--batch-size", "1", "--snapshot", str(tmp_path / name))
        assert done.code == 2
        assert done.err.startswith("gpumem-tui: --snapshot ")
        assert len(done.err.splitlines()) == 1
