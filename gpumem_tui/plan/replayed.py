"""Settings of the allocator as changes of a plan: no run is made for them, the traces that are there are replayed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpumem_tui.formula.techniques import ALLOCATOR, Technique, techniques_of
from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.plan.answers import TracedAnswer, headroom_of
from gpumem_tui.plan.combination import Combination, Effect
from gpumem_tui.plan.plan import Plan
from gpumem_tui.search.fragmentation import AllocatorRemedy, larger_batch, remedy
from gpumem_tui.search.prediction import Fit, Traced


def technique_of(found: AllocatorRemedy) -> Technique:
    """Return a setting of the allocator as a change: its name, how to have it, and what it gains."""
    before, after = map(format_bytes, found.reserved_bytes)
    made = techniques_of("command")[ALLOCATOR].filled(option=found.option, how=found.how, before=before, after=after)
    return replace(made, given_option=found.assignment)


def effect_on(now: TracedAnswer) -> Effect | None:
    """Return what the best setting comes to alone, where it saves reserved bytes or makes a larger batch fit.

    The allocated peak stays as it is.
    """
    batch_size = now.plan.batch_size
    found = remedy(now.traced, batch_size, headroom_of(now.plan)) or larger_batch(now.traced)
    if found is None:
        return None
    found = replace(found, batch_size=batch_size)
    then, (before, after) = replace(now, traced=found.after), found.reserved_bytes
    is_model = isinstance(now.plan, Plan)
    fit: Fit = found.fit if not is_model else "fits" if then.fits else "does not fit"
    effect = Effect(
        technique_of(found),
        "traced",
        then.peak_allocated_bytes,
        before - after,
        fit,
        then.max_batch_size,
        after,
        then.breakdown,
        now.plan if isinstance(now.plan, Plan) else None,
        then.device_used_bytes,
    )
    return None if effect.no_gain(now.known_batch_size) else effect


def fitting_with(now: TracedAnswer) -> tuple[Technique, TracedAnswer] | None:
    """Return the setting with which a model's plan fits, and the answer with it; None where none makes it fit."""
    found = remedy(now.traced, now.plan.batch_size, headroom_of(now.plan))
    then = now if found is None else replace(now, traced=found.after)
    return (technique_of(found), then) if found is not None and then.fits else None


def replayed(one: Combination, there: Traced) -> Combination | None:
    """Return what was run, under the setting of the allocator too that helps it most; None where none does.

    Args:
        there: its trace on the planned GPU.
    """
    if isinstance(one.traced, Unknown) or (found := remedy(there, one.batch_size, one.beside_bytes)) is None:
        return None
    changes = (technique_of(found), *one.changes)
    return replace(one, changes=changes, traced=one.traced.under(found.after.settings))


def assignment_of(changes: Iterable[Technique]) -> str:
    """Return the variable that a set of changes has the allocator's setting in, before a command; "" for none."""
    found = (one for one in changes if one.key == ALLOCATOR and one.how.startswith("export"))
    return next((f"{one.given_option} " for one in found), "")
