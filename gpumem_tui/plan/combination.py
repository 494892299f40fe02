"""The results of changes to a plan, alone and together; which set is worth a run, and which is recommended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gpumem_tui.formula.techniques import ALLOCATOR, NotApplicable, Price, Technique
from gpumem_tui.memory import Breakdown, Unknown, format_bytes
from gpumem_tui.plan.answers import Answer, TracedAnswer, formula_only
from gpumem_tui.plan.plan import Plan
from gpumem_tui.search.prediction import Fit, Traced

NOTHING = Price()
"""The price of no change."""


@dataclass(frozen=True)
class Combination:
    """Changes made together to a model's plan or to a command, with a micro-batch and its passes.

    Attributes:
        changes: none where smaller passes alone do it, or where nothing is changed.
        batch_size: samples of a pass with them, on one GPU.
        passes: of an optimizer step; of a command, for the samples that one pass had.
        traced: a command's run with them, on the GPU that the command was traced on; or why it is missing.
        beside_bytes: what they take besides: gradients of earlier passes, where the run made no passes.
        is_spared: they can be run, and were not needed.
        formula: the closed form's answer to the plan with them; None for a command, which has no closed form.
        passes_price: of passes that are smaller than planned; none where they are as planned.
    """

    changes: tuple[Technique, ...]
    batch_size: int
    passes: int = 1
    traced: Traced | Unknown = field(default_factory=lambda: Unknown("not run"))
    beside_bytes: int = 0
    is_spared: bool = False
    formula: Answer | None = None
    passes_price: Price = NOTHING

    @classmethod
    def of_command(cls, changes: tuple[Technique, ...], batch_size: int, passes: int = 1) -> Combination:
        """Return changes to a command, before their run; more passes count as a change."""
        return cls(changes, batch_size, passes, passes_price=Price(changes=int(passes > 1)))

    @property
    def by_formula(self) -> Answer:
        """The closed form's answer to a model's plan with the changes."""
        assert self.formula is not None, "a model's combination has a closed form"
        return self.formula

    @property
    def plan(self) -> Plan:
        """A model's plan with the changes, and with the micro-batch that fits."""
        return self.by_formula.plan

    @property
    def formula_only(self) -> bool:
        """Return whether nothing but the closed form can answer a model's plan with the changes."""
        return self.formula is not None and formula_only(self.formula.plan)

    @property
    def smaller_passes(self) -> bool:
        """Return whether one of the changes is a micro-batch smaller than planned, with more passes for it."""
        return self.passes_price.changes > 0

    @property
    def gpus(self) -> int:
        """GPUs that a change shards over, each with a pass of that size; 1: none does."""
        return max((change.gpus for change in self.changes), default=1)

    @property
    def price(self) -> Price:
        """The price of all, smaller passes counted as a change; it is compared by `formula.techniques.COST_ORDER`."""
        return sum((change.price for change in self.changes), self.passes_price)

    @property
    def last_resorts(self) -> str:
        """The cost of the changes that nobody makes gladly, to be put after their names; empty for none."""
        dear = [f"of {change.name}: {change.cost}" for change in self.changes if change.price.is_last_resort]
        return f". The price {'; '.join(dear)}" if dear else ""

    @property
    def words(self) -> str:
        """The changes by name; empty for none."""
        names = [change.name for change in self.changes]
        if self.smaller_passes:
            names.append(f"{self.passes:,} passes of {self.batch_size:,}")
        elif self.formula is None and self.gpus > 1:
            names.append(f"batch {self.batch_size:,} on each")
        return " + ".join(names)


