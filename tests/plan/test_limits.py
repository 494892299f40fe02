"""How far one of a plan's numbers can go: by traces made by hand, and by the formula if missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import MIB, Bucket, Unknown
from gpumem_tui.plan.answers import predicted, usable_of
from gpumem_tui.plan.goals import QUANTITIES, Quantity
from gpumem_tui.plan.limits import Known, Limit, _padding, limit
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.report import limit_lines, limit_markdown
from gpumem_tui.search.prediction import Traced
from gpumem_tui.simulator.allocator.replay import AffineTrace, NotAffine, TraceByLength
from gpumem_tui.simulator.allocator.timeline import Timeline
from tests.plan.plans import TRACED
from tests.plan.printing import limit_json
from tests.search.traces import traced, training

LLAMA = Plan(find_model("llama-3.2-1b"), Recipe("bf16"), find_gpu("rtx-3090-24gb"), batch_size=2)
GPT2 = Plan(find_model("gpt2"), Recipe(), find_gpu("a100-80gb"), batch_size=2)


def no_torch(plan: Plan) -> Unknown:
    return Unknown("torch is not installed")


def step(plan: Plan, batch_size: int) -> Timeline:
    """500 MiB of weights over the GPUs; activations of half a MiB a token and a byte for each pair of tokens."""
    length = plan.shape.seq_len
    sizes = {
        Bucket.PARAMETERS: 500 * MIB // plan.recipe.gpus,
        Bucket.ACTIVATIONS: batch_size * length * (MIB // 2 + length),
        Bucket.OPTIMIZER: 24 * 1024 * MIB // plan.recipe.gpus if plan.shape.name == "gpt2" else 0,
    }
    return training(sizes, layers=1)


class Tracing:
    """Traces what is wanted, and counts it."""

    def __init__(self, traced_step: Callable[[Plan, int], Timeline] = step) -> None:
        self.plans: list[Plan] = []
        self._step = traced_step
        self._found: dict[Plan, Traced] = {}

    def known(self, plan: Plan) -> Traced | None:
        return self._found.get(plan)

    def solve(self, quantity: Quantity, plan: Plan, passes: int | None = None) -> Limit:
        while (found := limit(quantity, plan, self.known, passes)).wanted:
            for one in found.wanted:
                assert one not in self._found, "an answer is not wanted again"
                self.plans.append(one)
                form = AffineTrace.fit((2, self._step(one, 2)), (3, self._step(one, 3)))
                self._found[one] = traced(form, one.gpu)
        return found


def test_the_longest_sequence_was_traced_and_the_next_one_does_not_fit() -> None:
    tracing = Tracing()
    found = tracing.solve("seq-len", LLAMA)
    assert found.how == "verified"
    assert found.value is not None
    assert found.beyond == found.value + 128
    assert {found.value, found.beyond} <= {plan.shape.seq_len for plan in tracing.plans}
    assert found.plan is not None
    assert found.plan.shape.seq_len == found.value
    assert len(tracing.plans) <= 8


def test_a_kernel_that_changes_with_the_length_only_takes_more_traces() -> None:
    def jumps(plan: Plan, batch_size: int) -> Timeline:
        more = 5_000 * MIB if plan.shape.seq_len > 4_000 else 0
        return training({Bucket.ACTIVATIONS: batch_size * plan.shape.seq_len * MIB + more}, layers=1)

    found = Tracing(jumps).solve("seq-len", LLAMA)
    assert (found.how, found.value, found.beyond) == ("verified", 8_064, 8_192)


@pytest.mark.parametrize("model", ["gpt2-medium", "bert-base"])
def test_learned_positions_bound_the_sequence_and_say_so(model: str) -> None:
    plan = Plan(find_model(model), Recipe("bf16"), find_gpu("h100-80gb"))
    found = Tracing().solve("seq-len", plan)
    assert (found.how, found.value, found.beyond) == ("verified", plan.shape.max_seq_len, None)
    assert f"{plan.shape.max_seq_len:,} positions" in found.note


def test_without_torch_the_formula_answers_and_says_that_it_is_an_estimate() -> None:
    for quantity in QUANTITIES:
        found = limit(quantity, LLAMA, no_torch)
        assert found.how == "formula"
        assert not found.wanted
        assert "torch is not installed" in found.note
    longest = limit("seq-len", LLAMA, no_torch)
    assert longest.plan is not None
    assert longest.value is not None
    assert predicted(longest.plan).needed_bytes <= usable_of(longest.plan)
    longer = replace(longest.plan, shape=LLAMA.shape.overridden(seq_len=longest.value + 128))
    assert predicted(longer).needed_bytes > usable_of(longer)
    assert "by formula: an estimate" in limit_lines(LLAMA, longest)[0]


def test_where_traces_end_before_the_answer_is_verified_they_still_say_more_than_the_formula() -> None:
    tracing = Tracing()
    settled = tracing.solve("seq-len", LLAMA)
    first = {plan.shape.seq_len for plan in tracing.plans[:3]}

    def known(plan: Plan) -> Traced | Unknown | None:
        return tracing.known(plan) if plan.shape.seq_len in first else Unknown("not traced within 50 s")

    found = limit("seq-len", LLAMA, known)
    assert settled.value is not None
    assert found.value is not None
    assert found.how == "traced"
    assert abs(found.value - settled.value) <= 256
    assert "not verified: not traced within 50 s" in found.note


def test_the_largest_batch_and_the_passes_that_follow_from_it() -> None:
    tracing = Tracing()
    plan = replace(LLAMA, target_batch=100)
    largest = tracing.solve("batch-size", plan).value
    found = tracing.solve("accumulation", plan)
    assert largest is not None
    assert found.plan is not None
    assert found.value == -(-100 // largest)
    assert found.plan.batch_size <= largest
    assert found.plan.batch_size * found.value >= 100


def test_the_fewest_gpus_were_traced_and_one_less_is_too_few() -> None:
    plan = replace(GPT2, recipe=Recipe(sharding="zero3", gpus=2), gpu=find_gpu("rtx-3060-12gb"))
    tracing = Tracing()
    found = tracing.solve("gpus", plan)
    assert (found.how, found.value, found.beyond) == ("verified", 4, 2)
    assert found.plan is not None
    assert found.plan.recipe.gpus == 4


def test_a_target_and_its_passes_ask_for_gpus_too() -> None:
    plan = replace(GPT2, recipe=Recipe(sharding="zero3", gpus=2), target_batch=64)
    assert Tracing().solve("gpus", plan, passes=4).value == 8
    unsharded = replace(LLAMA, target_batch=64)
    found = Tracing().solve("gpus", unsharded, passes=4)
    assert (found.value, found.how) == (8, "traced")
    assert "--sharding" in found.note


def test_what_has_no_sequence_says_so() -> None:
    plan = Plan(find_model("resnet-18"), Recipe(), find_gpu("a100-80gb"))
    found = limit("seq-len", plan, no_torch)
    assert found.value is None
    assert "no sequence" in found.note


def test_the_answer_in_words_markdown_and_json() -> None:
    found = Tracing().solve("seq-len", LLAMA)
    assert found.value is not None
    assert found.beyond is not None
    lines = limit_lines(LLAMA, found)
    assert f"{found.value:,} tokens, verified" in lines[0]
    assert f"{found.beyond:,}" in lines[0]
    assert f"--seq-len {found.value}" in lines[-1]
    assert f"--seq-len {found.value}" in limit_markdown(LLAMA, found)
    said = limit_json(LLAMA, found)
    assert (said["solve"], said["value"], said["how"]) == ("seq-len", found.value, "verified")


def known_nothing(plan: Plan) -> None:
    return None


def test_nothing_is_claimed_before_the_first_trace() -> None:
    known: Known = known_nothing
    found = limit("seq-len", LLAMA, known)
    assert found.how == "formula"
    assert found.wanted


def test_a_form_through_lengths_gives_every_other_one() -> None:
    traces = {length: AffineTrace.fit((2, _at(length, 2)), (3, _at(length, 3))) for length in (128, 256, 512)}
    form = TraceByLength.fit(traces)
    assert form.at(1024).at(4).sizes == _at(1024, 4).sizes
    with pytest.raises(NotAffine):
        TraceByLength.fit({**dict(list(traces.items())[:2]), 640: AffineTrace.constant(training({}, layers=1))})


def _at(length: int, batch_size: int) -> Timeline:
    return step(replace(LLAMA, shape=LLAMA.shape.overridden(seq_len=length)), batch_size)


def test_a_shorter_sequence_that_does_not_fit_is_named() -> None:
    first = limit("seq-len", LLAMA, no_torch).value
    assert first is not None

    def in_pieces(plan: Plan, batch_size: int) -> Timeline:
        length = plan.shape.seq_len
        fits = length != first and length <= first + 256
        return training({Bucket.ACTIVATIONS: batch_size * MIB * (1 if fits else 1 << 20)}, layers=1)

    found = Tracing(in_pieces).solve("seq-len", LLAMA)
    assert (found.how, found.value, found.beyond) == ("verified", first + 256, first + 384)
    assert f"{first:,} was traced and does not fit" in found.note
    assert f"{found.value:,} was traced itself, so it is safe" in found.note


def test_where_no_value_will_do_it_says_what_is_missing_and_what_lifts_it() -> None:
    plan = replace(LLAMA, gpu=find_gpu("t4-16gb"), recipe=Recipe())
    for quantity in QUANTITIES:
        found = limit(quantity, plan, no_torch)
        assert found.value is None
        lines = " ".join(limit_lines(plan, found))
        assert f"optimizer state alone take ≈{16 * 1_235_814_400 / 2**30:.2f} GiB" in lines
        assert found.lift is not None
        lifted = found.lift.plan
        assert predicted(lifted).needed_bytes <= usable_of(lifted)
        assert f"to lift it, by formula: {found.lift.words}" in lines
        assert limit_json(plan, found)["lift"]["command"] in lines


@pytest.mark.parametrize(("traced_gib", "is_lifted"), [(22, True), (300, True), (3000, False)])
def test_by_trace_it_says_what_is_missing_of_the_least_value_and_what_saves_as_much(
    traced_gib: int, is_lifted: bool
) -> None:
    def too_much(plan: Plan, batch_size: int) -> Timeline:
        return training({Bucket.ACTIVATIONS: batch_size * traced_gib * 1024 * MIB}, layers=1)

    found = Tracing(too_much).solve("batch-size", replace(LLAMA, batch_size=1))
    assert (found.lift is not None) == is_lifted
    if found.lift is not None:
        missing_gib = float(re.search(r"lacks? ([\d.]+) GiB", found.note)[1])  # type: ignore[index]
        as_it_is, lifted = (predicted(plan).needed_bytes for plan in (replace(LLAMA, batch_size=1), found.lift.plan))
        assert 1 - lifted / as_it_is >= missing_gib / (missing_gib + usable_of(found.lift.plan) / 2**30) - 0.001
    assert (found.value, found.how) == (None, "traced")
    assert "even 1 sample lack" in found.note
    assert "by trace" in found.note


def test_gpus_come_in_parts_of_a_machine_and_whole_machines() -> None:
    def gpus(node: int, memory: str) -> int | None:
        goals = replace(GPT2.goals, node_gpus=node)
        plan = replace(GPT2, recipe=Recipe(sharding="zero3", gpus=2), gpu=find_gpu(memory), goals=goals)
        found = Tracing().solve("gpus", plan)
        assert found.how == "verified"
        return found.value

    assert gpus(1, "rtx-3060-12gb") == 3
    assert gpus(8, "rtx-3060-12gb") == 4
    assert gpus(6, "rtx-3060-12gb") == 3


def test_experts_that_fsdp2_fills_up_are_named() -> None:
    recipe = Recipe("amp-bf16", sharding="fsdp2", gpus=2)
    plan = replace(LLAMA, shape=find_model("deepseek-v3"), recipe=recipe, batch_size=1000, gpu=find_gpu("t4-16gb"))
    found = limit("gpus", plan, lambda _: TRACED)
    assert found.value is None
    assert "more GPUs than a block has experts (256) it fills them up" in limit_lines(plan, found)[0]
    small = replace(plan, recipe=replace(recipe, recompute="full"), batch_size=1, gpu=find_gpu("h100-80gb"))
    spread = replace(small, recipe=replace(small.recipe, expert_parallel=8))
    fewest = limit("gpus", spread, lambda _: Unknown("not traced")).value
    assert f"--expert-parallel 8 does with ≈{fewest:,} GPUs" in _padding(small)


def test_the_fewest_gpus_are_so_many_that_experts_can_be_spread_over_them() -> None:
    recipe = Recipe("bf16", sharding="fsdp2", gpus=64, expert_parallel=64, recompute="full")
    plan = replace(LLAMA, shape=find_model("deepseek-v3"), recipe=recipe, batch_size=1, gpu=find_gpu("h100-80gb"))
    assert limit("gpus", plan, lambda _: Unknown("not traced")).value == 128
