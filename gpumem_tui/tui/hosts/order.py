"""Which hosts are listed, and in which order: by what is free, in use or the matter there, whose it is and which GPUs.

A filter is words, all of which a host's name or GPUs or one of its processes has, and conditions on the host
(``free>=2``, ``free>=20GiB``, ``use<50``, ``user=ada``, ``model=h100``, ``alert``).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from gpumem_tui.memory import size_from
from gpumem_tui.monitor.alerts import Severity
from gpumem_tui.remote.status import HostPhase, HostStatus, RemoteProcess


class HostOrder(Enum):
    """The orders in which hosts can be sorted, as the key goes through them. The value is the column's heading."""

    NAMED = "HOST"
    FREE = "FREE"
    USE = "UTIL"
    ALERT = "STATE"
    USER = "USERS"
    MODEL = "MODEL"

    @property
    def descends(self) -> bool:
        """The largest first, unless it is reversed."""
        return self in (HostOrder.FREE, HostOrder.USE)


class HostsSort(Enum):
    """The orders in which processes can be sorted, as the key goes through them. The value is the column's heading."""

    MEMORY = "GPU MEM"
    HOST = "HOST"
    RANK = "RANK"
    SM = "SM%"
    USER = "USER"

    @property
    def descends(self) -> bool:
        """The largest first, unless it is reversed."""
        return self in (HostsSort.MEMORY, HostsSort.SM)


HOST_LETTERS = {
    "h": HostOrder.NAMED, "f": HostOrder.FREE, "s": HostOrder.USE, "a": HostOrder.ALERT, "u": HostOrder.USER,
    "m": HostOrder.MODEL,
}  # fmt: skip
PROCESS_LETTERS = {
    "g": HostsSort.MEMORY, "h": HostsSort.HOST, "r": HostsSort.RANK, "s": HostsSort.SM, "u": HostsSort.USER,
}  # fmt: skip
"""The column that a letter chooses after `o`, as on the Monitor where that has the column."""

_SEVERITY = {Severity.CRITICAL: 0, Severity.WARNING: 2, Severity.NOTE: 3}
_AWAY, _WELL = 1, 4


def _matter(status: HostStatus) -> int:
    """Return how bad things stand there: an alert that is critical, away, other alerts, none."""
    if status.phase is HostPhase.AWAY:
        return _AWAY
    alert = status.worst_alert
    return _WELL if alert is None else _SEVERITY[alert.severity]


_VALUES: Mapping[HostOrder, Callable[[HostStatus], float | str | tuple[object, ...] | None]] = {
    HostOrder.FREE: lambda each: (
        (each.free_gpus, each.memory.known.free_bytes) if each.memory.known.total_bytes else None
    ),
    HostOrder.USE: lambda each: each.busy_percent,
    HostOrder.ALERT: _matter,
    HostOrder.USER: lambda each: each.users or None,
    HostOrder.MODEL: lambda each: each.models.lower() or None,
}
"""Sort key of each order; None sorts last."""


def ordered(statuses: Sequence[HostStatus], order: HostOrder, *, reverse: bool) -> tuple[HostStatus, ...]:
    """Return the hosts in an order; those without a value come last."""
    if order is HostOrder.NAMED:
        return tuple(reversed(statuses)) if reverse else tuple(statuses)
    pairs = [(_VALUES[order](each), each) for each in statuses]
    known = [(value, each) for value, each in pairs if value is not None]
    known.sort(key=lambda pair: pair[0], reverse=order.descends != reverse)
    return (*(each for _, each in known), *(each for value, each in pairs if value is None))


_CONDITION = re.compile(r"(free|use|user|model|alert)(?:(>=|<=|>|<|=|:)(.*))?")
_COMPARED = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
    ":": operator.ge,
}
_Is = Callable[[HostStatus], bool]


@dataclass(frozen=True)
class Filter:
    """A filter as typed, taken apart.

    Attributes:
        words: in small letters.
        conditions: on hosts; `user`: whose processes are listed, in small letters, empty for anybody's.
        problem: one line on a condition that gives nothing; empty otherwise.
    """

    words: tuple[str, ...] = ()
    conditions: tuple[_Is, ...] = ()
    user: str = ""
    problem: str = ""

    @classmethod
    def of(cls, typed: str) -> Filter:
        """Take apart what is typed. A condition whose value is still to be typed is none yet."""
        words, conditions, user, problem = [], [], "", ""
        for word in typed.lower().split():
            found = _CONDITION.fullmatch(word)
            if found is None or (found[2] is None and found[1] not in ("free", "alert")):
                words.append(word)
            elif found[3] != "":
                made = _condition(found[1], found[2] or ">=", found[3] or "1")
                problem = made if isinstance(made, str) else problem
                conditions += [] if isinstance(made, str) else [made]
                user = found[3] if found[1] == "user" else user
        return cls(tuple(words), tuple(conditions), user, problem)

    def has_host(self, status: HostStatus) -> bool:
        """Return whether a host is listed."""
        if self.problem or not all(is_so(status) for is_so in self.conditions):
            return False
        about = f"{status.host.name} {status.models}".lower()
        if all(word in about for word in self.words):
            return True
        return any(self.has_process(each) for each in status.processes)

    def has_process(self, each: RemoteProcess) -> bool:
        """Return whether a process of a host that is listed is listed."""
        if self.user and self.user not in (each.user or "").lower():
            return False
        return all(word in each.about for word in self.words)


def _condition(name: str, compared: str, value: str) -> _Is | str:
    """Return a condition on a host, or what is wrong with it."""
    is_so = _COMPARED[compared]
    if name == "alert":
        return lambda status: _matter(status) < _WELL
    if name == "user":
        return lambda status: any(value in user.lower() for user in status.users)
    if name == "model":
        return lambda status: value in status.models.lower()
    if name == "use":
        try:
            percent = float(value.removesuffix("%"))
        except ValueError:
            return f"use{compared}{value}: use is in percent, such as use<50"
        return lambda status: status.busy_percent is not None and is_so(status.busy_percent, percent)
    if value.isdecimal():
        return lambda status: _answers(status) and is_so(status.free_gpus, int(value))
    try:
        size_bytes = size_from(value)
    except ValueError:
        return f"free{compared}{value}: free GPUs are meant, such as free>=2, or a size on one, such as free>=20GiB"
    return lambda status: _answers(status) and is_so(status.most_free_bytes, size_bytes)


def _answers(status: HostStatus) -> bool:
    """Return whether it states now what its GPUs hold: of one that is away nobody knows."""
    return bool(status.gpus) and status.phase is not HostPhase.AWAY
