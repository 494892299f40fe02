"""The network cut over GPUs, against the forms of the papers and counts by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.checks import fault, why_formula_only
from gpumem_tui.formula.parallel import micro_batches_kept
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.predict import at_moment, max_batch_size, predict, terms, usable_bytes
from gpumem_tui.formula.recipe import Recipe, Schedule
from gpumem_tui.formula.rows import Moment
from gpumem_tui.memory import GIB, Bucket

GPT3 = ModelShape(
    "gpt3-175b", "gpt2", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=4 * 12288, vocab=51200, seq_len=2048,
    max_seq_len=2048, tied_head=True, dropout=0.1,
)  # fmt: skip
"""Korthikanti et al. 2022, table 3."""
LLAMA = find_model("llama-3-8b")
BLOCK_ROWS = ("attention", "feed-forward", "normalization", "dropout masks", "attention scores")


def recipe(**values: Any) -> Recipe:
    made = Recipe(**{"precision": "bf16", **values})
    return made if "gpus" in values else replace(made, gpus=made.model_parallel)


def block_bytes(shape: ModelShape, made: Recipe) -> int:
    """The bytes of the blocks as the last of them goes backward."""
    rows = at_moment(terms(shape, made, 1), Moment.LAST_BLOCK)
    return sum(row.size_bytes for row in rows if row.name in BLOCK_ROWS)


@pytest.mark.parametrize("tensor", [2, 8])
def test_tensor_parallel_is_the_papers_10_and_24_over_t(tensor: int) -> None:
    made = recipe(attention="math", tensor_parallel=tensor)
    per_token = 10 * 12288 + 24 * 12288 // tensor + 5 * 96 * 2048 // tensor
    assert block_bytes(GPT3, made) == 96 * 2048 * per_token


@pytest.mark.parametrize("tensor", [2, 8])
def test_with_sequence_parallel_everything_is_over_t(tensor: int) -> None:
    made = recipe(attention="math", tensor_parallel=tensor, sequence_parallel=True)
    assert block_bytes(GPT3, made) == 96 * 2048 * (34 * 12288 + 5 * 96 * 2048) // tensor


def test_tensor_parallel_cuts_matrices_and_vocabulary_but_not_norms() -> None:
    found = predict(LLAMA, recipe(tensor_parallel=8), 0)
    norms = (2 * 32 + 1) * 4096
    assert found.breakdown[Bucket.PARAMETERS] == 2 * ((8_030_261_248 - norms) // 8 + norms)


def test_biases_of_the_output_projections_stay_whole() -> None:
    found = predict(find_model("gpt2"), recipe(tensor_parallel=4), 0)
    hidden, layers = 768, 12
    embedding = -(-50257 // 4) * hidden + 1024 * hidden
    matrices = (3 * hidden * hidden + hidden * hidden + 2 * 4 * hidden * hidden) // 4
    cut_biases, whole_biases, norms = (3 * hidden + 4 * hidden) // 4, 2 * hidden, 4 * hidden
    weights = embedding + layers * (matrices + cut_biases + whole_biases + norms) + 2 * hidden
    assert found.breakdown[Bucket.PARAMETERS] == 2 * weights


def test_the_logits_are_cut_by_the_vocabulary() -> None:
    found = predict(LLAMA, recipe(tensor_parallel=8), 2)
    logits = next(row for row in found.rows if row.name == "output head: logits")
    assert logits.size_bytes == 2 * 2 * 2048 * 128_256 // 8


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "place", "kept"),
    [
        ("gpipe", 12, 0, (12, 1)),
        ("gpipe", 12, 3, (12, 1)),
        ("1f1b", 12, 0, (4, 1)),
        ("1f1b", 12, 3, (1, 1)),
        ("1f1b", 2, 0, (2, 1)),
        ("1f1b", 0, 1, (3, 1)),
        # 1 + (p − 1)/(p·v) of the whole network, p stages of which have v pieces: (p·v + p − 1)/v of a stage
        ("interleaved", 12, 0, (4 * 2 + 3, 2)),
    ],
)
def test_a_stage_keeps_what_its_schedule_has_under_way(
    schedule: Schedule, micro_batches: int, place: int, kept: tuple[int, int]
) -> None:
    made = recipe(pipeline_parallel=4, schedule=schedule, micro_batches=micro_batches)
    assert micro_batches_kept(made, place) == kept


def test_the_first_stage_of_1f1b_keeps_as_much_as_the_whole_network_does() -> None:
    stage = recipe(attention="math", pipeline_parallel=8)
    assert block_bytes(GPT3, stage) == block_bytes(GPT3, recipe(attention="math"))


def test_the_stages_parameters_are_the_networks_and_one_more_tied_head() -> None:
    places = [replace(GPT3, layers=24, part=part) for part in ("first", "middle", "middle", "last")]
    assert sum(map(count_parameters, places)) == count_parameters(GPT3) + GPT3.vocab * GPT3.hidden
    untied = [replace(LLAMA, layers=16, part=part) for part in ("first", "last")]
    assert sum(map(count_parameters, untied)) == count_parameters(LLAMA)


def test_one_micro_batch_at_a_time_makes_the_last_stage_the_fuller_one() -> None:
    names = {row.name for row in predict(LLAMA, recipe(pipeline_parallel=4, micro_batches=1), 1).rows}
    assert "output head: logits" in names
    names = {row.name for row in predict(GPT3, recipe(pipeline_parallel=4, micro_batches=8), 1).rows}
    assert "output head: logits" not in names


def test_context_parallel_cuts_what_grows_with_the_sequence_and_no_weights() -> None:
    alone, cut = predict(LLAMA, recipe(), 1), predict(LLAMA, recipe(context_parallel=4), 1)
    on_their_way = 2 * 2048 // 4 * 2 * 8 * 128 * 2
    growing = alone.activation_bytes_per_sample - alone.breakdown[Bucket.BATCH_DATA]
    cut_growing = cut.activation_bytes_per_sample - cut.breakdown[Bucket.BATCH_DATA]
    assert cut_growing == growing // 4 + on_their_way
    assert cut.breakdown[Bucket.PARAMETERS] == alone.breakdown[Bucket.PARAMETERS]


def test_sharding_is_over_the_gpus_that_hold_the_same_part() -> None:
    found = predict(LLAMA, recipe(tensor_parallel=8, context_parallel=2, gpus=64, sharding="zero1"), 0)
    unsharded = predict(LLAMA, recipe(tensor_parallel=8), 0)
    assert found.breakdown[Bucket.OPTIMIZER] == -(-unsharded.breakdown[Bucket.OPTIMIZER] // 8)


@pytest.mark.parametrize("cut", [{"pipeline_parallel": 4}, {"tensor_parallel": 4, "sequence_parallel": True}])
def test_the_largest_batch_fits_and_one_more_does_not(cut: dict[str, Any]) -> None:
    made = recipe(recompute="full", **cut)
    largest = max_batch_size(LLAMA, made, 80 * GIB)
    assert predict(LLAMA, made, largest).needed_bytes <= usable_bytes(80 * GIB)
    assert predict(LLAMA, made, largest + 1).needed_bytes > usable_bytes(80 * GIB)


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"tensor_parallel": 3}, "--tensor-parallel"),
        ({"tensor_parallel": 16}, "--tensor-parallel"),
        ({"sequence_parallel": True}, "--sequence-parallel"),
        ({"pipeline_parallel": 33}, "--pipeline-parallel"),
        ({"pipeline_parallel": 4, "schedule": "interleaved", "virtual_stages": 3}, "--virtual-stages"),
        ({"context_parallel": 3}, "--context-parallel"),
        ({"context_parallel": 2, "attention": "math"}, "--attention"),
        ({"tensor_parallel": 4, "gpus": 6}, "--gpus"),
    ],
)
def test_a_cut_that_cannot_be_names_the_option_to_change(values: dict[str, Any], option: str) -> None:
    wrong = fault(LLAMA, recipe(**values))
    assert wrong is not None
    assert wrong[0] == option


def test_a_convolutional_network_is_not_cut() -> None:
    assert fault(find_model("resnet-50"), recipe(tensor_parallel=2)) is not None
    assert fault(find_model("resnet-50"), recipe()) is None


def test_what_only_the_formula_answers_says_so() -> None:
    cut = recipe(tensor_parallel=2)
    for name in ("bert-base", "vit-b-16", "mixtral-8x7b", "qwen3-30b-a3b"):
        assert f"{name} is not" in why_formula_only(find_model(name), cut)
    assert "not together with --sharding zero1" in why_formula_only(LLAMA, replace(cut, sharding="zero1", gpus=4))
    assert "adafactor does not update parts" in why_formula_only(LLAMA, replace(cut, optimizer="adafactor"))
    assert "the loss scaling of amp-fp16" in why_formula_only(LLAMA, replace(cut, precision="amp-fp16"))
    assert "--pipeline-parallel 2: formula only" in why_formula_only(LLAMA, recipe(pipeline_parallel=2))
    assert "DeepSpeed" in why_formula_only(LLAMA, recipe(sharding="deepspeed-zero2", gpus=8))
    assert not why_formula_only(LLAMA, recipe(sharding="fsdp2", gpus=8))
    assert not why_formula_only(LLAMA, cut)


def test_what_pytorch_gathers_along_the_sequence_stays() -> None:
    rows = {row.name: row for row in terms(LLAMA, recipe(tensor_parallel=4, sequence_parallel=True), 2)}
    assert rows["gathered inputs"].size_bytes == (2 * LLAMA.layers + 1) * 2 * 2048 * 4096 * 2 * 3 // 4
    assert "gathered inputs" not in {row.name for row in terms(LLAMA, recipe(tensor_parallel=4), 2)}


class TestExpertParallel:
    """A block's experts over GPUs that hold all else alike."""

    mixtral = find_model("mixtral-8x7b")

    def rows(self, **recipe: Any) -> dict[str, int]:
        found = terms(self.mixtral, Recipe("bf16", **recipe), 1)
        return {row.name: row.size_bytes for row in found}

    def test_each_holds_its_share_of_the_experts_and_all_of_the_rest(self) -> None:
        experts = 32 * 8 * 3 * 4096 * 14336
        rest = count_parameters(self.mixtral) - experts
        spread = self.rows(gpus=8, expert_parallel=8)
        assert spread["parameters"] == 2 * (rest + experts // 8)
        assert spread["gradients"] == spread["parameters"]
        assert spread["optimizer state"] == 2 * spread["parameters"]

    def test_what_is_sharded_is_as_without(self) -> None:
        spread = self.rows(gpus=64, expert_parallel=8, sharding="zero3")
        whole = self.rows(gpus=64, sharding="zero3")
        for name in ("parameters", "gradients", "optimizer state"):
            assert spread[name] == whole[name]
        assert spread["gathered parameters"] < whole["gathered parameters"] / 4

    def test_tokens_go_out_and_come_in(self) -> None:
        sent = self.rows(gpus=8, expert_parallel=8)["tokens on their way to experts"]
        assert sent == 2 * 2048 * 2 * 4096 * 2

    @pytest.mark.parametrize(
        ("name", "recipe", "says"),
        [
            ("llama-3-8b", {"gpus": 2, "expert_parallel": 2}, "llama-3-8b has no experts to spread"),
            ("mixtral-8x7b", {"gpus": 3, "expert_parallel": 3}, "3 does not divide the 8 experts"),
            ("mixtral-8x7b", {"gpus": 4, "expert_parallel": 8}, "of the 4 GPUs that hold the same part"),
        ],
    )
    def test_what_cannot_be_spread_is_said(self, name: str, recipe: dict[str, Any], says: str) -> None:
        wrong = fault(find_model(name), Recipe(**recipe))
        assert wrong is not None
        assert wrong[0] == "--expert-parallel"
        assert says in wrong[1]
