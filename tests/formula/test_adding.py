"""Each entry of the catalog's tables is whole: what a newcomer leaves out fails here."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import msgspec
import pytest

import gpumem_tui.catalog
from gpumem_tui.catalog import shapes
from gpumem_tui.catalog.loader import find_model, models
from gpumem_tui.catalog.shapes import FAMILIES, Family, FamilyRecord, LackingFamily
from gpumem_tui.catalog.tables import read_tables, records
from gpumem_tui.formula.fixed import KEPT
from gpumem_tui.formula.parameters import TENSORS, count_parameters
from gpumem_tui.formula.predict import predict
from gpumem_tui.formula.recipe import (
    BASE_QUANTIZATIONS,
    EXTRAS,
    OPTIMIZERS,
    PRECISIONS,
    SHARDINGS,
    BaseQuantization,
    Optimizer,
    Precision,
    Recipe,
    Sharding,
)
from gpumem_tui.formula.records import (
    OPTIMIZER_RECORDS,
    PRECISION_RECORDS,
    QUANTIZATION_RECORDS,
    SHARDING_RECORDS,
    OptimizerRecord,
    PrecisionRecord,
    QuantizationRecord,
    ShardingRecord,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CATALOG = Path(gpumem_tui.catalog.__file__).parent
READ_BY_CHILDREN: Mapping[str, type[Any]] = {
    "optimizers.toml": OptimizerRecord,
    "precisions.toml": PrecisionRecord,
    "sharding.toml": ShardingRecord,
    "quantization.toml": QuantizationRecord,
    "families.toml": FamilyRecord,
}


@pytest.mark.parametrize("file", READ_BY_CHILDREN)
def test_what_children_read_is_toml_and_typed_as_its_record(file: str) -> None:
    tables = tomllib.loads((CATALOG / file).read_text())
    ours = read_tables(file)
    assert json.loads(json.dumps(ours)) == tables
    assert list(ours) == list(tables)
    for table in tables.values():
        msgspec.convert(table, READ_BY_CHILDREN[file])


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumem_tui.catalog.tables.__file__", str(tmp_path / "tables.py"))
    (tmp_path / "bad.toml").write_text("[one]\nstage = 1\ntitle = yes\n")
    with pytest.raises(ValueError, match=r"bad.toml, line 3: 'title' has no value"):
        read_tables("bad.toml")
    (tmp_path / "bad.toml").write_text('[one]\nstage = 1\ncolour = "red"\n')
    with pytest.raises(ValueError, match=r"bad.toml: one: .*colour"):
        records("bad.toml", ShardingRecord)


@pytest.mark.parametrize(
    ("file", "tables", "names"),
    [
        ("optimizers.toml", OPTIMIZER_RECORDS, OPTIMIZERS),
        ("precisions.toml", PRECISION_RECORDS, PRECISIONS),
        ("sharding.toml", SHARDING_RECORDS, SHARDINGS),
        ("quantization.toml", {**QUANTIZATION_RECORDS, "none": None}, BASE_QUANTIZATIONS),
        ("families.toml", FAMILIES, get_args(Family)),
    ],
)
def test_every_name_has_its_table_and_every_table_its_name(
    file: str, tables: Mapping[str, object], names: tuple[str, ...]
) -> None:
    without, unnamed = set(names) - set(tables), set(tables) - set(names)
    assert not without, f"{file} has no table of {', '.join(without)}"
    assert not unnamed, f"tables of {file} whose names stand in no Literal: {', '.join(unnamed)}"


@pytest.mark.parametrize("name", OPTIMIZER_RECORDS)
def test_an_optimizer_says_how_it_is_counted_and_explained(name: Optimizer) -> None:
    record = OPTIMIZER_RECORDS[name]
    assert (record.states is None) == (record.kept in KEPT), "a number of states, or a way in which it keeps others"
    assert record.keeps
    assert record.note
    assert record.source
    assert record.class_names
    same = [other for other in OPTIMIZER_RECORDS.values() if other.states == record.states and other.counted_as]
    assert bool(record.counted_as) == bool(record.per_parameter), "counted_as and per_parameter go together"
    explained = record.counted_as or record.way_of or record.kept == "in-8-bits" or same
    assert explained, f"no help shows what {name} keeps: give it counted_as and per_parameter"


@pytest.mark.parametrize("name", PRECISION_RECORDS)
def test_a_precision_is_told_apart_by_what_it_keeps(name: Precision) -> None:
    record = PRECISION_RECORDS[name]
    rows = predict(find_model("gpt2"), Recipe(precision=name), 1).rows
    assert any(row.source == record.source for row in rows)
    assert record.advice
    assert [other for other, found in PRECISION_RECORDS.items() if found.keeps == record.keeps] == [name]


@pytest.mark.parametrize("name", sorted(SHARDING_RECORDS.keys() - {"none"}))
def test_a_way_of_sharding_changes_what_one_gpu_holds(name: Sharding) -> None:
    shape, whole = find_model("gpt2"), Recipe("amp-bf16", gpus=8)
    sharded = replace(whole, sharding=name)
    assert predict(shape, sharded, 1).fixed_bytes != predict(shape, whole, 1).fixed_bytes


@pytest.mark.parametrize("name", QUANTIZATION_RECORDS)
def test_a_format_of_frozen_weights_takes_less_than_16_bits(name: BaseQuantization) -> None:
    record = QUANTIZATION_RECORDS[name]
    assert 0 < record.matrix_bytes(1024, 1024) < 2 * 1024 * 1024
    recipe = Recipe("bf16", adapter="lora", base_quantization=name)
    rows = {row.name: row for row in predict(find_model("llama-3.2-1b"), recipe, 1).rows}
    assert rows["quantized parameters"].source == record.source


class TestFamily:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_has_a_model_weights_rows_and_a_network(self, family: Family) -> None:
        torch = pytest.importorskip("torch")
        from gpumem_tui.workload.models import build_model

        found = [shape for shape in models().values() if shape.family == family]
        assert found, f"models.toml has no model of {family}"
        smallest = min(found, key=count_parameters)
        assert predict(smallest, Recipe(), 1).activation_bytes_per_sample > 0
        with torch.device("meta"):
            network = build_model(smallest, Recipe())
        made = sum(parameter.numel() for parameter in {id(one): one for one in network.parameters()}.values())
        assert made == count_parameters(smallest)

    def test_without_a_piece_is_one_clear_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shape = replace(find_model("gpt2"), family="new")  # type: ignore[arg-type]
        with pytest.raises(LackingFamily, match=r"the family 'new' of networks has no record: .*families.toml"):
            shape.check()
        known = MappingProxyType({**FAMILIES, "new": FAMILIES["gpt2"]})
        monkeypatch.setattr(shapes, "FAMILIES", known)
        with pytest.raises(LackingFamily, match=r"the family 'new' of networks has no weights: .*parameters.py"):
            predict(shape, Recipe(), 1)

    def test_that_is_no_transformer_needs_activations_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        record = replace(FAMILIES["resnet"], has_batch_norm=False)
        monkeypatch.setattr(shapes, "FAMILIES", MappingProxyType({**FAMILIES, "new": record}))
        known = MappingProxyType({**TENSORS, "new": TENSORS["mlp"]})
        monkeypatch.setattr("gpumem_tui.formula.parameters.TENSORS", known)
        shape = replace(find_model("mlp"), family="new")  # type: ignore[arg-type]
        with pytest.raises(LackingFamily, match=r"'new' of networks has no activations: .*activations.py"):
            predict(shape, Recipe(), 1)

    def test_without_a_network_cannot_be_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("torch")
        from gpumem_tui.workload import models as networks

        monkeypatch.delitem(networks.NETWORKS, "gpt2")
        with pytest.raises(LackingFamily, match=r"the family 'gpt2' of networks has no network: "):
            networks.build_model(find_model("gpt2"), Recipe())


def test_every_extra_takes_bytes_from_some_network() -> None:
    recipes = (Recipe("amp-bf16"), Recipe("amp-bf16", sharding="zero3", gpus=4))
    for extra in EXTRAS:
        saved = [
            predict(find_model(name), recipe, 8).peak_bytes - predict(find_model(name), recipe, 8, extras).peak_bytes
            for name in ("gpt2", "resnet-50")
            for recipe in recipes
            for extras in [frozenset({extra})]
        ]
        assert max(saved) > 0, f"nothing asks for {extra}"
