"""Short help on every row, decision and technique: the formula, the plan's numbers in it, the source, the limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import msgspec

from gpumem_tui.catalog.loader import toml_tables
from gpumem_tui.formula.parameters import count_parameters, textbook_parameters
from gpumem_tui.formula.records import OPTIMIZER_RECORDS
from gpumem_tui.formula.rows import AS_BACKWARD_ENDS, ONE_BLOCK, ROW_WORDS, THE_FIRST_BLOCK, WITHOUT_EXPERTS, FormulaRow
from gpumem_tui.formula.techniques import COST_ORDER, NotApplicable, Technique, catalog_techniques, other_way
from gpumem_tui.memory import format_bytes
from gpumem_tui.plan.answers import Answer, answer, moments_of, terms_of
from gpumem_tui.plan.combination import Effect
from gpumem_tui.plan.judgement import judgement_words, judgements
from gpumem_tui.plan.plan import Plan
from gpumem_tui.plan.techniques import techniques
from gpumem_tui.report.tables import counted
from gpumem_tui.simulator.allocator.profile import beside_allocator_bytes


@dataclass(frozen=True)
class Explanation:
    """The help's text for a row, a technique, a judgement or a decision.

    Attributes:
        key: a row's name, a technique's or a judgement's key, or one of `DECISIONS`.
        formula: in symbols: b batch, S sequence, h hidden, L layers, a heads, V vocabulary, N parameters, D GPUs,
            w bytes of a value.
        numbers: the formula with this plan's numbers.
        limits: where it stops being right; "" for nothing to say.
    """

    key: str
    title: str
    formula: str
    numbers: str
    source: str
    limits: str


_DECISION_WORDS = msgspec.convert(toml_tables("help.toml")["decisions"], dict[str, dict[str, str]])
DECISIONS = {key: Explanation(key, **words) for key, words in _DECISION_WORDS.items()}
"""Further explanations, besides rows, techniques and judgements; the textbook's two forms for transformers only."""


def explanations(plan: Plan) -> Mapping[str, Explanation]:
    """Return every help text of a plan by key: rows, decisions, techniques, judgements.

    Raises:
        ValueError: as `answer`.
    """
    now, judged = answer(plan), techniques(plan)
    found = [
        *(_row(row) for row in (*terms_of(plan), *now.prediction.rows)),  # the peak's own last: they stay
        *_decisions(now),
        *(_effect(now, effect) for effect in judged.helping),
        *(_inapplicable(entry) for entry in judged.not_applicable),
        _by_trace(other_way(plan.recipe)),
        *(
            Explanation(advice.key, advice.title, judgement_words()[advice.key].formula, advice.text, advice.source, "")
            for advice in judgements(plan)
        ),
    ]
    return MappingProxyType({explanation.key: explanation for explanation in found})


def _row(row: FormulaRow) -> Explanation:
    name = row.name
    for suffix in (ONE_BLOCK, THE_FIRST_BLOCK, WITHOUT_EXPERTS, AS_BACKWARD_ENDS):
        name = name.removesuffix(suffix)
    words = ROW_WORDS[name]
    numbers = f"{row.expression} = {format_bytes(row.size_bytes)}"
    limits = "; ".join(part for part in (row.note, words.limits.format(states=_states())) if part)
    return Explanation(row.name, row.name, words.formula, numbers, row.source, limits)


@cache
def _states() -> str:
    """Return what each optimizer keeps per parameter, the most first, in a few words."""
    by_count: dict[str, list[str]] = {}
    for record in OPTIMIZER_RECORDS.values():
        if record.counted_as:
            by_count.setdefault(record.per_parameter, []).append(record.counted_as)
    numbers = sorted((count for count in by_count if count.isdecimal()), reverse=True)
    counts = [*numbers, *(count for count in by_count if not count.isdecimal())]
    # Kinds, in small letters, come before names.
    named = {count: ", ".join(sorted(by_count[count], key=lambda name: not name.islower())) for count in counts}
    return "states per parameter: " + "; ".join(f"{names} {count}" for count, names in named.items())


