"""Settings of the allocator in a plan: the existing traces tell, without a further run."""

from __future__ import annotations

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.formula.techniques import ALLOCATOR, Price
from gpumem_tui.plan.answers import TracedAnswer, answer
from gpumem_tui.plan.combination import Combination
from gpumem_tui.plan.combining import command_of
from gpumem_tui.plan.command import CommandPlan, techniques_of_command
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.recommended import all_techniques, change_words, plan_answer, recommended
from gpumem_tui.plan.report import _combinations
from gpumem_tui.search.config import SearchConfig
from gpumem_tui.search.fragmentation import larger_batch
from gpumem_tui.search.predicting import Predicted
from gpumem_tui.search.prediction import Formula, Prediction, Traced
from gpumem_tui.simulator.allocator.replay import AffineTrace, replay
from gpumem_tui.simulator.allocator.settings import AllocatorSettings
from gpumem_tui.tui.plan.help import CommandHelp
from tests.plan.commands import READY, change, command_config, ran
from tests.search.traces import lengths, traced

SHARES = (3, 4, 5, 6)


def _growing(config: SearchConfig, scale: int) -> Traced:
    """Steps whose sizes differ, of so many times GROWING's bytes."""
    two, three = (lengths(*(size * scale * one for one in SHARES)) for size in (2, 3))
    form = AffineTrace.fit((2, two), (3, three))
    return traced(form, config.device.gpu)


def _of_growing(config: SearchConfig, batch_size: int, *tried: Combination) -> CommandPlan:
    formula = Formula(config.workload, config.device.gpu.total_bytes, config.headroom)
    return CommandPlan(config, batch_size, Predicted(Prediction(formula, _growing(config, 1)), READY), tried)


def _beyond(found: Traced) -> int:
    """The batch that fits with expandable segments and not without."""
    larger = larger_batch(found)
    assert larger is not None
    assert larger.largest is not None
    return larger.largest[1]


def test_a_setting_of_the_allocator_comes_first_and_needs_no_run() -> None:
    config = command_config(gpu="rtx-3090-24gb")
    size = _beyond(_growing(config, 1))
    plan = _of_growing(config, size)
    first = techniques_of_command(plan, plan.answer()).helping[0]
    assert (first.change.key, first.change.name, first.fits) == (ALLOCATOR, "expandable_segments:True", True)
    assert first.reserved_bytes is not None
    assert first.saved_bytes == plan.answer().peak_reserved_bytes - first.reserved_bytes > 0
    assert (plan.fitting, plan.cost) == (plan.replayed[0], Price())
    line, written = command_of(plan, plan.replayed[0])
    assert line == f"PYTORCH_ALLOC_CONF=expandable_segments:True python train.py --batch-size {size}"
    assert written == ()
    assert change_words(plan, plan.answer()) == (
        "To change: expandable_segments:True (export PYTORCH_ALLOC_CONF=expandable_segments:True), traced: it fits."
    )
    roomy = _of_growing(config, 1)
    assert techniques_of_command(roomy, roomy.answer()).helping[0].change.key == ALLOCATOR, "it saves there, too"


def test_a_change_that_fits_with_the_setting_only_is_known_without_a_further_run() -> None:
    config = command_config(gpu="rtx-3090-24gb")
    halved = _growing(config, 1)
    size = _beyond(halved)
    tried = ran((change("autocast", config),), size, 1, halved)
    dearer = _growing(config, 2)
    formula = Formula(config.workload, config.device.gpu.total_bytes, config.headroom)
    plan = CommandPlan(config, size, Predicted(Prediction(formula, dearer), READY), (tried,))
    assert not plan.fits_with(tried)
    both = plan.fitting
    assert both is not None
    assert [one.key for one in both.changes] == [ALLOCATOR, "autocast"]
    assert both.price == tried.price
    assert both in plan.together
    expandable = AllocatorSettings(expandable_segments=True)
    assert isinstance(both.traced, Traced)
    independent = replay(halved.trace.at(size), halved.capacity_range.low_bytes, expandable)
    assert independent.fits
    assert both.traced.at(size).peak_reserved_bytes == independent.peak_reserved_bytes


# A model's plan


def _model_plan(batch_size: int) -> tuple[Plan, TracedAnswer]:
    """A plan whose trace leaves pieces in segments, as the closed form knows nothing of, and what it states."""
    found = _growing(command_config(gpu="rtx-3090-24gb"), 1)
    plan = Plan(find_model("gpt2"), Recipe(), found.gpu, batch_size, headroom=0.0)
    return plan, TracedAnswer(plan, found)


def test_a_model_that_fits_with_the_setting_needs_nothing_else() -> None:
    plan, now = _model_plan(_beyond(_growing(command_config(gpu="rtx-3090-24gb"), 1)))
    first = all_techniques(plan, now).helping[0]
    assert (first.change.key, first.fits, first.by) == (ALLOCATOR, True, "traced")
    best = recommended(plan, now)
    assert isinstance(best.combination, Combination)
    assert isinstance(best.traced, TracedAnswer)
    assert [one.key for one in best.combination.changes] == [ALLOCATOR]
    assert best.combination.plan == plan
    assert best.traced.fits
    assert "To change: expandable_segments:True (export PYTORCH_ALLOC_CONF=expandable_segments:True)." in plan_answer(
        answer(plan), now, best
    )
    assert next(_combinations(now, best)).endswith(
        f"PYTORCH_ALLOC_CONF=expandable_segments:True gpumem-tui plan --model gpt2 --batch-size {plan.batch_size} "
        "--gpu sim:rtx-3090-24gb --headroom 0.0\n```"
    )


def test_what_a_trace_confirms_with_the_setting_only_is_recommended_with_it() -> None:
    size = _beyond(_growing(command_config(gpu="rtx-3090-24gb"), 1))
    plan, fits_with_it = _model_plan(size)
    now = TracedAnswer(plan, _growing(command_config(gpu="rtx-3090-24gb"), 3))
    best = recommended(plan, now, lambda one: TracedAnswer(one.at(size), fits_with_it.traced))
    assert isinstance(best.combination, Combination)
    assert best.combination.changes[0].key == ALLOCATOR
    assert best.combination.plan != plan, "the setting alone is not enough"
    assert isinstance(best.traced, TracedAnswer)
    assert best.traced.fits


# On the screen


def test_the_pane_lists_the_setting_first_with_the_line_to_export() -> None:
    config = command_config(gpu="rtx-3090-24gb")
    plan = _of_growing(config, _beyond(_growing(config, 1)))
    pane = CommandHelp.of(plan, plan.answer(), None, ())
    heading, first = ("".join(text for text, _ in line.spans) for line in pane.rows(80, ALLOCATOR)[:2])
    assert heading == "Cheapest combination that fits"
    assert first.startswith("✓ expandable_segments:True")
    shown = "\n".join("".join(text for text, _ in line.spans) for line in pane.rows(80, ALLOCATOR))
    assert "none: export PYTORCH_ALLOC_CONF=expandable_segments:True" in " ".join(shown.split())
    details = pane.details(ALLOCATOR)
    assert details is not None
    assert ("export PYTORCH_ALLOC_CONF=expandable_segments:True", "") in details[1][0]
    keys = [line.key for line in pane.rows(80, ALLOCATOR) if line.key]
    assert len(keys) == len(set(keys)), "one row is chosen at a time"
    best = pane.details(keys[0])
    assert best is not None
    assert best[2].startswith("PYTORCH_ALLOC_CONF=expandable_segments:True python ")
