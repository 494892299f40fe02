"""What the Monitor draws from: the newest snapshot, what probes said beside it, its history and its alerts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from gpumem_tui.monitor.alerts import Alert, Alerts
from gpumem_tui.monitor.history import History, Series
from gpumem_tui.monitor.snapshot import GpuReading, Snapshot, Source
from gpumem_tui.tui.monitor.state import device_key
from gpumem_tui.watch.published import Key, ProbeSource, Published

HOLD_S = 0.2
"""How long a snapshot is held back for what probes say beside it, so that both are of one moment."""
_AT_ONCE_S = 0.5
"""The snapshots that follow the first one so soon complete it: they are drawn at once."""


class Feed:
    """Takes every snapshot in, whether the screen shows it or not.

    Attributes:
        published: what the probes said beside the newest one.
        alerts: what is the matter now; `rings`: one of them began with the newest snapshot.
        notice: what the source says of itself.
        first, latest: None before there is one.
    """

    def __init__(self, source: Source, history: History, alerts: Alerts, probes: ProbeSource | None) -> None:
        self.source = source
        self.published = Published()
        self.alerts: tuple[Alert, ...] = ()
        self.rings = False
        self.notice = ""
        self.first: Snapshot | None = None
        self.latest: Snapshot | None = None
        self._history = history
        self._judge = alerts
        self._probes = probes
        self._followed: Key | None = None
        self._asked: Snapshot | None = None
        self._held_since_s: float | None = None

    def subscribe(self, tell: Callable[[], None]) -> None:
        """Have this called whenever a look may find something new, from another thread; it must not wait."""
        self.source.subscribe(tell)
        if self._probes is not None:
            self._probes.subscribe(tell)

    @property
    def is_held(self) -> bool:
        """A snapshot waits for what probes say: look again after `HOLD_S` even if nobody told to."""
        return self._held_since_s is not None

    def look(self) -> bool:
        """Take in the newest snapshot and what probes say; False if nothing is new. Never waits."""
        notice, snapshot = self.source.notice, self.source.latest()
        if snapshot is None:
            return False
        if self._is_awaited(snapshot):
            return False
        published = self._probes.latest() if self._probes is not None else self.published
        if snapshot is self.latest and published is self.published and notice == self.notice:
            return False
        self.first = self.first or snapshot
        self.latest, self.published, self._held_since_s = snapshot, published, None
        self.notice = notice
        self._history.add(snapshot, published.figures)
        before = {alert.key for alert in self.alerts}
        self.alerts = self._judge.update(snapshot, published.figures, published.out_of_memory, published.growing)
        self.rings = any(alert.key not in before for alert in self.alerts)
        return True

    def restart(self, past: Sequence[Snapshot], step_s: float) -> None:
        """Forget past snapshots: the source shows another moment now.

        Args:
            past: snapshots from before it, `step_s` apart.
        """
        self._history, self._judge = self._history.emptied(), self._judge.anew()
        interval_s, self._history.interval_s = self._history.interval_s, step_s
        for snapshot in past:
            self._history.add(snapshot)
            self._judge.update(snapshot)
        self._history.interval_s = interval_s
        self.first, self.latest, self.alerts = (past[0] if past else None), None, ()

    def follow(self, key: Key | None) -> None:
        """Have the history of this process read too."""
        if key != self._followed:
            self._followed = key
            if self._probes is not None and self._asked is not None:
                self._probes.ask(self._asked.gpus, key)

    def stop(self) -> None:
        """End what reads; returns at once, from any thread."""
        self.source.stop()
        if self._probes is not None:
            self._probes.stop()

    def _is_awaited(self, snapshot: Snapshot) -> bool:
        """Ask what probes say beside a new snapshot; whether it still waits for that.

        The first snapshot is drawn first: to read probes, much is imported.
        """
        if self._probes is None or self.latest is None:
            return False
        if snapshot is not self._asked:
            self._asked = snapshot
            self._probes.ask(snapshot.gpus, self._followed)
        if snapshot is self.latest or self.seen_s(snapshot) < _AT_ONCE_S:
            return False
        if self._held_since_s is None:
            self._held_since_s = monotonic()
        return self._probes.is_reading and monotonic() - self._held_since_s < HOLD_S

    def seen_s(self, snapshot: Snapshot) -> float:
        """How long it had looked when a snapshot was made."""
        return snapshot.time_s - self.first.time_s if self.first is not None else 0.0

    def series(self, gpu: GpuReading, columns: int, span_s: float, now_s: float) -> Series:
        """A device's last `span_s` seconds."""
        return self._history.series(device_key(gpu), columns, span_s, now_s)
