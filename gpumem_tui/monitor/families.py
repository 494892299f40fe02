"""Metric families that are filled machine by machine. Imports prometheus_client: import it where it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpumem_tui.memory import Unknown
from gpumem_tui.monitor.readings import Reading

_LONGEST_LABEL = 200


@dataclass(frozen=True)
class Family:
    """A metric: every series of it has these labels, and ``host`` before them.

    Attributes:
        name: without ``gpumem_`` before it; a counter's without ``_total`` after it.
        counter: it only grows.
    """

    name: str
    words: str
    labels: tuple[str, ...] = ()
    counter: bool = False


class Sheet:
    """The series of all machines, by family."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def has(self, family: Family) -> None:
        """Declare a family, even if no series of it follows."""
        if family.name not in self._families:
            kind = CounterMetricFamily if family.counter else GaugeMetricFamily
            self._families[family.name] = kind(f"gpumem_{family.name}", family.words, labels=("host", *family.labels))

    def add(
        self,
        family: Family,
        host: str,
        labels: Sequence[str],
        reading: Reading[int] | Reading[float],
        factor: float = 1,
    ) -> None:
        """One series, if the value is known."""
        self.has(family)
        if not isinstance(reading, Unknown):
            self._families[family.name].add_metric(
                [host, *(label[:_LONGEST_LABEL] for label in labels)], reading * factor
            )

    def metrics(self) -> Iterator[Metric]:
        """All families, in the order in which they were named."""
        yield from self._families.values()
