"""Known cases: the plan recommends what an expert does, and gives up last what an expert gives up last.

Sources: QLoRA is Dettmers et al. 2023, whose abstract tunes 65B on one GPU of 48 GB. torchtune's recipes are
`llama3_1/8B_lora_single_device`, `8B_full_single_device` and `8B_full`, its advice is "Memory Optimization Overview"
(docs.pytorch.org/torchtune). Transformers' advice is "Methods and tools for efficient training on a single GPU".
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import Unknown
from gpumem_tui.plan.answers import answer
from gpumem_tui.plan.combination import Combination
from gpumem_tui.plan.command import CommandPlan
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.recommended import change_words, plan_answer, recommended
from gpumem_tui.plan.techniques import cheapest_combination
from tests.plan.commands import base_predicted, change, changed, command_config, ran

BF16, MIXED = Recipe("bf16"), Recipe("amp-bf16")
NO_TRACE = Unknown("not traced")


def plan_for(model: str, gpu: str, recipe: Recipe, seq_len: int = 0, batch_size: int = 1) -> Plan:
    shape = find_model(model)
    return Plan(shape.overridden(seq_len=seq_len) if seq_len else shape, recipe, find_gpu(gpu), batch_size)


CASES = {
    "Llama-3-8B on one card of 24 GB: QLoRA, not SGD, a second GPU and half the sequence (Dettmers et al. 2023)": (
        plan_for("llama-3-8b", "rtx-4090-24gb", Recipe()), ["qlora", "full-recompute"], 1,
    ),
    "70B on one card of 48 GB: QLoRA (Dettmers et al. 2023, 65B on 48 GB)": (
        plan_for("llama-2-70b", "rtx-a6000-48gb", BF16, 512), ["qlora", "full-recompute"], 1,
    ),
    "Llama-3-8B in bf16, where LoRA leaves 0.5 GiB: QLoRA still (torchtune, Fine-Tuning Llama2 with QLoRA)": (
        plan_for("llama-3-8b", "rtx-4090-24gb", BF16, 2048), ["qlora", "full-recompute"], 1,
    ),
    "8B in bf16 on 40 GB: LoRA, over weights as they are (torchtune, 8B_lora_single_device)": (
        plan_for("llama-3-8b", "a100-40gb", BF16, 2048), ["lora"], 1,
    ),
    "8B in bf16 on 80 GB: every weight is trained, with AdamW (torchtune, 8B_full_single_device)": (
        plan_for("llama-3-8b", "a100-80gb", BF16, 2048), ["adamw-fused"], 1,
    ),
    "8B on 8 cards of 40 GB that are there: every weight is trained, sharded (torchtune, 8B_full)": (
        plan_for("llama-3-8b", "a100-40gb", replace(BF16, gpus=8), 2048), ["zero3"], 1,
    ),
    "a batch that is too large: accumulate gradients, before checkpointing (torchtune's overview)": (
        plan_for("resnet-50", "rtx-2060-6gb", Recipe(), batch_size=256), [], 43,
    ),
    "BERT-large at batch 32 on 12 GB: mixed precision and accumulation (Transformers' guide)": (
        plan_for("bert-large", "rtx-3060-12gb", Recipe(), batch_size=32), ["mixed-precision"], 8,
    ),
    "1.5B on 24 GB: an 8-bit Adam before another optimizer or adapters (Transformers' guide)": (
        plan_for("gpt2-xl", "rtx-4090-24gb", Recipe(), batch_size=8), ["adamw-8bit"], 1,
    ),
    "405B: QLoRA on as few further GPUs as it takes, at the whole sequence": (
        plan_for("llama-3.1-405b", "h100-80gb", BF16, 512), ["qlora", "full-recompute", "zero3"], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_an_expert_does_is_recommended(case: str) -> None:
    plan, changes, batch_size = CASES[case]
    found = cheapest_combination(plan, traceable=True)
    assert isinstance(found, Combination)
    assert ([one.key for one in found.changes], found.batch_size) == (changes, batch_size)
    assert answer(found.plan).fits
    assert found.plan.shape.seq_len == plan.shape.seq_len


def test_llama_on_24_gb_keeps_much_of_the_card_free_and_says_the_price() -> None:
    plan, *_ = CASES[next(iter(CASES))]
    best = recommended(plan, NO_TRACE)
    assert isinstance(best.combination, Combination)
    assert answer(best.combination.plan).spare_bytes > 5 * 2**30
    said = plan_answer(answer(plan), NO_TRACE, best)
    assert "To change: QLoRA + full recompute. The price of QLoRA: fine-tuning only, as LoRA; weights rounded" in said


def test_the_price_of_further_gpus_is_said() -> None:
    plan, *_ = CASES["405B: QLoRA on as few further GPUs as it takes, at the whole sequence"]
    said = plan_answer(answer(plan), NO_TRACE, recommended(plan, NO_TRACE))
    assert "of ZeRO-3 over 4 GPUs: 4 GPUs; 1.5 times the communication of plain data parallel training." in said


def test_what_the_formula_alone_knows_comes_before_adapters_that_a_trace_can_confirm() -> None:
    plan = plan_for("llama-3.2-1b", "rtx-3060-12gb", BF16, 2048)
    said = plan_answer(answer(plan), NO_TRACE, recommended(plan, NO_TRACE))
    assert "To change: 8-bit AdamW + chunked loss, by formula alone; what a trace can confirm is QLoRA." in said


def test_adapters_are_not_offered_twice() -> None:
    """A plan that trains them can have its base quantized, which is no further step away from training all."""
    plan = plan_for("llama-3-70b", "h100-80gb", replace(BF16, adapter="lora"), 512)
    found = cheapest_combination(plan, traceable=True)
    assert isinstance(found, Combination)
    assert "qlora" in [one.key for one in found.changes]
    assert found.price.frozen == 0
    assert found.last_resorts == ""


def test_a_command_that_fits_with_adapters_is_not_told_to_change_its_optimizer() -> None:
    config = command_config(gpu="rtx-4090-24gb")
    small = {"activations": 100, "optimizer": 1}
    alone = (changed(config, "sgd", 24, **small), changed(config, "lora", 24, **small))
    plan = CommandPlan(config, 24, base_predicted(config), alone)
    assert plan.fitting is alone[1]
    said = change_words(plan, plan.answer())
    assert said.endswith(
        "traced: it fits. The price of LoRA: fine-tuning only: frozen weights, a low-rank update, "
        "another learning rate."
    )


def test_a_command_gets_the_gpus_that_it_lacks_last() -> None:
    config = command_config(gpu="rtx-4090-24gb")
    small = changed(config, "lora", 24, activations=100).traced
    tried = [ran((change(key, config),), 24, 1, small) for key in ("sharded", "sgd", "lora")]
    assert [one.changes[0].key for one in sorted(tried, key=lambda one: one.price)] == ["lora", "sgd", "sharded"]
