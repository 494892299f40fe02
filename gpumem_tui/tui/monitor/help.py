"""The Monitor's help: keys, ledger, columns, marks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from gpumem_tui.memory import Bucket
from gpumem_tui.monitor.alerts import Alert
from gpumem_tui.monitor.ledger import DEVICE_BUCKETS
from gpumem_tui.tui.kit.dialogs import help_entry, help_heading
from gpumem_tui.tui.kit.figures import MUTED, Row
from gpumem_tui.tui.kit.glyphs import BUCKET_LOOKS
from gpumem_tui.tui.monitor.header import alert_mark

_ALERT_WIDTH = 56

_KEYS = (
    ("↑ ↓", "choose a process; page up, page down, home and end too"),
    ("enter", "its details; of one that ran out of memory, what filled the device"),
    ("l", "look into its next step: what the peak consists of, by module and by line"),
    ("a", "attach: put a probe into a Python process; asks first"),
    ("h", "history of the process, or of the GPU again"),
    ("p", "processes with a probe: as at their peak, or as now"),
    ("R", "the ranks of its job side by side"),
    ("o", "plan with its model on its GPU"),
    ("T  K", "terminate it, kill it: asks first"),
    ("/", "filter by user, pid, command, container or gpu3; esc clears"),
    ("s  < >", "sort by the next column, or the one before; r: the other way"),
    ("t", "tree: children below their parents"),
    ("g  G", "next GPU, the one before: its ledger and its history"),
    ("f", "only the processes of that GPU"),
    ("v", "history or processes, where there is room for one"),
    ("[  ]", "history: a shorter time, a longer one"),
    ("tab", "to the history: ← → look back, with the values at the cursor"),
    ("space", "hold the picture; reading goes on"),
    ("1 2 3", "Monitor, Search, Plan"),
    ("ctrl+p", "all commands by name, and the themes"),
    ("q", "quit"),
)
_COLUMNS = (
    ("GPU MEM", "GiB on that device; a process on two GPUs has two lines"),
    ("SM%", "share of the GPU's multiprocessors over the last seconds"),
    ("CPU%", "of one core"),
    ("HOST MEM", "GiB resident in the machine's memory"),
    ("PEAK", "with a probe: the most ever allocated at once"),
    ("STEP", "with a probe: optimizer steps since it was loaded"),
    ("STEP TIME", "with a probe: the mean of the last steps"),
    ("RETRIES", "with a probe: how often the allocator had to give its cache back"),
    ("–", "unknown, never 0: details say why"),
)
_MARKS = (
    ("stale 4 s", "a driver call hangs: the last readings and their age"),
    ("lost", "the GPU does not answer any more; it stays listed"),
    ("▲  △", "an alert: critical, warning"),
    ("✗", "memory ran out under this process; listed for half an hour"),
)


def monitor_help(alerts: Sequence[Alert]) -> list[Row]:
    """The lines of the help, below all alerts that there are now."""
    return [
        *_now(alerts),
        help_heading("Keys"), *(help_entry(key, what) for key, what in _KEYS), [],
        help_heading("Ledger"), *(_bucket(bucket) for bucket in DEVICE_BUCKETS),
        help_entry("", "a process with a probe is divided into its buckets"), [],
        help_heading("Columns"), *(help_entry(name, what) for name, what in _COLUMNS), [],
        help_heading("Marks"), *(help_entry(mark, what) for mark, what in _MARKS),
    ]  # fmt: skip


def _now(alerts: Sequence[Alert]) -> list[Row]:
    lines: list[Row] = []
    for alert in alerts:
        first, *rest = textwrap.wrap(alert.message, _ALERT_WIDTH)
        lines += [help_entry(alert_mark(alert), first), *(help_entry("", line) for line in rest)]
    return [help_heading("Alerts now"), *lines, []] if lines else []


def _bucket(bucket: Bucket) -> Row:
    pattern, colour = BUCKET_LOOKS[bucket]
    title = "pid and name" if bucket is Bucket.PROCESS else bucket.title
    return [(pattern * 2, colour), (f" {title:<17}", ""), (bucket.meaning, MUTED)]
