"""The rows that a GPU measured: the table is whole, and those that need few packages are predicted again."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from importlib.metadata import version
from itertools import accumulate
from operator import attrgetter
from pathlib import Path

import pytest

from gpumem_tui.catalog.loader import find_gpu
from tests.gpu.measured import DEFAULT_FOLDER, Folder
from tests.gpu.outcome import ALLOCATED_PERCENT, Cause, Comparison, Predicted, Real, predict, write_csv
from tests.gpu.place import Machine
from tests.gpu.rows import PROGRAMS, Interpreter, NotHere, Row, load_rows

MEASURED = Folder(DEFAULT_FOLDER)
_SEGMENTS = {"segment_alloc": 1, "segment_free": -1, "segment_map": 1, "segment_unmap": -1}
FEW_NEEDS = [row for row in MEASURED.rows if {*row.needs} <= {"transformers", "accelerate", "peft"} and not row.clone]
"""The packages of the extra "libraries", without compiled ones, which take long."""


def test_each_row_is_a_program_of_its_own() -> None:
    rows = load_rows()
    assert len({(row.command, str(row.environment)) for row in rows}) == len(rows) >= 60
    scripts = {row.command.split()[0] for row in rows if not row.clone} | {"long_train.py", "fitted.py"}
    assert scripts == {path.name for path in PROGRAMS.glob("*.py")}


def test_what_a_session_leaves_can_be_measured_against(tmp_path: Path) -> None:
    """Its table.csv and machine.toml make such a folder; what did not end there has no figures."""
    machine = Machine(gpu="NVIDIA H200", simulated="h200-141gb", driver="580", packages={"torch": "2.11.0"})
    rows = [Comparison(name="lstm", kind="LSTM", real=REAL, predicted=INSIDE)]
    rows += [Comparison(name="moe", kind="experts", real=Real(name="moe", error="killed"), predicted=INSIDE)]
    write_csv(tmp_path / "measured.csv", rows)
    (tmp_path / "machine.toml").write_text(machine.toml())
    folder = Folder(tmp_path)
    assert (folder.machine.gpu, folder.machine.packages) == ("NVIDIA H200", {"torch": "2.11.0"})
    assert folder.causes == {}
    assert {name: real.allocated for name, real in folder.real.items()} == {"lstm": REAL.allocated}


def test_what_was_measured_is_in_the_table_of_programs_as_it_ran() -> None:
    commands = {row.name: row.command for row in load_rows()}
    assert {name: real.command for name, real in MEASURED.real.items()} == {
        name: commands[name] for name in MEASURED.real
    }
    assert set(MEASURED.causes) <= set(MEASURED.real)


@pytest.mark.parametrize("name", MEASURED.real)
def test_a_history_comes_to_the_figures_beside_it(name: str) -> None:
    """The requested and the reserved bytes, event by event, have the recorded peaks."""
    with gzip.open(DEFAULT_FOLDER / "events" / f"{name}.events.json.gz") as file:
        (events,) = [trace for trace in json.load(file)["traces"] if trace]
    requested, reserved = (
        max(accumulate(sign * size for action, _, size, *_ in events if (sign := signs.get(action))))
        for signs in ({"alloc": 1, "free_requested": -1}, _SEGMENTS)
    )
    assert (requested, reserved) == (MEASURED.real[name].requested, MEASURED.real[name].reserved)


REAL = Real(name="llama-amp", allocated=10_000, reserved=11_000, reserved_at_end=11_000, beside_allocator=500)
INSIDE = Predicted(allocated=10_000, reserved=11_000, low=11_400, high=11_600, fit="fits")


@pytest.mark.parametrize(
    ("predicted", "said"),
    [
        (INSIDE, ()),
        (Predicted(allocated=10_011, reserved=11_000, low=11_400, high=11_600), ("allocated +0.11 %",)),
        (Predicted(allocated=10_000, reserved=10_880, low=11_400, high=11_600), ("reserved -1.09 %",)),
        (Predicted(allocated=10_000, reserved=11_000, low=11_400, high=11_499), ("device above its range",)),
        (Predicted(allocated=10_000, reserved=11_000, low=11_501, high=11_600), ("device below its range",)),
        (Predicted(error="no kernel"), ("predicted: no kernel",)),
    ],
)
def test_what_lies_outside(predicted: Predicted, said: tuple[str, ...]) -> None:
    row = next(row for row in load_rows() if row.name == "llama-amp")
    folder = Folder(DEFAULT_FOLDER)
    folder.real, folder.causes = {"llama-amp": REAL}, {}
    found = folder.compared(row, predicted)
    assert found.outside == said
    assert bool(folder.complaint(found)) == bool(said)
    assert found.is_false_fit is False
    folder.causes = {"llama-amp": Cause(why="it is tried", allocated_percent=0.11)}
    assert bool(folder.complaint(found)) == (said != ("allocated +0.11 %",))


def test_causes_are_written_as_the_rows_are_now(tmp_path: Path) -> None:
    shutil.copytree(DEFAULT_FOLDER, tmp_path / "h200", ignore=lambda *_: ["events"])
    (tmp_path / "h200" / "causes.toml").write_text(
        '[lstm]\nallocated_percent = 5.0\nwhy = "its \\"reserve\\""\n[unet3d]\nwhy = "gone"\n[vgg16]\nwhy = "kept"\n'
    )
    folder = Folder(tmp_path / "h200")
    rows = {row.name: row for row in folder.rows}
    real = {name: folder.real[name] for name in ("lstm", "unet3d", "gcn-gat")}

    def predicted(name: str, times: float) -> Predicted:
        allocated = round(times * real[name].allocated)
        return Predicted(allocated=allocated, reserved=real[name].reserved, high=real[name].device + 1, fit="fits")

    found = [folder.compared(rows[name], predicted(name, times)) for name, times in (("lstm", 1.02), ("unet3d", 1.0))]
    found.append(folder.compared(rows["gcn-gat"], Predicted(error="stops")))
    folder.update(found)
    again = Folder(tmp_path / "h200")
    assert again.causes == {
        "gcn-gat": Cause(why="not known", error="stops"),
        "vgg16": Cause(why="kept"),
        "lstm": Cause(why='its "reserve"', allocated_percent=2.0),
    }
    assert [again.complaint(row) for row in found] == ["", "", ""]


OTHERWISE_BY_NOW = {
    "t5-adafactor": "transformers 5.24 makes a position bias contiguous, so that the efficient kernel takes it",
}
"""Rows whose programs take other memory with a later version of a library than machine.toml's."""


@pytest.mark.scripts
@pytest.mark.parametrize("row", FEW_NEEDS, ids=attrgetter("name"))
def test_a_measured_row_is_predicted_or_its_cause_is_known(row: Row) -> None:
    """By the packages of this environment: what they allocate, not in which order, is that of the measured ones."""
    python = Interpreter(sys.executable, find_gpu(MEASURED.machine.simulated).compute_capability)
    try:
        python.check(row)
    except NotHere as error:
        pytest.skip(str(error))
    if row.name in OTHERWISE_BY_NOW and version("transformers") != MEASURED.machine.packages["transformers"]:
        pytest.skip(OTHERWISE_BY_NOW[row.name])
    found = MEASURED.compared(row, predict(row, sys.executable, f"sim:{MEASURED.machine.simulated}", None))
    assert found.is_whole
    cause = MEASURED.causes.get(row.name)
    if cause is None or cause.allocated_percent is None:
        assert abs(found.allocated_percent) <= ALLOCATED_PERCENT
