"""The accuracy table, on measurements made up for the purpose."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import MIB
from gpumem_tui.workload.spec import WorkloadSpec
from tests.published.accuracy import AccuracyRow, main, summarize, traced, traced_published
from tests.published.measurements import (
    DataError,
    Machine,
    PhasePeaks,
    RecordedEdge,
    RecordedRun,
    Side,
    load_published,
    load_recordings,
)

_WORKLOAD = WorkloadSpec(Recipe(), shape=find_model("mlp").overridden(layers=2, hidden=256))
_GPU = find_gpu("h200-141gb")
_CONTEXT_BYTES = 500 * MIB


def _machine(driver: str = "580.1") -> Machine:
    return Machine(str(torch.__version__), driver, _GPU, {})


def _side(allocated_bytes: int, reserved_bytes: int) -> Side:
    phases = (
        PhasePeaks(0, "build", 10, 20, reserved_bytes // 2),
        PhasePeaks(1, "forward", 10, allocated_bytes, reserved_bytes),
        PhasePeaks(1, "backward", 10, allocated_bytes - 1, reserved_bytes),
    )
    return Side(phases=phases, context_end_bytes=_CONTEXT_BYTES)


def _run(real: Side, simulated: Side, driver: str = "580.1", name: str = "mlp-small") -> RecordedRun:
    return RecordedRun(
        id=name,
        workload=_WORKLOAD,
        batch_size=4,
        steps=2,
        machine=_machine(driver),
        real=real,
        simulated=simulated,
    )


def _edge(simulated: int | None, real: int | None, name: str) -> RecordedEdge:
    return RecordedEdge(
        id=name, workload=_WORKLOAD, limit_bytes=MIB, machine=_machine(), simulated=simulated, real=real, tried={}
    )


def _write(folder: Path, *recordings: RecordedRun | RecordedEdge) -> Path:
    (folder / "gpu.jsonl").write_bytes(b"".join(msgspec.json.encode(found) + b"\n" for found in recordings))
    return folder


def _row(traced_bytes: int, measured_bytes: int = 1000) -> AccuracyRow:
    return AccuracyRow("x", "recorded", "allocated", None, traced_bytes, measured_bytes)


def _table(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    nothing = str(folder / "none.toml")
    assert main(["--recordings", str(folder), "--published", nothing, *options]) == 0
    return capsys.readouterr().out


class TestSummary:
    def test_counts_errors_without_their_sign_and_the_unsafe_side_apart(self) -> None:
        [summary] = summarize([_row(990), _row(1000), _row(1030)])
        assert summary.rows == 3
        assert summary.median_percent == pytest.approx(1.0)
        assert summary.maximum_percent == pytest.approx(3.0)
        assert summary.p95_percent == pytest.approx(2.8)
        assert summary.under_share == pytest.approx(1 / 3)

    def test_of_a_single_row(self) -> None:
        [summary] = summarize([_row(900)])
        assert summary.median_percent == summary.p95_percent == summary.maximum_percent == pytest.approx(10.0)

    def test_kinds_and_origins_are_not_mixed(self) -> None:
        published = AccuracyRow("y", "published", "allocated", None, 1, 1)
        reserved = AccuracyRow("z", "recorded", "reserved", None, 1, 1)
        assert [summary.rows for summary in summarize([_row(1000), published, reserved, _row(1)])] == [2, 1, 1]


class TestRecordings:
    def test_peaks_are_over_all_phases(self) -> None:
        side = _side(1000, 4000)
        peaks = [side.peak_bytes("allocated"), side.peak_bytes("reserved"), side.peak_bytes("device_used")]
        assert peaks == [1000, 4000, 4000 + _CONTEXT_BYTES]

    def test_as_recorded_shows_the_figures_of_the_recording(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _write(tmp_path, _run(real=_side(2000, 4000), simulated=_side(1000, 4000)))
        body = json.loads(_table(capsys, tmp_path, "--json", "--as-recorded"))
        errors = {row["kind"]: row["error_percent"] for row in body["rows"]}
        assert errors == {"allocated": -50.0, "reserved": 0.0, "device_used": 0.0}
        assert [row["formula_bytes"] is None for row in body["rows"]] == [False, True, True]

    def test_runs_are_traced_again_by_default(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        _write(tmp_path, _run(real=_side(2000, 4000), simulated=_side(1000, 4000)))
        body = json.loads(_table(capsys, tmp_path, "--json"))
        now = traced(_WORKLOAD, _GPU, batch_size=4, steps=2)
        assert {row["kind"]: row["traced_bytes"] for row in body["rows"]} == now

    def test_a_run_that_failed_has_no_row(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        good = _run(_side(2000, 4000), _side(1000, 4000))
        _write(tmp_path, good, _run(Side(error="killed by SIGSEGV"), _side(1, 1), name="other"))
        assert {row["id"] for row in json.loads(_table(capsys, tmp_path, "--json", "--as-recorded"))["rows"]} == {
            "mlp-small"
        }

    def test_the_newest_of_one_machine_counts_and_other_drivers_beside_it(self, tmp_path: Path) -> None:
        old, new = _run(_side(1, 1), _side(1, 1)), _run(_side(2, 2), _side(2, 2))
        elsewhere = _run(_side(3, 3), _side(3, 3), driver="600.1")
        assert load_recordings(_write(tmp_path, old, elsewhere, new)) == [new, elsewhere]

    def test_share_of_exact_largest_batches(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        _write(tmp_path, _edge(4, 4, "a"), _edge(4, 5, "b"), _edge(4, None, "not found"))
        assert "recorded, largest batch under a cap: 1 of 2 exact" in _table(capsys, tmp_path)

    def test_a_damaged_line_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = _write(tmp_path, _edge(4, 4, "a")) / "gpu.jsonl"
        path.write_bytes(path.read_bytes() + b'{"event": "run"}\n')
        with pytest.raises(DataError, match=r"gpu\.jsonl:2"):
            load_recordings(tmp_path)
        assert main(["--recordings", str(tmp_path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


class TestPublished:
    def test_a_table_of_published_peaks(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        peaks = tmp_path / "peaks.toml"
        peaks.write_text(_PEAKS)
        assert main(["--recordings", str(tmp_path), "--published", str(peaks)]) == 0
        printed = capsys.readouterr().out
        assert "because of this" in printed
        assert "1 published figures cannot be modelled:\n  lora-1: adapters" in printed

    def test_a_context_and_an_addition_by_the_source_count(self, tmp_path: Path) -> None:
        peaks = tmp_path / "peaks.toml"
        peaks.write_text(_PEAKS)
        published = load_published(peaks)
        with_both, plain = (
            published.modelled[0],
            msgspec.structs.replace(published.modelled[0], context_bytes=0, add_bytes=0),
        )
        assert traced_published(with_both) - traced_published(plain) == 1000 + 24

    def test_a_run_is_traced_by_the_rules_of_its_torch(self, tmp_path: Path) -> None:
        peaks = tmp_path / "peaks.toml"
        peaks.write_text(_PEAKS)
        dropped = msgspec.structs.replace(load_published(peaks).modelled[0], kind="allocated")
        kept = msgspec.structs.replace(dropped, torch="1.13")
        assert traced_published(kept) > traced_published(dropped)

    @pytest.mark.parametrize("text", ["[[modelled]]\nid = 1", "modelled = 3", "not toml"])
    def test_a_file_that_is_none(self, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        peaks = tmp_path / "peaks.toml"
        peaks.write_text(text)
        assert main(["--recordings", str(tmp_path), "--published", str(peaks)]) == 2
        assert str(peaks) in capsys.readouterr().err


def test_without_data_one_line_says_where_to_get_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recordings", str(tmp_path / "none"), "--published", str(tmp_path / "none.toml")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "python -m tests.gpu.record" in line


_PEAKS = """
[[modelled]]
id = "made-up"
source = "this test"
kind = "device_used"
measured_bytes = 100_000_000
gpu = "a100-40gb"
model = "mlp"
shape = { layers = 3, hidden = 512 }
batch_size = 8192
precision = "fp32"
optimizer = "sgd-momentum"
context_bytes = 1000
add_bytes = 24
add = "something"
tolerance_percent = 1.0
why = "because of this"

[[not_modelled]]
ids = ["lora-1"]
reason = "adapters"
"""