def _decisions(now: Answer) -> list[Explanation]:
    plan, prediction, steps = now.plan, now.prediction, now.accumulation
    shape, gpus, total = plan.shape, plan.recipe.gpus, plan.gpu.total_bytes
    moments = {moment: found.at(max(1, now.max_batch_size)) for moment, found in moments_of(plan).items()}
    bound = min(moments, key=lambda one: (now.usable_bytes - moments[one].fixed_bytes) // moments[one].sample_bytes)
    known: dict[str, object] = {
        "moment": prediction.moment.value,
        "fixed": format_bytes(prediction.fixed_bytes),
        "batch": plan.batch_size,
        "sample": format_bytes(prediction.activation_bytes_per_sample),
        "peak": format_bytes(now.peak_bytes),
        "assumptions": " ".join(prediction.assumptions),
        "total": format_bytes(total),
        "share": f"{1 - plan.headroom:g}",
        "beside": format_bytes(beside_allocator_bytes(plan.gpu)),
        "usable": format_bytes(now.usable_bytes),
        "bound": bound.value,
        "bound_fixed": format_bytes(moments[bound].fixed_bytes),
        "bound_sample": format_bytes(moments[bound].sample_bytes),
        "largest": f"{now.max_batch_size:,}",
        "target": f"{steps.target_batch:,}",
        "gpus": gpus,
        "s": "s" if gpus != 1 else "",
        "steps": steps.steps,
        "rounded": "" if steps.exact else f", rounded up: {steps.global_batch_size:,} samples instead",
        "samples": counted(steps.global_batch_size, "sample"),
        "tokens": f", {now.global_batch_tokens:,} tokens" if now.global_batch_tokens else "",
        "order": COST_ORDER,
        "sharding": plan.recipe.sharding,
    }
    takes_tokens = shape.record.inputs == "tokens"
    if takes_tokens:
        known |= _textbook(plan)
    return [
        replace(words, numbers=words.numbers.format(**known), limits=words.limits.format(**known))
        for key, words in DECISIONS.items()
        if takes_tokens or not key.startswith("textbook")
    ]


def _textbook(plan: Plan) -> dict[str, object]:
    """Work out the textbook's two forms: parameters, and activations by recompute."""
    shape = plan.shape
    linear = shape.layers * shape.seq_len * plan.batch_size * shape.hidden
    scores = 5 * shape.layers * plan.batch_size * shape.heads * shape.seq_len**2
    return {
        "vocab": f"{shape.vocab:,}",
        "hidden": f"{shape.hidden:,}",
        "layers": shape.layers,
        "counted": f"{textbook_parameters(shape.layers, shape.hidden, shape.vocab):,}",
        "parameters": f"{count_parameters(shape):,}",
        "none": format_bytes(34 * linear + scores),
        "selective": format_bytes(34 * linear),
        "full": format_bytes(2 * linear + (34 * linear + scores) // shape.layers),
    }


def _effect(now: Answer, effect: Effect) -> Explanation:
    change, technique = effect.change, catalog_techniques()[effect.change.key]
    numbers = (
        f"{format_bytes(now.peak_bytes)} → {format_bytes(effect.peak_bytes)} at batch {effect.plan.batch_size}; "
        f"largest batch {now.max_batch_size:,} → {effect.known_largest:,}"
    )
    only = "; formula only: cannot be traced" if effect.formula_only else ""
    limits = f"cost: {change.cost}; {technique.caveat}{only}"
    return Explanation(change.key, change.name, technique.arithmetic, numbers, change.source, limits)


def _by_trace(technique: Technique) -> Explanation:
    numbers = "see its row: no formula has them"
    limits = f"cost: {technique.cost}; {technique.caveat}"
    return Explanation(technique.key, technique.name, technique.arithmetic, numbers, technique.source, limits)


def _inapplicable(entry: NotApplicable) -> Explanation:
    technique = catalog_techniques()[entry.key]
    numbers = f"not here: {entry.reason}"
    return Explanation(entry.key, entry.name, technique.arithmetic, numbers, "this plan", technique.caveat)
