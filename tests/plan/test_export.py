"""A plan as JSON, Markdown and a command line, and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from gpumem_tui.catalog.loader import find_gpu, find_model, gpus
from gpumem_tui.catalog.shapes import TYPED_CONTEXT, Context
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.plan.answers import answer, traced_answer
from gpumem_tui.plan.export import command_line
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.report import plan_markdown
from tests.plan.plans import GPT2, LLAMA_ON_FOUR, TRACED, plans
from tests.plan.printing import plan_json

UNTRACED = Unknown("not asked for")


class TestCommandLine:
    def test_options_at_their_default_are_left_out(self) -> None:
        assert command_line(GPT2) == "gpumem-tui plan --model gpt2 --batch-size 8 --gpu sim:a100-80gb"

    def test_everything_that_differs_is_in_it(self) -> None:
        plan = Plan(
            find_model("llama-3-8b").overridden(layers=4, seq_len=512),
            Recipe("bf16", "sgd", "full", "math", "zero2", 4),
            find_gpu("h100-80gb"),
            2,
            0.05,
            64,
            frozenset({"chunked-loss", "offload-activations"}),
        )
        assert command_line(plan) == (
            "gpumem-tui plan --model llama-3-8b --layers 4 --seq-len 512 --precision bf16 --optimizer sgd "
            "--recompute full --attention math --sharding zero2 --gpus 4 --batch-size 2 --gpu sim:h100-80gb "
            "--headroom 0.05 --target-batch 64 --extra chunked-loss --extra offload-activations"
        )

    def test_a_gpu_of_this_machine_goes_by_its_index(self) -> None:
        line = command_line(replace(GPT2, gpu=replace(GPT2.gpu, name="1", source="NVML on this machine")))
        assert isinstance(line, str)
        assert line.endswith("--gpu 1")

    def test_a_context_that_was_typed_is_in_it(self) -> None:
        def line(source: str) -> str | Unknown:
            context = Context(2 * GIB, 2 * GIB, 2 * GIB, source)
            return command_line(replace(GPT2, gpu=replace(GPT2.gpu, context=context)))

        assert line(TYPED_CONTEXT) == f"{command_line(GPT2)} --context-bytes 2147483648"
        assert line("measured on this machine") == command_line(GPT2)

    def test_what_is_in_no_catalog_has_none(self) -> None:
        odd = command_line(replace(GPT2, shape=replace(GPT2.shape, name="mine", dropout=0.5)))
        assert isinstance(odd, Unknown)
        assert "--config" in odd.reason
        assert isinstance(command_line(replace(GPT2, gpu=replace(GPT2.gpu, name="mine"))), Unknown)


class TestJson:
    def test_the_contract(self) -> None:
        body = plan_json(replace(GPT2, target_batch=100), TRACED)
        assert json.loads(json.dumps(body)).keys() == body.keys()
        assert body["schema"] == 1
        assert body["accumulation"] == {
            "steps": 13, "global_batch_size": 104, "target_batch": 100, "global_batch_tokens": 104 * 1024,
        }  # fmt: skip
        for technique in body["techniques"]:
            assert technique.keys() >= {"name", "saved_bytes", "max_batch_size", "cost"}
        keys = [curve["key"] for curve in body["curves"]]
        assert keys == [
            "batch-by-sample-size", "batch-by-model", "batch-by-gpu", "activations-by-recompute", "memory-over-step",
            "throughput",
        ]  # fmt: skip
        assert body["traced"]["buckets"]["activations"] == 8 * 100 * 2**20

    def test_extras_count_in_the_formula(self) -> None:
        plan = replace(GPT2, extras=frozenset({"chunked-loss"}))
        body = plan_json(plan, UNTRACED)
        assert body["workload"]["extras"] == ["chunked-loss"]
        assert body["formula"]["peak_bytes"] == answer(plan).peak_bytes < answer(GPT2).peak_bytes
        assert body["formula"]["max_batch_size"] == answer(plan).max_batch_size

    def test_a_trace_made_on_another_gpu_is_answered_on_the_plan_s(self) -> None:
        large, small = (
            plan_json(replace(GPT2, gpu=find_gpu(name)), TRACED)["traced"]["max_batch_size"]
            for name in ("a100-80gb", "a100-40gb")
        )
        assert large > small

    def test_the_combination_comes_with_its_command(self) -> None:
        body = plan_json(replace(LLAMA_ON_FOUR, headroom=0.02), UNTRACED)
        assert body["combination"]["techniques"] == ["pure bfloat16", "full recompute", "ZeRO-3 over 4 GPUs"]
        assert "--sharding zero3" in body["combination"]["command"]
        assert body["fits"] is False

    @settings(max_examples=settings().max_examples // 4)
    @given(plans())
    def test_any_plan_can_be_written(self, plan: Plan) -> None:
        body = plan_json(plan, UNTRACED)
        assert body["formula"]["peak_bytes"] == answer(plan).peak_bytes
        assert json.dumps(body)
        assert plan_markdown(plan, UNTRACED)


class TestMarkdown:
    def test_numbers_and_reasons(self) -> None:
        text = plan_markdown(LLAMA_ON_FOUR, UNTRACED)
        assert "# Plan: llama-3-8b on NVIDIA GeForce RTX 4090" in text
        assert "| parameters | 29.92 GiB | – |" in text
        assert "By formula it does not fit: 138.60 GiB are missing." in text
        assert "No trace: not asked for." in text
        assert "By formula, not traced, the cheapest that a trace can confirm" in text
        assert "full recompute: saves nothing here" in text

    def test_why_no_gpu_is_traced_is_said_once(self) -> None:
        alone = replace(TRACED.done, only_at=GPT2.batch_size, not_affine="uneven")
        text = plan_markdown(GPT2, replace(TRACED, done=alone))
        assert "None is traced here: uneven." in text
        assert "| uneven |" not in text

    def test_what_is_compiled_is_said_and_the_way_to_have_it_otherwise(self) -> None:
        compiled = replace(GPT2, recipe=replace(GPT2.recipe, compile=True))
        told = replace(TRACED, done=replace(TRACED.done, notes=("torch.compile: 1 graph compiled",)))
        assert "- torch.compile: 1 graph compiled\n" in plan_markdown(compiled, told)
        assert "- eager PyTorch, not compiled: without --compile, by trace alone: not" in plan_markdown(compiled, told)
        assert "- compiled by torch.compile: --compile, by trace alone: not" in plan_markdown(GPT2, TRACED)

    def test_every_gpu_of_the_catalog_is_listed(self) -> None:
        by_name = {row["name"]: row for row in plan_json(GPT2, TRACED)["gpus"]}
        assert by_name.keys() == gpus().keys()
        here = by_name[GPT2.gpu.name]
        assert here["same_architecture"]
        assert here["formula_max_batch_size"] == answer(GPT2).max_batch_size
        assert here["traced_max_batch_size"] == traced_answer(GPT2, TRACED).max_batch_size
        assert by_name["h200-141gb"]["traced_max_batch_size"] > here["traced_max_batch_size"]
        assert not by_name["h200-141gb"]["same_architecture"]
        assert all(row["traced_max_batch_size"] is None for row in plan_json(GPT2, UNTRACED)["gpus"])

    def test_what_a_gpu_lacks_is_said(self) -> None:
        bf16 = replace(GPT2, recipe=Recipe("amp-bf16"), gpu=find_gpu("t4-16gb"))
        assert "has no bfloat16 arithmetic" in plan_json(bf16, UNTRACED)["notes"][0]
        assert "NVIDIA T4 (sm_75) has no bfloat16 arithmetic" in plan_markdown(bf16, UNTRACED)
        by_name = {row["name"]: row for row in plan_json(replace(bf16, gpu=GPT2.gpu), TRACED)["gpus"]}
        assert "attention takes another kernel on sm_75" in by_name["t4-16gb"]["unavailable"]
        assert plan_json(GPT2, UNTRACED)["notes"] == []

    def test_a_trace_stands_beside_the_formula(self) -> None:
        text = plan_markdown(GPT2, TRACED)
        assert "| activations | 8.00 GiB | 0.78 GiB |" in text.replace(
            f"{answer(GPT2).breakdown.as_json()['activations'] / GIB:.2f} GiB", "8.00 GiB"
        )
        assert "By trace (torch 2.13 sm_80) it fits" in text
        assert "\n- CUDA context 0." in text
        assert "| optimizer 2 |" in text

    def test_tables_are_whole(self) -> None:
        columns = None
        for line in plan_markdown(GPT2, TRACED).splitlines():
            if not line.startswith("|"):
                columns = None
                continue
            columns = columns or line.count("|")
            assert line.count("|") == columns, line


@pytest.mark.parametrize("name", ["resnet-50", "vit-b-16", "bert-base", "mlp"])
def test_every_kind_of_network_can_be_written(name: str) -> None:
    text = plan_markdown(replace(GPT2, shape=find_model(name)), UNTRACED)
    assert name in text