def worth_running(
    likely: Callable[[], Iterable[Combination]],
    tried: Callable[[], Sequence[Combination]],
    cost: Callable[[], Price | None],
    most: int,
) -> Iterator[Combination]:
    """Yield the sets to run, one after the other, until none that is left would cost less than what fits.

    A set with all the changes of one whose run failed is left out: it would fail as well. All is asked for anew before
    each set, as the caller has run by then what was yielded.

    Args:
        likely: what may fit, in the order in which it is to be run.
        tried: what was run, each with its trace or why it is missing.
        cost: of the cheapest that was run and fits; None where nothing does.
        most: so many are yielded at most.
    """
    for _ in range(most):
        ran, fitting = tried(), cost()
        failed = [set(one.changes) for one in ran if isinstance(one.traced, Unknown) and one.changes]
        known = [(one.changes, one.batch_size) for one in ran]
        cheaper = (one for one in likely() if fitting is None or one.price < fitting)
        fresh = (one for one in cheaper if (one.changes, one.batch_size) not in known)
        if (one := next((one for one in fresh if not any(less <= set(one.changes) for less in failed)), None)) is None:
            return
        yield one


@dataclass(frozen=True)
class Effect:
    """The effect of one technique, applied alone to a plan or a command.

    Attributes:
        by: the source of the figures: ``traced``: by a run with the change made; ``formula``: by the closed form, of a
            command worked out from its own trace.
        peak_bytes, saved_bytes: at the batch size as it is, on one GPU (at the new one where that is the technique);
            negative where a fixed price pays off only at larger batches.
        fit: whether it fits; of a model's plan with its headroom left free.
        largest: the largest batch of one GPU with it, or why that is not known.
        device_used_bytes: at the peak, by which `fit` goes; None for a model's plan.
        reserved_bytes, buckets: at the peak; None where only the allocated bytes exist.
        of_model: a model's plan with the technique applied; None for a command.
    """

    change: Technique
    by: Literal["traced", "formula"]
    peak_bytes: int
    saved_bytes: int
    fit: Fit
    largest: int | Unknown
    reserved_bytes: int | None = None
    buckets: Breakdown | None = None
    of_model: Plan | None = None
    device_used_bytes: int | None = None

    @property
    def plan(self) -> Plan:
        """A model's plan with the technique applied."""
        assert self.of_model is not None, "it is the effect on a model's plan"
        return self.of_model

    @property
    def fits(self) -> bool:
        """Return whether it fits for certain."""
        return self.fit == "fits"

    @property
    def formula_only(self) -> bool:
        """Return whether nothing but the closed form can answer a model's plan with it."""
        return self.of_model is not None and formula_only(self.of_model)

    @property
    def known_largest(self) -> int | None:
        """The largest batch if known."""
        return self.largest if isinstance(self.largest, int) else None

    def no_gain(self, largest: int | None) -> str:
        """Say that it saves nothing; empty where it does, or fits more than the `largest` without it."""
        if self.saved_bytes > 0 or (largest is not None and (self.known_largest or 0) > largest):
            return ""
        return f"takes {format_bytes(-self.saved_bytes)} more here" if self.saved_bytes else "saves nothing here"


@dataclass(frozen=True)
class Techniques:
    """All techniques: those that help, the best first, and the others with the reason why not."""

    helping: tuple[Effect, ...]
    not_applicable: tuple[NotApplicable, ...]

    def by_help(self, *, fits: bool) -> Techniques:
        """Return the same sorted by what helps most: what costs nothing, fits, the larger batch, more bytes saved.

        Args:
            fits: so does what is planned as it is: nothing comes first for that.
        """

        def order(one: Effect) -> tuple[bool, bool, int, int]:
            costs, largest = one.change.key != ALLOCATOR, one.known_largest or 0
            return costs, not (one.fits or fits), -largest, -one.saved_bytes

        return replace(self, helping=tuple(sorted(self.helping, key=order)))


@dataclass(frozen=True)
class Recommended:
    """The changes that make a plan fit, and how certain that is.

    Attributes:
        combination: the cheapest; or why it is missing.
        traced: what a trace reports of it, which is that it fits; or why none does: then it fits by formula alone.
        formula_only: by formula a cheaper one, which no trace can confirm; None for none.
        untraced: likely ones that no trace reports anything of.
    """

    combination: Combination | Unknown
    traced: TracedAnswer | Unknown
    formula_only: Combination | None = None
    untraced: tuple[Combination, ...] = ()

    @property
    def traceable(self) -> Combination | Unknown:
        """The cheapest that a trace can confirm; or why it is missing."""
        found = self.combination
        return Unknown("only the formula knows it") if isinstance(found, Combination) and found.formula_only else found
