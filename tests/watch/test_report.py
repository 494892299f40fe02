"""Samples and looks as JSON and as lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpumem_tui.probe.wire import KeptPlace, LookAnswer
from gpumem_tui.report.objects import encoded
from gpumem_tui.report.tables import ago
from gpumem_tui.watch.documents import read_document
from gpumem_tui.watch.printed import LookLine
from gpumem_tui.watch.reader import Watcher
from gpumem_tui.watch.records import ProbedProcess, ProbeSample
from gpumem_tui.watch.report import (
    fitting_columns,
    header_line,
    look_lines,
    process_line,
    sample_json,
    sample_line,
)
from tests.watch.rings import GIB, ON_CPU, RECORD, RingFile, gone, this_process

BYTES_OR_NULL = {"type": ["integer", "null"], "minimum": 0}
SAMPLE = {
    "type": "object",
    "required": [
        "event", "pid", "rank", "step", "device", "buckets", "allocated_bytes", "reserved_bytes",
        "peak_allocated_bytes", "age_s", "unavailable",
    ],
    "properties": {
        "event": {"const": "sample"},
        "schema": {"const": 1},
        "pid": {"type": "integer"},
        "rank": {"type": ["integer", "null"]},
        "step": {"type": "integer"},
        "device": {"type": "string"},
        "buckets": {"type": "object", "additionalProperties": BYTES_OR_NULL},
        "peak_buckets": {"type": "object", "additionalProperties": BYTES_OR_NULL},
        "allocated_bytes": BYTES_OR_NULL,
        "reserved_bytes": BYTES_OR_NULL,
        "peak_allocated_bytes": BYTES_OR_NULL,
        "age_s": {"type": ["number", "null"], "minimum": 0},
        "unavailable": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}  # fmt: skip
HELD = {"operator": "aten.mm", "module": "blocks.0", "source": "train.py:7", "allocations": 1}
LOOK: dict[str, Any] = {
    "request": 3,
    "step": 12,
    "wall_ns": 1,
    "step_s": 0.5,
    "method": "allocator history",
    "devices": [
        {
            "device": 0,
            "device_uuid": RECORD.device_uuid,
            "peak_bytes": 4 * GIB,
            "buckets": {"parameters": GIB, "activations": 3 * GIB},
            "held": [
                {**HELD, "bucket": "activations", "bytes": 2 * GIB},
                {**HELD, "bucket": "activations", "bytes": GIB, "module": "", "source": "loss.py:1\x1b[31m"},
                {**HELD, "bucket": "parameters", "bytes": GIB, "source": "", "before_step": True},
            ],
            "timeline": [[0.0, GIB], [0.2, 4 * GIB], [0.4, 2 * GIB]],
            "phases": [[0.0, "forward"], [0.3, "optimizer"]],
            "peak_s": 0.2,
        }
    ],
    "unavailable": {"phases": "compiled"},
}


@pytest.fixture
def ring(tmp_path: Path) -> RingFile:
    ring = RingFile(tmp_path / "probes", this_process(rank=1, world_size=2))
    ring.sample(RECORD, ON_CPU)
    return ring


@pytest.fixture
def process(ring: RingFile) -> ProbedProcess:
    [process] = Watcher([ring.files.directory]).processes()
    return process


@pytest.fixture
def look(ring: RingFile, process: ProbedProcess) -> LookAnswer:
    ring.document(ring.files.look, LOOK)
    look = read_document(LookAnswer, process.files, process.uid)
    assert look is not None
    return look


def test_samples_follow_the_schema_and_unknown_is_null_with_its_reason(process: ProbedProcess) -> None:
    on_cpu, on_gpu = (json.loads(json.dumps(sample_json(process, sample))) for sample in process.samples)
    for body in (on_cpu, on_gpu):
        jsonschema.validate(body, SAMPLE)
        nulls = {
            f"{group}.{name}"
            for group in ("buckets", "peak_buckets")
            for name in body[group]
            if body[group][name] is None
        }
        nulls |= {name for name in body if name.endswith("_bytes") and body[name] is None}
        assert nulls <= body["unavailable"].keys()
    assert on_cpu["allocated_bytes"] is None
    assert on_gpu["buckets"]["other"] == GIB
    assert on_gpu["peak_buckets"]["activations"] == 14 * GIB
    assert (on_gpu["rank"], on_gpu["step"], on_gpu["device"]) == (1, 1, "cuda:0")


def test_the_columns_stand_under_their_heads(process: ProbedProcess) -> None:
    on_cpu, on_gpu = (sample_line(process, sample) for sample in process.samples)
    assert len(header_line()) == len(on_cpu) == len(on_gpu) <= 120
    assert on_gpu.split()[1:5] == ["1", "cuda:0", "1", "0.2500"]
    assert on_gpu.endswith(" 17.00 GiB  40.00 GiB  30.00 GiB")
    assert on_cpu.split()[-3:] == ["–"] * 3


@pytest.mark.parametrize("width", [80, 90, 100, 120, 200])
def test_the_table_fits_the_terminal(process: ProbedProcess, width: int) -> None:
    columns = fitting_columns(width)
    lines = [header_line(columns), *(sample_line(process, sample, columns) for sample in process.samples)]
    assert all(len(line) <= width for line in lines)
    assert {"PID", "device", "parameters", "gradients", "optimizer", "peak"} <= set(columns)
    assert ("other" in columns) == (width >= 120)


def test_who_publishes_and_how(process: ProbedProcess) -> None:
    line = process_line(process, now_s=process.process.started_ns / 1e9 + 300)
    assert line == f"PID {process.pid}, rank 1 of 2 (python train.py), torch 2.13.0, by run 5 min ago"


def test_who_has_ended(tmp_path: Path) -> None:
    who = gone(command=("python", "\x1b[2Jtrain.py"), job="night\x1b[2J")
    RingFile(tmp_path / "probes", who).sample(replace(RECORD, step=1234))
    [process] = Watcher([tmp_path / "probes"]).processes()
    assert process.process.job == "night [2J"
    line = process_line(process, now_s=process.process.started_ns / 1e9)
    told = "killed or crashed (not observed); the last step seen was 1,234; a few may have followed"
    assert line == f"PID 4000000 (python  [2Jtrain.py), torch 2.13.0, by run 0 s ago: {told}"


def test_steps_are_counted_to_the_end_where_the_interpreter_exits(tmp_path: Path) -> None:
    ring = RingFile(tmp_path / "probes", gone())
    ring.sample(replace(RECORD, step=3000))
    ring.end()
    [process] = Watcher([tmp_path / "probes"]).processes()
    assert process_line(process).endswith("; the last step was 3,000")


def test_a_look_by_source_line(process: ProbedProcess, look: LookAnswer) -> None:
    lines = look_lines(process, look)
    assert lines[0] == "cuda:0: peak 4.00 GiB allocated, most of it activations (3.00 GiB)"
    assert lines[1].endswith("step 12, 0.500 s with the recording (allocator history)")
    assert "cuda:0: peak 4.00 GiB at 0.200 s" in lines
    assert "      3.00 GiB  75.0%  activations" in lines
    listed = lines[lines.index("by source") + 1 :]
    assert listed[:3] == [
        "      2.00 GiB  50.0%  train.py:7",
        "      1.00 GiB  25.0%  loss.py:1 [31m",
        "      1.00 GiB  25.0%  (allocated before this step)",
    ]
    assert "     0.000 s  forward    1.00 GiB to 4.00 GiB  <- peak" in lines
    assert "     0.300 s  optimizer  2.00 GiB to 2.00 GiB" in lines
    assert lines[-1] == "no phases: compiled"


def test_what_the_processs_own_limit_leaves_is_said(process: ProbedProcess, look: LookAnswer) -> None:
    *_, on_gpu = process.samples
    limited = ProbeSample(replace(on_gpu.record, limit_bytes=42 * GIB))
    assert sample_json(process, limited)["limit_left_bytes"] == 2 * GIB
    within = replace(process, samples=(limited,))
    assert "cuda:0: peak 4.00 GiB at 0.200 s; the process limits itself to 42.00 GiB" in look_lines(within, look)


def test_a_look_by_module_and_by_bucket(process: ProbedProcess, look: LookAnswer) -> None:
    assert "      3.00 GiB  75.0%  blocks.0" in look_lines(process, look, "module")
    assert not any(line.startswith("by ") for line in look_lines(process, look, "bucket"))


def test_a_look_as_json_sums_to_the_peak(process: ProbedProcess, look: LookAnswer) -> None:
    [device] = json.loads(encoded(LookLine.of(process, look)))["devices"]
    assert sum(device["buckets"].values()) == device["peak_bytes"]
    for by in ("by_module", "by_source"):
        assert sum(place["bytes"] for place in device[by]) == device["peak_bytes"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-5, "0 s ago"), (119, "119 s ago"), (120, "2 min ago"), (7200, "2 h ago"), (3 * 86400, "3 d ago")],
)
def test_spans_of_time(seconds: float, said: str) -> None:
    assert ago(seconds) == said


def test_what_every_step_leaves_behind(process: ProbedProcess, look: LookAnswer) -> None:
    known = KeptPlace(0, "aten.add", "loss", "train.py:31", 3 << 20, 2)
    unknown = KeptPlace(-1, "", "", "", 1 << 20, 1)
    lines = look_lines(process, replace(look, kept=(known, unknown)))
    at = lines.index("left behind by every step, and not released two steps later:")
    assert lines[at + 1 : at + 3] == [
        "       3.0 MiB  cuda:0  train.py:31, in loss, aten.add",
        "       1.0 MiB  cpu  (no line known)",
    ]
    assert "every step releases what it makes" in "\n".join(look_lines(process, replace(look, kept=())))
    assert "left behind" not in "\n".join(look_lines(process, look))
    assert json.loads(encoded(LookLine.of(process, replace(look, kept=(known,)))))["kept"] == [
        {
            "device": "cuda:0", "operator": "aten.add", "module": "loss", "source": "train.py:31",
            "bytes": 3 << 20, "allocations": 2,
        }
    ]  # fmt: skip
    assert LookLine.of(process, look).kept is None
