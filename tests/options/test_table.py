"""The table of options: it agrees with what its options set, and reads and writes values as they are typed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.cli.search import search
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB
from gpumem_tui.options.configuration import Options, asked_by, check_searchable, limit_from
from gpumem_tui.options.table import COMMAND, DEVICE, OPTIONS, SEARCH, SHAPE, WORKLOAD, OptionRow
from gpumem_tui.options.workload import WorkloadOptions
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.workload.command import Command
from gpumem_tui.workload.spec import WorkloadSpec

A100 = find_gpu("a100-80gb")


def names(options: tuple[OptionRow, ...]) -> set[str]:
    return {option.name for option in options}


def test_every_option_sets_a_field_and_every_field_has_an_option() -> None:
    assert names(SHAPE) <= {field.name for field in fields(ModelShape)}
    of_workload = {field.name for field in fields(WorkloadOptions)} - {"changes"}
    assert names((*WORKLOAD, COMMAND)) - names(SHAPE) == of_workload
    assert names((*DEVICE, *SEARCH)) == {field.name for field in fields(Options)} - {"trained"}


def test_the_defaults_are_those_of_the_fields() -> None:
    untold = Options()
    assert all(option.default is None for option in SHAPE)
    for record in (untold, untold.trained):
        for field in fields(record):
            if field.name in OPTIONS:
                assert getattr(record, field.name) == OPTIONS[field.name].default, field.name


def test_what_is_asked_for_by_name_lands_in_its_record() -> None:
    options = asked_by({"layers": 2, "precision": "bf16", "model": "gpt2", "steps": 5, "share": True})
    assert options == Options(
        WorkloadOptions(model="gpt2", precision="bf16", changes={"layers": 2}), steps=5, share=True
    )
    with pytest.raises(AssertionError, match="no option takes"):
        asked_by({"layer": 2})


def test_the_command_line_takes_the_table() -> None:
    typed = {option.name: option for option in search.params if isinstance(option, click.Option)}
    own = {"as_json", "plain", "quiet", "help", "help_all"}
    assert typed.keys() - own == OPTIONS.keys() - {"command"}
    for name in typed.keys() - own:
        assert typed[name].opts == [OPTIONS[name].flag]
        assert typed[name].help == OPTIONS[name].help


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("limit_bytes", "20GiB", 20 * GIB),
        ("headroom", "0.2", 0.2),
        ("headroom", "", 0.1),
        ("layers", "12", 12),
        ("layers", "", None),
        ("share", "yes", True),
        ("share", "no", False),
        ("assumed_rows", "0.25 a.py:3=0.5", (("", 0.25), ("a.py:3", 0.5))),
        ("assumed_rows", "", ()),
        ("freeze", "3", "3"),
    ],
)
def test_a_value_is_read_as_it_is_shown(name: str, text: str, value: Any) -> None:
    assert OPTIONS[name].read(text) == value
    assert OPTIONS[name].text(value) == text


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("steps", "0", "--steps: must be from 1 to 10,000, not 0"),
        ("ramp_step", "0", "--step: must be from 1 to 1,000,000,000, not 0"),
        ("headroom", "1", "--headroom: must be a number from 0 to 0.99, not 1"),
        ("headroom", "x", "--headroom: must be a number from 0 to 0.99, not x"),
        ("timeout_s", "0.5", "--timeout: must be a number from 1 to 1e+06, not 0.5"),
        ("limit_bytes", "lots", "--limit: 'lots' is not a size such as 20GiB or 512MiB"),
        (
            "assumed_rows",
            "2",
            "--assume-rows: '2' is not a share from 0 to 1 such as 0.25, or FILE:LINE=SHARE or FILE:LINE=NUMBER",
        ),
    ],
)
def test_what_is_no_value_is_one_line_that_names_the_option(name: str, text: str, line: str) -> None:
    with pytest.raises(OptionError) as caught:
        OPTIONS[name].read(text)
    assert str(caught.value) == line


def test_a_limit_of_all_that_the_device_has_is_no_fault() -> None:
    assert limit_from("80GiB", 80 * GIB) == 80 * GIB
    with pytest.raises(OptionError, match="--limit: the device has only"):
        limit_from("80.01GiB", 80 * GIB)


def configured(recipe: Recipe, *, simulated: bool) -> SearchConfig:
    return SearchConfig(WorkloadSpec(recipe, shape=find_model("gpt2")), Device(A100, simulated=simulated))


@pytest.mark.parametrize(
    ("recipe", "option"),
    [
        (
            Recipe(tensor_parallel=2, gpus=2),
            "--tensor-parallel 2: a search on a GPU of this machine runs the step of one",
        ),
        (Recipe(sharding="zero3", gpus=2), "--sharding zero3: a search on a GPU of this machine"),
    ],
)
def test_one_rank_of_several_runs_on_a_simulated_gpu_only(recipe: Recipe, option: str) -> None:
    check_searchable(configured(recipe, simulated=True))
    with pytest.raises(OptionError, match=option):
        check_searchable(configured(recipe, simulated=False))


def test_one_rank_of_a_command_is_followed_on_a_simulated_gpu_only() -> None:
    workload = WorkloadSpec(Recipe(), command=Command(("torchrun", "train.py", "{batch}"), "."), rank=3)
    check_searchable(SearchConfig(workload, Device(A100, simulated=True)))
    with pytest.raises(OptionError, match="--rank: a GPU of this machine runs what the command starts"):
        check_searchable(SearchConfig(workload, Device(A100, simulated=False)))


@pytest.mark.parametrize(("option", "given"), [("--through save", {"through": "save"}), ("--resume", {"resume": True})])
def test_checkpoints_are_neither_written_nor_made_up_on_a_real_gpu(option: str, given: dict[str, Any]) -> None:
    workload = WorkloadSpec(Recipe(), command=Command(("python", "train.py", "{batch}"), "."), **given)
    check_searchable(SearchConfig(workload, Device(A100, simulated=True)))
    with pytest.raises(OptionError, match=f"{option}: on a GPU of this machine checkpoints are"):
        check_searchable(SearchConfig(workload, Device(A100, simulated=False)))
