"""Ranks that finish no step any more: which one stopped first, where it is, and who waits for it.

Pure; for ranks of this machine and of others. Ranks that wait for each other have often finished as many steps: then
where they stand tells, as all but the first are in a collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_tui.text import shortened

if TYPE_CHECKING:
    from gpumem_tui.probe.wire import Stall

_LONGEST = 60


@dataclass(frozen=True)
class StoppedAt:
    """The place where the training thread of a process is, as its probe reports.

    Attributes:
        phase: of the step; empty if unknown. collective: the function of ``torch.distributed`` that it is in.
        source, function: the program's own line as ``file.py:line``, and what it is in; empty if unknown.
        busy: whether it computes.
    """

    phase: str = ""
    collective: str = ""
    source: str = ""
    function: str = ""
    busy: bool = False

    @classmethod
    def of(cls, said: object) -> StoppedAt | None:
        """Return it from JSON; None if that is none."""
        if not isinstance(said, Mapping):
            return None
        texts = {name: said.get(name) for name in ("phase", "collective", "source", "function")}
        kept = {name: shortened(text, _LONGEST) for name, text in texts.items() if isinstance(text, str)}
        return cls(**kept, busy=said.get("busy") is True)

    @classmethod
    def of_stall(cls, stall: Stall) -> StoppedAt:
        """Return it from what the probe wrote."""
        return cls(
            phase=shortened(stall.phase, _LONGEST),
            collective=shortened(stall.collective, _LONGEST),
            source=shortened(stall.source, _LONGEST),
            function=shortened(stall.function, _LONGEST),
            busy=stall.busy,
        )

    @property
    def waits(self) -> bool:
        """Return whether the rank waits for others: in a collective, or in backward, where they average gradients."""
        return bool(self.collective) or (self.phase == "backward" and not self.busy)

    @property
    def words(self) -> str:
        """Return where it is, in a few words."""
        inside = f"in {self.collective}" if self.collective else f"in {self.phase}" if self.phase else ""
        line = f"at {self.source}" if self.source else ""
        function = f"({self.function})" if self.source and self.function not in ("", "<module>") else ""
        said = " ".join(part for part in (inside, line, function) if part) or "at an unknown line"
        return said if self.waits else f"{said}, {'computing' if self.busy else 'idle'}"

    def as_json(self) -> dict[str, object]:
        """Return it as an object; what is unknown is null."""
        texts = {name: getattr(self, name) or None for name in ("phase", "collective", "source", "function")}
        return {**texts, "busy": self.busy, "waits": self.waits}


@dataclass(frozen=True)
class RankState:
    """One rank: the last step that it finished, how long ago, whether that is longer than steps take, where it is.

    `rank` is None of a process that is no rank of a job.
    """

    rank: int | None
    step: int
    silent_s: float
    is_silent: bool
    at: StoppedAt | None = None


@dataclass(frozen=True)
class Stop:
    """Ranks that have stopped.

    Attributes:
        first: the one that stopped first; None where that cannot be told.
        waiting: those that wait for it.
        silent: all that have stopped; `size`: how many ranks were seen.
    """

    first: RankState | None
    waiting: tuple[RankState, ...]
    silent: tuple[RankState, ...]
    size: int

    @property
    def since_s(self) -> float:
        """Return for how long nothing has gone on."""
        return min(each.silent_s for each in self.silent)

    @property
    def words(self) -> str:
        """Return it in one line."""
        first = self.first
        where = "" if first is None or first.at is None else f", {first.at.words}"
        if first is None or first.rank is None:
            lone = self.silent[0] if self.size == 1 else None
            subject = "no step has finished" if lone is not None else "no rank has finished a step"
            stands = f": {lone.at.words}" if lone is not None and lone.at is not None else _where(self.silent)
            return f"{subject} for {self.since_s:.0f} s{stands}"
        if len(self.silent) == 1:
            return f"rank {first.rank} has finished no step for {first.silent_s:.0f} s{where}{_where(self.waiting)}"
        said = f"rank {first.rank} stopped first, after step {first.step:,}, {first.silent_s:.0f} s ago"
        return f"{said}{where}{_where(self.waiting)}"


def _where(ranks: Sequence[RankState]) -> str:
    """Return where others stand, those of one place together."""
    places: dict[str, list[int]] = {}
    for each in ranks:
        if each.at is not None and each.rank is not None:
            verb = "wait " if each.at.waits else ""
            places.setdefault(f"{verb}{each.at.words}", []).append(each.rank)
    said = [f"{_named(ranks)} {place.replace('wait ', 'waits ', 1) if len(ranks) == 1 else place}"
            for place, ranks in places.items()]  # fmt: skip
    return "".join(f"; {one}" for one in said)


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def stop_of(ranks: Iterable[RankState]) -> Stop | None:
    """Return which of the ranks of a job have stopped; None while all continue."""
    known = tuple(ranks)
    silent = tuple(each for each in known if each.is_silent)
    if not silent:
        return None
    first = _first(silent, is_all=len(silent) == len(known))
    waiting = tuple(each for each in silent if each is not first and each.at is not None and each.at.waits)
    return Stop(first, waiting, silent, len(known))


def _first(silent: Sequence[RankState], *, is_all: bool) -> RankState | None:
    in_order = sorted(silent, key=lambda each: (each.step, -each.silent_s))
    told = [each for each in in_order if each.at is not None]
    for_others = [each for each in told if each.at is not None and not each.at.waits]
    if 0 < len(for_others) < len(told):
        return for_others[0]
    least, *others = in_order
    if not is_all or all(least.step < each.step for each in others):
        return least
    places = Counter(each.at for each in told)
    alone = [each for each in told if places[each.at] == 1]
    return alone[0] if len(alone) == 1 and len(places) == 2 else None
