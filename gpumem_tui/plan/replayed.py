"""Settings of the allocator as changes of a plan: no run is made for them, the traces that are there are replayed."""

from __future__ import annotations

from dataclasses import replace

from gpumem_tui.formula.techniques import ALLOCATOR, Technique, techniques_of
from gpumem_tui.memory import Unknown, format_bytes
from gpumem_tui.plan.combination import Combination, Effect
from gpumem_tui.plan.plan import Plan
from gpumem_tui.search.fragmentation import AllocatorRemedy, remedy
from gpumem_tui.search.prediction import Traced


def technique_of(found: AllocatorRemedy) -> Technique:
    """Return a setting of the allocator as a change: its name, how to have it, and what it gains."""
    before, after = map(format_bytes, found.reserved_bytes)
    made = techniques_of("command")[ALLOCATOR].filled(option=found.option, how=found.how, before=before, after=after)
    return replace(made, given_option=found.assignment)


def effect_of(found: AllocatorRemedy, of_model: Plan | None = None) -> Effect:
    """Return what a setting comes to alone: it saves reserved bytes, the allocated peak stays.

    Args:
        of_model: a model's plan, which it leaves as it is; None for a command.
    """
    before, after = found.reserved_bytes
    replay = found.after.at(found.batch_size)
    return Effect(
        technique_of(found),
        "traced",
        replay.peak_allocated_bytes,
        before - after,
        found.fit,
        found.after.max_batch_size,
        after,
        replay.breakdown,
        of_model,
    )


def replayed(one: Combination, there: Traced) -> Combination | None:
    """Return what was run, under the setting of the allocator too that helps it most; None where none does.

    Args:
        there: its trace on the planned GPU.
    """
    if isinstance(one.traced, Unknown) or (found := remedy(there, one.batch_size, one.beside_bytes)) is None:
        return None
    changes = (technique_of(found), *one.changes)
    return replace(one, changes=changes, traced=one.traced.under(found.after.settings))


def assignment_of(changes: tuple[Technique, ...]) -> str:
    """Return the variable that a set of changes has the allocator's setting in, before a command; "" for none."""
    found = (one for one in changes if one.key == ALLOCATOR and one.how.startswith("export"))
    return next((f"{one.given_option} " for one in found), "")
