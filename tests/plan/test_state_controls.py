"""Each control: what it sets, how far it goes, how it steps, what it refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu, find_model, gpus, models
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.plan.control import Choice, Control, Number, PlanError
from gpumem_tui.plan.controls import control_of, controls, plan_of, remarks
from gpumem_tui.plan.plan import Draft, Plan, draft_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GPT2 = Plan(find_model("gpt2"), Recipe(), find_gpu("a100-80gb"), batch_size=8)


def draft(model: str = "gpt2", **fields: object) -> Draft:
    return replace(draft_of(replace(GPT2, shape=find_model(model))), **fields)  # type: ignore[arg-type]


def number(made: Draft, key: str) -> Number:
    control = control_of(made, key)
    assert isinstance(control, Number)
    return control


def after(made: Draft, key: str, value: int | None) -> Draft:
    return number(made, key).put(made, value)


def steps(made: Draft, key: str, way: int, *, jump: bool = False, times: int = 1) -> list[int | None]:
    """The values on the way."""
    values = []
    for _ in range(times):
        made = number(made, key).stepped(made, way, jump=jump)
        values.append(number(made, key).get(made))
    return values


@pytest.mark.parametrize("model", models())
def test_every_model_of_the_catalog_is_a_plan_and_back(model: str) -> None:
    plan = replace(GPT2, shape=find_model(model))
    assert plan_of(draft_of(plan)) == plan


def test_a_changed_model_is_its_catalog_entry_with_changes() -> None:
    plan = replace(GPT2, shape=find_model("llama-3-8b").overridden(layers=16, seq_len=4096))
    made = draft_of(plan)
    assert made.shape == find_model("llama-3-8b")
    assert made.changes == {"layers": 16, "seq_len": 4096}
    assert plan_of(made) == plan


def test_a_model_from_elsewhere_is_its_own_base_and_can_be_left() -> None:
    own = replace(find_model("gpt2"), name="mine", layers=3, published_parameters=None)
    made = draft_of(replace(GPT2, shape=own))
    model = control_of(made, "model")
    assert isinstance(model, Choice)
    assert model.options(made)[0].value == "mine"
    assert plan_of(model.put(made, "gpt2")).shape == find_model("gpt2")


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("gpt2", {"kv_heads", "image_size"}),
        ("llama-3-8b", {"image_size"}),
        ("vit-b-16", {"kv_heads", "vocab", "seq_len"}),
        ("resnet-50", {"layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len"}),
    ],
)
def test_a_control_is_there_only_where_the_model_has_the_field(model: str, missing: set[str]) -> None:
    keys = {control.key for control in controls(draft(model))}
    everything = {"layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "image_size"}
    assert everything - keys == missing
    assert {"model", "batch_size", "precision", "gpu", "gpus", "headroom", "target_batch"} <= keys


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("heads", 7, "7 heads do not divide a hidden size of 768"),
        ("hidden", 770, "12 heads do not divide a hidden size of 770"),
        ("seq_len", 1025, "gpt2 has 1024 positions"),
        ("gpus", 0, "give at least 1, not 0"),
        ("batch_size", 0, "give at least 1, not 0"),
        ("batch_size", 10**10, "give at most 1,000,000,000"),
        ("target_batch", 7, "7 is less than one pass of 8 (8 × 1 GPU)"),
        ("headroom", 100, "give at most 99"),
    ],
)
def test_what_cannot_be_names_its_control(key: str, value: int, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(after(draft(), key, value))
    assert said in str(caught.value)
    assert caught.value.control == ("heads" if key == "hidden" else key)


def test_key_value_heads_divide_the_heads() -> None:
    with pytest.raises(PlanError, match="5 key/value heads do not divide 32 heads") as caught:
        plan_of(after(draft("llama-3-8b"), "kv_heads", 5))
    assert caught.value.control == "kv_heads"


def test_the_feed_forward_width_follows_the_hidden_size_until_it_is_set() -> None:
    wide = after(draft("llama-3-8b"), "hidden", 8192)
    assert number(wide, "ffn").get(wide) == 28672
    assert plan_of(after(after(draft("llama-3-8b"), "ffn", 10_000), "hidden", 8192)).shape.ffn == 10_000


def test_going_back_to_the_models_own_value_leaves_no_change() -> None:
    made = after(after(draft(), "layers", 13), "layers", 12)
    assert made == draft()


@pytest.mark.parametrize(
    ("key", "way", "values"),
    [
        ("batch_size", 1, [9, 10]),
        ("hidden", 1, [960, 1152]),
        ("hidden", -1, [576, 384]),
        ("heads", 1, [16, 24]),
        ("heads", -1, [8, 6]),
        ("seq_len", -1, [896, 768]),
        ("vocab", 1, [50304, 50432]),
        ("headroom", -1, [9, 8]),
        ("target_batch", 1, [8, 16]),
        ("target_batch", -1, [None, None]),
    ],
)
def test_nudges(key: str, way: int, values: list[int | None]) -> None:
    assert steps(draft(), key, way, times=2) == values


@pytest.mark.parametrize(
    ("key", "way", "values"),
    [
        ("batch_size", 1, [16, 32]),
        ("batch_size", -1, [4, 2, 1, 1]),
        ("layers", 1, [24]),
        ("gpus", 1, [2, 4, 8]),
        ("seq_len", -1, [512, 256]),
        ("headroom", 1, [15, 20]),
    ],
)
def test_jumps(key: str, way: int, values: list[int | None]) -> None:
    assert steps(draft(), key, way, jump=True, times=len(values)) == values


def test_odd_values_fall_in_step() -> None:
    assert steps(draft(batch_size=9), "batch_size", 1, jump=True) == [16]
    assert steps(draft(batch_size=9), "batch_size", -1, jump=True) == [8]
    assert steps(after(draft(), "seq_len", 1000), "seq_len", -1) == [896]


def test_choices_step_through_their_options_and_stop_at_the_ends() -> None:
    made = draft()
    precision = control_of(made, "precision")
    once = precision.stepped(made, 1, jump=False)
    assert once.recipe.precision == "amp-bf16"
    assert precision.stepped(made, -1, jump=False) == made
    assert precision.stepped(made, 1, jump=True).recipe.precision == "fp16"


def test_techniques_of_the_formula_alone_are_controls_too() -> None:
    made = draft()
    for key, value in (("loss", "chunked"), ("offload", "optimizer+activations"), ("offload", "activations")):
        control = control_of(made, key)
        assert isinstance(control, Choice)
        made = control.put(made, value)
        assert control.get(made) == value
    plan = plan_of(made)
    assert plan.extras == {"chunked-loss", "offload-activations"}
    assert draft_of(plan) == made
    assert dict(remarks(plan)) == dict.fromkeys(("loss", "offload"), "formula only: cannot be traced or searched")


def test_another_model_comes_with_its_own_shape() -> None:
    made = after(draft(), "layers", 3)
    model = control_of(made, "model")
    assert isinstance(model, Choice)
    assert plan_of(model.put(made, "gpt2-xl")).shape == find_model("gpt2-xl")


def test_every_control_has_words_and_no_words_are_left_over() -> None:
    words = tomllib.loads(files("gpumem_tui.plan").joinpath("controls.toml").read_text("utf-8"))
    seen: dict[str, Control] = {}
    recipe = Recipe(
        gpus=8, tensor_parallel=2, pipeline_parallel=2, expert_parallel=2, schedule="interleaved", adapter="lora"
    )
    for model in models():
        for made in (draft(model), draft(model, recipe=recipe)):
            seen |= {control.key: control for control in controls(made)}
    assert seen.keys() == words.keys()
    for key, control in seen.items():
        known = draft("mixtral-8x7b") if isinstance(control, Choice) else draft()
        if isinstance(control, Choice) and "notes" in words[key]:
            assert {option.value for option in control.options(known)} >= words[key]["notes"].keys()


def test_every_gpu_can_be_picked() -> None:
    gpu = control_of(draft(), "gpu")
    assert isinstance(gpu, Choice)
    assert {plan_of(gpu.put(draft(), option.value)).gpu for option in gpu.options(draft())} == set(gpus().values())


def test_a_share_of_a_per_cent_stays_what_it_is() -> None:
    made = draft(headroom=0.125)
    assert number(made, "headroom").text(made) == "12.5 %"
    assert plan_of(made).headroom == 0.125


def test_remarks_stand_beside_what_is_allowed_but_odd() -> None:
    plan = replace(GPT2, shape=find_model("llama-3-8b").overridden(seq_len=16384), recipe=Recipe(sharding="zero3"))
    assert dict(remarks(plan)) == {
        "seq_len": "longer than the 8,192 it was trained at",
        "sharding": "one GPU: there is nothing to shard over",
    }
    flash = Recipe(attention="flash", gpus=2)
    assert {key for key, _ in remarks(replace(GPT2, recipe=flash))} == {"attention", "gpus"}
    assert not list(remarks(GPT2))


@given(
    model=st.sampled_from(sorted(models())),
    moves=st.lists(st.tuples(st.integers(0, 20), st.sampled_from([-1, 1]), st.booleans()), max_size=25),
)
def test_stepping_keeps_numbers_in_their_range(model: str, moves: list[tuple[int, int, bool]]) -> None:
    made = draft(model)
    for index, way, jump in moves:
        listed = controls(made)
        control = listed[index % len(listed)]
        made = control.stepped(made, way, jump=jump)
        if isinstance(control, Number):
            control.check(made)


@given(
    model=st.sampled_from(sorted(models())),
    typed=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10**6)), min_size=1, max_size=6),
    way=st.sampled_from([-1, 1]),
)
def test_whatever_was_typed_every_control_still_steps(model: str, typed: list[tuple[int, int]], way: int) -> None:
    made = draft(model)
    numbers = [control for control in controls(made) if isinstance(control, Number)]
    for index, value in typed:
        made = numbers[index % len(numbers)].put(made, value)
    for control in controls(made):
        control.stepped(made, way, jump=False)
        control.stepped(made, way, jump=True)
        assert control.text(made)


@given(
    model=st.sampled_from([name for name in sorted(models()) if models()[name].heads]),
    moves=st.lists(
        st.tuples(st.sampled_from(["heads", "kv_heads", "hidden"]), st.sampled_from([-1, 1])), min_size=1, max_size=12
    ),
)
def test_small_steps_of_heads_and_widths_always_go_together(model: str, moves: list[tuple[str, int]]) -> None:
    made = draft(model)
    keys = {control.key for control in controls(made)}
    for key, way in moves:
        if key in keys:
            made = control_of(made, key).stepped(made, way, jump=False)
            assert plan_of(made).shape.heads


def test_a_model_that_cannot_have_the_adapters_is_said_at_their_control() -> None:
    draft = draft_of(Plan(find_model("resnet-50"), Recipe(adapter="lora"), find_gpu("t4-16gb")))
    with pytest.raises(PlanError, match="resnet-50 is no language model") as caught:
        plan_of(draft)
    assert caught.value.control == "adapter"


class TestAdapterControls:
    """Rank, targets and base are there with adapters only, and go when these go."""

    def draft(self) -> Draft:
        return draft_of(Plan(find_model("llama-3.2-1b"), Recipe("bf16"), find_gpu("t4-16gb")))

    def test_come_and_go_with_the_adapter(self) -> None:
        without = self.draft()
        assert {"lora_rank", "lora_targets", "base_quantization"}.isdisjoint(c.key for c in controls(without))
        adapter = control_of(without, "adapter")
        lora = adapter.stepped(without, 1, jump=False)
        targets, base = control_of(lora, "lora_targets"), control_of(lora, "base_quantization")
        packed = base.stepped(targets.stepped(lora, 1, jump=False), 1, jump=False)
        assert packed.recipe.lora_targets == "q_proj,k_proj,v_proj,o_proj"
        assert packed.recipe.base_quantization == "nf4-dq"
        assert plan_of(packed).recipe.has_adapters
        assert adapter.stepped(packed, -1, jump=True).recipe == without.recipe

    def test_targets_that_were_typed_stay_a_choice(self) -> None:
        plan = Plan(find_model("llama-3.2-1b"), Recipe(adapter="lora", lora_targets="k_proj"), find_gpu("t4-16gb"))
        shown = control_of(draft_of(plan), "lora_targets")
        assert isinstance(shown, Choice)
        assert shown.text(draft_of(plan)) == "k_proj"
        assert "k_proj" in [option.value for option in shown.options(draft_of(plan))]

    def test_a_classifier_has_none(self) -> None:
        draft = draft_of(Plan(find_model("vit-b-16"), Recipe(), find_gpu("t4-16gb")))
        assert "adapter" not in [c.key for c in controls(draft)]
