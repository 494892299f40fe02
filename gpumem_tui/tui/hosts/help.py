"""The help of the screen of hosts: keys, columns, states."""

from __future__ import annotations

from gpumem_tui.tui.kit.dialogs import help_entry, help_heading
from gpumem_tui.tui.kit.figures import Row

_KEYS = (
    ("↑ ↓", "choose a host, or a process"),
    ("tab", "to the other list"),
    ("enter", "the full Monitor of the host; esc there leads back"),
    ("x  → ←", "its GPUs below it"),
    ("f", "only the processes of that host"),
    ("/", "filter by host, gpu3, pid, user or command; esc clears"),
    ("s  < >", "sort by memory, host, rank, SM% or user; r: the other way"),
    ("e", "search on that host: the form, with its name in it"),
    ("o", "plan for the GPU of that process, or for the emptiest of that host"),
    ("c", "try the hosts that are away at once"),
    ("1 2 3", "hosts, Search, Plan"),
    ("ctrl+p", "all commands by name, and the themes"),
    ("q", "quit"),
)
_COLUMNS = (
    ("USED/TOTAL", "GiB of all GPUs of the host; ≥ where a GPU does not say"),
    ("UTIL", "mean of its GPUs"),
    ("AGE", "how old its last reading is, where that is more than a few seconds"),
    ("STATE", "its worst alert; why it is away, and when it is tried again"),
    ("RANK", "with a probe: of a distributed job; sort by it to see ranks together"),
    ("PEAK", "with a probe: GiB, the most ever allocated at once"),
)


_SIGNALS = ("T  K", "in the list of processes: terminate it, kill it there; asks first")


def hosts_help(*, allow_signals: bool = False) -> list[Row]:
    """The lines of the help."""
    keys = [*_KEYS[:-3], *([_SIGNALS] if allow_signals else []), *_KEYS[-3:]]
    ended = "only what you end is ended" if allow_signals else "nothing is ended (--allow-signals offers it)"
    return [
        help_heading("Keys"), *(help_entry(key, what) for key, what in keys), [],
        help_heading("Columns"), *(help_entry(name, what) for name, what in _COLUMNS), [],
        help_entry("", f"Nothing is installed or written on hosts; {ended}."),
    ]  # fmt: skip
