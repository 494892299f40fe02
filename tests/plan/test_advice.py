"""Advice on Search is what the Plan states of the same step and GPU."""

from __future__ import annotations

from dataclasses import replace

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB
from gpumem_tui.plan.advice import advise
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.techniques import techniques
from gpumem_tui.search.config import Device, SearchConfig
from gpumem_tui.workload.spec import WorkloadSpec

GPU = find_gpu("rtx-4090-24gb")
MODEL = find_model("llama-3-8b")
CONFIG = SearchConfig(WorkloadSpec(Recipe(), MODEL), Device(GPU, simulated=True))


def test_the_best_single_changes_are_the_plans() -> None:
    offered = [one.option for one in advise(CONFIG)][1:]
    planned = [technique.change.option for technique in techniques(Plan(MODEL, Recipe(), GPU)).helping]
    assert offered == planned[: len(offered)]


def test_under_a_cap_it_is_of_a_gpu_that_leaves_as_much() -> None:
    small = replace(CONFIG, workload=WorkloadSpec(Recipe(), find_model("gpt2-xl")))
    whole, capped = advise(small), advise(replace(small, limit_bytes=12 * GIB))
    assert whole
    assert capped
    assert "fits" in capped[0].buys
    assert whole != capped


def test_a_workload_file_has_none() -> None:
    assert advise(replace(CONFIG, workload=WorkloadSpec(Recipe(), file="train.py"))) == ()
