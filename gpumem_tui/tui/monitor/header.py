"""The lines above everything: machine, driver, time, alerts; and what is below where there is no GPU to watch."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.alerts import Alert, AlertKind, Severity
from gpumem_tui.monitor.snapshot import STARTING, Snapshot
from gpumem_tui.tui.kit.figures import MUTED, Row, fit, header_line, span_width
from gpumem_tui.tui.monitor.state import MonitorState


def header_row(state: MonitorState, width: int, clock: Callable[[float], str], notices: Sequence[str]) -> Row:
    """Return the header; what matters least is dropped where it is too short. `notices` come first, but empty ones."""
    snapshot = state.snapshot
    right: Row = [(" PAUSED ", "bold $background on $warning"), (" ", "")] if state.paused else []
    right += [(" MINE ONLY ", "bold $background on $accent"), (" ", "")] if state.mine else []
    right += [(" AT PEAK ", "bold $background on $activations"), (" ", "")] if state.at_peak else []
    if snapshot is not None:
        right.append((clock(snapshot.time_s), MUTED))
    facts = [notice for notice in notices if notice]
    facts += _facts(snapshot) if snapshot is not None else []
    subject, *others = facts or [""]
    return header_line((subject, "bold"), [(fact, MUTED) for fact in others], right, width)


def lasting_last(alerts: Sequence[Alert]) -> list[Alert]:
    """Return the alerts, a missing GPU last: what just happened comes first."""
    return sorted(alerts, key=lambda alert: alert.kind is AlertKind.NO_DRIVER)


def alert_mark(alert: Alert) -> str:
    """Return the character that states whether an alert is critical or a warning."""
    return "▲" if alert.severity is Severity.CRITICAL else "△"


def help_alerts(alerts: Sequence[Alert]) -> Iterator[Row]:
    """Yield the lines of the help about all current alerts; none without any."""
    from gpumem_tui.tui.kit.help import help_entries, help_heading

    if alerts:
        yield help_heading("Alerts now")
        for alert in alerts:
            yield from help_entries([(alert_mark(alert), alert.message)])
        yield []


def alert_row(alerts: Sequence[Alert], width: int) -> Row:
    """Return the alerts in a line, the worst first; how many more there are (the help lists all)."""
    row: Row = []
    for number, alert in enumerate(alerts):
        style = "bold $error" if alert.severity is Severity.CRITICAL else "bold $warning"
        text = f"{alert_mark(alert)} {alert.message}"
        more = len(alerts) - number
        reserve = len(f"  +{more} more") if more > 1 else 0
        room = width - span_width(row) - reserve - (2 if row else 0)
        if row and len(text) > room:
            row.append((f"  +{more} more", "bold"))
            break
        row += [("  ", "")] if row else []
        row.append((fit(text, min(len(text), room)), style))
    return row


def _facts(snapshot: Snapshot) -> list[str]:
    host = snapshot.host
    facts = [host.name]
    problems = dict.fromkeys((snapshot.problem, *(driver.problem for driver in snapshot.drivers)))
    facts += [problem for problem in problems if STARTING in problem]  # no alert, and other GPUs may be shown below
    facts += snapshot.versions
    facts += [f"CPU {host.cpu_percent:>3.0f}%"] if not isinstance(host.cpu_percent, Unknown) else []
    used, total = host.memory_used_bytes, host.memory_total_bytes
    if isinstance(used, int) and isinstance(total, int):
        facts.append(f"memory {used / GIB:.0f}/{total / GIB:.0f} GiB")
    return facts


_WIDEST = 72
_MEANWHILE_WIDTH = 22


def is_troubled(snapshot: Snapshot | None) -> bool:
    """There is nothing to draw a ledger of."""
    return snapshot is None or not snapshot.gpus


def trouble_rows(snapshot: Snapshot | None, width: int, height: int, waited_s: float) -> list[Row]:
    """Return a short text in the middle of `width` × `height` cells."""
    measure = min(_WIDEST, width)
    lines: list[Row] = []
    if snapshot is None:
        lines.append([("Asking the GPU driver", "bold")])
        if waited_s >= 2:
            said = f"It has not answered for {waited_s:.0f} s. The screen continues as soon as it does."
            lines += _wrapped(said, measure)
    else:
        lines.append([("No GPU to watch", "bold $warning")])
        lines += [[], *_wrapped(snapshot.problem or "The driver lists no GPU on this machine.", measure)]
    lines += [[], *(_pair(key, what, measure) for key, what in _MEANWHILE)]
    if snapshot is not None:
        lines += [
            [],
            *_wrapped("The driver is asked again every few seconds; GPUs show as soon as it answers.", measure),
        ]
    lines = lines[:height]
    left = (width - measure) // 2
    above = max(0, (height - len(lines)) // 3)
    return [*([] for _ in range(above)), *([(" " * left, ""), *line] for line in lines)]


_MEANWHILE = (
    ("2", "Search: the largest batch, on a simulated GPU"),
    ("3", "Plan: what fits, and what would make more fit"),
    ("gpumem-tui run -- CMD", "train under a probe: it shows here, on the CPU too"),
    ("gpumem-tui doctor", "what works here, what does not, and the remedy"),
    ("q", "quit"),
)


def _wrapped(text: str, width: int) -> list[Row]:
    return [[(line, "")] for line in textwrap.wrap(text, width)]


def _pair(key: str, what: str, width: int) -> Row:
    return [(f"{key:<{_MEANWHILE_WIDTH}}", "bold $primary"), (what[: max(0, width - _MEANWHILE_WIDTH)], MUTED)]
