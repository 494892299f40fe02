"""A program's occasional work, such as evaluating and saving: awaited, reached, missing. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from gpumem_tui.workload.spec import Through

Occasion = Literal["evaluation", "saving", "resuming"]

_AWAITED: Mapping[Through, tuple[Occasion, ...]] = {
    "steps": (),
    "eval": ("evaluation",),
    "save": ("saving",),
    "all": ("evaluation", "saving"),
}
_REACHED_BY: Mapping[Occasion, str] = {
    "evaluation": "--through eval",
    "saving": "--through save",
    "resuming": "--resume",
}
_NOUNS = {"evaluation": "evaluation", "saving": "save"}


@dataclass(frozen=True)
class NotReached:
    """A part of a program that its run has not come to.

    Attributes:
        when: the setting by which the program comes to it, and when, as ``save_strategy every 50 steps``; None where
            the program does not say whether it ever does.
        reach: the option that follows it.
    """

    phase: Occasion
    when: str | None
    reach: str


class Later:
    """Tells which occasions of a program a run awaits once its steps are made, which came, and which did not.

    Args:
        through: which it awaits.
        resumes: whether the program is to begin from a checkpoint.

    Attributes:
        after: the steps made when the run began to await them; None before, and where nothing is awaited.
    """

    def __init__(self, through: Through = "steps", *, resumes: bool = False) -> None:
        self.after: int | None = None
        self.resumes = resumes
        self._through = through
        self._came: dict[Occasion, int] = {}
        self._seen: set[Occasion] = set()
        self._declared: Callable[[], Mapping[Occasion, str]] | None = None

    def declare(self, declared: Callable[[], Mapping[Occasion, str]]) -> None:
        """Take over what a framework states that it will do: by occasion, the setting and when (see `NotReached`).

        Args:
            declared: asked when it is needed, as settings are resolved while training is prepared.
        """
        self._declared = declared

    @property
    def is_declared(self) -> bool:
        """Return whether a framework announces what the program does."""
        return self._declared is not None

    @property
    def reached(self) -> Collection[Occasion]:
        """Return the occasions that came."""
        return self._came.keys()

    def came(self, occasion: Occasion, steps: int) -> None:
        """Note that an occasion came after so many steps; before the first step it is of less than is trained."""
        if steps or occasion == "resuming":
            self._came.setdefault(occasion, steps)

    def seemed(self, occasion: Occasion, steps: int) -> None:
        """Note what looks like an occasion, of programs that do not say when they have one."""
        if steps:
            self._seen.add(occasion)

    def awaits(self, occasion: Occasion) -> bool:
        """Return whether the run continues until an occasion comes."""
        return self.after is not None and occasion in _AWAITED[self._through] and occasion not in self._came

    def begin(self, steps: int) -> bool:
        """Return whether the run continues now that it has made its steps."""
        if self.after is None and not self._came.keys() >= {*_AWAITED[self._through]}:
            self.after = steps
        return self.after is not None

    @property
    def is_over(self) -> bool:
        """Return whether all came that was awaited."""
        return self.after is not None and not any(map(self.awaits, _AWAITED[self._through]))

    def lines(self, steps: int) -> list[str]:
        """Say, after so many steps, which occasions that were asked for came; nothing before the steps are made."""
        found = []
        for occasion in _AWAITED[self._through] if steps else ():
            option, noun = f"--through {self._through}", _NOUNS[occasion]
            if occasion in self._came:
                found.append(f"{option}: the {noun} after step {self._came[occasion]} is part of this")
            elif self.after is not None:
                more = f", nor within {steps - self.after} more" if steps > self.after else ""
                found.append(f"{option}: no {noun} came after step {self.after}{more}; this is of the steps alone")
        if self.resumes and steps and "resuming" not in self._came:
            found.append("--resume: this program was not resumed: give it its own option for a checkpoint that exists")
        return found

    def not_reached(self, *, has_ended: bool) -> tuple[NotReached, ...]:
        """Return the occasions that the program has, or may have, and that did not come.

        Args:
            has_ended: the program has come to its own end, so that nothing follows.
        """
        if self._declared is not None:
            return tuple(
                NotReached(occasion, when, _REACHED_BY[occasion])
                for occasion, when in self._declared().items()
                if occasion not in self._came and not (has_ended and occasion != "resuming")
            )
        known: Collection[Occasion] = () if has_ended else ("evaluation", "saving")
        return tuple(NotReached(one, None, "--steps N") for one in known if one not in {*self._came, *self._seen})
