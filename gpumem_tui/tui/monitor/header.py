"""The lines above everything: machine, driver and time, then what needs somebody's eye."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.alerts import Alert, Severity
from gpumem_tui.monitor.snapshot import Snapshot
from gpumem_tui.tui.kit.figures import MUTED, Row, fit, span_width
from gpumem_tui.tui.kit.glyphs import PROGRAM
from gpumem_tui.tui.monitor.state import MonitorState


def header_row(state: MonitorState, width: int, clock: Callable[[float], str], notices: Sequence[str]) -> Row:
    """What matters least is dropped where the line is too short. `notices` come first; empty ones say nothing."""
    snapshot = state.snapshot
    left: Row = [(PROGRAM, "bold $primary")]
    right: Row = [(" PAUSED ", "bold $background on $warning"), (" ", "")] if state.paused else []
    right += [(" AT PEAK ", "bold $background on $activations"), (" ", "")] if state.at_peak else []
    if snapshot is not None:
        right.append((clock(snapshot.time_s), MUTED))
    facts = [notice for notice in notices if notice]
    facts += _facts(snapshot) if snapshot is not None else []
    for number, fact in enumerate(facts):
        lead = "  " if number == 0 else " · "
        if span_width(left) + len(lead) + len(fact) + span_width(right) + 1 > width:
            continue
        left += [(lead, MUTED), (fact, "bold" if number == 0 else MUTED)]
    return [*left, (" " * max(0, width - span_width(left) - span_width(right)), ""), *right]


def alert_row(alerts: Sequence[Alert], width: int) -> Row:
    """The alerts in a line, the worst first; how many more there are."""
    row: Row = []
    for number, alert in enumerate(alerts):
        critical = alert.severity is Severity.CRITICAL
        style = "bold $error" if critical else "bold $warning"
        text = f"{'▲' if critical else '△'} {alert.message}"
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
    facts += [f"driver {snapshot.driver_version}"] if isinstance(snapshot.driver_version, str) else []
    facts += [f"CUDA {snapshot.cuda_version}"] if isinstance(snapshot.cuda_version, str) else []
    facts += [f"CPU {host.cpu_percent:>3.0f}%"] if not isinstance(host.cpu_percent, Unknown) else []
    used, total = host.memory_used_bytes, host.memory_total_bytes
    if isinstance(used, int) and isinstance(total, int):
        facts.append(f"memory {used / GIB:.0f}/{total / GIB:.0f} GiB")
    return facts
