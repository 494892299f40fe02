"""Plans come back as they were saved; a damaged file is one line, and the others are still there."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_tui.catalog.config_file import ModelFile
from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.store import PlanStore, SavedPlan, StoreError

PLAN = Plan(
    find_model("llama-3-8b").overridden(seq_len=4096),
    Recipe("bf16", "adamw-8bit", "full", "flash", "zero3", 4),
    find_gpu("rtx-4090-24gb"),
    batch_size=2,
    headroom=0.05,
    target_batch=64,
    extras=frozenset({"chunked-loss", "offload-optimizer"}),
)
RESNET = Plan(find_model("resnet-50"), Recipe(), find_gpu("t4-16gb"), batch_size=32)


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "plans")


OF_A_FILE = replace(PLAN, model_file=ModelFile("/models/mine/config.json", find_model("llama-3-8b"), True))


@pytest.mark.parametrize("plan", [PLAN, RESNET, OF_A_FILE], ids=["llama", "resnet", "file"])
def test_a_plan_comes_back_as_it_was(store: PlanStore, plan: Plan) -> None:
    store.save("eight b", plan)
    assert store.load("eight b") == plan
    assert store.saved() == ((SavedPlan("eight b", plan),), ())


def test_a_gpu_and_a_model_that_are_in_no_catalog_come_back_too(store: PlanStore) -> None:
    own = replace(
        PLAN,
        gpu=replace(PLAN.gpu, name="mine", title="GPU 0"),
        shape=replace(find_model("gpt2"), name="my model", layers=3, published_parameters=None),
    )
    store.save("own", own)
    assert store.load("own") == own


def test_saving_again_replaces_and_leaves_nothing_beside(store: PlanStore) -> None:
    store.save("a", PLAN)
    store.save("a", RESNET)
    assert store.load("a") == RESNET
    assert os.listdir(store.folder) == ["a.json"]


def test_a_deleted_plan_is_gone_and_the_others_stay(store: PlanStore) -> None:
    store.save("a", PLAN)
    store.save("b", RESNET)
    assert store.has("a")
    store.delete("a")
    assert not store.has("a")
    assert store.saved() == ((SavedPlan("b", RESNET),), ())
    with pytest.raises(StoreError, match="cannot delete"):
        store.delete("a")
    with pytest.raises(StoreError, match="cannot name a plan"):
        store.delete("../b")
    assert not store.has("../b")


def test_nothing_is_listed_and_nothing_made_before_the_first_plan(store: PlanStore) -> None:
    assert store.saved() == ((), ())
    assert not store.folder.exists()


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", " lead", "x" * 61, "tab\t", "nul\0"])
def test_a_name_that_is_no_file_name_is_refused(store: PlanStore, name: str) -> None:
    with pytest.raises(StoreError, match="cannot name a plan"):
        store.save(name, PLAN)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda body: b"{", "is no plan"),
        (lambda body: b"\xff\xfe", "is no plan"),
        (lambda body: json.dumps({**body, "batch_size": "2"}).encode(), r"\$.batch_size"),
        (lambda body: json.dumps({**body, "batch_size": 0}).encode(), "batch size must be at least 1"),
        (lambda body: json.dumps({**body, "schema": 9}).encode(), "has schema 9"),
        (lambda body: json.dumps({**body, "shape": {**body["shape"], "heads": 7}}).encode(), "do not divide"),
        (lambda body: json.dumps({**body, "recipe": {**body["recipe"], "precision": "fp4"}}).encode(), "fp4"),
        (lambda body: json.dumps({**body, "more": 1}).encode(), "unknown field"),
    ],
)
def test_a_damaged_file_is_one_line_and_hides_no_other(store: PlanStore, damage: object, said: str) -> None:
    store.save("good", PLAN)
    path = store.save("bad", PLAN)
    assert callable(damage)
    path.write_bytes(damage(json.loads(path.read_text())))
    with pytest.raises(StoreError, match=said) as caught:
        store.load("bad")
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    plans, complaints = store.saved()
    assert [saved.name for saved in plans] == ["good"]
    assert complaints == (str(caught.value),)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot save"):
        PlanStore(tmp_path / "file" / "plans").save("a", PLAN)
    with pytest.raises(StoreError, match="cannot read"):
        PlanStore(tmp_path / "none").load("a")
